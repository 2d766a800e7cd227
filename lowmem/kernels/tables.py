"""Tables for parameters that are updated together: rectangles, slices, and offsets in the workspace."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lowmem.kernels.source import KernelSource
from lowmem.tiles.layout import WIDEST, Layout

# Number of lines and columns of partial sums that a program of `fold` processes at a time.
FOLD = 16, 128


class TableRow(NamedTuple):
    """A rectangle of one slice of a parameter."""

    member: int
    slice: int
    row: int
    col: int
    rows: int
    cols: int
    stride: int
    element: int  # index of the first element in the tensors of the shard


class Member(NamedTuple):
    """One parameter."""

    layout: Layout  # layout of the shard
    tensors: Mapping[tuple[str, int], Tensor]  # the weight ("param") and full-size states, by name and part number
    small: Mapping[tuple[str, str], Tensor]  # the other states, by kind and name
    numbers_offset: int = 0  # index of its group's first number
    key_index: int = 0  # index of its noise key

    @property
    def _views(self) -> list[Tensor]:
        return self.layout.views(self.tensors["param", 0])

    @property
    def fits(self) -> bool:
        """True if kernels can update the parameter: its tensors and the rows of its rectangles are contiguous."""
        if not all(each.is_contiguous() for each in (*self.tensors.values(), *self.small.values())):
            return False
        views = self._views
        narrow = all(view.shape[1] == 1 or view.stride(1) < 1 << 28 for view in views)  # int32 offsets within a tile
        return narrow and all(view.shape[2] == 1 or view.stride(2) == 1 for view in views)

    @property
    def is_aligned(self) -> bool:
        """True if all rows start at multiples of 16 elements, and all rectangles at multiples of 16 bytes."""
        numel = self.tensors["param", 0].numel()
        rectangles = list(self.rectangles(0))
        return all((each.cols | each.stride | each.element) % 16 == 0 for each in rectangles) and all(
            (tensor.data_ptr() + each.element // (numel // tensor.numel()) * tensor.itemsize) % 16 == 0
            for tensor in self.tensors.values()
            for each in rectangles
        )

    def rectangles(self, number: int) -> Iterator[TableRow]:
        """Yields the rectangles of the member's slices on this rank. number: index of the member."""
        weight = self.tensors["param", 0]
        for view, rectangle in zip(self._views, self.layout.rectangles, strict=True):
            batch, rows, cols = view.shape
            first = (view.data_ptr() - weight.data_ptr()) // weight.itemsize
            outer = rectangle.rect
            for n, start in itertools.product(range(batch if rows else 0), range(0, cols, WIDEST)):
                yield TableRow(
                    member=number,
                    slice=outer.batch.start + n,
                    row=outer.rows.start,
                    col=outer.cols.start + start,
                    rows=rows,
                    cols=min(WIDEST, cols - start),
                    stride=view.stride(1) if rows > 1 else cols,
                    element=first + n * view.stride(0) + start,
                )


class Tables:
    """Static tables for parameters that are updated together, on the host.

    Attributes:
        programs: the row of `rectangles` that each program processes.
        rectangles, slices: the tables of kernels.
        totals: (number of a pass, whether they are maxima) → part of the workspace with the sums of the pass.
        size: size of the workspace.
    """

    def __init__(self, source: KernelSource, members: Sequence[Member], *, sharded: bool = False) -> None:
        """sharded: whether ranks add the sums of each pass. If so, `fold` also computes the sums of scalars."""
        self._source = source
        self._members = members
        self._storages = dict(source.update.kind.storages)
        self._totals_of_scalars = sharded or source.update.kind.batched
        shapes = [member.layout.shape for member in members]
        self._slices = [(n, index) for n, (batch, *_) in enumerate(shapes) for index in range(batch)]
        row_of_slice = {each: row for row, each in enumerate(self._slices)}
        rectangles = [each for n, member in enumerate(members) for each in member.rectangles(n)]
        self._rectangles = sorted(rectangles, key=lambda each: (each.member, each.slice))
        self._slice_of = [row_of_slice[each.member, each.slice] for each in self._rectangles]
        down, across = source.tile.strip
        self._strips = [(-(-each.rows // down), -(-each.cols // across)) for each in self._rectangles]
        self._counts = [down * across for down, across in self._strips]  # number of programs for each rectangle
        self._counts_of_slices = [0] * len(self._slices)
        for row, count in zip(self._slice_of, self._counts, strict=True):
            self._counts_of_slices[row] += count
        self.programs = [row for row, count in enumerate(self._counts) for _ in range(count)]
        self._first = [0, *itertools.accumulate(self._counts)]
        rows, cols = ([shapes[n][side] for n, _ in self._slices] for side in (1, 2))
        self._lengths = {"row": rows, "row_max": rows, "col": cols, "scalar": [1] * len(self._slices)}
        self._offsets = dict[tuple[str, Any], list[int]]()  # offsets in the workspace, by rectangle or slice
        self.totals = dict[tuple[int, bool], slice]()
        self.size = 0
        self._assign_offsets()
        self.rectangles = [self._rectangle_columns(row) for row in range(len(self._rectangles))]
        self.slices = [self._slice_columns(row) for row in range(len(self._slices))]

    def _sums(self, number: int, largest: bool) -> Iterator[tuple[tuple[int, int], str]]:
        """Yields (key, kind) of the sums or the maxima of a pass that `fold` computes."""
        for n, (kind, _) in enumerate(self._source.update.passes[number].sums):
            if (kind == "row_max") is largest and (kind != "scalar" or self._totals_of_scalars):
                yield (number, n), kind

    def _assign_offsets(self) -> None:
        def assign(kind: str, name: Any, sizes: Sequence[int]) -> None:
            *self._offsets[kind, name], self.size = itertools.accumulate(sizes, initial=self.size)

        passes = range(len(self._source.update.passes))
        for number, largest in itertools.product(passes, (False, True)):
            start = self.size
            for key, kind in self._sums(number, largest):
                assign("total", key, self._lengths[kind])
            self.totals[number, largest] = slice(start, self.size)
        for number, each in enumerate(self._source.update.passes):
            for n, (kind, _) in enumerate(each.sums):
                if kind == "scalar" and not self._totals_of_scalars:  # the code between passes adds them, also later
                    start = self.size
                    assign("partial", (number, n), self._counts)
                    self.size = start  # the same memory, by slice
                    assign("total", (number, n), self._counts_of_slices)
        for node, kind in self._source.vectors.items():
            assign("vector", node, self._lengths[kind])
        start = largest_size = self.size
        for number in passes:
            self.size = start  # reuses the memory of earlier passes' partial sums
            for largest in (False, True):
                for key, kind in self._sums(number, largest):
                    assign("partial", key, [lines * length for lines, _, length in self._partial(kind)])
            largest_size = max(largest_size, self.size)
        self.size = largest_size

    def _partial(self, kind: str) -> Iterator[tuple[int, int, int]]:
        """Yields (lines, start in the sum, length of a line) for the partial sums of each rectangle."""
        for each, (down, across) in zip(self._rectangles, self._strips, strict=True):
            if kind == "scalar":
                yield down * across, 0, 1
            elif kind == "col":
                yield down, each.col, each.cols
            else:
                yield across, each.row, each.rows

    def folds(self, number: int, largest: bool) -> tuple[list[int], list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Returns the programs, jobs and pieces of `fold` for the sums or the maxima of a pass."""
        programs = list[int]()
        jobs = list[tuple[int, ...]]()
        pieces = list[tuple[int, ...]]()
        for key, kind in self._sums(number, largest):
            by_slice: list[list[tuple[int, ...]]] = [[] for _ in self._slices]
            partial = zip(self._slice_of, self._offsets["partial", key], self._partial(kind), strict=True)
            for slice_row, offset, piece in partial:
                by_slice[slice_row].append((offset, *piece))
            totals = zip(by_slice, self._offsets["total", key], self._lengths[kind], strict=True)
            for of_slice, offset, length in totals:
                jobs.append((len(programs), offset, length, len(pieces), len(of_slice)))
                programs += [len(jobs) - 1] * -(-length // FOLD[1])
                pieces += of_slice
        return programs, jobs, pieces

    def _rectangle_columns(self, row: int) -> list[int]:
        """Returns a row of the table of rectangles."""
        each = self._rectangles[row]
        slice_row = self._slice_of[row]
        member = self._members[each.member]
        line = each.slice * member.layout.shape[1] + each.row
        high, low = divmod(each.col + (1 << 31), 1 << 32)
        fixed = each._asdict() | {"first": self._first[row], "slice": slice_row, "group": member.numbers_offset}
        noise = {"line": (line + (1 << 31)) % (1 << 32) - (1 << 31), "high": high, "low": low - (1 << 31)}
        fixed |= noise | {"key": member.key_index}
        columns = list[int]()
        for kind, name in self._source.rectangles.keys:
            if kind == "pointer":
                tensor = member.tensors[name]
                group = self._storages[name[0]].parts[name[1]].group
                columns.append(tensor.data_ptr() + each.element // group * tensor.itemsize)
            elif kind == "partial":
                columns.append(self._offsets[kind, name][row])
            elif kind == "vector":
                start = each.row if self._source.vectors[name] == "row" else each.col
                columns.append(self._offsets[kind, name][slice_row] + start)
            else:
                columns.append(fixed[kind])
        return columns

    def _slice_columns(self, row: int) -> list[int]:
        """Returns a row of the table of slices."""
        n, index = self._slices[row]
        member = self._members[n]
        batch, rows, cols = member.layout.shape
        parts = 1 if self._totals_of_scalars else self._counts_of_slices[row]
        fixed = {"rows": rows, "cols": cols, "slices": batch, "index": index, "member": n}
        fixed |= {"group": member.numbers_offset, "parts": parts}
        columns = list[int]()
        for kind, name in self._source.slices.keys:
            if kind == "state":
                state = member.small[name]
                columns.append(state.data_ptr() + index * (state.nbytes // batch))
            elif kind == "result":
                columns.append(self._source.results.index(name) * len(self._members) + n)
            else:
                columns.append(fixed[kind] if kind in fixed else self._offsets[kind, name][row])
        return columns
