"""How a parameter is viewed as [batch, rows, cols], and which rectangles of it are in the shard of this rank."""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

Extent = Literal["full", "row", "col", "slice"]


@dataclass(frozen=True)
class View:
    """Which dimensions of a parameter are batch, rows and cols, each in the order in which they are laid side by side.

    What a rule sums or factors, it does within each slice of the batch.
    """

    batch: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    cols: tuple[int, ...] = ()

    @classmethod
    def vector(cls, ndim: int) -> "View":
        """All elements in one row, whatever the shape."""
        return cls(cols=tuple(range(ndim)))

    @classmethod
    def matrix(cls, ndim: int) -> "View":
        """A vector is one row, three dimensions are a stack of matrices (experts), and a convolution is the matrix that
        it multiplies its patches with, [out, in * kernel].
        """
        if ndim < 2:
            return cls.vector(ndim)
        first = ndim == 3
        return cls((0,) if first else (), (int(first),), tuple(range(1 + first, ndim)))

    def sizes(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """A shape as [batch, rows, cols]."""
        batch, rows, cols = (math.prod(shape[d] for d in dims) for dims in (self.batch, self.rows, self.cols))
        return batch, rows, cols

    def state_shape(self, extent: Extent, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The logical shape of a state: the parameter's own, or its batch dimensions and those of rows or cols."""
        if extent == "full":
            return shape
        dims = self.batch + {"row": self.rows, "col": self.cols, "slice": ()}[extent]
        return tuple(shape[d] for d in dims)

    def has_groups(self, shape: tuple[int, ...], group: int) -> bool:
        """Whether rows consist of groups of `group` elements that follow one another in memory."""
        return group == 1 or (self.cols[-1:] == (len(shape) - 1,) and shape[-1] % group == 0)

    def stacked(self) -> "View":
        """The view of several parameters of this view, stacked along a new first dimension."""
        batch, rows, cols = (tuple(d + 1 for d in dims) for dims in (self.batch, self.rows, self.cols))
        return View((0, *batch), rows, cols)


@dataclass(frozen=True)
class Rect:
    """A rectangle of a parameter seen as [batch, rows, cols], in the parameter's own coordinates."""

    batch: slice
    rows: slice
    cols: slice

    def subdivide(self, tile: int, block: int = 1) -> Iterator["Rect"]:
        """Rectangles of about `tile` elements each that cover this one: whole slices, whole rows, a multiple of `block`
        at a time, or parts of a row.
        """
        b, r, c = self.size
        if not b * r * c:
            yield self
            return
        cols = min(c, tile)
        rows = min(r, max(block, tile // cols // block * block)) if cols == c else 1
        batch = min(b, max(1, tile // (rows * cols))) if rows == r and cols == c else 1
        for b0 in range(self.batch.start, self.batch.stop, batch):
            for r0 in range(self.rows.start, self.rows.stop, rows):
                for c0 in range(self.cols.start, self.cols.stop, cols):
                    yield Rect(
                        slice(b0, min(b0 + batch, self.batch.stop)),
                        slice(r0, min(r0 + rows, self.rows.stop)),
                        slice(c0, min(c0 + cols, self.cols.stop)),
                    )

    def narrow(self, width: int) -> Iterator["Rect"]:
        """This rectangle cut before every column whose number is a multiple of `width`."""
        start, stop = self.cols.start, self.cols.stop
        borders = [start, *range(start - start % width + width, stop, width), stop]
        for first, last in itertools.pairwise(borders):
            yield self if (first, last) == (start, stop) else Rect(self.batch, self.rows, slice(first, last))

    def regular(self, block: int, line: int) -> tuple["Rect | None", "Rect | None"]:
        """This rectangle in two: a multiple of `block` rows, or if it is a single row of `line` elements, twice that at
        least; and what is left over. Either may be None.
        """
        _, r, c = self.size
        side, size, step = (self.cols, c, line) if r == 1 else (self.rows, r, block)
        count = size - size % step if size >= 2 * step else 0
        middle = side.start + count

        def of(part: slice) -> "Rect | None":
            if part.start == part.stop:
                return None
            return Rect(self.batch, self.rows, part) if r == 1 else Rect(self.batch, part, self.cols)

        return of(slice(side.start, middle)), of(slice(middle, side.stop))

    def within(self, outer: "Rect") -> tuple[slice, slice, slice]:
        """This rectangle's indices in a tensor that holds just `outer`."""

        def shift(inner: slice, outer: slice) -> slice:
            return slice(inner.start - outer.start, inner.stop - outer.start)

        return shift(self.batch, outer.batch), shift(self.rows, outer.rows), shift(self.cols, outer.cols)

    @functools.cached_property
    def size(self) -> tuple[int, int, int]:
        """Batch, rows and cols."""
        batch, rows, cols = (s.stop - s.start for s in (self.batch, self.rows, self.cols))
        return batch, rows, cols


@dataclass(frozen=True)
class Span:
    """The shard of a parameter of `shape` that a rank holds: elements from `start` to `stop`, in the order of its
    dimensions. Where there are other ranks, each holds `size` of them, the last ones fewer or none.
    """

    shape: tuple[int, ...]
    start: int
    stop: int
    size: int

    @functools.cached_property
    def numel(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)

    @property
    def held(self) -> int:
        """Elements of it that are here."""
        return self.stop - self.start

    def grouped(self, group: int) -> "Span":
        """The span of a tensor with one value per `group` elements of a row."""
        return Span(grouped(self.shape, group), self.start // group, self.stop // group, self.size // group)


def grouped(shape: Sequence[int], group: int) -> tuple[int, ...]:
    """The shape of a tensor with one value per `group` elements of a row."""
    return tuple(shape) if group == 1 else (*shape[:-1], shape[-1] // group)


Box = tuple[slice, ...]


@dataclass(frozen=True)
class Block:
    """A rectangle of a parameter, and where it is in a shard.

    rect: in [batch, rows, cols].  start, stop: elements of the flat shard, which viewed in `shape` hold it at `index`
    (None: all of it) with the dimensions in `order`.
    """

    rect: Rect
    start: int
    stop: int
    shape: tuple[int, ...]
    index: Box | None
    order: tuple[int, ...]

    def view(self, shard: Tensor, group: int = 1) -> Tensor:
        """The rectangle in a shard of the parameter: flat, or in its own shape and however that lies in memory.

        A tensor with one value per `group` elements of a row gives [batch, rows, cols / group].
        """
        shape, index, (batch, rows, cols) = grouped(self.shape, group), self.index, self.rect.size
        if group > 1 and index is not None:
            index = *index[:-1], slice(index[-1].start // group, index[-1].stop // group)
        if shard.shape != shape:
            shard = shard.view(-1)[self.start // group : self.stop // group].view(shape)
        if index is not None:
            shard = shard[index]
        if self.order != tuple(range(shard.ndim)):
            shard = shard.permute(self.order)
        return shard.view(batch, rows, cols // group)


@dataclass(frozen=True)
class Layout:
    """Which rectangles of a [batch, rows, cols] parameter a process holds.

    shape: that of the full parameter as [batch, rows, cols].  blocks: the rectangles of the shard.
    cuts: how sweeps have cut that into tiles, by what they have cut it for.
    """

    shape: tuple[int, int, int]
    blocks: tuple[Block, ...]
    cuts: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, shape: tuple[int, ...], view: View, start: int = 0, stop: int | None = None) -> "Layout":
        """The elements from `start` to `stop` of a parameter in the order of its dimensions: all of them by default.

        A range of a matrix is the end of a row, whole rows, and the start of a row.
        """
        sizes, numel = view.sizes(shape), math.prod(shape)
        stop = numel if stop is None else stop
        if (start, stop) != (0, numel):
            shape, view = _merged(shape, view)
        dims = view.batch + view.rows + view.cols
        if not shape:
            shape, dims = (1,), (0,)
        if start >= stop:
            nothing = Rect(slice(0, 0), slice(0, 1), slice(0, 1))
            return cls(sizes, (Block(nothing, 0, 0, (0, *shape[1:]), None, dims),))
        blocks, done = [], 0
        for box in _boxes(start, stop, shape):
            extent = tuple(s.stop - s.start for s in box)
            end = done + math.prod(extent)
            looped = tuple(d for side in (view.batch, view.rows, view.cols) for d in _looped(side, box, shape))
            for at in itertools.product(*(range(extent[d]) for d in looped)):
                inner = dict(zip(looped, at, strict=True))
                index = tuple(slice(inner.get(d, 0), inner.get(d, n - 1) + 1) for d, n in enumerate(extent))
                part = tuple(slice(s.start + i.start, s.start + i.stop) for s, i in zip(box, index, strict=True))
                rect = Rect(*(_side(side, part, shape) for side in (view.batch, view.rows, view.cols)))
                blocks.append(Block(rect, done, end, extent, index if looped else None, dims))
            done = end
        return cls(sizes, tuple(blocks))

    @property
    def in_order(self) -> bool:
        """Whether the process holds all of the parameter, whose elements in memory are in the order of the view."""
        first = self.blocks[0]
        complete = len(self.blocks) == 1 and first.index is None and first.rect.size == self.shape
        return complete and first.order == tuple(range(len(first.order)))

    @property
    def one_line(self) -> bool:
        """Whether the parameter is a single line, of which every range is a single rectangle."""
        return self.shape[:2] == (1, 1)

    def lines(self, count: int) -> "Layout":
        """The layout of `count` such shards stacked, of parameters that are `one_line`."""
        (block,) = self.blocks
        here = block.rect.size[0] * block.rect.size[2]  # none, if the rank holds nothing
        rect = Rect(slice(0, count if here else 0), block.rect.rows, block.rect.cols)
        stacked = Block(rect, 0, count * here, (count, here), None, (0, 1))
        return Layout((count, 1, self.shape[2]), (stacked,))

    @functools.cached_property
    def rects(self) -> tuple[Rect, ...]:
        """The rectangles, in the order of `views`."""
        return tuple(block.rect for block in self.blocks)

    def views(self, shard: Tensor, group: int = 1) -> list[Tensor]:
        """A shard as one [batch, rows, cols] view per rectangle; see `Block.view`."""
        return [block.view(shard, group) for block in self.blocks]


def _merged(shape: tuple[int, ...], view: View) -> tuple[tuple[int, ...], View]:
    """The same in fewer dimensions: those that follow one another on the same side are one."""
    sides = (view.batch, view.rows, view.cols)
    follows = {after for side in sides for d, after in itertools.pairwise(side) if after == d + 1}
    number, sizes = {}, list[int]()
    for d, size in enumerate(shape):
        if d in follows:
            sizes[-1] *= size
        else:
            number[d] = len(sizes)
            sizes.append(size)
    batch, rows, cols = (tuple(number[d] for d in side if d in number) for side in sides)
    return tuple(sizes), View(batch, rows, cols)


def _boxes(start: int, stop: int, shape: tuple[int, ...]) -> Iterator[Box]:
    """The boxes that a range of elements consists of, in its order, each with all of its last dimensions."""
    if start >= stop:
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner
    if first > last:  # it begins and ends within one index of the first dimension
        for box in _boxes(start - last * inner, stop - last * inner, shape[1:]):
            yield slice(last, last + 1), *box
        return
    for box in _boxes(start - (first - 1) * inner, inner if start < first * inner else 0, shape[1:]):
        yield slice(first - 1, first), *box
    if first < last:
        yield slice(first, last), *(slice(0, n) for n in shape[1:])
    for box in _boxes(0, stop - last * inner, shape[1:]):
        yield slice(last, last + 1), *box


def _looped(side: tuple[int, ...], box: Box, shape: tuple[int, ...]) -> list[int]:
    """Dimensions of one side that are gone through one by one, so that the others are a run of its coordinates, and one
    of memory.
    """
    looped: list[int] = []
    after: int | None = None  # the first dimension of the run
    closed = False
    for d in reversed(side):
        size = box[d].stop - box[d].start
        follows = after is None or d + 1 == after
        if size == 1:
            closed |= shape[d] > 1
            after = d if after is not None and follows else after
        elif closed or not follows:
            looped.append(d)
            closed = True
        else:
            after, closed = d, size < shape[d]
    return looped[::-1]


def _side(side: tuple[int, ...], box: Box, shape: tuple[int, ...]) -> slice:
    """Where a box lies among the coordinates of one side."""
    start, length = 0, 1
    for d in side:
        start, length = start * shape[d] + box[d].start, length * (box[d].stop - box[d].start)
    return slice(start, start + length)
