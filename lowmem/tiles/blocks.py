"""Divides shards into tiles, and tiles into blocks, for compiled code.

a tile [b, r, c] of several rows          a single line [b, 1, c]
┌───────────────┐ ─┐                      ┌────┬────┬────┬────┐
│  m rows       │  │ one block            │ m  │ m  │ m  │ m  │ n parts of m elements
├───────────────┤ ─┘                      └────┴────┴────┴────┘
│  m rows       │    n blocks             as [b, n, 1, m]
└───────────────┘    as [b, n, m, c]
"""

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lowmem.tiles.graph import fuse_with, materialize
from lowmem.tiles.layout import Layout, Place, Rect
from lowmem.tiles.tile import DIMS, GRAD, Vectors
from lowmem.tiles.traced import Arguments, Pass

# Form of a tile: (it has several batch slices, each slice is one row). Part of the cache key.
Form = tuple[bool, bool]

# On a CPU, compiled code sums columns over this many rows at a time, which fit into the cache, and sums a single line
# over this many elements at a time.
BLOCK_ROWS = 16
LINE = 1024

# Columns are summed within each block of rows, in vector registers, and then over blocks. This is the maximum number of
# float32 sums in memory at a time.
BLOCK_SUMS = 1 << 20

# (preferred, minimum) number of rows in a block, and of elements in a part of a single line.
ROWS = BLOCK_ROWS, 4
PART = LINE, 128

# A matrix of up to ONE_BLOCK elements may be one block. Larger ones have at least FEWEST blocks, for several threads.
ONE_BLOCK = 1 << 17
FEWEST = 16

# Maximum number of elements that a kernel can count in int32.
LARGEST = 1 << 31


@functools.lru_cache(maxsize=1024)
def blocks(rows: int, cols: int, group: int = 1) -> tuple[int, int, int] | None:
    """Divides a matrix into [blocks, rows per block, cols], or a single line into [parts, 1, elements per part]. Each
    part consists of complete groups of elements. Returns None if no such division exists.

    [4096, 1000] → (256, 16, 1000): blocks of 16 rows.  [1, 4096] → (4, 1, 1024): parts of 1,024 elements.
    """
    if rows * cols >= LARGEST or cols % group:
        return None
    if rows == 1:
        preferred, minimum = (-(-number // group) for number in PART)
        part = _divisor(cols // group, preferred, minimum, may_be_one=cols <= ONE_BLOCK)
        return None if part is None else (cols // group // part, 1, part * group)
    preferred, minimum = (max(number, -(-rows * cols // BLOCK_SUMS)) for number in ROWS)
    height = _divisor(rows, preferred, minimum, may_be_one=rows * cols <= ONE_BLOCK)
    return None if height is None else (rows // height, height, cols)


def _divisor(length: int, preferred: int, minimum: int, may_be_one: bool) -> int | None:
    """Returns a divisor of `length` as the block size: 96 → 16, 331 (a prime) → 331 if it may be one block.

    This is the smallest divisor that is at least `preferred` and gives FEWEST blocks, or else the largest from
    `preferred` down to `minimum`, or else the length itself if it may be one block.
    """
    upwards, downwards = range(preferred, length // FEWEST + 1), range(min(preferred, length), minimum - 1, -1)
    for size in (*upwards, *downwards):
        if length % size == 0:
            return size
    return length if may_be_one else None


@functools.lru_cache(maxsize=1024)
def divisible_places(layout: Layout, group: int) -> list[Place] | None:
    """Cuts a shard into as few tiles as possible that divide into blocks. Returns None if a part cannot be divided.

    Args:
        layout: the rectangles of the shard.
        group: the number of consecutive elements in a row that are encoded together.
    """
    found: list[Place] = []
    for n, rectangle in enumerate(layout.rectangles):
        outer, order = rectangle.rect, rectangle.order
        batch, rows, cols = outer.size
        if not batch * rows * cols:
            continue
        if rectangle.index is not None or order != tuple(range(len(order))):
            return None  # the elements are not contiguous in the order of the view
        one = next(outer.subdivide(LARGEST - 1)) == outer and blocks(rows, cols, group)
        for rect in (outer,) if one else _regular(outer):
            if blocks(*rect.size[1:], group) is None:
                return None
            found.append(layout.place(n, rect))
    return found


def _regular(outer: Rect) -> Iterator[Rect]:
    """Divides a rectangle into a multiple of `BLOCK_ROWS` rows (`LINE` elements of a single line) and the remainder."""
    _, rows, cols = outer.size
    for rect in outer.subdivide(min(rows * cols, LARGEST - 1)):  # one slice of the batch at a time
        line = rect.size[1] == 1
        side, step = (rect.cols, LINE) if line else (rect.rows, BLOCK_ROWS)
        middle = side.stop - (side.stop - side.start) % step
        for part in (slice(side.start, middle), slice(middle, side.stop)):
            if part.start < part.stop:
                yield Rect(rect.batch, rect.rows, part) if line else Rect(rect.batch, part, rect.cols)


def form_of(size: tuple[int, int, int]) -> Form:
    """Returns the form of a tile [b, r, c]."""
    return size[0] > 1, size[1] == 1


def shape_of(sizes: Sequence[Any], *, is_line: bool) -> tuple[Any, Any, Any]:
    """Returns the shape [b, r, c] of a tile, given the sizes of its gradient in blocks."""
    batch, count, height, *cols = sizes
    width = functools.reduce(operator.mul, cols)
    return (batch, 1, count * width) if is_line else (batch, count * height, width)


def run_in_blocks(tile_pass: Pass, args: Arguments) -> Vectors:
    """Calls the function of a pass with a tile in blocks, and returns the sums of the tile.

    args: includes the vectors of the pass: row [b, r], col [b, c], and scalar [b] or [].
    """
    args = args | {key: value.flatten(3) for key, value in args.items() if key[0] in tile_pass.storages}
    grad = args[GRAD, 0]
    batch, count, height, width = grad.shape
    is_line = height == 1

    def broadcast(vector_kind: str, value: Tensor) -> Tensor:
        """Reshapes a vector so that it broadcasts to [b, n, m, c]."""
        if vector_kind == "col":
            return value.view((batch, count, 1, width) if is_line else (batch, 1, 1, width))
        value = value.view((batch, 1, 1, 1) if is_line or DIMS[vector_kind] == (0,) else (batch, count, height, 1))
        if vector_kind == "noise" and is_line:  # noise is counted from the start of the line
            parts = materialize(torch.arange(count, dtype=torch.int32, device=value.device) * width)
            value = value + parts.view(1, -1, 1, 1)
        return value

    vectors = {key: args[key] for key, *_ in tile_pass.args if key[0] != "reading"}
    here = {key: broadcast(key[0], materialize(value)) if value.ndim else value for key, value in vectors.items()}
    return _summed(tile_pass.run(args, here), grad, is_line)


def _summed(values: Vectors, grad: Tensor, is_line: bool) -> Vectors:
    """Returns the sums of a tile in blocks. Lines are summed first, in vector registers and one loop for all sums."""

    first = grad[..., :1, :1]

    def lines(value: Tensor) -> Tensor:
        return fuse_with(value, first)

    def of(kind: str) -> Vectors:
        return {key: value for key, value in values.items() if key[0] == kind}

    row, col = {key: lines(value).sum(-1) for key, value in of("row").items()}, of("col")
    if row and col:  # column sums follow in the same loop over blocks, while the block is in the cache
        of_block = next(iter(row.values())).sum(-1)[..., None, None]
        col = {key: fuse_with(value, of_block) for key, value in col.items()}

    def rows(value: Tensor, fold: Callable[..., Tensor]) -> Tensor:
        return fold(value.flatten(1), -1, keepdim=True) if is_line else value.flatten(1)

    return {
        **{key: rows(value, torch.sum) for key, value in row.items()},
        **{key: value.sum(-2).flatten(1) if is_line else value.sum(-2).sum(-2) for key, value in col.items()},
        **{key: lines(value).sum(-1).flatten(1).sum(-1) for key, value in of("scalar").items()},
        **{key: rows(lines(value).amax(-1), torch.amax) for key, value in of("row_max").items()},
    }
