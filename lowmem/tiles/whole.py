"""A parameter that is one tile: how it is divided into blocks, and the sweep in which its whole update is traced."""

import functools
from collections.abc import Iterator
from typing import NoReturn, Unpack

import torch
from torch import Tensor

from lowmem.tiles.graph import realized
from lowmem.tiles.layout import Rect
from lowmem.tiles.storage import Held, mix
from lowmem.tiles.sweep import Cut, Given, Reading, Sweep
from lowmem.tiles.tile import BLOCK_ROWS, LINE, ApplyFn, Formats, RawTile, ReduceFn, Sums, TileBody

# Columns are summed within each block of rows, in vector registers, and then over blocks: so many float32 sums at most
# exist at a time.
BLOCK_SUMS = 1 << 20

# Rows of a block, and elements of a part of a single line: as few as the first that divide it, or at least the second.
ROWS = BLOCK_ROWS, 4
PART = LINE, 128

# A matrix of up to so many elements may be one block. Larger ones have so many at least, which threads share.
ONE_BLOCK = 1 << 17
FEWEST = 16

# Elements that a kernel counts in int32.
LARGEST = 1 << 31

EVERYWHERE = Rect(slice(0, None), slice(0, None), slice(0, None))


class UntraceableError(Exception):
    """An update cannot be traced as a whole."""


@functools.lru_cache(maxsize=1024)
def blocks(rows: int, cols: int) -> tuple[int, int, int] | None:
    """[blocks, rows of a block, cols] of a matrix, or of a single line cut into parts: [parts, 1, elements of a part].

    None: it does not divide into such.
    """
    if rows * cols >= LARGEST:
        return None
    if rows == 1:
        part = _divisor(cols, *PART, small=cols <= ONE_BLOCK)
        return None if part is None else (cols // part, 1, part)
    usual, least = (max(number, -(-rows * cols // BLOCK_SUMS)) for number in ROWS)
    height = _divisor(rows, usual, least, small=rows * cols <= ONE_BLOCK)
    return None if height is None else (rows // height, height, cols)


def _divisor(length: int, usual: int, least: int, small: bool) -> int | None:
    """The smallest divisor from `usual` on, else the largest from `least` on, else all of it if it is `small`."""
    for size in (*range(usual, length // FEWEST + 1), *range(min(usual, length), least - 1, -1)):
        if length % size == 0:
            return size
    return length if small else None


class WholeSweep(Sweep):
    """A sweep over fake tensors, in which an update is traced.

    Args:
        weight, grad: in blocks, [batch, blocks, rows of a block, cols].  lines: each is a single line, in parts.
        reading: as for `Sweep`.
        noise_key: int32 scalar, if noise is drawn.
        shared: float32 scalar, the number that `golden_ratio_noise` gives for the step.
    """

    def __init__(
        self,
        weight: Held,
        grad: Tensor,
        reading: Reading,
        *,
        lines: bool,
        noise_key: Tensor | None,
        shared: Tensor,
    ) -> None:
        batch, count, block, cols = grad.shape
        self.shape = (batch, 1, count * cols) if lines else (batch, count * block, cols)
        self.device, self.members, self.rule_clip_coef = grad.device, 1, reading.rule_clip_coef
        self._weight, self._grad, self._reading = weight, grad, reading
        self._lines, self._noise_key, self._shared = lines, noise_key, shared
        self._guarded, self._at_once, self._across = True, True, None
        self._finite = None if reading.finite is None else reading.finite.expand(1)
        self._square_sums, self._measured = reading.square_sums, None
        self._written = False

    def reduce(self, fn: ReduceFn, **given: Unpack[Given]) -> Sums:
        """As that of a sweep."""
        sums = super().reduce(fn, **given)
        if self._lines and (sums.row or sums.col or sums.row_max):
            raise UntraceableError("sums along rows or columns of a single line")
        return sums

    def materialized(self) -> NoReturn:
        """Raises `UntraceableError`."""
        raise UntraceableError("the rule steps on the parameter as one tensor")

    def scalar(self, value: Tensor | float) -> Tensor:
        """A number as a float32 scalar."""
        return value.float() if isinstance(value, Tensor) else super().scalar(value)

    def _tiles(self, given: Given, in_blocks: bool = False) -> Iterator[tuple[Cut, RawTile]]:
        batch, rows, _ = self.shape
        assert isinstance(self._grad, Tensor)
        scalars = {name: self.scalar(value) for name, value in (given.get("scalar") or {}).items()}
        raw = RawTile(
            grad=self._grad,
            param=self._weight.parts,
            inverse_scale=self._reading.inverse_scale,
            limit=self._reading.limit,
            clip_coef=self._reading.clip_coef,
            full={name: held.parts for name, held in (given.get("full") or {}).items()},
            row={name: realized(value.view(batch, rows)) for name, value in (given.get("row") or {}).items()},
            col={name: realized(value.view(batch, -1)) for name, value in (given.get("col") or {}).items()},
            scalar={name: realized(value) if value.ndim else value for name, value in scalars.items()},
        )
        yield Cut(0, EVERYWHERE, complete=True, block=2, compiled=True), raw

    def _bind(self, body: TileBody, fn: ReduceFn | ApplyFn, formats: Formats, cut: Cut) -> TileBody:
        return functools.partial(body, fn, formats)

    def _by_slice(self, of_members: Tensor) -> Tensor:
        return realized(of_members).expand(self.shape[0])

    def _shared_noise(self) -> Tensor:
        return self._shared

    def _noise(self) -> Tensor:
        batch, rows, _ = self.shape
        assert self._noise_key is not None
        line = torch.arange(batch * rows, dtype=torch.int32, device=self.device)
        noise = realized(mix(line + self._noise_key)).view(batch, rows)
        _, count, block, cols = self._grad.shape
        if self._lines:  # the noise of a column is counted from the start of its line
            noise = noise + torch.arange(count, dtype=torch.int32, device=self.device) * cols
        return noise.view(batch, count, block)
