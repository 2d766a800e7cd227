"""Tables for parameters that are updated together: rectangles, slices, and offsets in the workspace."""

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lowmem.kernels.source import Source
from lowmem.tiles.layout import WIDEST, Layout

# Number of lines and columns of partial sums that a program of `fold` processes at a time.
FOLD = 16, 128


class Rectangle(NamedTuple):
    """A rectangle of one slice of a parameter. element: index of its first element in the tensors of the shard."""

    member: int
    slice: int
    row: int
    col: int
    rows: int
    cols: int
    stride: int
    element: int


class Member(NamedTuple):
    """One parameter.

    layout: layout of the shard.  tensors: parts of the weight ("param") and full-size states, by name and part number.
    small: the other states, by kind and name.  group: offset of the group's numbers.  key: index of the noise key.
    """

    layout: Layout
    tensors: Mapping[tuple[str, int], Tensor]
    small: Mapping[tuple[str, str], Tensor]
    group: int = 0
    key: int = 0

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
        numel, rectangles = self.tensors["param", 0].numel(), list(self.rectangles(0))
        return all((each.cols | each.stride | each.element) % 16 == 0 for each in rectangles) and all(
            (tensor.data_ptr() + each.element // (numel // tensor.numel()) * tensor.itemsize) % 16 == 0
            for tensor in self.tensors.values()
            for each in rectangles
        )

    def rectangles(self, number: int) -> Iterator[Rectangle]:
        """Yields the rectangles of the member's slices on this rank. number: index of the member."""
        weight = self.tensors["param", 0]
        for view, rectangle in zip(self._views, self.layout.rectangles, strict=True):
            batch, rows, cols = view.shape
            first, outer = (view.data_ptr() - weight.data_ptr()) // weight.itemsize, rectangle.rect
            for n, start in itertools.product(range(batch if rows else 0), range(0, cols, WIDEST)):
                yield Rectangle(
                    number, outer.batch.start + n, outer.rows.start, outer.cols.start + start, rows,
                    min(WIDEST, cols - start), view.stride(1) if rows > 1 else cols,
                    first + n * view.stride(0) + start,
                )  # fmt: skip


class Tables:
    """Static tables for parameters that are updated together, on the host.

    Attributes:
        tiles: number of programs for each rectangle.
        rectangles, slices: the tables of kernels.
        totals: (number of a pass, whether they are maxima) → part of the workspace with the sums of the pass.
        size: size of the workspace.
    """

    def __init__(self, source: Source, members: Sequence[Member], *, sharded: bool = False) -> None:
        """sharded: whether all sums of a pass are totals, which ranks add."""
        self._source, self._members, self._storages = source, members, dict(source.update.kind.storages)
        self._totals_of_scalars = sharded or source.update.kind.batched
        shapes = [member.layout.shape for member in members]
        self._slices = [(n, index) for n, (batch, *_) in enumerate(shapes) for index in range(batch)]
        numbers = {each: n for n, each in enumerate(self._slices)}
        found = (each for n, member in enumerate(members) for each in member.rectangles(n))
        self._rectangles = sorted(found, key=lambda each: (each.member, each.slice))
        self._slice_of = [numbers[each.member, each.slice] for each in self._rectangles]
        down, across = source.tile.strip
        self._strips = [(-(-each.rows // down), -(-each.cols // across)) for each in self._rectangles]
        self.tiles = [down * across for down, across in self._strips]
        self._first = [0, *itertools.accumulate(self.tiles)]
        rows, cols = ([shapes[n][side] for n, _ in self._slices] for side in (1, 2))
        self._lengths = {"row": rows, "row_max": rows, "col": cols, "scalar": [1] * len(self._slices)}
        self._places = dict[tuple[str, Any], list[int]]()  # offsets in the workspace, by rectangle or slice
        self.totals, self.size = dict[tuple[int, bool], slice](), 0
        self._give_places()
        self.rectangles = [self._of_rectangle(n, each) for n, each in enumerate(self._rectangles)]
        self.slices = [self._of_slice(n, *each) for n, each in enumerate(self._slices)]

    @staticmethod
    def programs(counts: Sequence[int]) -> list[int]:
        """Returns the row that each program processes, given the number of programs per row."""
        return [n for n, count in enumerate(counts) for _ in range(count)]

    def _sums(self, number: int, largest: bool) -> Iterator[tuple[tuple[int, int], str]]:
        """Yields (key, kind) of the sums or the maxima of a pass that `fold` computes."""
        for n, (kind, _) in enumerate(self._source.update.passes[number].sums or ()):
            if (kind == "row_max") is largest and (kind != "scalar" or self._totals_of_scalars):
                yield (number, n), kind

    def _give_places(self) -> None:
        def place(kind: str, name: Any, sizes: Sequence[int]) -> None:
            *self._places[kind, name], self.size = itertools.accumulate(sizes, initial=self.size)

        for n, largest in itertools.product(range(len(self._source.update.passes)), (False, True)):
            start = self.size
            for key, kind in self._sums(n, largest):
                place("total", key, self._lengths[kind])
            self.totals[n, largest] = slice(start, self.size)
        for n, each in enumerate(self._source.update.passes):
            for which, (kind, _) in enumerate(each.sums or ()):
                if kind == "scalar" and not self._totals_of_scalars:  # the code between passes adds them, also later
                    place("partial", (n, which), self.tiles)
        for node, kind in self._source.vectors.items():
            place("vector", node, self._lengths[kind])
        kept = most = self.size
        for n, _ in enumerate(self._source.update.passes):
            self.size = kept  # reuses the memory of earlier passes' partial sums
            for largest in (False, True):
                for key, kind in self._sums(n, largest):
                    place("partial", key, [lines * length for lines, _, length in self._partial(kind)])
            most = max(most, self.size)
        self.size = most

    def _partial(self, kind: str) -> Iterator[tuple[int, int, int]]:
        """Yields (lines, start in the sum, length of a line) for the partial sums of each rectangle."""
        for each, (down, across) in zip(self._rectangles, self._strips, strict=True):
            if kind == "scalar":
                yield down * across, 0, 1
            else:
                yield (down, each.col, each.cols) if kind == "col" else (across, each.row, each.rows)

    def folds(self, number: int, largest: bool) -> tuple[list[int], list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Returns the programs, jobs and pieces of `fold` for the sums or the maxima of a pass."""
        programs, jobs, pieces = list[int](), list[tuple[int, ...]](), list[tuple[int, ...]]()
        for key, kind in self._sums(number, largest):
            of_slice: list[list[tuple[int, ...]]] = [[] for _ in self._slices]
            for n, place, piece in zip(self._slice_of, self._places["partial", key], self._partial(kind), strict=True):
                of_slice[n].append((place, *piece))
            for here, place, length in zip(of_slice, self._places["total", key], self._lengths[kind], strict=True):
                first = len(programs)
                programs += [len(jobs)] * -(-length // FOLD[1])
                jobs.append((first, place, length, len(pieces), len(here)))
                pieces += here
        return programs, jobs, pieces

    def _of_rectangle(self, number: int, each: Rectangle) -> list[int]:
        """Returns the columns of a rectangle."""
        member, of_slice, columns = self._members[each.member], self._slice_of[number], list[int]()
        line, (high, low) = each.slice * member.layout.shape[1] + each.row, divmod(each.col + (1 << 31), 1 << 32)
        fixed = {
            "first": self._first[number], "rows": each.rows, "cols": each.cols, "stride": each.stride,
            "member": each.member, "group": member.group, "slice": of_slice, "offset": each.element, "key": member.key,
            "line": (line + (1 << 31)) % (1 << 32) - (1 << 31), "high": high, "low": low - (1 << 31),
        }  # fmt: skip
        for kind, name in self._source.rectangles.keys:
            if kind == "pointer":
                tensor, group = member.tensors[name], self._storages[name[0]].parts[name[1]].group
                columns.append(tensor.data_ptr() + each.element // group * tensor.itemsize)
            elif kind == "partial":
                columns.append(self._places[kind, name][number])
            elif kind == "vector":
                start = each.row if self._source.vectors[name] == "row" else each.col
                columns.append(self._places[kind, name][of_slice] + start)
            else:
                columns.append(fixed[kind])
        return columns

    def _of_slice(self, number: int, n: int, index: int) -> list[int]:
        """Returns the columns of slice `index` of member `n`."""
        member, columns = self._members[n], list[int]()
        batch, rows, cols = member.layout.shape
        fixed = {"rows": rows, "cols": cols, "slices": batch, "index": index, "member": n, "group": member.group}
        first, last = (bisect(self._slice_of, number) for bisect in (bisect_left, bisect_right))  # its rectangles
        for kind, name in self._source.slices.keys:
            if kind == "state":
                state = member.small[name]
                columns.append(state.data_ptr() + index * (state.nbytes // batch))
            elif kind == "result":
                columns.append(self._source.results.index(name) * len(self._members) + n)
            elif kind == "total" and ("total", name) not in self._places:
                columns.append(self._places["partial", name][first])
            elif kind == "parts":
                columns.append(1 if self._totals_of_scalars else self._first[last] - self._first[first])
            else:
                columns.append(fixed[kind] if kind in fixed else self._places[kind, name][number])
        return columns
