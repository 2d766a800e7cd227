"""Writes the kernel of a pass, in which a program processes several tiles of a rectangle one after another."""

from typing import Any

import torch
from torch import Tensor, fx

from lowmem.errors import UnsupportedError
from lowmem.kernels.inputs import Columns, Scalars, Tile
from lowmem.kernels.printing import TYPES, Lines, Printer, Value, op_name, source_of
from lowmem.tiles.graph import Sizes
from lowmem.tiles.rounding import mix
from lowmem.tiles.storage import Held
from lowmem.tiles.tile import DIMS, RawTile, Sums
from lowmem.tiles.traced import GRAD, Arguments, Graph, Kind, Pass, reading_of

LOWEST = 'float("-inf")'

# Arguments of a tile that its noise depends on: the numbers of its lines, and its first column number in two parts.
LINE, KEY, HIGH, LOW = (("place", name) for name in ("line", "key", "high", "low"))


def trace_tile(kind: Kind, reached: Pass, tile: Tile) -> Graph:
    """Traces the function of a pass for a tile. If the pass writes, the results are the tensors of the tile."""
    storages, sizes, shape = dict(kind.storages), Sizes(), (1, tile.rows, tile.cols)
    tensors = {
        (name, n): sizes.tensor((*shape[:2], shape[2] // part.group), part.dtype, kind.device)
        for name in dict.fromkeys((GRAD, "param", *reached.full.values()))
        for n, part in enumerate(storages[name].parts)
    }
    args: Arguments = dict(tensors)
    for key, dtype, tail in reached.args:
        if key[0] == "noise":
            args[LINE] = sizes.tensor((1, tile.rows, 1), torch.int32, kind.device)
            args |= {each: sizes.tensor((), torch.int32, kind.device) for each in (KEY, HIGH, LOW)}
        else:
            here = [n if d in DIMS.get(key[0], ()) else 1 for d, n in enumerate(shape)]
            args[key] = sizes.tensor(() if tail is None else here, dtype, kind.device)

    def results_of(given: Arguments) -> dict[Any, Tensor]:
        def held(name: str) -> Held:
            return Held(storages[name], tuple(given[name, n] for n, _ in enumerate(storages[name].parts)))

        vectors = {key: given[key] for key, *_ in reached.args if key[0] not in ("reading", "noise")}
        if LINE in given:
            noise = mix(given[LINE] + given[KEY])
            noise = torch.where(given[HIGH] != 0, mix(noise + given[HIGH]), noise)
            vectors["noise", ""] = noise + given[LOW]
        full = {name: held(state) for name, state in reached.full.items()}
        sums = reached.body(RawTile(given[GRAD, 0], held("param"), reading_of(given), full, vectors)) or Sums()
        if reached.sums is None:
            return {key: given[key] for key in tensors if key[0] != GRAD}
        return {(each, name): value for each, name, value in sums.items()}

    return Graph.of(results_of, args)


def kernel_shape(value: Tensor) -> tuple[int, ...]:
    """Returns the shape of a value in the kernel: without the batch dimension, and () for one element."""
    shape = tuple(value.shape)
    if all(size == 1 for size in shape):
        return ()
    return shape[1:] if len(shape) > 1 and shape[0] == 1 else shape


class TilePrinter(Printer):
    """Prints the function of a pass."""

    def __init__(
        self, scalars: Scalars, columns: Columns, reached: Pass, graph: Graph, tile: Tile, *, aligned: bool
    ) -> None:
        super().__init__(Lines())
        self._scalars, self._columns, self._tile, self._aligned = scalars, columns, tile, aligned
        self._keys = {node: key for key, node in graph.inputs.items()}
        self._vectors = dict(zip(reached.vectors, reached.node.args[0], strict=True))
        self._kind, self.storages = scalars.update.kind, dict(scalars.update.kind.storages)

    def once(self, value: Value) -> Value:
        return value._replace(code=self.text.once(value.code))

    def place(self, name: str, n: int) -> tuple[str, str]:
        """Returns the code for the addresses of a tensor's tile, and for the mask of its elements."""
        part = self.storages[name].parts[n]
        if name == GRAD:
            byte = f"{self._columns.load('offset')} * {part.dtype.itemsize}"
            code = f"(tl.load(grads + member) + {byte}).to(tl.pointer_type({TYPES[part.dtype]}))"
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
        (kind, name), meta = key, _ = self._keys[node], node.meta["val"]
        shape = kernel_shape(meta)
        if kind in self.storages:
            place, inside = self.place(kind, name)
            return self.assign(f"tl.load({place}, mask={inside}, other=0)", shape, meta.dtype)
        if kind == "place":
            if key == KEY:
                return self.once(Value(f"tl.load(keys + {self._columns.load('key')})", (), torch.int32))
            first = self.once(Value(f"{self._columns.load(name)}.to(tl.int32)", (), torch.int32))
            if key == HIGH:
                return first
            code = f"{first.code} + {'col0' if key == LOW else '0' if self._tile.rows == 1 else 'rows'}"
            return self.assign(code, shape, torch.int32)
        if kind in ("row", "col"):
            source = source_of(self._vectors[key])
            at, limit = ("rows", "R") if kind == "row" else ("cols", "C")
            vector = self.text.once(f"work + {self._columns.load('vector', source)}")
            return self.assign(f"tl.load({vector} + {at}, mask={at} < {limit}, other=0.0)", shape, torch.float32)
        if key in self._vectors:
            return self.once(self._scalars.stored(self._vectors[key]))
        if kind == "reading":
            return self.once(self._scalars.input(self._scalars.update.graph.inputs[key]))  # type: ignore[arg-type]
        return self.once(self._scalars.number(self._kind.numbers.index(name), single=True))

    def reshaped(self, node: fx.Node, value: Value) -> Value:
        shape = kernel_shape(node.meta["val"])
        if value.shape == shape or not value.shape or op_name(node) == "expand":
            return value
        return self.assign(f"tl.reshape({value.code}, {list(shape)})", shape, value.dtype)

    def reduced(self, node: fx.Node, value: Value) -> Value:
        """Returns a sum or maximum within a tile, for example over a group."""
        functions = {"sum": "tl.sum({}, {}, keep_dims={})", "amax": "largest({}, {}, {})"}
        name, ndim = op_name(node), node.args[0].meta["val"].ndim  # type: ignore[union-attr]
        if name not in functions or len(node.args[1]) > 1:  # type: ignore[arg-type]
            raise UnsupportedError(f"{node.format_node()} is not supported in Triton")
        (axis,), keep = (*node.args[1:], False)[:2]  # type: ignore[misc]
        code = functions[name].format(value.code, axis % ndim - ndim + len(value.shape), bool(keep))
        return self.assign(code, kernel_shape(node.meta["val"]), value.dtype)


def pass_text(scalars: Scalars, columns: Columns, number: int, reached: Pass, tile: Tile, *, aligned: bool) -> str:
    """Returns the source of the kernel for pass `number`."""
    graph = trace_tile(scalars.update.kind, reached, tile)
    printer = TilePrinter(scalars, columns, reached, graph, tile, aligned=aligned)
    line, (rows, cols), before, after = tile.rows == 1, (tile.rows, tile.cols), list[str](), list[str]()
    row_sums: dict[str, str] = {}  # shared by scalar sums

    def masked(value: Value, other: str = "0.0") -> str:
        return f"tl.where(inside1, {value.code}, {other})"

    def row_sum(value: Value) -> str:
        if value.code not in row_sums:
            row_sums[value.code] = printer.assign(f"tl.sum({masked(value)}, 1)").code
        return row_sums[value.code]

    for which, (key, node) in enumerate(graph.results.items()):
        if reached.sums is None:
            if node.op != "placeholder":
                value, (place, inside) = printer.value(node), printer.place(*key)
                printer.lines.append(f"tl.store({place}, {value.code}, mask={inside})")
            continue
        value, acc = printer.value(node), f"sum{which}"
        if value.shape != (rows, cols):  # the value needs broadcasting
            value = printer.assign(f"tl.broadcast_to({value.code}, [{rows}, {cols}])", (rows, cols), value.dtype)
        partial = printer.text.once(f"work + {columns.load('partial', (number, which))}")
        if key[0] in ("row", "row_max"):
            of_row = row_sum(value) if key[0] == "row" else f"largest({masked(value, LOWEST)}, 1, False)"
            at = f"row0 + tl.arange(0, {rows})"
            printer.lines.append(f"tl.store({partial} + across.to(tl.int64) * R + {at}, {of_row}, mask={at} < R)")
        elif key[0] == "col":
            before.append(f"{acc} = tl.zeros([{rows}, {cols}], tl.float32)")
            printer.lines.append(f"{acc} += {masked(value)}")
            at = f"col0 + tl.arange(0, {cols})"
            after.append(f"tl.store({partial} + down.to(tl.int64) * C + {at}, tl.sum({acc}, 0), mask={at} < C)")
        else:
            before.append(f"{acc} = tl.zeros([{rows}{f', {cols}' if line else ''}], tl.float32)")
            printer.lines.append(f"{acc} += {masked(value) if line else row_sum(value)}")
            after.append(f"tl.store({partial} + tile, tl.sum({f'tl.sum({acc}, 1)' if line else acc}, 0))")

    of_line = f"col0 = across * {tile.strip[1]} + step * {cols}"
    of_rows = f"row0 = down * {tile.strip[0]} + step * {rows}"
    loop = [of_line if line else of_rows, f"rows = row0 + tl.arange(0, {rows})[:, None]"]
    groups = {1, *(part.group for storage in printer.storages.values() for part in storage.parts)}
    for group in sorted(groups):
        by, at = f" // {group}" if group > 1 else "", f"tl.arange(0, {cols // group})[None, :]"
        cols_of = "cols" if group == 1 else f"cols{group}"
        loop += [
            f"{cols_of} = col0{by} + {at}",
            f"inside{group} = (rows < R) & ({cols_of} < C{by})",
            f"base{group} = {'' if line else f'row0.to(tl.int64) * (stride{by}) + '}col0{by}",
            f"offsets{group} = tl.arange(0, {rows})[:, None] * (stride{by}) + {at}",
        ]
    names = {"R": "rows", "C": "cols", "stride": "stride"}
    sizes = [f"{name} = {columns.load(key)}.to(tl.int32)" for name, key in names.items()]
    sizes += [f"{name} = tl.multiple_of({name}, 16)" for name in ("C", "stride") if aligned]
    start = [
        "row = table + tl.load(programs + tl.program_id(0)) * RECTANGLE_COLUMNS",
        *(f"{name} = {columns.load(name)}" for name in ("member", "group", "slice")),
        *sizes,
        f"tile = (tl.program_id(0) - {columns.load('first')}).to(tl.int32)",
        f"strips = tl.cdiv(C, {tile.strip[1]})",
        "down, across = tile // strips, tile % strips",
        "row0 = 0" if line else f"col0 = across * {cols}",
        f"rest = C - across * {tile.strip[1]}" if line else f"rest = R - down * {tile.strip[0]}",
    ]
    body = [
        *before,
        f"for step in range(tl.minimum(tl.cdiv(rest, {cols if line else rows}), {tile.steps})):",
        *(f"    {text}" for text in [*loop, *printer.lines]),
        *after,
    ]
    return printer.text.function(f"pass_{number}", scalars.args, start, body)
