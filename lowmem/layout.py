"""How a parameter is seen as [batch, rows, cols], and which rectangles of it a process holds."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

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

    def kept(self, extent: Extent, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The logical shape of a state: the parameter's own, or its batch dimensions and those of rows or cols."""
        if extent == "full":
            return shape
        dims = self.batch + {"row": self.rows, "col": self.cols, "slice": ()}[extent]
        return tuple(shape[d] for d in dims)

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

    def subdivide(self, tile: int) -> Iterator["Rect"]:
        """Rectangles of about `tile` elements each that cover this one: whole slices, whole rows, or parts of a row."""
        b, r, c = (s.stop - s.start for s in (self.batch, self.rows, self.cols))
        cols = min(c, tile)
        rows = min(r, max(1, tile // cols)) if cols == c else 1
        batch = min(b, max(1, tile // (rows * cols))) if rows == r and cols == c else 1
        for b0 in range(self.batch.start, self.batch.stop, batch):
            for r0 in range(self.rows.start, self.rows.stop, rows):
                for c0 in range(self.cols.start, self.cols.stop, cols):
                    yield Rect(
                        slice(b0, min(b0 + batch, self.batch.stop)),
                        slice(r0, min(r0 + rows, self.rows.stop)),
                        slice(c0, min(c0 + cols, self.cols.stop)),
                    )

    def within(self, outer: "Rect") -> tuple[slice, slice, slice]:
        """This rectangle's indices in a tensor that holds just `outer`."""

        def shift(inner: slice, outer: slice) -> slice:
            return slice(inner.start - outer.start, inner.stop - outer.start)

        return shift(self.batch, outer.batch), shift(self.rows, outer.rows), shift(self.cols, outer.cols)

    @property
    def size(self) -> tuple[int, int, int]:
        """Batch, rows and cols."""
        batch, rows, cols = (s.stop - s.start for s in (self.batch, self.rows, self.cols))
        return batch, rows, cols


@dataclass(frozen=True)
class Layout:
    """Which rectangles of a [batch, rows, cols] parameter a process holds.

    Either they lie one after the other in flat local memory, or `order` says how a whole parameter is cut into them: by
    each index into its first `loops` dimensions, once the dimensions are in that order.
    """

    shape: tuple[int, int, int]
    rects: tuple[Rect, ...]
    order: tuple[int, ...] | None = None
    loops: int = 0

    @classmethod
    def whole(cls, shape: tuple[int, ...], view: View) -> "Layout":
        """The whole parameter, on one device."""
        sizes = view.sizes(shape)
        groups = [_last_run(dims) for dims in (view.batch, view.rows, view.cols)]
        loops = tuple(d for looped, _ in groups for d in looped)
        rects = []
        for index in itertools.product(*(range(shape[d]) for d in loops)):
            at = dict(zip(loops, index, strict=True))
            sides = []
            for (looped, run), size in zip(groups, sizes, strict=True):
                length, start = math.prod(shape[d] for d in run), 0
                for d in looped:
                    start = start * shape[d] + at[d]
                sides.append(slice(start * length, (start + 1) * length if looped else size))
            rects.append(Rect(*sides))
        return cls(sizes, tuple(rects), loops + tuple(d for _, run in groups for d in run), len(loops))

    def views(self, local: Tensor) -> list[Tensor]:
        """A local tensor as one [batch, rows, cols] view a rectangle."""
        if self.order is None:
            parts = local.flatten().split([math.prod(rect.size) for rect in self.rects])
            return [part.view(rect.size) for part, rect in zip(parts, self.rects, strict=True)]
        ordered = local.permute(self.order)
        indices = itertools.product(*(range(n) for n in ordered.shape[: self.loops]))
        return [ordered[index].view(rect.size) for index, rect in zip(indices, self.rects, strict=True)]


def _last_run(dims: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Dimensions to loop over, and those at the end that follow one another in memory and are seen as one."""
    cut = len(dims)
    while cut > 1 and dims[cut - 1] == dims[cut - 2] + 1:
        cut -= 1
    cut = max(cut - 1, 0)
    return dims[:cut], dims[cut:]
