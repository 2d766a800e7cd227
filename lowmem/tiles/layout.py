"""Views a parameter as [batch, rows, cols], and divides the local shard into rectangles."""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

Extent = Literal["full", "row", "col", "slice"]

# Tiles do not cross column numbers that are multiples of this, because the columns of a tile are counted in int32.
WIDEST = 1 << 30


class View(NamedTuple):
    """The dimensions of a parameter that form its batch, rows and columns, in order.

    A rule sums and factors within each batch slice.
    """

    batch: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    cols: tuple[int, ...] = ()

    @classmethod
    def vector(cls, ndim: int) -> "View":
        """Returns a view of the parameter as a single row."""
        return cls(cols=tuple(range(ndim)))

    @classmethod
    def matrix(cls, ndim: int) -> "View":
        """Returns a view of the parameter as a matrix: a vector is one row, a 3-D parameter is a stack of matrices
        (experts), and a convolution is [out, in * kernel].
        """
        if ndim < 2:
            return cls.vector(ndim)
        first = ndim == 3
        return cls((0,) if first else (), (int(first),), tuple(range(1 + first, ndim)))

    def sizes(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Returns [batch, rows, cols] for a parameter shape."""
        batch, rows, cols = (math.prod(shape[d] for d in side) for side in self)
        return batch, rows, cols

    def state_shape(self, extent: Extent, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of a state: the parameter's shape, or its batch dimensions with its rows or columns."""
        if extent == "full":
            return shape
        dims = self.batch + {"row": self.rows, "col": self.cols, "slice": ()}[extent]
        return tuple(shape[d] for d in dims)

    def has_groups(self, shape: tuple[int, ...], group: int) -> bool:
        """Returns whether rows consist of complete groups of `group` elements that are contiguous in memory."""
        return group == 1 or (self.cols[-1:] == (len(shape) - 1,) and shape[-1] % group == 0)

    def stacked(self) -> "View":
        """Returns the view of several parameters stacked along a new first dimension."""
        batch, rows, cols = (tuple(d + 1 for d in side) for side in self)
        return View((0, *batch), rows, cols)


class Rect(NamedTuple):
    """A rectangle of a parameter viewed as [batch, rows, cols], in the coordinates of the full parameter."""

    batch: slice
    rows: slice
    cols: slice

    def subdivide(self, tile: int) -> Iterator["Rect"]:
        """Divides the rectangle into rectangles of about `tile` elements: full slices, full rows, or parts of a row."""
        b, r, c = self.size
        if not b * r * c:
            yield self
            return
        border = (self.cols.start // WIDEST + 1) * WIDEST
        if border < self.cols.stop:
            for cols in (slice(self.cols.start, border), slice(border, self.cols.stop)):
                yield from Rect(self.batch, self.rows, cols).subdivide(tile)
            return
        width = min(c, tile)
        height = min(r, max(1, tile // width)) if width == c else 1
        depth = min(b, max(1, tile // (height * width))) if height == r and width == c else 1
        for batch in _cut(self.batch, depth):
            for rows in _cut(self.rows, height):
                for cols in _cut(self.cols, width):
                    yield Rect(batch, rows, cols)

    @property
    def size(self) -> tuple[int, int, int]:
        """Size of the rectangle, [b, r, c]."""
        batch, rows, cols = self
        return batch.stop - batch.start, rows.stop - rows.start, cols.stop - cols.start


def _cut(side: slice, length: int) -> Iterator[slice]:
    """Divides a slice into slices of this length; the last one may be shorter."""
    for start in range(side.start, side.stop, length):
        yield slice(start, min(start + length, side.stop))


@dataclass(frozen=True)
class Span:
    """The local shard of a parameter with shape `shape`: elements `start` to `stop` in row-major order. Each rank has
    `size` elements, except that the last ranks may have fewer or none.
    """

    shape: tuple[int, ...]
    start: int
    stop: int
    size: int

    @functools.cached_property
    def numel(self) -> int:
        """Number of elements in the parameter."""
        return math.prod(self.shape)

    @property
    def held(self) -> int:
        """Number of elements on this rank."""
        return self.stop - self.start

    def grouped(self, group: int) -> "Span":
        """Returns the span of a tensor with one value per `group` elements of a row."""
        return Span(grouped(self.shape, group), self.start // group, self.stop // group, self.size // group)


def grouped(shape: Sequence[int], group: int) -> tuple[int, ...]:
    """Returns the shape of a tensor with one value per `group` elements of a row."""
    return tuple(shape) if group == 1 else (*shape[:-1], shape[-1] // group)


Box = tuple[slice, ...]


def cut(inner: Box | None, tensor: Tensor, group: int = 1) -> Tensor:
    """Returns a view of part of a tensor with one value per `group` elements of a row. inner: None selects all."""
    if inner is None:
        return tensor
    if group > 1:
        *lines, cols = inner
        inner = *lines, slice(cols.start // group, cols.stop // group)
    return tensor[inner]


class Place(NamedTuple):
    """The position of a tile.

    rectangle: the index of its rectangle in the layout.  rect: the tile's coordinates in the parameter.  inner: the
    tile's coordinates in that rectangle, or None if the tile is the whole rectangle.
    """

    rectangle: int
    rect: Rect
    inner: Box | None


@dataclass(frozen=True)
class Rectangle:
    """A rectangle of a parameter, and its position in the shard.

    rect: coordinates in [batch, rows, cols].  start, stop: the elements of the flat shard that contain the rectangle.
    shape: the shape in which they are viewed.  index: the part of this view that is the rectangle (None: all).  order:
    the permutation of its dimensions to batch, rows, cols.
    """

    rect: Rect
    start: int
    stop: int
    shape: tuple[int, ...]
    index: Box | None
    order: tuple[int, ...]

    def view(self, shard: Tensor, group: int = 1) -> Tensor:
        """Returns the rectangle as a view [b, r, c / group] of a shard with one value per `group` elements of a row.
        The shard is flat, or has the shape of the parameter in any memory order.
        """
        shape, (batch, rows, cols) = grouped(self.shape, group), self.rect.size
        if shard.shape != shape:
            shard = shard.view(-1)[self.start // group : self.stop // group].view(shape)
        shard = cut(self.index, shard, group)
        if self.order != tuple(range(shard.ndim)):
            shard = shard.permute(self.order)
        return shard.view(batch, rows, cols // group)


@dataclass(frozen=True, eq=False)
class Layout:
    """The rectangles that form a shard of a parameter.

        elements 5 to 20 of a matrix [4, 6] are three rectangles:

        · · · · · ▪      the end of a row
        ▪ ▪ ▪ ▪ ▪ ▪ ┐    whole rows
        ▪ ▪ ▪ ▪ ▪ ▪ ┘
        ▪ ▪ · · · ·      the start of a row

    shape: shape of the full parameter, [B, R, C].  rectangles: ordered as the elements of the shard.
    """

    shape: tuple[int, int, int]
    rectangles: tuple[Rectangle, ...]
    _places: dict[int, list[Place]] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, shape: tuple[int, ...], view: View, start: int = 0, stop: int | None = None) -> "Layout":
        """Returns the layout of elements `start` to `stop` (default: all) of a parameter in row-major order."""
        sizes, numel = view.sizes(shape), math.prod(shape)
        stop = numel if stop is None else stop
        if (start, stop) != (0, numel):
            shape, view = _merged(shape, view)
        dims = sum(view, ())
        if not shape:
            shape, dims = (1,), (0,)
        if start >= stop:
            nothing = Rect(slice(0, 0), slice(0, 1), slice(0, sizes[2]))  # complete groups, zero rows
            return cls(sizes, (Rectangle(nothing, 0, 0, (0, *shape[1:]), None, dims),))
        rectangles, done = [], 0
        for box in _boxes(start, stop, shape):
            extent = tuple(s.stop - s.start for s in box)
            end = done + math.prod(extent)
            looped = tuple(d for side in view for d in _looped(side, box, shape))
            for at in itertools.product(*(range(extent[d]) for d in looped)):
                inner = dict(zip(looped, at, strict=True))
                index = tuple(slice(inner.get(d, 0), inner.get(d, n - 1) + 1) for d, n in enumerate(extent))
                part = tuple(slice(s.start + i.start, s.start + i.stop) for s, i in zip(box, index, strict=True))
                rect = Rect(*(_side(side, part, shape) for side in view))
                rectangles.append(Rectangle(rect, done, end, extent, index if looped else None, dims))
            done = end
        return cls(sizes, tuple(rectangles))

    @property
    def one_line(self) -> bool:
        """True if the parameter is a single row, so that every range of elements is one rectangle."""
        return self.shape[:2] == (1, 1)

    def lines(self, count: int) -> "Layout":
        """Returns the layout of `count` stacked shards of parameters that are `one_line`."""
        (only,) = self.rectangles
        here = only.rect.size[0] * only.rect.size[2]  # 0 if the local shard is empty
        rect = Rect(slice(0, count if here else 0), only.rect.rows, only.rect.cols)
        stacked = Rectangle(rect, 0, count * here, (count, here), None, (0, 1))
        return Layout((count, 1, self.shape[2]), (stacked,))

    def place(self, n: int, rect: Rect) -> Place:
        """Returns the position of a tile in rectangle `n`."""
        outer = self.rectangles[n].rect
        inner = tuple(slice(s.start - o.start, s.stop - o.start) for s, o in zip(rect, outer, strict=True))
        return Place(n, rect, None if rect == outer else inner)

    def places(self, tile: int) -> list[Place]:
        """Cuts the shard into tiles of about `tile` elements."""
        if tile not in self._places:
            outer = [rectangle.rect for rectangle in self.rectangles]
            self._places[tile] = [self.place(n, rect) for n, each in enumerate(outer) for rect in each.subdivide(tile)]
        return self._places[tile]

    def views(self, shard: Tensor, group: int = 1) -> list[Tensor]:
        """Returns a view [b, r, c / group] of a shard for each rectangle; see `Rectangle.view`."""
        return [rectangle.view(shard, group) for rectangle in self.rectangles]


def _merged(shape: tuple[int, ...], view: View) -> tuple[tuple[int, ...], View]:
    """Merges consecutive dimensions on the same side of the view."""
    follows = {after for side in view for d, after in itertools.pairwise(side) if after == d + 1}
    number, sizes = {}, list[int]()
    for d, size in enumerate(shape):
        if d in follows:
            sizes[-1] *= size
        else:
            number[d] = len(sizes)
            sizes.append(size)
    return tuple(sizes), View(*(tuple(number[d] for d in side if d in number) for side in view))


def _boxes(start: int, stop: int, shape: tuple[int, ...]) -> Iterator[Box]:
    """Divides a range of elements into boxes, in order.

    elements 3 to 14 of shape [2, 3, 4], as (plane, rows, cols):
    (0, 0, 3:4)  (0, 1:3, 0:4)  (1, 0, 0:2)
    """
    if start >= stop:
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner
    if first > last:  # the range is within one index of the first dimension
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
    """Returns the dimensions of one side to loop over so that the other dimensions are one contiguous range.

    sides (0, 1) of shape [4, 5]: box [0:4, 0:5] → (), one range;  box [0:4, 2:3] → (0,), since the coordinates 2, 7,
    12 and 17 are not contiguous;  box [1:2, 2:5] → (), the range 7 to 10
    """
    looped: list[int] = []
    run_start: int | None = None  # the first dimension of the contiguous range, which grows from the last dimension
    complete = False  # whether no dimension can be added to the range
    for d in reversed(side):
        size = box[d].stop - box[d].start
        adjacent = run_start is None or d + 1 == run_start
        if size == 1:
            complete |= shape[d] > 1
            run_start = d if run_start is not None and adjacent else run_start
        elif complete or not adjacent:
            looped.append(d)
            complete = True
        else:
            run_start, complete = d, size < shape[d]
    return looped[::-1]


def _side(side: tuple[int, ...], box: Box, shape: tuple[int, ...]) -> slice:
    """Returns the coordinates of a box on one side of the view."""
    start, length = 0, 1
    for d in side:
        start, length = start * shape[d] + box[d].start, length * (box[d].stop - box[d].start)
    return slice(start, start + length)


def block_starts(size: int, step: int, tensor: Tensor) -> Sequence[int]:
    """Returns the starts of blocks of `step`. A dry run only needs three: blocks of equal size use equal memory."""
    starts = range(0, size, step)
    dry = is_fake(tensor) and not torch.compiler.is_compiling()  # tracing also uses fake tensors
    return sorted({*starts[:2], *starts[-1:]}) if dry else starts
