"""Tiles of fake tensors, in which an update is traced, and the compiled code of that.

A parameter that is one tile is updated by one compiled function. One of several tiles (a shard, a gradient that is
computed block by block, rows that do not divide into blocks) runs the same code cut at each pass over the tiles: a part
for every tile, and a part between two passes, where the sums of all tiles and ranks are known.
"""

import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, fx

from lowmem.tiles.gradients import Gradient
from lowmem.tiles.graph import Function, Size, Sizes, compiled, realized, trace
from lowmem.tiles.layout import Layout, Place, Rect
from lowmem.tiles.storage import Held
from lowmem.tiles.stored import Source, StoredTiles, Totals, over_ranks
from lowmem.tiles.sweep import Given, Reading, Scalars, Tiles, Vectors, vectors_of
from lowmem.tiles.tile import DIMS, RawTile, Sums, extent

# Compiled code on a CPU sums columns over this many rows at a time, which the cache holds, and a single line in this
# many elements at a time.
BLOCK_ROWS = 16
LINE = 1024

# Columns are summed within each block of rows, in vector registers, and then over blocks: so many float32 sums at most
# exist at a time.
BLOCK_SUMS = 1 << 20

# Rows of a block, and elements of a part of a single line: as few as the first that divide it, or at least the second.
ROWS = BLOCK_ROWS, 4
PART = LINE, 128

# A matrix of up to ONE_BLOCK elements may be one block. Larger ones have at least FEWEST blocks, which threads share.
ONE_BLOCK = 1 << 17
FEWEST = 16

# Elements that a kernel counts in int32.
LARGEST = 1 << 31


Result = TypeVar("Result")

# Of a tile: it has several slices of the batch; each of them is a single line. Code is special to that.
Form = tuple[bool, bool]


class UntraceableError(Exception):
    """An update cannot be traced."""


@functools.lru_cache(maxsize=1024)
def blocks(rows: int, cols: int, group: int = 1) -> tuple[int, int, int] | None:
    """[blocks, rows of a block, cols] of a matrix, or of a single line cut into parts: [parts, 1, elements of a part],
    each of complete groups of elements.

    None: it does not divide into such.
    """
    if rows * cols >= LARGEST or cols % group:
        return None
    if rows == 1:
        usual, least = (-(-number // group) for number in PART)
        part = _divisor(cols // group, usual, least, small=cols <= ONE_BLOCK)
        return None if part is None else (cols // group // part, 1, part * group)
    usual, least = (max(number, -(-rows * cols // BLOCK_SUMS)) for number in ROWS)
    height = _divisor(rows, usual, least, small=rows * cols <= ONE_BLOCK)
    return None if height is None else (rows // height, height, cols)


def _divisor(length: int, usual: int, least: int, small: bool) -> int | None:
    """The smallest divisor from `usual` on, else the largest from `least` on, else all of it if it is `small`."""
    for size in (*range(usual, length // FEWEST + 1), *range(min(usual, length), least - 1, -1)):
        if length % size == 0:
            return size
    return length if small else None


class Piece(NamedTuple):
    """A tile that compiled code takes: where it is, and its blocks."""

    place: Place
    blocks: tuple[int, int, int]

    @property
    def form(self) -> Form:
        batch, rows, _ = self.place.rect.size
        return batch > 1, rows == 1

    def shape(self, group: int, own: int) -> tuple[int, ...]:
        """The shape of a tensor with a value per `own` elements of a row, in blocks: [b, n, m, c]; where elements of a
        row are encoded in groups, [b, n, m, c / group, group / own].
        """
        count, height, width = self.blocks
        shape = self.place.rect.size[0], count, height, width // group
        return shape if group == 1 else (*shape, group // own)


@functools.lru_cache(maxsize=1024)
def pieces(layout: Layout, group: int) -> list[Piece] | None:
    """The tiles of a shard, as few as possible; None if it does not divide into such.

    group: elements of a row that are encoded together.
    """
    found: list[Piece] = []
    for n, rectangle in enumerate(layout.rectangles):
        outer, order = rectangle.rect, rectangle.order
        batch, rows, cols = outer.size
        if not batch * rows * cols:
            continue
        if rectangle.index is not None or order != tuple(range(len(order))):
            return None  # its elements are not side by side in the order of the view
        one = next(outer.subdivide(LARGEST - 1)) == outer and blocks(rows, cols, group)
        for rect in (outer,) if one else _regular(outer):
            divided = blocks(*rect.size[1:], group)
            if divided is None:
                return None
            found.append(Piece(layout.place(n, rect), divided))
    return found


def _regular(outer: Rect) -> Iterator[Rect]:
    """A rectangle in parts: a multiple of `BLOCK_ROWS` rows, or of `LINE` elements of a single line, and the rest."""
    _, rows, cols = outer.size
    for rect in outer.subdivide(min(rows * cols, LARGEST - 1)):  # one slice of the batch at a time
        line = rect.size[1] == 1
        side, step = (rect.cols, LINE) if line else (rect.rows, BLOCK_ROWS)
        middle = side.stop - (side.stop - side.start) % step
        for part in (slice(side.start, middle), slice(middle, side.stop)):
            if part.start < part.stop:
                yield Rect(rect.batch, rect.rows, part) if line else Rect(rect.batch, part, rect.cols)


@dataclass
class Pass:
    """A pass over the tiles, as nodes of a graph.

    entering: kind, source and result of each vector of which tiles take their part (`StoredTiles.part`).
    leaving: kind, name, source and result of each sum.
    nodes: those of a tile.
    """

    entering: list[tuple[str, fx.Node, fx.Node]] = field(default_factory=list)
    leaving: list[tuple[str, str, fx.Node, fx.Node]] = field(default_factory=list)
    nodes: set[fx.Node] = field(default_factory=set)


@dataclass(eq=False)
class TracedTiles(Tiles):
    """One tile in blocks, of fake tensors, while an update is traced.

    Attributes:
        weight, grad: in blocks, [b, n, m, c], or in groups of elements, [b, n, m, c / group, group].
        lines: each slice is a single line in parts, [b, n, 1, m].
        full: the shape of the parameter, if the tile is one of several; the passes over them are noted in `passes`.
        key: of the noise, int32 scalar, if noise is drawn.
    """

    weight: Held
    grad: Tensor
    reading: Reading
    scalars: Scalars
    lines: bool
    full: tuple[Any, Any, Any] | None
    key: Tensor | None
    passes: list[Pass] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._blocks = batch, count, height, cols = *self.grad.shape[:3], math.prod(self.grad.shape[3:])
        self._tile = (batch, 1, count * cols) if self.lines else (batch, count * height, cols)
        self.shape, self.members, self.device = self.full or self._tile, 1, self.grad.device

    def complete_grad(self) -> Tensor:
        raise UntraceableError("the rule steps on the parameter as one tensor")

    def reduce(self, body: Callable[[RawTile], Sums], given: Given) -> Sums:
        def finished(raw: RawTile) -> list[tuple[str, str, Tensor]]:
            return [(kind, name, self._finished(kind, value)) for kind, name, value in body(raw).items()]

        here, sums = self._pass(finished, given, vectors_of(given))
        if self.full is not None:
            for n, (kind, name, value) in enumerate(sums):
                total, source, result = _standing_for(value, extent(kind, self.shape))
                here.leaving.append((kind, name, source, result))
                sums[n] = kind, name, total
        return Sums.of(sums)

    def _finished(self, kind: str, value: Tensor) -> Tensor:
        """The sum of a tile from those of its blocks and lines."""
        if kind == "scalar":
            return value.sum(-1)
        if kind == "col":
            return value.flatten(1) if self.lines else value.sum(-2)
        if self.lines:
            return value.sum(-1, keepdim=True) if kind == "row" else value.amax(-1, keepdim=True)
        return value

    def each(self, body: Callable[[RawTile], None], given: Given, vectors: Vectors) -> None:
        self._pass(body, given, vectors)

    def noise_keys(self) -> Tensor:
        assert self.key is not None
        return self.key

    def _pass(self, body: Callable[[RawTile], Result], given: Given, vectors: Vectors) -> tuple[Pass, Result]:
        """Calls `body` with the tile, and notes what it does."""
        here, nodes = Pass(), _nodes()
        for (kind, name), value in vectors.items():
            if value.ndim:
                vectors[kind, name] = realized(value.reshape(extent(kind, self.shape)))
        start = len(nodes)
        entered = {key: self._entered(here, key[0], value) for key, value in vectors.items()}
        # here, so that the code of each pass does it: what lies between two passes has no tile
        full = {name: _in_blocks(held) for name, held in (given.get("full") or {}).items()}
        result = body(self._raw(_in_blocks(self.grad), _in_blocks(self.weight), full, entered))
        here.nodes = set(list(nodes)[start:])
        self.passes.append(here)
        return here, result

    def _entered(self, here: Pass, kind: str, value: Tensor) -> Tensor:
        """A vector, or what the tile takes of it, broadcastable to [b, n, m, c]."""
        if self.full is not None:
            value, source, result = _standing_for(value, extent(kind, self._tile) if value.ndim else ())
            here.entering.append((kind, source, result))
        if value.ndim == 0:
            return value
        batch, count, height, width = self._blocks
        if kind == "col":
            return value.view((batch, count, 1, width) if self.lines else (batch, 1, 1, width))
        value = value.view((batch, 1, 1, 1) if self.lines or DIMS[kind] == (0,) else (batch, count, height, 1))
        if kind == "noise" and self.lines:  # that of a column is counted from the start of its line
            parts = realized(torch.arange(count, dtype=torch.int32, device=self.device) * width)
            value = value + parts.view(1, -1, 1, 1)
        return value


def _in_blocks(value: Tensor | Held) -> Any:
    """A tensor, or those of a storage, without the dimension of groups: [b, n, m, c]."""
    if isinstance(value, Held):
        return Held(value.storage, tuple(map(_in_blocks, value.parts)))
    return value.flatten(-2) if value.ndim == 5 else value


def _nodes() -> Any:
    """The nodes that have been traced so far."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    assert mode is not None  # a tile is traced
    return mode.tracer.graph.nodes


def _standing_for(value: Tensor, shape: Sequence[Size]) -> tuple[Tensor, fx.Node, fx.Node]:
    """A tensor for which the values are known when the code is called, and the nodes of `value` and of that tensor."""
    new = value.new_empty(tuple(shape))
    node = next(iter(reversed(_nodes())))
    return new, node.args[0], node


def _repeated(node: fx.Node) -> bool:
    """Sizes, and the numbers of a rule one by one, which all code computes again that uses them."""
    number = node.target is operator.getitem and node.args[0].target is torch.ops.aten.unbind.int  # type: ignore[union-attr]
    return number or (node.op != "placeholder" and not isinstance(node.meta.get("val"), Tensor))


def _used_by(nodes: Iterable[fx.Node]) -> dict[fx.Node, None]:
    """The nodes that these use, in place of those that are computed again what they are computed from."""
    used: dict[fx.Node, None] = {}
    for node in nodes:
        for each in node.all_input_nodes:
            used |= _used_by([each]) if _repeated(each) else {each: None}
    return used


class Code(NamedTuple):
    """A part of a graph, compiled: its inputs and outputs as nodes of that graph."""

    run: Function
    inputs: list[fx.Node]
    outputs: list[fx.Node]

    @classmethod
    def of(cls, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node], sizes: Sizes) -> "Code":
        """Compiles some nodes of a graph."""
        own = set(nodes)
        inputs = [node for node in _used_by(nodes) | dict.fromkeys(outputs) if node not in own]
        graph = fx.Graph()
        copies = {node: graph.placeholder(f"input{n}") for n, node in enumerate(inputs)}
        for node in inputs:
            copies[node].meta = node.meta

        def copy(node: fx.Node) -> fx.Node:
            if node not in copies:
                copies[node] = graph.node_copy(node, copy)
            return copies[node]

        for node in nodes:
            copy(node)
        graph.output([copy(node) for node in outputs])
        module = fx.GraphModule(torch.nn.Module(), graph)
        return cls(compiled(module, sizes, [node.meta["val"] for node in inputs]), inputs, list(outputs))


class TracedUpdate:
    """Compiled code of an update, of a tile of some form.

    Args:
        update: called with the arguments; returns tensors, and the tiles that it went over.
        shared, tile: fake arguments: those that all tiles of a parameter have in common, and those of one tile.
    """

    def __init__(
        self,
        update: Callable[..., tuple[list[Tensor], TracedTiles]],
        sizes: Sizes,
        shared: Sequence[Tensor | Size],
        tile: Sequence[Tensor],
        *,
        cut: bool,
    ) -> None:
        self._sizes, found = sizes, list[TracedTiles]()

        def run(*args: Any) -> list[Tensor]:
            results, tiles = update(*args)
            found[:] = [tiles]
            return results

        self._cut, args = cut, [*shared, *tile]
        try:
            graph = trace(run, args)
        except Exception as error:  # a rule may do anything that PyTorch cannot trace
            raise UntraceableError(str(error)) from error
        if not cut:
            self.run = compiled(graph, sizes, args)
            return
        nodes = list(graph.graph.nodes)
        self.placeholders = [node for node in nodes if node.op == "placeholder"]
        self.passes = found[0].passes
        (self.results,) = nodes[-1].args
        marks = {node for each in self.passes for *_, node in (*each.entering, *each.leaving)}
        self._between: list[list[fx.Node]] = [[] for _ in range(len(self.passes) + 1)]
        self._within: list[list[fx.Node]] = [[] for _ in self.passes]
        begun = 0
        for node in nodes:
            if node.op == "call_function" and node not in marks and isinstance(node.meta.get("val"), Tensor):
                n = next((n for n, each in enumerate(self.passes) if node in each.nodes), None)
                begun = begun if n is None else n + 1
                (self._between[begun] if n is None else self._within[n]).append(node)
        self.within, self.between = list[Code](), list[Code]()

    def compile(self, first: bool) -> None:
        """Compiles what a tile needs, and with `first` what lies between two passes, if that has not been done."""
        if not self._cut or (self.within and not first) or self.between:
            return
        if not self.within:
            outputs = [[source for *_, source, _ in each.leaving] for each in self.passes]
            self.within = [Code.of(*pair, self._sizes) for pair in zip(self._within, outputs, strict=True)]
        if first:
            used = {source for each in self.passes for _, source, _ in each.entering} | set(self.results)
            for nodes in reversed(self._between):
                code = Code.of(nodes, [node for node in nodes if node in used], self._sizes)
                used.update(code.inputs)
                self.between.insert(0, code)


def run_cut(
    updates: Mapping[Form, TracedUpdate],
    tiles: StoredTiles,
    pieces: Sequence[Piece],
    shared: Sequence[Tensor],
    groups: Sequence[int],
    tensors: Sequence[Gradient],
) -> list[Tensor]:
    """Runs an update over several tiles.

    Args:
        updates: by the form of a piece.
        tiles: of the parameter, which say what each takes of vectors.
        pieces: its tiles.
        shared: arguments of all tiles.
        groups, tensors: the gradient and the tensors of weight and states; of how many elements of a row each has one
            value.
    """
    first, sizes = updates[pieces[0].form], tiles.shape
    common = [*shared, *sizes]
    values: dict[fx.Node, Any] = dict(zip(first.placeholders, common, strict=False))
    sources = [Source(tiles.layout, tensor, group) for tensor, group in zip(tensors, groups, strict=True)]

    def between(n: int) -> None:
        code = first.between[n]
        values.update(zip(code.outputs, code.run(*(values[node] for node in code.inputs)), strict=True))

    for n, first_pass in enumerate(first.passes):
        between(n)
        entering = [(kind, values[source]) for kind, source, _ in first_pass.entering]
        total = Totals(sizes, tiles.device)
        for piece in pieces if n % 2 == 0 else reversed(pieces):  # begins with what is in the cache
            update = updates[piece.form]
            code, here = update.within[n], update.passes[n]
            shapes = (piece.shape(max(groups), group) for group in groups)
            parts = (source.tile(piece.place).view(shape) for source, shape in zip(sources, shapes, strict=True))
            local = dict(zip(update.placeholders, (*common, *parts), strict=True))
            for (kind, value), (*_, node) in zip(entering, here.entering, strict=True):
                local[node] = tiles.part(kind, value, piece.place).contiguous()
            sums = zip(here.leaving, code.run(*(local[node] for node in code.inputs)), strict=True)
            total.add(piece.place, Sums.of((kind, name, value) for (kind, name, *_), value in sums))
        totals = total.sums if tiles.across is None else over_ranks(tiles.across, total.sums)
        values.update({node: getattr(totals, kind)[name] for kind, name, _, node in first_pass.leaving})
    between(len(first.passes))
    return [values[node] for node in first.results]
