"""The sweep: one pass over a parameter, its gradient and its states, tile by tile, in float32.

A rule passes module-level functions of one `Tile` to `Sweep.reduce` and `Sweep.apply`. Everything a rule must not know
is in this folder: tile size, device, storage, compilation, how many small parameters are stacked into one and, through
`Layout`, which shard of the parameter this process holds.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypedDict, Unpack

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from lowmem.errors import UnsupportedError
from lowmem.tiles.compiled import tile_function
from lowmem.tiles.gradients import ComputedGradient, Gradient
from lowmem.tiles.layout import Layout, Rect
from lowmem.tiles.norms import exact, summable
from lowmem.tiles.storage import FromParameter, Held, Nearest, golden_ratio_noise, mix, nearest
from lowmem.tiles.tile import (
    BLOCK_ROWS,
    LINE,
    REDUCED_SQUARE,
    SQUARE,
    ApplyFn,
    Formats,
    RawTile,
    ReduceFn,
    Summing,
    Sums,
    Tile,
    TileBody,
    Writing,
    apply_tile,
    reduce_tile,
)

Vectors = Mapping[str, Tensor]
Scalars = Mapping[str, Tensor | float]
States = Mapping[str, Held]
Slices = tuple[slice, ...] | None
Views = list[tuple[list[Tensor], int]]

# Elements per tile. Eager code on a CPU wants the few float32 temporaries of a tile in the cache; on a GPU it trades
# temporary memory against launches. Compiled code has next to no temporaries: there a tile is large, or everything.
CPU_TILE = 1 << 17
CPU_COMPILED_TILE = 1 << 24
GPU_TILE = 1 << 22

# Tiles do not cross columns whose number is a multiple of this: int32 counts the columns of a tile.
WIDEST = 1 << 30


class Given(TypedDict, total=False):
    """What tile functions read by name in addition to the gradient and the weight.

    full: states of the parameter's size.  row: one value per row, [B, R].  col: [B, C].  scalar: a number, or [B].
    """

    full: States | None
    row: Vectors | None
    col: Vectors | None
    scalar: Scalars | None


class Across(Protocol):
    """The ranks that hold a shard of the parameter each."""

    def all_reduce_sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Each float32 tensor summed over the ranks, in one collective."""

    def all_reduce_max(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The elementwise maximum of each float32 tensor over the ranks, in one collective."""


@dataclass(frozen=True)
class Reading:
    """What happens to a gradient as it is read, and what the step has settled about it.

    inverse_scale: float32 scalar that the gradient is multiplied by first, or None.
    limit: float32 scalar >= 0; the gradient is clamped to +-limit after that, or None.
    clip_coef: float32 scalar that it is multiplied by after that, or None.
    rule_clip_coef: clip coefficient of the rule's own clipping that the rule applies itself, or None.
    finite: boolean, a scalar or [members]; False leaves everything as it is. None: the sweep decides for itself, per
    parameter, for which an Inf or NaN in its gradient counts.
    sums_squares: where the sweep decides, squares that overflow float32 count as well.
    square_sums: those of the unscaled gradients, float64 [members], where they have been measured already.
    """

    inverse_scale: Tensor | None = None
    limit: Tensor | None = None
    clip_coef: Tensor | None = None
    rule_clip_coef: Tensor | None = None
    finite: Tensor | None = None
    sums_squares: bool = False
    square_sums: Tensor | None = None


class Cut(NamedTuple):
    """A tile of the parameter: `rect`, in rectangle number `of` of the layout.

    complete: it covers that rectangle.  block: rows that columns are summed over at a time; 1: all at once.
    compiled: processed by compiled code.
    """

    of: int
    rect: Rect
    complete: bool
    block: int = 1
    compiled: bool = False


def _cuts(layout: Layout, on_cpu: bool, compiled: bool, tile: int | None) -> list[Cut]:
    """As `_cut_up` gives them, which it does once for a layout."""
    cut_for = (on_cpu, compiled, tile)
    parts: list[Cut] | None = layout.cuts.get(cut_for)
    if parts is None:
        parts = layout.cuts[cut_for] = list(_cut_up(layout.rects, *cut_for))
    return parts


def _cut_up(rects: Sequence[Rect], on_cpu: bool, compiled: bool, tile: int | None) -> Iterator[Cut]:
    """The tiles of a parameter. Compiled code gets what is large and regular: its sizes are never 1, nor is a line or a
    column ever summed in odd parts, so that nothing is compiled again for them.
    """
    eager = tile or (CPU_TILE if on_cpu else GPU_TILE)
    block = BLOCK_ROWS if on_cpu else 1
    parts = [(of, outer, part) for of, outer in enumerate(rects) for part in outer.narrow(WIDEST)]
    for of, outer, part in parts:
        if not compiled:
            yield from (Cut(of, rect, rect == outer) for rect in part.subdivide(eager))
            continue
        large = tile or (CPU_COMPILED_TILE if on_cpu else math.prod(part.size))
        for rect in part.subdivide(large, block):
            regular, rest = rect.regular(block, LINE)
            if regular is not None:
                yield Cut(of, regular, regular == outer, 1 if regular.size[1] == 1 else block, compiled=True)
            if rest is not None:
                yield from (Cut(of, tail, tail == outer) for tail in rest.subdivide(eager))


def _two_of_each_size(cuts: Sequence[Cut]) -> list[Cut]:
    """What a dry run needs: equal tiles take equal memory, once the first one has made the sums over all of them."""
    of_size: dict[tuple[tuple[int, ...], int], list[Cut]] = {}
    for cut in cuts:
        of_size.setdefault((cut.rect.size, cut.block), []).append(cut)
    return [cut for same in of_size.values() for cut in same[:2]]


NO_READING = Reading()


class Sweep:
    """The reads and writes of one update, given to `UpdateRule.update`.

    Numbers that are passed to `reduce` and `apply` become float32 tensors, so that a value that
    changes with the step never becomes a constant of compiled code.

    Args:
        layout: the local shard of the parameter in [batch, rows, cols].
        weight: the local shard of the parameter and the other tensors of its storage.
        grad: the local shard of the gradient, in the dtype it came in; or one that is computed as it is read, and then
            `layout` is of its blocks.
        reading: what happens to the gradient as it is read.
        members: how many parameters are stacked.
        noise_keys: gives a 31-bit key for each of them, for storages that draw a number per element.
        step: of training, for storages that draw a number per step.
        across: the ranks that hold the other shards; None if there are none.
        compiled: run compiled tile functions.
        tile: elements per tile; None: chosen by device.

    Attributes:
        members: how many parameters are stacked.
        shape: [batch, rows, cols]; where small parameters are stacked, the batch is those of all, one after the other.
        rule_clip_coef: for the rule, the coefficient of its own clipping by norm, or None.
    """

    def __init__(
        self,
        layout: Layout,
        weight: Held,
        grad: Gradient,
        reading: Reading = NO_READING,
        *,
        members: int = 1,
        noise_keys: Callable[[], Sequence[int]] = lambda: (0,),
        step: int = 1,
        across: Across | None = None,
        compiled: bool = False,
        tile: int | None = None,
    ) -> None:
        self.layout = layout
        self.shape = layout.shape
        self._weight, self._grad, self._reading = weight, grad, reading
        param = weight.parts[0]
        self.device = param.device
        self.rule_clip_coef = reading.rule_clip_coef
        self.members = members
        self._noise_keys, self._step, self._across = noise_keys, step, across
        self._guarded = True  # by its own measurement
        self._finite = None if reading.finite is None else reading.finite.expand(members)
        self._cuts = _cuts(layout, param.device.type == "cpu", compiled, tile)
        self._at_once = len(self._cuts) == 1 and self._cuts[0].rect.size == self.shape
        if is_fake(param):
            self._cuts = _two_of_each_size(self._cuts)
        self._passes = 0
        self._params = self._views(weight)
        if isinstance(grad, Tensor) and grad.is_complex():
            grad = grad.abs()  # to be measured
        self._grads = layout.views(grad) if isinstance(grad, Tensor) else []
        self._written = False
        self._measured: tuple[Tensor, Tensor] | None = None  # sums of squares [B], known after the first reduce
        self._square_sums = reading.square_sums

    @property
    def count(self) -> int:
        """Elements in each slice of the batch."""
        return self.shape[1] * self.shape[2]

    @functools.cached_property
    def square_sums(self) -> Tensor:
        """Sum of the squares of each parameter's unscaled, unclipped gradient over all shards: float64 [members]. It is
        summed in float32 unless that overflows.
        """
        if self._square_sums is not None:
            return self._square_sums
        if self._measured is None:
            self.reduce(_nothing)
        assert self._measured is not None
        return exact(*(sums.view(self.members, -1).sum(-1) for sums in self._measured))

    @property
    def finite(self) -> Tensor | None:
        """Whether each gradient is free of Inf and NaN: boolean [members], on the device.

        `apply` and `store` leave everything of a parameter as it was where it is False. None: everything is written.
        """
        if self._finite is None and self._guarded:
            if self._reading.sums_squares:
                count = math.prod(self.shape) // self.members
                self._finite = summable(self.square_sums, self._reading.limit, count)
            else:
                self._finite = self.square_sums.isfinite()
        return self._finite

    def pass_nonfinite(self) -> None:
        """Writes everything from here on: the rule says what a gradient that is not finite does."""
        self._guarded = False

    def reduce(self, fn: ReduceFn, **given: Unpack[Given]) -> Sums:
        """Sums of what `fn` names: rows [B, R], columns [B, C], scalars [B], all float32.

        The first reduce of a sweep measures the gradient on the way, so measuring costs no pass of its own.
        """
        measure = self._measured is None and self._square_sums is None
        batch, rows, cols = self.shape
        total = Sums()

        def merge(into: dict[str, Tensor], size: tuple[int, ...], where: tuple[slice, ...], part: Vectors) -> None:
            largest = into is total.row_max
            for name, value in part.items():
                if self._at_once:
                    into[name] = value
                    continue
                if name not in into:
                    start = -torch.inf if largest else 0.0
                    into[name] = torch.full(size, start, dtype=torch.float32, device=self.device)
                here = into[name][where]
                (torch.maximum if largest else torch.add)(here, value, out=here)

        formats = Formats.of(self._weight.storage, given.get("full") or {})
        for cut, raw in self._tiles(given, in_blocks=True):
            rect, run = cut.rect, self._bind(reduce_tile, fn, formats, cut)
            row_sums, col_sums, scalar_sums, row_max = run(Summing(measure, cut.compiled), raw)
            if cut.compiled:
                scalar_sums = {name: lines.sum(-1) for name, lines in scalar_sums.items()}
            if cut.block > 1:
                col_sums = {name: blocks.sum(-2) for name, blocks in col_sums.items()}
            merge(total.row, (batch, rows), (rect.batch, rect.rows), row_sums)
            merge(total.col, (batch, cols), (rect.batch, rect.cols), col_sums)
            merge(total.scalar, (batch,), (rect.batch,), scalar_sums)
            merge(total.row_max, (batch, rows), (rect.batch, rect.rows), row_max)
        if self._across is not None:
            _sum_up(self._across, total)
        if measure:
            self._measured = total.scalar.pop(SQUARE), total.scalar.pop(REDUCED_SQUARE)
        return total

    def apply(self, fn: ApplyFn, **given: Unpack[Given]) -> None:
        """Writes what `fn` gives for each tile: `param`, and states of the parameter's size by their name in `full`."""
        if isinstance(self._grad, ComputedGradient):
            _ = self.square_sums  # measured before the weight changes, from which the gradient is computed
        formats = Formats.of(self._weight.storage, given.get("full") or {})
        storages = [formats.param, *(storage for _, storage in formats.full)]
        noise = self._noise() if formats.drawing else None
        drawn = any(storage.noise == "step" for storage in storages)
        shared = self._shared_noise() if drawn else None
        finite = None if self.finite is None else self._by_slice(self.finite)
        for cut, raw in self._tiles(given):
            rect, run = cut.rect, self._bind(apply_tile, fn, formats, cut)
            here = None if self._at_once else (rect.batch, rect.rows)
            bits = first = None
            if noise is not None:
                high, low = divmod(rect.cols.start + (1 << 31), 1 << 32)
                first = torch.full((), low - (1 << 31), dtype=torch.int32, device=self.device)
                bits = _cut(noise, here) if not high else mix(_cut(noise, here) + high)
            run(Writing(None if finite is None else _cut(finite, here and here[:1]), bits, first, shared), raw)
        self._written = True

    def store(self, state: Tensor, value: Tensor) -> Tensor:
        """Writes a small state (row, column or slice) and returns what it holds now, in the state's dtype and shape."""
        new, finite = value.view_as(state), self.finite
        if finite is not None and self.members == 1:
            new = torch.where(finite.view(()), new, state)
        elif finite is not None:
            members = (self.members, -1)
            new = torch.where(finite[:, None], new.view(members), state.view(members)).view_as(state)
        state.copy_(new)
        return new

    def stored(self, value: Tensor) -> Tensor:
        """As `Tile.stored`, for small tensors."""
        return nearest(value, self._weight.parts[0].dtype)

    @contextmanager
    def materialized(self) -> Iterator[Tensor]:
        """The local shard as one leaf tensor with `.grad`, for optimizers that are not written as reduce and apply.

        It is the parameter itself where that can hold the result (float32, or nearest rounding), else a float32 copy
        that is written back tile by tile. The gradient is unscaled and clipped in place.
        """
        _ = self.square_sums  # measured before anything changes the gradient
        self.pass_nonfinite()
        grad, reading, storage = self._grad, self._reading, self._weight.storage
        assert isinstance(grad, Tensor)  # such rules have needs_dense_gradient
        if reading.inverse_scale is not None:
            grad.mul_(reading.inverse_scale)
        if reading.limit is not None:
            grad.clamp_(-reading.limit, reading.limit)
        if reading.clip_coef is not None:
            grad.mul_(reading.clip_coef)
        exact = isinstance(storage, Nearest)
        param = self._weight.parts[0].detach() if exact else storage.decode(self._weight.parts)
        param.requires_grad_()
        param.grad = grad.to(param.dtype)
        yield param
        if not exact:
            self.apply(_replaced, full={"value": Held(Nearest(torch.float32), (param.detach(),))})

    def _views(self, held: Held) -> Views:
        """Each tensor of a storage by rectangle, and the size of its groups."""
        return [
            (self.layout.views(tensor, part.group), part.group)
            for part, tensor in zip(held.storage.parts, held.parts, strict=True)
        ]

    def _tiles(self, given: Given, in_blocks: bool = False) -> Iterator[tuple[Cut, RawTile]]:
        """Every second pass goes backwards, and begins with what the one before has left in the cache."""
        if self._written and isinstance(self._grad, ComputedGradient):
            raise UnsupportedError(
                "this rule reads the gradient once more after it has written the weight, from which the gradient is "
                "computed. Set needs_dense_gradient = True in its class"
            )
        order = self._cuts if self._passes % 2 == 0 else self._cuts[::-1]
        self._passes += 1
        batch, rows, cols = self.shape
        fulls = {name: self._views(held) for name, held in (given.get("full") or {}).items()}
        on_rows = {name: t.view(batch, rows) for name, t in (given.get("row") or {}).items()}
        on_cols = {name: t.view(batch, cols) for name, t in (given.get("col") or {}).items()}
        scalars = {name: self.scalar(v) for name, v in (given.get("scalar") or {}).items()}
        for cut in order:
            i, rect, block = cut.of, cut.rect, cut.block if in_blocks else 1
            outer = self.layout.blocks[i]
            local = None if cut.complete else rect.within(outer.rect)
            here = None if self._at_once else (rect.batch, rect.rows, rect.cols)
            grad = self._grad.view(outer) if isinstance(self._grad, ComputedGradient) else self._grads[i]
            raw = RawTile(
                grad=_cut(grad, local, block),
                param=_tiles_of(self._params, i, local, block),
                inverse_scale=self._reading.inverse_scale,
                limit=self._reading.limit,
                clip_coef=self._reading.clip_coef,
                full={name: _tiles_of(views, i, local, block) for name, views in fulls.items()},
                row={name: _cut(t, here and here[:2]) for name, t in on_rows.items()},
                col={name: _cut(t, here and here[::2]) for name, t in on_cols.items()},
                scalar={name: t if t.ndim == 0 else _cut(t, here and here[:1]) for name, t in scalars.items()},
            )
            yield cut, raw

    def _bind(self, body: TileBody, fn: ReduceFn | ApplyFn, formats: Formats, cut: Cut) -> TileBody:
        """`body` for a rule's function and storages: `reduce_tile` or `apply_tile`."""
        return tile_function(body, fn, formats, cut.compiled)

    def scalar(self, value: Tensor | float) -> Tensor:
        """A number as a float32 scalar on the parameter's device (filled there: no copy from the host)."""
        if isinstance(value, Tensor):
            return value
        return torch.full((), value, dtype=torch.float32, device=self.device)

    def _shared_noise(self) -> Tensor:
        return self.scalar(golden_ratio_noise(self._step))

    def _by_slice(self, of_members: Tensor) -> Tensor:
        """What each of the stacked parameters has, for each slice of the batch."""
        if self.members in (1, self.shape[0]):
            return of_members.expand(self.shape[0]).contiguous()
        return of_members.repeat_interleave(self.shape[0] // self.members, output_size=self.shape[0])

    def _noise(self) -> Tensor:
        """int32 [batch, rows]: random bits of each line of each parameter. int32 arithmetic may wrap."""
        batch, rows, _ = self.shape
        lines = batch * rows // self.members
        line = torch.arange(lines, dtype=torch.int32, device=self.device)
        if self.members == 1:
            (key,) = self._noise_keys()
            return mix(line + key).view(batch, rows)
        keys = torch.tensor(self._noise_keys(), dtype=torch.int32).to(self.device, non_blocking=True)
        return mix(line + keys[:, None]).view(batch, rows)


def _tiles_of(views: Views, of: int, local: Slices, block: int) -> tuple[Tensor, ...]:
    """One tile of each tensor of a storage, in rectangle number `of`."""
    return tuple(_cut(tensors[of], local, block, group) for tensors, group in views)


def _cut(tensor: Tensor, where: Slices, block: int = 1, group: int = 1) -> Tensor:
    """A part of a tensor (None: all of it), in its memory, with strides of its own and no base: compiled code is valid
    for just those.
    """
    if where is None and block == 1:
        return tensor.detach()
    if where is not None and group > 1:
        *lines, cols = where
        where = *lines, slice(cols.start // group, cols.stop // group)
    part = tensor if where is None else tensor[where]
    batch, *sizes = part.shape
    if block > 1:
        sizes = [sizes[0] // block, block, sizes[1]]
    return part.view(batch, *sizes).detach()


def _sum_up(across: Across, total: Sums) -> None:
    """Replaces what one rank has summed by what all have."""
    named = [(into, name) for into in (total.row, total.col, total.scalar) for name in into]
    if named:
        parts = across.all_reduce_sum([into[name] for into, name in named])
        for (into, name), value in zip(named, parts, strict=True):
            into[name] = value
    if total.row_max:
        parts = across.all_reduce_max(list(total.row_max.values()))
        total.row_max = dict(zip(total.row_max, parts, strict=True))


def begin_storage(layout: Layout, weight: Held) -> None:
    """Encodes a weight, before its first update, into the tensors that its storage has in addition to the parameter."""
    storage = FromParameter(weight.storage.parts, weight.storage)
    sweep = Sweep(layout, Held(storage, weight.parts), weight.parts[0])
    sweep.pass_nonfinite()
    sweep.apply(_unchanged)


def _unchanged(t: Tile) -> dict[str, Tensor]:
    return {"param": t.param}


def _nothing(t: Tile) -> Sums:
    return Sums()


def _replaced(t: Tile) -> dict[str, Tensor]:
    return {"param": t.full.value}


# -- outside of a sweep ------------------------------------------------------------------------------------------------


def flat(tensor: Tensor) -> Tensor:
    """The elements in the order of their memory, whatever the order of dimensions: a view of one dimension."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def tiles(tensor: Tensor) -> tuple[Tensor, ...]:
    """`flat`, cut into tiles."""
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
