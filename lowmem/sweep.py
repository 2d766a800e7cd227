"""The sweep: one pass over a parameter, its gradient and its states, tile by tile, in float32.

A rule hands module-level functions of one `Tile` to `Sweep.reduce` and `Sweep.apply`. Everything a rule must not know
stands here: tile size, device, stored dtype, rounding, compilation and, through `Layout`, which piece of the
parameter this process holds.
"""

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowmem import rounding

Named = dict[str, Tensor]
Vectors = Mapping[str, Tensor]
Scalars = Mapping[str, Tensor | float]

# Elements a tile. Eager code on a CPU wants a tile's few float32 temporaries in the cache; on a GPU it trades temporary
# memory against launches. Compiled code has next to no temporaries: there a tile is large, or the whole parameter.
CPU_TILE = 1 << 17
CPU_COMPILED_TILE = 1 << 22
GPU_TILE = 1 << 22

# Compiled code is dynamic in every size but 0 and 1, and special to a dtype, a rounding, a clip: together that can be
# more than dynamo's own limit of 8 for one function, past which it would fail in the middle of a step.
SPECIALISATIONS = 64


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


@dataclass(frozen=True)
class Layout:
    """Which rectangles of a [batch, rows, cols] parameter a process holds, in the order of its local memory."""

    shape: tuple[int, int, int]
    rects: tuple[Rect, ...]

    @classmethod
    def whole(cls, shape: tuple[int, int, int]) -> "Layout":
        """The whole parameter, on one device."""
        return cls(shape, (Rect(*(slice(0, n) for n in shape)),))

    def views(self, local: Tensor) -> list[Tensor]:
        """A local tensor as one [batch, rows, cols] view a rectangle."""
        sizes = [tuple(s.stop - s.start for s in (r.batch, r.rows, r.cols)) for r in self.rects]
        if len(sizes) == 1:
            return [local.view(sizes[0])]
        parts = local.flatten().split([b * r * c for b, r, c in sizes])
        return [part.view(size) for part, size in zip(parts, sizes, strict=True)]


@dataclass
class Sums:
    """What a reduce function gives for a tile of [b, r, c], and `Sweep.reduce` for the parameter of [B, R, C].

    row: name → sums along a row, [b, r].  col: name → sums along a column, [b, c].  scalar: name → sums over both, [b].
    """

    row: dict[str, Tensor] = field(default_factory=dict)
    col: dict[str, Tensor] = field(default_factory=dict)
    scalar: dict[str, Tensor] = field(default_factory=dict)


class RawTile(NamedTuple):
    """The stored tensors of one tile: what compiled code is given."""

    grad: Tensor
    param: Tensor
    residual: Tensor | None
    factor: Tensor | None
    limit: Tensor | None
    full: Named
    row: Named
    col: Named
    scalar: Named


class Fields:
    """Tensors by name, as attributes."""

    def __init__(self, named: Named) -> None:
        self._named = named

    def __getattr__(self, name: str) -> Tensor:
        return self._named[name]


class Tile:
    """One rectangle as a rule's function sees it: everything float32, everything broadcastable to [b, r, c].

    grad: the gradient, unscaled and clipped.  param: the weight.  full, row, col, scalar: what was handed to the sweep.
    """

    def __init__(self, raw: RawTile) -> None:
        self._raw = raw
        self.full = Fields({k: v.float() for k, v in raw.full.items()})
        self.row = Fields({k: v.unsqueeze(-1) for k, v in raw.row.items()})
        self.col = Fields({k: v.unsqueeze(-2) for k, v in raw.col.items()})
        self.scalar = Fields({k: v if v.ndim == 0 else v[:, None, None] for k, v in raw.scalar.items()})
        self._cache: dict[str, Tensor] = {}

    def _once(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        if name not in self._cache:
            self._cache[name] = compute()
        return self._cache[name]

    @property
    def unclipped(self) -> Tensor:
        """The gradient that norms are taken of: unscaled, not yet clipped by value."""
        factor, grad = self._raw.factor, self._raw.grad
        return self._once("unclipped", lambda: grad.float() if factor is None else grad.float() * factor)

    @property
    def grad(self) -> Tensor:
        """The gradient, unscaled and clipped."""
        limit = self._raw.limit
        return self.unclipped if limit is None else self._once("grad", lambda: self.unclipped.clamp(-limit, limit))

    @property
    def grad_square(self) -> Tensor:
        """The gradient squared, computed once for the rule and the measurement."""
        return self._once("grad_square", self.grad.square)

    @property
    def square_sum(self) -> Tensor:
        """Sum of `unclipped` squared, [b]."""
        square = self.grad_square if self._raw.limit is None else self.unclipped.square()
        return square.sum((-2, -1))

    @property
    def param(self) -> Tensor:
        """The weight."""
        return self._once("param", lambda: rounding.widen(self._raw.param, self._raw.residual))


ReduceFn = Callable[[Tile], Sums]
ApplyFn = Callable[[Tile], Named]


def _reduce_tile(fn: ReduceFn, measure: bool, raw: RawTile) -> tuple[Named, Named, Named, Tensor | None]:
    tile = Tile(raw)
    sums = fn(tile)
    return sums.row, sums.col, sums.scalar, tile.square_sum if measure else None


def _apply_tile(fn: ApplyFn, finite: Tensor, noise_row: Tensor | None, noise_col: Tensor | None, raw: RawTile) -> None:
    tile = Tile(raw)
    new = fn(tile)
    for name, value in new.items():
        if name != "param":
            old = raw.full[name]
            old.copy_(torch.where(finite, value, old))
    if "param" not in new:
        return
    value = torch.where(finite, new["param"], tile.param)
    if raw.residual is not None:
        stored, residual = rounding.split(value, raw.param.dtype)
        raw.param.copy_(stored)
        raw.residual.copy_(residual)
    elif noise_row is not None and noise_col is not None:
        bits = rounding.mix(noise_row.unsqueeze(-1) + noise_col)
        raw.param.copy_(rounding.narrow_stochastically(value, raw.param.dtype, bits))
    else:
        raw.param.copy_(value)


@functools.cache
def _tile_function(body: Callable[..., Any], fn: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    """`body` with `fn` bound; compiled once a function, with dynamic shapes, for every parameter and placement."""
    if not compiled:
        return functools.partial(body, fn)

    def tile_function(*args: Any) -> Any:
        return body(fn, *args)

    # Dynamo keeps what it compiled, and counts it, by code object: each pair gets one of its own.
    code = tile_function.__code__.replace(co_name=f"{body.__name__.strip('_')}_{fn.__name__}")
    own = types.FunctionType(code, globals(), closure=tile_function.__closure__)
    compiled_own = torch.compile(own, dynamic=True, fullgraph=True)
    return torch._dynamo.config.patch(recompile_limit=SPECIALISATIONS)(compiled_own)


class Sweep:
    """The reads and writes of one update of one parameter, given to `UpdateRule.update`.

    Every number handed to `reduce` and `apply` besides tensors is turned into a float32 tensor, so that what changes
    from step to step never becomes a constant of compiled code.

    Args:
        layout: the local piece of the parameter in [batch, rows, cols].
        param, grad: the local piece, in the stored dtype.
        residual: what compensated rounding keeps, int16, like `param`; None for other roundings.
        factor: float32 scalar that the gradient is multiplied with as it is read (unscale, norm clip), or None.
        limit: float32 scalar ≥ 0, the gradient is clamped to ±limit after `factor`, or None.
        noise_key: 31-bit key for stochastic rounding, or None.
        compiled: run tile functions through torch.compile.
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
        noise_key: int | None = None,
        compiled: bool = False,
        tile: int | None = None,
    ) -> None:
        self.layout = layout
        self.shape = layout.shape
        self.device = param.device
        self._param, self._grad, self._residual = param.detach(), grad, residual
        self._factor, self._limit = factor, limit
        self._compiled = compiled
        if tile is None:
            on_cpu = param.device.type == "cpu"
            tile = (CPU_COMPILED_TILE if on_cpu else param.numel()) if compiled else CPU_TILE if on_cpu else GPU_TILE
        self._rects = [(i, r) for i, outer in enumerate(layout.rects) for r in outer.subdivide(max(1, tile))]
        self._at_once = [rect for _, rect in self._rects] == list(Layout.whole(self.shape).rects)
        self._params = layout.views(self._param)
        self._grads = layout.views(grad)
        self._residuals = layout.views(residual) if residual is not None else None
        self._square_sums: Tensor | None = None  # [B], known after the first reduce
        self._noise = self._noise_vectors(noise_key) if noise_key is not None else (None, None)

    @property
    def count(self) -> int:
        """Elements in each slice of the batch."""
        return self.shape[1] * self.shape[2]

    @functools.cached_property
    def square_sum(self) -> Tensor:
        """Sum of the squares of the whole unscaled, unclipped gradient: a float32 scalar."""
        return self._measure().sum()

    def _measure(self) -> Tensor:
        if self._square_sums is None:
            self.reduce(_nothing)
        assert self._square_sums is not None
        return self._square_sums

    @functools.cached_property
    def finite(self) -> Tensor:
        """Whether the gradient is free of Inf and NaN (and its squares of overflow): a boolean scalar on the device.

        `apply` and `store` leave everything as it was where it is False.
        """
        return self.square_sum.isfinite()

    def reduce(
        self,
        fn: ReduceFn,
        *,
        full: Vectors | None = None,
        row: Vectors | None = None,
        col: Vectors | None = None,
        scalar: Scalars | None = None,
    ) -> Sums:
        """Sums of what `fn` gives for each tile: rows [B, R], columns [B, C], scalars [B], all float32.

        The first reduce of a sweep measures the gradient on the way, so measuring costs no pass of its own.
        """
        run = _tile_function(_reduce_tile, fn, self._compiled)
        measure = self._square_sums is None
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

        squares: dict[str, Tensor] = {}
        for rect, raw in self._tiles(full, row, col, scalar):
            row_sums, col_sums, scalar_sums, square_sum = run(measure, raw)
            add(total.row, (batch, rows), (rect.batch, rect.rows), row_sums)
            add(total.col, (batch, cols), (rect.batch, rect.cols), col_sums)
            add(total.scalar, (batch,), (rect.batch,), scalar_sums)
            if measure:
                add(squares, (batch,), (rect.batch,), {"grad": square_sum})
        if measure:
            self._square_sums = squares["grad"]
        return total

    def apply(
        self,
        fn: ApplyFn,
        *,
        full: Vectors | None = None,
        row: Vectors | None = None,
        col: Vectors | None = None,
        scalar: Scalars | None = None,
    ) -> None:
        """Writes what `fn` gives for each tile: `param`, and states of the parameter's size by their name in `full`."""
        run = _tile_function(_apply_tile, fn, self._compiled)
        finite = self.finite
        noise_row, noise_col = self._noise
        for rect, raw in self._tiles(full, row, col, scalar):
            tile_row = _cut(noise_row, (rect.batch, rect.rows)) if noise_row is not None else None
            tile_col = _cut(noise_col, (rect.cols,)) if noise_col is not None else None
            run(finite, tile_row, tile_col, raw)

    def store(self, state: Tensor, value: Tensor) -> Tensor:
        """Writes a small state (row, column or scalar) and returns what it holds now, in float32."""
        kept = torch.where(self.finite, value.view(state.shape), state)
        state.copy_(kept)
        return kept

    @contextmanager
    def materialized(self) -> Iterator[Tensor]:
        """The local piece as one leaf tensor with `.grad`, for optimizers that are not written as reduce and apply.

        It is the stored weight itself where that can hold the result (float32, or nearest rounding), else a float32
        copy that is written back tile by tile. The gradient is unscaled and clipped in place.
        """
        self._measure()  # before anything changes the gradient
        grad = self._grad
        if self._factor is not None:
            grad.mul_(self._factor)
        if self._limit is not None:
            grad.clamp_(-self._limit, self._limit)
        exact = self._residual is None and self._noise[0] is None
        param = self._param.detach() if exact else rounding.widen(self._param, self._residual)
        param.requires_grad_()
        param.grad = grad if exact else grad.float()
        yield param
        if not exact:
            self.apply(_replaced, full={"value": param.detach()})

    def _tiles(
        self, full: Vectors | None, row: Vectors | None, col: Vectors | None, scalar: Scalars | None
    ) -> Iterator[tuple[Rect, RawTile]]:
        batch, rows, cols = self.shape
        fulls = {name: self.layout.views(t) for name, t in (full or {}).items()}
        on_rows = {name: t.view(batch, rows) for name, t in (row or {}).items()}
        on_cols = {name: t.view(batch, cols) for name, t in (col or {}).items()}
        scalars = {name: self.scalar(v) for name, v in (scalar or {}).items()}
        for i, rect in self._rects:
            local = rect.within(self.layout.rects[i])
            yield (
                rect,
                RawTile(
                    grad=_cut(self._grads[i], local),
                    param=_cut(self._params[i], local),
                    residual=None if self._residuals is None else _cut(self._residuals[i], local),
                    factor=self._factor,
                    limit=self._limit,
                    full={name: _cut(views[i], local) for name, views in fulls.items()},
                    row={name: _cut(t, (rect.batch, rect.rows)) for name, t in on_rows.items()},
                    col={name: _cut(t, (rect.batch, rect.cols)) for name, t in on_cols.items()},
                    scalar={name: t if t.ndim == 0 else _cut(t, (rect.batch,)) for name, t in scalars.items()},
                ),
            )

    def scalar(self, value: Tensor | float) -> Tensor:
        """A number as a float32 scalar on the parameter's device (filled there: no copy from the host)."""
        if isinstance(value, Tensor):
            return value
        return torch.full((), value, dtype=torch.float32, device=self.device)

    def _noise_vectors(self, key: int) -> tuple[Tensor, Tensor]:
        """int32 [batch, rows] and [cols] whose sum, mixed, is the noise of an element. int32 arithmetic may wrap."""
        batch, rows, cols = self.shape
        line = torch.arange(batch * rows, dtype=torch.int32, device=self.device).view(batch, rows)
        return rounding.mix(line + key), torch.arange(cols, dtype=torch.int32, device=self.device)


def _cut(whole: Tensor, where: tuple[slice, ...]) -> Tensor:
    """A part of `whole`, in its memory, with strides of its own and no base: compiled code is valid for just those."""
    if all(s.start == 0 and s.stop == n for s, n in zip(where, whole.shape, strict=True)):
        return whole.detach()
    part = whole[where]
    return part.view(part.shape).detach()


def _nothing(t: Tile) -> Sums:
    return Sums()


def _replaced(t: Tile) -> dict[str, Tensor]:
    return {"param": t.full.value}
