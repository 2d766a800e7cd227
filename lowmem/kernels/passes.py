"""Writes the kernel of a pass, in which a program processes several tiles of a rectangle one after another.

Lines of AdaLomo's first pass:

    v0 = tl.load(h0 + base1 + offsets1, mask=inside1, other=0)    the gradient of a tile
    v1 = v0 * v0                                                  a line of `lowmem.kernels.printing`
    sum1 += tl.where(inside1, v1, 0.0)                            a column sum, stored after the loop over tiles
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lowmem.errors import UnsupportedError
from lowmem.kernels.arguments import Columns, KernelScalars, TileSize
from lowmem.kernels.printing import TRITON_TYPES, Lines, Printer, Value, arg, op_name, source_of
from lowmem.tiles.graph import Sizes
from lowmem.tiles.rounding import mix
from lowmem.tiles.tile import DIMS, GRAD
from lowmem.tiles.traced import Arguments, Graph, Kind, Pass

LOWEST = 'float("-inf")'

# Arguments that determine the noise of a tile: the numbers of its lines, the noise key of its parameter, and the number
# of its first column in two parts.
NOISE_LINE, NOISE_KEY, NOISE_HIGH, NOISE_LOW = (("noise_part", name) for name in ("line", "key", "high", "low"))


def trace_tile(kind: Kind, tile_pass: Pass, tile: TileSize) -> Graph:
    """Traces the function of a pass for a tile. If the pass writes, the results are the tensors of the tile."""
    sizes = Sizes()
    shape = (1, tile.rows, tile.cols)
    tensors = {
        (name, n): sizes.tensor((1, tile.rows, tile.cols // part.group), part.dtype, kind.device)
        for name, storage in tile_pass.storages.items()
        for n, part in enumerate(storage.parts)
    }
    args: Arguments = dict(tensors)
    for key, dtype, tail in tile_pass.args:
        if key[0] == "noise":
            args[NOISE_LINE] = sizes.tensor((1, tile.rows, 1), torch.int32, kind.device)
            for part in (NOISE_KEY, NOISE_HIGH, NOISE_LOW):
                args[part] = sizes.tensor((), torch.int32, kind.device)
        else:
            here = [n if d in DIMS.get(key[0], ()) else 1 for d, n in enumerate(shape)]
            args[key] = sizes.tensor(() if tail is None else here, dtype, kind.device)

    def results_of(values: Arguments) -> dict[Any, Tensor]:
        vectors = {key: values[key] for key, *_ in tile_pass.args if key[0] not in ("reading", "noise")}
        if NOISE_LINE in values:
            noise = mix(values[NOISE_LINE] + values[NOISE_KEY])
            noise = torch.where(values[NOISE_HIGH] != 0, mix(noise + values[NOISE_HIGH]), noise)
            vectors["noise", ""] = noise + values[NOISE_LOW]
        sums = tile_pass.run(values, vectors)
        return {key: values[key] for key in tensors} if tile_pass.writes else sums

    return Graph.of(results_of, args)


def kernel_shape(value: Tensor) -> tuple[int, ...]:
    """Returns the shape of a value in the kernel: without the batch dimension, and () for one element."""
    shape = tuple(value.shape)
    if all(size == 1 for size in shape):
        return ()
    return shape[1:] if len(shape) > 1 and shape[0] == 1 else shape


class TilePrinter(Printer):
    """Prints the kernel of pass `number`.

    Attributes:
        before, after: lines before and after the loop over the tiles of a program.
    """

    def __init__(self, scalars: KernelScalars, columns: Columns, number: int, tile: TileSize, *, aligned: bool) -> None:
        super().__init__(Lines())
        self.before = list[str]()
        self.after = list[str]()
        self.storages = dict(scalars.update.kind.storages)
        self._scalars = scalars
        self._columns = columns
        self._number = number
        self._tile = tile
        self._aligned = aligned
        tile_pass = scalars.update.passes[number]
        graph = trace_tile(scalars.update.kind, tile_pass, tile)
        self._writes = tile_pass.writes
        self._results = graph.results
        self._keys = {node: key for key, node in graph.inputs.items()}
        vectors = zip(tile_pass.vectors, tile_pass.node.args[0], strict=True)
        self._nodes = {**scalars.update.graph.inputs, **dict(vectors)}  # of the update, by key
        self._row_sums: dict[str, str] = {}  # value → sum of each row

    def once(self, value: Value) -> Value:
        return value._replace(code=self.text.once(value.code))

    def address(self, name: str, n: int) -> tuple[str, str]:
        """Returns the code for the addresses of a tensor's tile, and for the mask of its elements."""
        part = self.storages[name].parts[n]
        if name == GRAD:
            byte = f"{self._columns.load('element')} * {part.dtype.itemsize}"
            code = f"(tl.load(grads + member) + {byte}).to(tl.pointer_type({TRITON_TYPES[part.dtype]}))"
        else:
            code = self._columns.pointer("pointer", (name, n), part.dtype)
        pointer = self.text.once(f"tl.multiple_of({code}, 16)" if self._aligned else code)
        return f"{pointer} + base{part.group} + offsets{part.group}", f"inside{part.group}"

    def source(self, node: fx.Node) -> Value | None:
        if op_name(node) == "arange":
            at: Any = range(*node.args)  # type: ignore[arg-type]
            return self.assign(f"tl.arange(0, {len(at)}) * {at.step} + {at.start}", (len(at),), torch.int32)
        if node not in self._keys:
            return None
        key = self._keys[node]
        kind, name = key
        meta = node.meta["val"]
        shape = kernel_shape(meta)
        if kind in self.storages:
            address, inside = self.address(kind, name)
            return self.assign(f"tl.load({address}, mask={inside}, other=0)", shape, meta.dtype)
        if key == NOISE_KEY:
            return self.once(Value(f"tl.load(keys + {self._columns.load('key')})", (), torch.int32))
        if kind == "noise_part":
            first = self.once(Value(f"{self._columns.load(name)}.to(tl.int32)", (), torch.int32))
            if key == NOISE_HIGH:
                return first
            offset = "col0"
            if key == NOISE_LINE:
                offset = "0" if self._tile.is_line else "rows"
            return self.assign(f"{first.code} + {offset}", shape, torch.int32)
        if kind in ("row", "col"):
            source = source_of(self._nodes[key])
            at, limit = ("rows", "R") if kind == "row" else ("cols", "C")
            vector = self.text.once(f"work + {self._columns.load('vector', source)}")
            return self.assign(f"tl.load({vector} + {at}, mask={at} < {limit}, other=0.0)", shape, torch.float32)
        if key in self._nodes:
            return self.once(self._scalars.vector(self._nodes[key]))
        return self.once(self._scalars.number(self._scalars.update.kind.numbers.index(name), single=True))

    def reshaped(self, node: fx.Node, value: Value) -> Value:
        shape = kernel_shape(node.meta["val"])
        if value.shape == shape or not value.shape or op_name(node) == "expand":
            return value
        return self.assign(f"tl.reshape({value.code}, {list(shape)})", shape, value.dtype)

    def reduced(self, node: fx.Node, value: Value) -> Value:
        """Returns a sum or maximum within a tile, for example over a group."""
        functions = {"sum": "tl.sum({}, {}, keep_dims={})", "amax": "largest({}, {}, {})"}
        name = op_name(node)
        ndim = arg(node).meta["val"].ndim
        axes: Any = node.args[1] if len(node.args) > 1 else ()
        keep = len(node.args) > 2 and node.args[2]
        if name not in functions or len(axes) != 1:
            raise UnsupportedError(f"{node.format_node()} is not supported in Triton")
        code = functions[name].format(value.code, axes[0] % ndim - ndim + len(value.shape), bool(keep))
        return self.assign(code, kernel_shape(node.meta["val"]), value.dtype)

    def write_tensors(self) -> None:
        """Prints code that stores the tensors of a tile that the pass changes."""
        for (name, n), node in self._results.items():
            if node.op != "placeholder":
                value = self.value(node)
                address, inside = self.address(name, n)
                self.lines.append(f"tl.store({address}, {value.code}, mask={inside})")

    def write_sums(self) -> None:
        """Prints code for partial sums. Sums over several tiles begin in `before` and are stored in `after`."""
        rows, cols = self._tile.rows, self._tile.cols
        for n, ((kind, _), node) in enumerate(self._results.items()):
            value = self.value(node)
            if value.shape != (rows, cols):  # the value needs broadcasting
                value = self.assign(f"tl.broadcast_to({value.code}, [{rows}, {cols}])", (rows, cols), value.dtype)
            partial = self.text.once(f"work + {self._columns.load('partial', (self._number, n))}")
            if kind in ("row", "row_max"):
                of_row = self._row_sum(value) if kind == "row" else f"largest({_masked(value, LOWEST)}, 1, False)"
                at = f"row0 + tl.arange(0, {rows})"
                self.lines.append(f"tl.store({partial} + across.to(tl.int64) * R + {at}, {of_row}, mask={at} < R)")
            elif kind == "col":
                at = f"col0 + tl.arange(0, {cols})"
                self._sum_over_tiles(f"sum{n}", f"[{rows}, {cols}]", _masked(value))
                total = f"tl.sum(sum{n}, 0)"
                self.after.append(f"tl.store({partial} + down.to(tl.int64) * C + {at}, {total}, mask={at} < C)")
            elif self._tile.is_line:
                self._sum_over_tiles(f"sum{n}", f"[{rows}, {cols}]", _masked(value))
                self.after.append(f"tl.store({partial} + tile, tl.sum(tl.sum(sum{n}, 1), 0))")
            else:
                self._sum_over_tiles(f"sum{n}", f"[{rows}]", self._row_sum(value))
                self.after.append(f"tl.store({partial} + tile, tl.sum(sum{n}, 0))")

    def _sum_over_tiles(self, name: str, shape: str, code: str) -> None:
        self.before.append(f"{name} = tl.zeros({shape}, tl.float32)")
        self.lines.append(f"{name} += {code}")

    def _row_sum(self, value: Value) -> str:
        """Returns the variable with the sum of each row of a value, which its row sum and its scalar sum share."""
        if value.code not in self._row_sums:
            self._row_sums[value.code] = self.assign(f"tl.sum({_masked(value)}, 1)").code
        return self._row_sums[value.code]

    def kernel(self) -> str:
        """Returns the source of the kernel."""
        tile = self._tile
        if self._writes:
            self.write_tensors()
        else:
            self.write_sums()
        groups = {1, *(part.group for storage in self.storages.values() for part in storage.parts)}
        of_tile = [*_position(tile, sorted(groups)), *self.lines]
        length = tile.cols if tile.is_line else tile.rows
        body = [
            *self.before,
            f"for step in range(tl.minimum(tl.cdiv(rest, {length}), {tile.steps})):",
            *(f"    {line}" for line in of_tile),
            *self.after,
        ]
        return self.text.function(f"pass_{self._number}", self._scalars.args, self._prologue(), body)

    def _prologue(self) -> list[str]:
        """Returns the lines at the start of a program, which load the size and position of its strip.

        They define `R` and `C`, the rows and columns of the rectangle, `stride`, the elements between two rows in
        memory, `member`, `group` and `slice`, `down` and `across`, the position of the strip, and `rest`, its rows or
        columns up to the end of the rectangle.
        """
        load, tile = self._columns.load, self._tile
        down, across = tile.strip
        names = {"R": "rows", "C": "cols", "stride": "stride"}
        sizes = [f"{name} = {load(key)}.to(tl.int32)" for name, key in names.items()]
        if self._aligned:
            sizes += [f"{name} = tl.multiple_of({name}, 16)" for name in ("C", "stride")]
        lines = [
            "row = table + tl.load(programs + tl.program_id(0)) * RECTANGLE_COLUMNS",
            *(f"{name} = {load(name)}" for name in ("member", "group", "slice")),
            *sizes,
            f"tile = (tl.program_id(0) - {load('first')}).to(tl.int32)",
            f"strips = tl.cdiv(C, {across})",
            "down, across = tile // strips, tile % strips",
        ]
        if tile.is_line:
            return [*lines, "row0 = 0", f"rest = C - across * {across}"]
        return [*lines, f"col0 = across * {tile.cols}", f"rest = R - down * {down}"]


def _masked(value: Value, other: str = "0.0") -> str:
    return f"tl.where(inside1, {value.code}, {other})"


def _position(tile: TileSize, groups: Sequence[int]) -> list[str]:
    """Returns the lines that compute the positions of a tile's elements, for tensors with each of these group sizes.

    They define `row0` or `col0`, the first row or column of the tile, `rows` and `cols`, and for each group size:
    `inside`, a mask of the elements inside the rectangle, `base`, the first element, and `offsets` from it.
    """
    down, across = tile.strip
    lines = [f"row0 = down * {down} + step * {tile.rows}", f"rows = row0 + tl.arange(0, {tile.rows})[:, None]"]
    if tile.is_line:
        lines[0] = f"col0 = across * {across} + step * {tile.cols}"
    for group in groups:
        by = f" // {group}" if group > 1 else ""
        cols = f"cols{group}" if group > 1 else "cols"
        of_row = "" if tile.is_line else f"row0.to(tl.int64) * (stride{by}) + "
        at = f"tl.arange(0, {tile.cols // group})[None, :]"
        lines += [
            f"{cols} = col0{by} + {at}",
            f"inside{group} = (rows < R) & ({cols} < C{by})",
            f"base{group} = {of_row}col0{by}",
            f"offsets{group} = tl.arange(0, {tile.rows})[:, None] * (stride{by}) + {at}",
        ]
    return lines
