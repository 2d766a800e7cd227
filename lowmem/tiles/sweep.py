"""The sweep: one pass over a parameter, its gradient and its states, tile by tile, in float32.

A rule hands module-level functions of one `Tile` to `Sweep.reduce` and `Sweep.apply`. Everything a rule must not know
stands here and in `tile.py`: tile size, device, stored dtype, rounding, compilation, how many small parameters are
stacked into one and, through `Layout`, which piece of the parameter this process holds.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from lowmem.tiles import storage
from lowmem.tiles.layout import Layout, Rect
from lowmem.tiles.tile import (
    BLOCK_ROWS,
    LINE,
    SQUARE,
    ApplyFn,
    RawTile,
    ReduceFn,
    Sums,
    Tile,
    Writing,
    apply_tile,
    reduce_tile,
    tile_function,
)


def flat(tensor: Tensor) -> Tensor:
    """The elements in the order of their memory, whatever the order of dimensions: a view of one dimension."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def tiles(tensor: Tensor) -> tuple[Tensor, ...]:
    """`flat` in pieces."""
    return flat(tensor).split(CPU_TILE if tensor.device.type == "cpu" else GPU_TILE)


def add(total: Tensor, grad: Tensor) -> None:
    """Adds a gradient to a sum in the same layout, to which it may be narrower.

    torch would make a copy of the whole gradient in the dtype of the sum, in four times the time on a CPU.
    """
    if grad.dtype == total.dtype or grad.stride() != total.stride():
        total.add_(grad)
        return
    for into, part in zip(tiles(total), tiles(grad), strict=True):
        into.add_(part)


Vectors = Mapping[str, Tensor]
Scalars = Mapping[str, Tensor | float]

# Elements a tile. Eager code on a CPU wants a tile's few float32 temporaries in the cache; on a GPU it trades temporary
# memory against launches. Compiled code has next to no temporaries: there a tile is large, or the whole parameter.
CPU_TILE = 1 << 17
CPU_COMPILED_TILE = 1 << 24
GPU_TILE = 1 << 22


class Across(Protocol):
    """The ranks that hold a piece of a parameter each, in whose hands every sum over it is."""

    def totals(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Each float32 tensor summed over the ranks, in one collective."""

    def largest(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Each float32 tensor's largest values over the ranks, in one collective."""


class Part(NamedTuple):
    """A tile of the parameter: `rect`, in the layout's rectangle number `of`.

    whole: it is all of that.  block: rows that columns are summed over at a time; 1: all at once.  compiled: by
    compiled code.
    """

    of: int
    rect: Rect
    whole: bool
    block: int = 1
    compiled: bool = False


def _parts(layout: Layout, on_cpu: bool, compiled: bool, tile: int | None) -> list[Part]:
    """As `_cut_up` gives them, which it does once for a layout."""
    cut_for = (on_cpu, compiled, tile)
    parts: list[Part] | None = layout.cuts.get(cut_for)
    if parts is None:
        parts = layout.cuts[cut_for] = list(_cut_up(layout.rects, *cut_for))
    return parts


def _cut_up(rects: Sequence[Rect], on_cpu: bool, compiled: bool, tile: int | None) -> Iterator[Part]:
    """The tiles of a parameter. Compiled code gets what is large and regular: its sizes are never 1, nor is a line or a
    column ever summed in odd pieces, so that it is not compiled again for them.
    """
    eager = tile or (CPU_TILE if on_cpu else GPU_TILE)
    block = BLOCK_ROWS if on_cpu else 1
    for of, outer in enumerate(rects):
        if not compiled:
            yield from (Part(of, rect, rect == outer) for rect in outer.subdivide(eager))
            continue
        large = tile or (CPU_COMPILED_TILE if on_cpu else math.prod(outer.size))
        for rect in outer.subdivide(large, block):
            regular, rest = rect.regular(block, LINE)
            if regular is not None:
                yield Part(of, regular, regular == outer, 1 if regular.size[1] == 1 else block, compiled=True)
            if rest is not None:
                yield from (Part(of, piece, piece == outer) for piece in rest.subdivide(eager))


class Sweep:
    """The reads and writes of one update, given to `UpdateRule.update`.

    Every number handed to `reduce` and `apply` besides tensors is turned into a float32 tensor, so that what changes
    from step to step never becomes a constant of compiled code.

    Args:
        layout: the local piece of the parameter in [batch, rows, cols].
        param, grad: the local piece, in the stored dtype.
        residual: what compensated rounding keeps, int16, like `param`; None for other roundings.
        factor: float32 scalar that the gradient is multiplied with as it is read (unscale, norm clip), or None.
        limit: float32 scalar ≥ 0, the gradient is clamped to ±limit after `factor`, or None.
        clip: float32 scalar that it is multiplied with after that, or None.
        own_clip: for the rule, what its own clipping by norm said of the step.
        finite: boolean scalar, where the step has been decided: False leaves everything as it was. None: the sweep
            finds out for itself, parameter by parameter.
        square_sums: those of the unscaled gradients, float32 [members], where they have been measured already.
        members: how many parameters are stacked.
        noise_keys: gives a 31-bit key for each of them, for what is rounded stochastically.
        stochastic: whether the weight is.
        across: the ranks that hold the other pieces; None: there are none.
        compiled: run tile functions through torch.compile.

    Attributes:
        members: as it was given.
        shape: [batch, rows, cols]; where small parameters are stacked, the batch is those of all, one after the other.
    """

    def __init__(
        self,
        layout: Layout,
        param: Tensor,
        grad: Tensor,
        *,
        residual: Tensor | None = None,
        factor: Tensor | None = None,
        limit: Tensor | None = None,
        clip: Tensor | None = None,
        own_clip: Tensor | None = None,
        finite: Tensor | None = None,
        square_sums: Tensor | None = None,
        members: int = 1,
        noise_keys: Callable[[], Sequence[int]] = lambda: (0,),
        stochastic: bool = False,
        across: Across | None = None,
        compiled: bool = False,
        tile: int | None = None,
    ) -> None:
        self.layout = layout
        self.shape = layout.shape
        self.device = param.device
        self._param, self._grad, self._residual = param.detach(), grad, residual
        self._factor, self._limit, self._clip = factor, limit, clip
        self.own_clip = own_clip
        self.members = members
        self._noise_keys, self._stochastic = noise_keys, stochastic and param.dtype in storage.ROUNDED_DTYPES
        self._across = across
        self._guarded = True  # by its own measurement
        self._finite = None if finite is None else finite.expand(members)
        self._parts = _parts(layout, param.device.type == "cpu", compiled, tile)
        self._at_once = len(self._parts) == 1 and self._parts[0].rect.size == self.shape
        if is_fake(param):  # a dry run computes nothing, and equal tiles take equal memory: one of each size will do
            self._parts = list({(part.rect.size, part.block): part for part in self._parts}.values())
        self._passes = 0
        self._params = layout.views(self._param)
        self._grads = layout.views(grad)
        self._residuals = layout.views(residual) if residual is not None else None
        self._slice_square_sums: Tensor | None = None  # [B], known after the first reduce
        self._square_sums = square_sums

    @property
    def count(self) -> int:
        """Elements in each slice of the batch."""
        return self.shape[1] * self.shape[2]

    @functools.cached_property
    def square_sums(self) -> Tensor:
        """Sum of the squares of each parameter's whole unscaled, unclipped gradient: float32 [members]."""
        if self._square_sums is not None:
            return self._square_sums
        if self._slice_square_sums is None:
            self.reduce(_nothing)
        assert self._slice_square_sums is not None
        return self._slice_square_sums.view(self.members, -1).sum(-1)

    @property
    def finite(self) -> Tensor | None:
        """Whether each gradient is free of Inf and NaN (and its squares of overflow): boolean [members], on the device.

        `apply` and `store` leave everything of a parameter as it was where it is False. None: nothing is held back.
        """
        if self._finite is None and self._guarded:
            self._finite = self.square_sums.isfinite()
        return self._finite

    def pass_nonfinite(self) -> None:
        """Holds nothing back by itself from here on: the rule says what a gradient that is not finite does."""
        self._guarded = False

    def reduce(
        self,
        fn: ReduceFn,
        *,
        full: Vectors | None = None,
        row: Vectors | None = None,
        col: Vectors | None = None,
        scalar: Scalars | None = None,
    ) -> Sums:
        """Sums of what `fn` names: rows [B, R], columns [B, C], scalars [B], all float32.

        The first reduce of a sweep measures the gradient on the way, so measuring costs no pass of its own.
        """
        measure = self._slice_square_sums is None and self._square_sums is None
        batch, rows, cols = self.shape
        total = Sums()

        def add(into: dict[str, Tensor], size: tuple[int, ...], where: tuple[slice, ...], part: Vectors) -> None:
            for name, value in part.items():
                if self._at_once:
                    into[name] = value
                    continue
                if name not in into:
                    into[name] = torch.zeros(size, dtype=torch.float32, device=self.device)
                into[name][where] += value

        def raise_to(into: dict[str, Tensor], where: tuple[slice, ...], part: Vectors) -> None:
            for name, value in part.items():
                if name not in into:
                    into[name] = torch.full((batch, rows), -torch.inf, dtype=torch.float32, device=self.device)
                into[name][where] = torch.maximum(into[name][where], value)

        for part, raw in self._tiles(full, row, col, scalar, in_blocks=True):
            rect, run = part.rect, tile_function(reduce_tile, fn, part.compiled)
            row_sums, col_sums, scalar_sums, row_max = run(measure, raw)
            if part.compiled:
                scalar_sums = {name: lines.sum(-1) for name, lines in scalar_sums.items()}
            if part.block > 1:
                col_sums = {name: blocks.sum(-2) for name, blocks in col_sums.items()}
            add(total.row, (batch, rows), (rect.batch, rect.rows), row_sums)
            add(total.col, (batch, cols), (rect.batch, rect.cols), col_sums)
            add(total.scalar, (batch,), (rect.batch,), scalar_sums)
            raise_to(total.row_max, (rect.batch, rect.rows), row_max)
        if self._across is not None:
            _sum_up(self._across, total)
        if measure:
            self._slice_square_sums = total.scalar.pop(SQUARE)
        return total

    def apply(
        self,
        fn: ApplyFn,
        *,
        full: Vectors | None = None,
        row: Vectors | None = None,
        col: Vectors | None = None,
        scalar: Scalars | None = None,
        stochastic: Sequence[str] = (),
        threshold: float | None = None,
    ) -> None:
        """Writes what `fn` gives for each tile: `param`, and states of the parameter's size by their name in `full`.

        stochastic: states that, if they are kept in 16 bits, are rounded to them at random, unbiased.
        threshold: in [0, 1): bfloat16 weights that would be rounded to the nearest one are rounded up (away from zero)
        where what is cut off is a larger part of their spacing than this.
        """
        rounded: tuple[str, ...] = ("param",) if self._stochastic else ()
        rounded += tuple(name for name in stochastic if (full or {})[name].dtype in storage.ROUNDED_DTYPES)
        noise = self._noise() if rounded else None
        finite = None if self.finite is None else self._by_slice(self.finite)
        limit = None if threshold is None else self.scalar(threshold)
        for part, raw in self._tiles(full, row, col, scalar):
            rect, run = part.rect, tile_function(apply_tile, fn, part.compiled)
            here = None if self._at_once else (rect.batch, rect.rows)
            own = None if noise is None else _cut(noise, here)
            first = torch.full((), rect.cols.start, dtype=torch.int32, device=self.device) if rounded else None
            run(rounded, Writing(None if finite is None else _cut(finite, here and here[:1]), own, first, limit), raw)

    def store(self, state: Tensor, value: Tensor) -> Tensor:
        """Writes a small state (row, column or slice) and returns what it holds now, in the state's dtype and shape."""
        kept, finite = value.view_as(state), self.finite
        if finite is not None and self.members == 1:
            kept = torch.where(finite.view(()), kept, state)
        elif finite is not None:
            members = (self.members, -1)
            kept = torch.where(finite[:, None], kept.view(members), state.view(members)).view_as(state)
        state.copy_(kept)
        return kept

    def stored(self, value: Tensor) -> Tensor:
        """As `Tile.stored`, for small tensors."""
        return storage.nearest(value, self._param.dtype)

    @contextmanager
    def materialized(self) -> Iterator[Tensor]:
        """The local piece as one leaf tensor with `.grad`, for optimizers that are not written as reduce and apply.

        It is the stored weight itself where that can hold the result (float32, or nearest rounding), else a float32
        copy that is written back tile by tile. The gradient is unscaled and clipped in place.
        """
        _ = self.square_sums  # measured before anything changes the gradient
        self.pass_nonfinite()
        grad = self._grad
        if self._factor is not None:
            grad.mul_(self._factor)
        if self._limit is not None:
            grad.clamp_(-self._limit, self._limit)
        if self._clip is not None:
            grad.mul_(self._clip)
        exact = self._residual is None and not self._stochastic
        param = self._param.detach() if exact else storage.widen(self._param, self._residual)
        param.requires_grad_()
        param.grad = grad.to(param.dtype)
        yield param
        if not exact:
            self.apply(_replaced, full={"value": param.detach()})

    def _tiles(
        self,
        full: Vectors | None,
        row: Vectors | None,
        col: Vectors | None,
        scalar: Scalars | None,
        in_blocks: bool = False,
    ) -> Iterator[tuple[Part, RawTile]]:
        """Every second pass goes backwards, and begins with what the one before has left in the cache."""
        order = self._parts if self._passes % 2 == 0 else self._parts[::-1]
        self._passes += 1
        batch, rows, cols = self.shape
        fulls = {name: self.layout.views(t) for name, t in (full or {}).items()}
        on_rows = {name: t.view(batch, rows) for name, t in (row or {}).items()}
        on_cols = {name: t.view(batch, cols) for name, t in (col or {}).items()}
        scalars = {name: self.scalar(v) for name, v in (scalar or {}).items()}
        for part in order:
            i, rect, block = part.of, part.rect, part.block if in_blocks else 1
            local = None if part.whole else rect.within(self.layout.rects[i])
            here = None if self._at_once else (rect.batch, rect.rows, rect.cols)
            yield (
                part,
                RawTile(
                    grad=_cut(self._grads[i], local, block),
                    param=_cut(self._params[i], local, block),
                    residual=None if self._residuals is None else _cut(self._residuals[i], local, block),
                    factor=self._factor,
                    limit=self._limit,
                    clip=self._clip,
                    full={name: _cut(views[i], local, block) for name, views in fulls.items()},
                    row={name: _cut(t, here and here[:2]) for name, t in on_rows.items()},
                    col={name: _cut(t, here and here[::2]) for name, t in on_cols.items()},
                    scalar={name: t if t.ndim == 0 else _cut(t, here and here[:1]) for name, t in scalars.items()},
                ),
            )

    def scalar(self, value: Tensor | float) -> Tensor:
        """A number as a float32 scalar on the parameter's device (filled there: no copy from the host)."""
        if isinstance(value, Tensor):
            return value
        return torch.full((), value, dtype=torch.float32, device=self.device)

    def _by_slice(self, of_members: Tensor) -> Tensor:
        """What each of the stacked parameters has, for each slice of the batch."""
        if self.shape[0] == self.members:
            return of_members
        return of_members.repeat_interleave(self.shape[0] // self.members, output_size=self.shape[0])

    def _noise(self) -> Tensor:
        """int32 [batch, rows]: random bits of each line of each parameter. int32 arithmetic may wrap."""
        batch, rows, _ = self.shape
        lines = batch * rows // self.members
        line = torch.arange(lines, dtype=torch.int32, device=self.device)
        if self.members == 1:
            (key,) = self._noise_keys()
            return storage.mix(line + key).view(batch, rows)
        keys = torch.tensor(self._noise_keys(), dtype=torch.int32).to(self.device, non_blocking=True)
        return storage.mix(line + keys[:, None]).view(batch, rows)


def _cut(whole: Tensor, where: tuple[slice, ...] | None, block: int = 1) -> Tensor:
    """A part of `whole` (None: all of it), in its memory, with strides of its own and no base: compiled code is valid
    for just those.
    """
    if where is None and block == 1:
        return whole.detach()
    part = whole if where is None else whole[where]
    batch, *sizes = part.shape
    if block > 1:
        sizes = [sizes[0] // block, block, sizes[1]]
    return part.view(batch, *sizes).detach()


def _sum_up(across: Across, total: Sums) -> None:
    """Replaces what one rank has summed by what all have."""
    named = [(into, name) for into in (total.row, total.col, total.scalar) for name in into]
    if named:
        parts = across.totals([into[name] for into, name in named])
        for (into, name), value in zip(named, parts, strict=True):
            into[name] = value
    if total.row_max:
        parts = across.largest(list(total.row_max.values()))
        total.row_max = dict(zip(total.row_max, parts, strict=True))


def _nothing(t: Tile) -> Sums:
    return Sums()


def _replaced(t: Tile) -> dict[str, Tensor]:
    return {"param": t.full.value}
