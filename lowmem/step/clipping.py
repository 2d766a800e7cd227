"""Norms of gradients, and the decision about a step: measured before the first update, settled once for all updates.

The order is that of a loop which calls `scaler.unscale_`, `clip_grad_value_` and `clip_grad_norm_`: gradients are
unscaled, clamped by value, and multiplied by one clip coefficient from the norm of the result.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
    """Norms of one parameter's gradient, float64 scalars on its device: Inf or NaN only if an element is.

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
    """What is settled about a step before its first update.

    finite: boolean scalar; False skips every update.  guarded: whether Inf or NaN in a gradient makes it False.
    clip_coef: of `clip_norm`, float32 scalar, or None.
    groups: id of a parameter group → its rule's own clipping.  norms: parameter → its norms.
    summable: parameter whose rule sums squares → whether it can, boolean scalar; False skips its update.
    prepared: float32 gradients have been unscaled and clamped in place.
    skipped: the host knows that the step is skipped, and nothing needs to run.
    """

    finite: Tensor
    guarded: bool = True
    clip_coef: Tensor | None = None
    groups: Mapping[int, GroupClip] = field(default_factory=dict)
    norms: Mapping[str, Norms] = field(default_factory=dict)
    summable: Mapping[str, Tensor] = field(default_factory=dict)
    prepared: bool = False
    skipped: bool = False


class Clipping:
    """What the gradients of a step are measured and clipped by.

    Args:
        groups, records, states, config: of the optimizer, live.
        device: of the loss scale.
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
        self.scaler, self._ranks = LossScaler(config.loss_scale, device), ranks
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

    def measure(self, record: ParamRecord, grad: Gradient) -> Norms:
        """The norms of a gradient, or of this rank's shard of it. A float32 gradient is unscaled and clamped in place,
        as PyTorch would; a 16-bit one keeps its bits and is read tile by tile, a computed one block by block.
        """
        if isinstance(grad, Tensor) and not grad.numel():  # this rank holds nothing of the parameter
            zero = torch.zeros((), dtype=torch.float64, device=grad.device)
            return Norms(zero, zero, zero, zero)
        inverse_scale, limit = self.scaler.inverse(grad.device), self.limit(grad.device)
        before_limit = record.rule.norm_before_clip_value
        parts = [self._measure(part, inverse_scale, limit, before_limit) for part in _float32_parts(grad)]
        if len(parts) == 1:
            return parts[0]
        raw, clamped, clipped_by, tiled = (torch.stack(norms) for norms in zip(*parts, strict=True))
        return Norms(norm_over(raw), norm_over(clamped), norm_over(clipped_by, self.norm_type), norm_over(tiled))

    def _measure(self, part: Tensor, inverse_scale: Tensor | None, limit: Tensor | None, before_limit: bool) -> Norms:
        if inverse_scale is not None:
            part.mul_(inverse_scale)
        raw, tiled = _norms(part)
        clamped = raw
        clipped_by = raw if self.norm_type == 2 else self._largest(part)
        if limit is not None:
            part.clamp_(-limit, limit)
            clamped, _ = _norms(part)
            if not before_limit:
                clipped_by = clamped if self.norm_type == 2 else self._largest(part)
        return Norms(raw, clamped, clipped_by, tiled)

    def _largest(self, values: Tensor) -> Tensor:
        return torch.linalg.vector_norm(values, torch.inf).double()

    def decide(self, measured: Mapping[str, Norms], *, prepared: bool) -> Decision:
        """Settles a step. No value is read back, except for a foreign optimizer, whose update cannot be undone.

        Args:
            measured: name → norms, of each parameter that got a gradient.
            prepared: the gradients that will be applied are those that were measured, not others of equal values.
        """
        # norms are summed in parameter order, which decides their last bits
        fired = [record for record in self.records.values() if record.name in measured]
        norms = {record.name: measured[record.name] for record in fired}
        if self._ranks is not None:
            norms = self._over_ranks(norms, self._ranks)
        device = next(iter(norms.values())).raw.device
        finite = torch.stack([each.raw.to(device) for each in norms.values()]).isfinite().all()
        # a dynamic loss scale that is too large skips the step, whatever the rule
        guarded = self.scaler.dynamic or not all(record.rule.takes_nonfinite(record.group) for record in fired)
        finite = finite if guarded else torch.ones_like(finite)
        coef = None
        if self.norm is not None:
            total = norm_over(torch.stack([each.clipped_by.to(device) for each in norms.values()]), self.norm_type)
            single = total.float()  # as torch divides, unless the norm itself is beyond float32
            coef = torch.where(single.isfinite(), self.norm / (single + 1e-6), (self.norm / total).float())
            coef = coef.clamp(max=1.0)
        groups = self._clip_groups(norms, finite, coef)
        skipped = not all(record.rule.can_be_skipped for record in fired) and not bool(finite)
        summable = self._summable(fired, norms, coef, groups)
        return Decision(finite, guarded, coef, groups, norms, summable, prepared, skipped)

    def _summable(
        self,
        fired: Iterable[ParamRecord],
        norms: Mapping[str, Norms],
        coef: Tensor | None,
        groups: Mapping[int, GroupClip],
    ) -> dict[str, Tensor]:
        """Whether a gradient as its rule will read it has squares that float32 can sum, for rules that do."""
        members: dict[int, list[ParamRecord]] = {}
        for record in fired:
            if sums_squares(record):
                members.setdefault(id(record.group), []).append(record)
        found: dict[str, Tensor] = {}
        for records in members.values():
            device = norms[records[0].name].clamped.device
            read = torch.stack([norms[record.name].clamped.to(device) for record in records])
            for each in _coefs(records[0], coef, groups):
                read = read * each.to(device)
            found |= zip((record.name for record in records), summable(read.square()).unbind(), strict=True)
        return found

    def _over_ranks(self, measured: Mapping[str, Norms], ranks: Ranks) -> dict[str, Norms]:
        """The norms of full gradients, from those of their shards."""
        device = next(iter(measured.values())).raw.device
        norms = torch.stack([torch.stack([norm.to(device) for norm in each]) for each in measured.values()])
        (squares,) = ranks.all_reduce_sum([norms.square()])
        total = squares.sqrt()
        if self.norm_type != 2:
            (total[:, 2],) = ranks.all_reduce_max([norms[:, 2]])
        return {name: Norms(*row.unbind()) for name, row in zip(measured, total.unbind(), strict=True)}

    def _clip_groups(self, norms: Mapping[str, Norms], finite: Tensor, coef: Tensor | None) -> dict[int, GroupClip]:
        """The clipping of each rule that has its own, given the gradients as `clip_norm` leaves them."""
        members: dict[int, list[ParamRecord]] = {}
        for record in self.records.values():
            if (record.trained or record.name in norms) and record.rule.needs_norm(record.group) is not None:
                members.setdefault(id(record.group), []).append(record)
        if not members:
            return {}
        zero = torch.zeros_like(finite, dtype=torch.float32)
        read = {name: each.clamped.to(zero.device) * (1.0 if coef is None else coef) for name, each in norms.items()}
        total = norm_over(torch.stack(list(read.values()))).float()
        clips = {}
        for n, group in enumerate(self.groups):
            if not (records := members.get(id(group), [])):
                continue
            rule = records[0].rule
            memory = self.memory.get(n) or {k: v.to(zero.device) for k, v in rule.group_memory(group).items()}
            clip = clips[id(group)] = rule.clip_by_norm(
                GroupNorms(
                    hyper=group,
                    norms=torch.stack([read.get(record.name, zero).float() for record in records]),
                    total=total,
                    states=[self._states.get(record.param, {}) for record in records],
                    memory=memory,
                )
            )
            # a skipped step leaves no trace here either
            self.memory[n] = {name: torch.where(finite, new, memory[name]) for name, new in clip.memory.items()}
        return clips

    def reading(self, records: Sequence[ParamRecord], grad: Gradient, decision: Decision | None) -> Reading:
        """What happens to the gradient of (stacked) parameters of one group on its way into their rule."""
        device = grad.device
        inverse_scale, limit = self.scaler.inverse(device), self.limit(device)
        if decision is None:
            return Reading(inverse_scale, limit, sums_squares=sums_squares(records[0]))
        group = decision.groups.get(id(records[0].group))
        coefs = [coef.to(device) for coef in _coefs(records[0], decision.clip_coef, decision.groups)]
        finite, square_sums = decision.finite.to(device), None
        if records[0].name in decision.summable:
            zero_is = torch.ones_like(finite)  # of a parameter without gradient
            finite = finite & torch.stack([decision.summable.get(r.name, zero_is).to(device) for r in records])
        if decision.prepared:
            zero = torch.zeros((), dtype=torch.float64, device=device)
            norms = [decision.norms[r.name].raw if r.name in decision.norms else zero for r in records]
            square_sums = torch.stack(norms).square()
        done = decision.prepared and _is_float32(grad)
        return Reading(
            None if done else inverse_scale,
            None if done else limit,
            functools.reduce(torch.mul, coefs) if coefs else None,
            group.coef.to(device) if group is not None and group.by_rule else None,
            finite if decision.guarded else None,
            square_sums=square_sums,
        )


def sums_squares(record: ParamRecord) -> bool:
    """Whether a parameter is left as it is where squares of its gradient overflow float32."""
    return record.rule.sums_squares and not record.rule.takes_nonfinite(record.group)


def _coefs(record: ParamRecord, coef: Tensor | None, groups: Mapping[int, GroupClip]) -> list[Tensor]:
    """What multiplies the gradient of a parameter: the clip coefficient of all, and that of its own group."""
    group = groups.get(id(record.group))
    by_engine = group.coef if group is not None and not group.by_rule else None
    return [each for each in (coef, by_engine) if each is not None]


def _norms(values: Tensor) -> tuple[Tensor, Tensor]:
    """The 2-norm in float32 as PyTorch computes it, and summed in tiles; where that overflows, of reduced values: both
    float64.
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
    return norm, norm_in_tiles


def _is_float32(grad: Gradient) -> bool:
    """Whether a gradient is a float32 tensor, which is unscaled and clamped in place."""
    return isinstance(grad, Tensor) and grad.dtype == torch.float32


def _float32_parts(grad: Gradient) -> Iterable[Tensor]:
    """The gradient itself if it is float32, else float32 copies of its tiles, or its blocks as they are computed."""
    if not isinstance(grad, Tensor):
        return (block for _, block in grad.blocks())
    single = torch.complex64 if grad.is_complex() else torch.float32
    return [grad] if grad.dtype == single else (tile.to(single) for tile in tiles(grad))
