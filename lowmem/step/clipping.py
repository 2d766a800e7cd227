"""Norms of gradients, and the decision about a step: measured before the first update, settled once for all updates.

The order is that of a loop which calls `scaler.unscale_`, `clip_grad_value_` and `clip_grad_norm_`: gradients are
unscaled, clamped by value, and multiplied by one clip coefficient from the norm of the result.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lowmem.options import FusedConfig
from lowmem.placements import Ranks
from lowmem.placements.record import ParamRecord
from lowmem.rules import GroupClip, GroupNorms
from lowmem.step.loss_scaler import LossScaler
from lowmem.tiles.gradients import Gradient
from lowmem.tiles.norms import REDUCED, norm_over, summable
from lowmem.tiles.sweep import Reading, tiles


class Norms(NamedTuple):
    """Norms of gradients, float64 [parameters]: Inf or NaN only if an element is.

    raw: 2-norm of the unscaled gradient.  clamped: the same after the clip by value.  clipped_by: what `clip_norm`
    measures.  tiled: as `raw`, but summed in tiles: as PyTorch computes it, on a CPU, the norm of a large float32
    tensor may be off by a per cent.
    """

    raw: Tensor
    clamped: Tensor
    clipped_by: Tensor
    tiled: Tensor


@dataclass(frozen=True)
class Decision:
    """What is known about the gradients of a step: before its first update, or in "immediate" after the last one.

    names: the parameters that got a gradient, in parameter order.  norms: of their gradients.
    updated: boolean [parameters]; False leaves a parameter as it is: the step is skipped, or its rule cannot sum the
    squares of its gradient.
    finite: boolean scalar; False skips every update.  guarded: whether Inf or NaN in a gradient makes it False.
    clip_coef: of `clip_norm`, float32 scalar, or None.  groups: id of a parameter group → its rule's own clipping.
    prepared: float32 gradients have been unscaled and clamped in place.
    skipped: the host knows that the step is skipped, and nothing needs to run.
    """

    names: tuple[str, ...]
    norms: Norms
    updated: Tensor
    finite: Tensor
    guarded: bool = True
    clip_coef: Tensor | None = None
    groups: Mapping[int, GroupClip] = field(default_factory=dict)
    prepared: bool = False
    skipped: bool = False

    @functools.cached_property
    def each(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Parameter → the sum of squares of its unscaled gradient, float64 scalar, and whether it is updated."""
        of_each = zip(self.norms.raw.square().unbind(), self.updated.unbind(), strict=True)
        return dict(zip(self.names, of_each, strict=True))


class Clipping:
    """What the gradients of a step are measured and clipped by.

    Args:
        groups, records, states, config: of the optimizer, live.
        device: of the loss scale and of decisions.
        ranks: that hold a shard of each gradient, over which norms are summed; None if gradients are complete.

    Attributes:
        memory: index of a group → what its rule's own clipping keeps for it.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        records: Mapping[Tensor, ParamRecord],
        states: Mapping[Tensor, Mapping[str, Any]],
        config: FusedConfig,
        device: torch.device,
        ranks: Ranks | None,
    ) -> None:
        self.scaler, self._device, self._ranks = LossScaler(config.loss_scale, device), device, ranks
        self.groups, self.records, self._states = groups, records, states
        self.norm, self.norm_type, self.value = config.clip_norm, float(config.norm_type), config.clip_value
        self.memory: dict[int, dict[str, Tensor]] = {}
        self._limits: dict[torch.device, Tensor] = {}

    def limit(self, device: torch.device) -> Tensor | None:
        """`clip_value` as a float32 scalar on `device`."""
        if self.value is None:
            return None
        if device not in self._limits:
            self._limits[device] = torch.full((), self.value, dtype=torch.float32, device=device)
        return self._limits[device]

    def changes(self, grad: Gradient) -> bool:
        """Whether `measure` changes the gradient in place."""
        return _is_float32(grad) and (self.scaler.value is not None or self.value is not None)

    def measure(self, record: ParamRecord, grad: Gradient) -> Tensor:
        """The `Norms` of a gradient, or of this rank's shard of it, float64 [4]. A float32 gradient is unscaled and
        clamped in place, as PyTorch would; a 16-bit one keeps its bits and is read tile by tile, a computed one block
        by block.
        """
        if isinstance(grad, Tensor) and not grad.numel():  # this rank holds nothing of the parameter
            return torch.zeros(4, dtype=torch.float64, device=grad.device)
        inverse_scale, limit = self.scaler.inverse(grad.device), self.limit(grad.device)
        before_limit = record.rule.norm_before_clip_value
        parts = [self._measure(part, inverse_scale, limit, before_limit) for part in _float32_parts(grad)]
        if len(parts) == 1:
            return parts[0]
        orders = (2.0, 2.0, self.norm_type, 2.0)
        norms = torch.stack(parts, 1).unbind()
        return torch.stack([norm_over(norm, order) for norm, order in zip(norms, orders, strict=True)])

    def _measure(self, part: Tensor, inverse_scale: Tensor | None, limit: Tensor | None, before_limit: bool) -> Tensor:
        if inverse_scale is not None:
            part.mul_(inverse_scale)
        raw, tiled, clipped_by = self._norms(part)
        clamped = raw
        if limit is not None:
            part.clamp_(-limit, limit)
            clamped, _, after_limit = self._norms(part)
            clipped_by = clipped_by if before_limit else after_limit
        return torch.stack((raw, clamped, clipped_by, tiled))

    def _norms(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Float64 scalars: the 2-norm in float32 as PyTorch computes it, and summed in tiles, each of reduced values
        where that overflows; and the norm of `norm_type`.
        """
        parts = tiles(values)
        single = tiled = torch.linalg.vector_norm(values)
        if len(parts) > 1:
            tiled = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(part) for part in parts]))
        buffer = torch.empty_like(parts[0])  # stays in the cache
        products = (torch.mul(part, REDUCED, out=buffer[: part.numel()]) for part in parts)
        reduced = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(product) for product in products]))
        large = reduced.double() / REDUCED
        norm, norm_in_tiles = (torch.where(each.isfinite(), each.double(), large) for each in (single, tiled))
        largest = None if self.norm_type == 2 else torch.linalg.vector_norm(values, torch.inf).double()
        return norm, norm_in_tiles, norm if largest is None else largest

    def decide(self, measured: Mapping[str, Tensor], *, prepared: bool) -> Decision:
        """Settles a step. No value is read back, except for a foreign optimizer, whose update cannot be undone.

        Args:
            measured: name → what `measure` returned, of each parameter that got a gradient.
            prepared: the gradients that will be applied are those that were measured, not others of equal values.
        """
        # norms are summed in parameter order, which decides their last bits
        fired = [record for record in self.records.values() if record.name in measured]
        stacked = torch.stack([measured[record.name].to(self._device) for record in fired], 1)
        norms = Norms(*(stacked if self._ranks is None else self._over_ranks(stacked, self._ranks)))
        # a dynamic loss scale that is too large skips the step, whatever the rule
        guarded = self.scaler.dynamic or not all(_of_groups(fired, _takes_nonfinite))
        finite = norms.raw.isfinite().all()
        finite = finite if guarded else torch.ones_like(finite)
        coef = None
        if self.norm is not None:
            total = norm_over(norms.clipped_by, self.norm_type)
            single = total.float()  # as torch divides, unless the norm itself is beyond float32
            coef = torch.where(single.isfinite(), self.norm / (single + 1e-6), (self.norm / total).float())
            coef = coef.clamp(max=1.0)
        read = norms.clamped if coef is None else norms.clamped * coef
        names = tuple(record.name for record in fired)
        groups = self._clip_groups(names, read, finite)
        if groups:
            one = torch.ones_like(finite, dtype=torch.float32)
            coefs = _of_groups(fired, lambda record: _coef(record, coef, groups))
            read = norms.clamped * torch.stack([one if each is None else each for each in coefs])
        updated = finite & (summable(read.square()) | ~self._mask(fired, sums_squares))
        skipped = not all(record.rule.can_be_skipped for record in fired) and not bool(finite)
        return Decision(names, norms, updated, finite, guarded, coef, groups, prepared, skipped)

    def review(self, fired: Sequence[ParamRecord]) -> Decision:
        """What is known about a step whose gradients have been applied as they arrived."""
        square_sums = self.gather(record.square_sum for record in fired)
        limit, counts = self.limit(self._device), torch.zeros(())
        if limit is not None:
            counts = torch.tensor([record.span.numel for record in fired], dtype=torch.float64)
        fits = summable(square_sums, limit, counts.to(self._device, non_blocking=True)) | ~self._mask(
            fired, sums_squares
        )
        updated = fits & (square_sums.isfinite() | self._mask(fired, _takes_nonfinite))
        finite = torch.ones((), dtype=torch.bool, device=self._device)
        return Decision(tuple(record.name for record in fired), Norms(*[square_sums.sqrt()] * 4), updated, finite)

    def gather(self, scalars: Iterable[Tensor | None]) -> Tensor:
        """Scalars of parameters, from their devices, as one tensor."""
        return torch.stack([scalar.to(self._device) for scalar in scalars if scalar is not None])

    def _mask(self, records: Sequence[ParamRecord], holds: Callable[[ParamRecord], bool]) -> Tensor:
        """Boolean [parameters]."""
        return torch.tensor(_of_groups(records, holds)).to(self._device, non_blocking=True)

    def _over_ranks(self, norms: Tensor, ranks: Ranks) -> Tensor:
        """The norms of full gradients, from those of their shards."""
        (squares,) = ranks.all_reduce_sum([norms.square()])
        total = squares.sqrt()
        if self.norm_type != 2:
            (total[2],) = ranks.all_reduce_max([norms[2]])
        return total

    def _clip_groups(self, names: Sequence[str], read: Tensor, finite: Tensor) -> dict[int, GroupClip]:
        """The clipping of each rule that has its own, given the norms of gradients as `clip_norm` leaves them."""
        norms = dict(zip(names, read.float().unbind(), strict=True))
        members: dict[int, list[ParamRecord]] = {}
        frozen: dict[int, list[ParamRecord]] = {}
        for record in self.records.values():
            if record.rule.needs_norm(record.group) is not None:
                there = members if record.trained or record.name in norms else frozen
                there.setdefault(id(record.group), []).append(record)
        clips: dict[int, GroupClip] = {}
        zero = torch.zeros_like(finite, dtype=torch.float32)
        for n, group in enumerate(self.groups):
            if not (records := members.get(id(group), [])):
                continue
            rule = records[0].rule
            memory = self.memory.get(n) or {k: v.to(zero.device) for k, v in rule.group_memory(group).items()}
            clip = clips[id(group)] = rule.clip_by_norm(
                GroupNorms(
                    hyper=group,
                    norms=torch.stack([norms.get(record.name, zero) for record in records]),
                    total=norm_over(read).float(),
                    states=[self._states.get(record.param, {}) for record in records],
                    frozen=[self._states.get(record.param, {}) for record in frozen.get(id(group), [])],
                    memory=memory,
                )
            )
            # a skipped step leaves no trace here either
            self.memory[n] = {name: torch.where(finite, new, memory[name]) for name, new in clip.memory.items()}
        return clips

    def reading(self, records: Sequence[ParamRecord], grad: Gradient, decision: Decision | None) -> Reading:
        """What happens to the gradient of (stacked) parameters of one group on its way into their rule."""
        device, first = grad.device, records[0]
        inverse_scale, limit = self.scaler.inverse(device), self.limit(device)
        if decision is None:
            return Reading(inverse_scale, limit, sums_squares=sums_squares(first))
        coef, own = _coef(first, decision.clip_coef, decision.groups), decision.groups.get(id(first.group))
        without_gradient = torch.zeros((), dtype=torch.float64, device=self._device), decision.finite
        each = [decision.each.get(record.name, without_gradient) for record in records]
        square_sums, updated = (torch.stack(of_each).to(device) for of_each in zip(*each, strict=True))
        done = decision.prepared and _is_float32(grad)
        return Reading(
            None if done else inverse_scale,
            None if done else limit,
            None if coef is None else coef.to(device),
            own.coef.to(device) if own is not None and own.by_rule else None,
            updated if decision.guarded else None,
            square_sums=square_sums if decision.prepared else None,
        )


Value = TypeVar("Value")


def _of_groups(records: Sequence[ParamRecord], value: Callable[[ParamRecord], Value]) -> list[Value]:
    """What is the same for every parameter of a group, of each parameter: computed once per group."""
    values = {key: value(record) for key, record in {id(record.group): record for record in records}.items()}
    return [values[id(record.group)] for record in records]


def sums_squares(record: ParamRecord) -> bool:
    """Whether a parameter is left as it is where squares of its gradient overflow float32."""
    return record.rule.sums_squares and not _takes_nonfinite(record)


def _takes_nonfinite(record: ParamRecord) -> bool:
    return record.rule.takes_nonfinite(record.group)


def _coef(record: ParamRecord, coef: Tensor | None, groups: Mapping[int, GroupClip]) -> Tensor | None:
    """What multiplies the gradient of a parameter: the clip coefficient of all, times that of its own group."""
    own = groups.get(id(record.group))
    if own is None or own.by_rule:
        return coef
    return own.coef if coef is None else coef * own.coef


def _is_float32(grad: Gradient) -> bool:
    """Whether a gradient is a float32 tensor, which is unscaled and clamped in place."""
    return isinstance(grad, Tensor) and grad.dtype == torch.float32


def _float32_parts(grad: Gradient) -> Iterable[Tensor]:
    """The gradient itself if it is float32, else float32 copies of its tiles, or its blocks as they are computed."""
    if not isinstance(grad, Tensor):
        return (block for _, block in grad.blocks())
    single = torch.complex64 if grad.is_complex() else torch.float32
    return [grad] if grad.dtype == single else (tile.to(single) for tile in tiles(grad))
