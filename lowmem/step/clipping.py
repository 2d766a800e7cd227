"""Measures gradient norms, and decides once per step how gradients are clipped and whether the step is skipped.

The order is the same as in a loop that calls `scaler.unscale_`, `clip_grad_value_` and `clip_grad_norm_`: gradients are
unscaled, clamped by value, and multiplied by one clip coefficient, which is computed from the norm of the result.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowmem.rules import GroupClip, GroupNorms
from lowmem.step.loss_scaler import LossScaler
from lowmem.step.parameters import Parameters
from lowmem.step.record import AddedGroup, ParamRecord
from lowmem.tiles.stored import tiles
from lowmem.tiles.sweep import Reading
from lowmem.tiles.transfers import to_device


class Norms(NamedTuple):
    """2-norms of gradients, summed in float32, so a norm above 1.8e19 is Inf.

    unscaled: without the loss scale.  clamped: after `clip_value`.  clipped: the norm that `clip_norm` limits.
    tiled: like `unscaled`, but summed tile by tile. On a CPU, PyTorch's norm of a large float32 tensor may be 1 % off.
    """

    unscaled: Tensor
    clamped: Tensor
    clipped: Tensor
    tiled: Tensor


# The clip coefficients of a parameter group, float32 scalars. Gradients are multiplied by the first one when they are
# read. The rule applies the second one to its update.
Clip = tuple[Tensor | None, Tensor | None]


@dataclass(frozen=True)
class Decision:
    """Norms, clip coefficients and skip flags of a step, known before its first update ("immediate": after its last).

    names: the parameters that got a gradient, in parameter order.
    norms: 2-norm of each unscaled gradient, float64 [parameters].
    updated: boolean [parameters]. False if the step is skipped, or in "immediate" if the norm is Inf or NaN.
    finite: boolean scalar. False skips all updates.
    clip_coef: the factor of `clip_norm`, a float32 scalar, or None.
    own_clips: the clip coefficients of parameter groups whose rule also clips.
    first_pass: norms that a second backward must reproduce (see `Norms.tiled`). None if `norms` already belong to the
        gradients that are applied.
    prepared: whether float32 gradients have been unscaled and clamped in place.
    skipped: whether the host knows that the step is skipped, so that no update is launched.
    """

    names: tuple[str, ...]
    norms: Tensor
    updated: Tensor
    finite: Tensor
    clip_coef: Tensor | None = None
    own_clips: Mapping[AddedGroup, Clip] = field(default_factory=dict)
    first_pass: Tensor | None = None
    prepared: bool = False
    skipped: bool = False

    @functools.cached_property
    def each(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Maps names to the sum of squares of the unscaled gradient, float64 [1], and to the flag in `updated`, [1]."""
        of_each = zip(self.norms.square().split(1), self.updated.split(1), strict=True)
        return dict(zip(self.names, of_each, strict=True))

    @functools.cached_property
    def form(self) -> tuple[Any, ...]:
        """The properties that the form of the readings of its gradients depends on; see `Reading.form`."""
        clips = [(group, *(clip is None for clip in clips)) for group, clips in self.own_clips.items()]
        return self.clip_coef is None, self.first_pass is None, self.prepared, *clips


class Clipping:
    """Measures and clips the gradients of a step.

    Args:
        parameters: the parameters of the optimizer. Norms are summed over the ranks that each gradient is sharded over.

    Attributes:
        device: the device of the loss scale and of decisions.
    """

    def __init__(self, parameters: Parameters) -> None:
        self.parameters, self.records, self.device = parameters, parameters.records, parameters.device
        self.scaler = LossScaler(parameters.config.loss_scale, self.device)
        self._ranks = next(map(parameters.shard.ranks_of, self.records), None)
        clip_value = parameters.config.clip_value
        self._limit = (
            None if clip_value is None else torch.full((), clip_value, dtype=torch.float32, device=self.device)
        )

    def factors(self, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """Returns the factor that unscales gradients, and the limit of `clip_value`: float32 scalars, or None."""
        return self.scaler.inverse(device), None if self._limit is None else self._limit.to(device)

    def changes(self, grad: Tensor) -> bool:
        """Returns whether `measure` changes the gradient in place."""
        return grad.dtype == torch.float32 and (self.scaler.value is not None or self._limit is not None)

    def measure(self, record: ParamRecord, grad: Tensor) -> Tensor:
        """Returns the `Norms` of a gradient, or of this rank's shard of it, float32 [4].

        A float32 gradient is unscaled and clamped in place, as PyTorch does. A 16-bit gradient does not change. It is
        read tile by tile, or at once on a GPU if it needs neither unscaling nor clamping.
        """
        if 0 in grad.shape:  # the shard is empty
            return torch.zeros(4, device=grad.device)
        inverse_scale, limit = self.factors(grad.device)
        if grad.device.type != "cpu" and limit is None and (inverse_scale is None or grad.dtype == torch.float32):
            unscaled = grad if inverse_scale is None else grad.mul_(inverse_scale)
            return torch.linalg.vector_norm(unscaled, dtype=torch.float32).expand(4)
        parts = []
        for part in [grad] if grad.dtype == torch.float32 else (tile.float() for tile in tiles(grad)):
            if inverse_scale is not None:
                part.mul_(inverse_scale)
            unscaled, tiled = _norms(part)
            clamped = unscaled if limit is None else _norms(part.clamp_(-limit, limit))[0]
            clipped = unscaled if record.rule.norm_before_clip_value else clamped
            parts.append(torch.stack(Norms(unscaled, clamped, clipped, tiled)))
        return parts[0] if len(parts) == 1 else torch.stack([*map(norm_over, torch.stack(parts, 1))])

    def decide(self, measured: Mapping[str, Tensor], *, prepared: bool) -> Decision:
        """Decides a step. The host waits only for third-party optimizers, because their updates cannot be undone.

        Args:
            measured: by name, the result of `measure` for each parameter that got a gradient.
            prepared: whether the measured gradients themselves will be applied, and not the gradients of another pass.
        """
        # the order of summation affects the last bits, so norms are summed in parameter order
        fired = [record for record in self.records.values() if record.name in measured]
        stacked = torch.stack([measured[record.name].to(self.device) for record in fired], 1)
        norms = self._over_ranks(stacked.double())
        finite = norm_over(norms.unscaled).isfinite()
        # with a dynamic loss scale, an overflow skips the step even if a rule handles Inf and NaN
        if not self.scaler.dynamic and all(record.handles_nonfinite for record in fired):
            finite = torch.ones_like(finite)
        coef = None
        if (limit := self.parameters.config.clip_norm) is not None:  # the same division as in torch
            coef = (limit / (norm_over(norms.clipped) + 1e-6)).clamp(max=1.0)
        own_clips: dict[AddedGroup, Clip] = {}
        read_norms = norms.clamped if coef is None else norms.clamped * coef
        for group, result in self._clip_by_rules(fired, read_norms):
            for name, new in result.memory.items():  # a skipped step does not change it
                group.memory[name].copy_(torch.where(finite, new, group.memory[name]))
            if result.by_rule:
                own_clips[group] = coef, result.coef
            else:
                own_clips[group] = result.coef if coef is None else coef * result.coef, None
        return Decision(
            names=tuple(record.name for record in fired),
            norms=norms.unscaled,
            updated=finite.expand(len(fired)),
            finite=finite,
            clip_coef=coef,
            own_clips=own_clips,
            first_pass=None if prepared else norms.tiled,
            prepared=prepared,
            skipped=any(record.rule.materializes for record in fired) and not bool(finite),
        )

    def review(self, fired: Sequence[ParamRecord], square_sums: Tensor) -> Decision:
        """Returns the decision for gradients that have already been applied or measured.

        square_sums: the sums of squares of the unscaled gradients, float64 [parameters].
        """
        updated = square_sums.isfinite()
        # a third-party optimizer has updated its parameter before the host knows
        unconditional = [record.rule.materializes or record.handles_nonfinite for record in fired]
        if any(unconditional):
            updated |= to_device(unconditional, torch.bool, self.device)
        return Decision(
            names=tuple(record.name for record in fired),
            norms=square_sums.sqrt(),
            updated=updated,
            finite=torch.ones((), dtype=torch.bool, device=self.device),
        )

    def _over_ranks(self, norms: Tensor) -> Norms:
        """Returns the norms of full gradients, given the norms of this rank's shards, float64 [4, parameters]."""
        if self._ranks is None:
            return Norms(*norms)
        (squares,) = self._ranks.all_reduce([norms.square()])
        return Norms(*squares.masked_fill(squares.float().isinf(), torch.inf).sqrt())

    def _clip_by_rules(
        self, fired: Sequence[ParamRecord], read_norms: Tensor
    ) -> Iterator[tuple[AddedGroup, GroupClip]]:
        """Yields the groups whose rules clip by norm, with their clipping.

        Args:
            fired: the parameters that got a gradient.
            read_norms: the norms of their gradients after `clip_norm`, float64 [parameters].
        """
        for group in self.parameters.groups:
            if group.rule.needs_norm(group.live) is None:
                continue
            norms = {record.name: norm for record, norm in zip(fired, read_norms.float().unbind(), strict=True)}
            members = [record for record in self.records.values() if record.group is group]
            active = dict.fromkeys(record for record in members if record.trained or record.name in norms)
            if not active:
                continue
            zero, states = torch.zeros_like(read_norms[0]).float(), self.parameters.states
            if not group.memory:
                with zero.device:  # creates it on the device instead of copying it
                    memory = group.rule.group_memory(group.live)
                    group.memory.update({name: value.clone() for name, value in memory.items()})
            measured = GroupNorms(
                hyper=group.live,
                norms=torch.stack([norms.get(record.name, zero) for record in active]),
                total=norm_over(read_norms),
                states=[states.get(record.param, {}) for record in active],
                frozen=[states.get(record.param, {}) for record in members if record not in active],
                memory=group.memory,
            )
            yield group, group.rule.clip_by_norm(measured)

    def reading(self, records: Sequence[ParamRecord], grad: Tensor, decision: Decision) -> Reading:
        """Returns how a rule reads the gradient of a parameter, or of a stack of parameters of one group."""
        device = grad.device
        inverse_scale, limit = self.factors(device)
        if decision.prepared and self.changes(grad):
            inverse_scale = limit = None
        clips = decision.own_clips.get(records[0].group, (decision.clip_coef, None))
        coef, rule_coef = (None if clip is None else clip.to(device) for clip in clips)
        known, finite = decision.each, decision.finite.view(1)
        each = zip(*(known.get(r.name) or (decision.norms.new_zeros(1), finite) for r in records), strict=True)
        square_sums, updated = ((torch.cat(of_each) if len(records) > 1 else of_each[0]).to(device) for of_each in each)
        measured = square_sums if decision.first_pass is None else None
        return Reading(inverse_scale, limit, coef, rule_coef, updated, measured)


def norm_over(norms: Tensor) -> Tensor:
    """Returns the 2-norm over several tensors from their norms, a float32 scalar, summed as PyTorch does."""
    return torch.linalg.vector_norm(norms.float())


def _norms(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the 2-norm of float32 values as PyTorch computes it, and summed tile by tile, as float32 scalars."""
    parts = tiles(values)
    norm = tiled = torch.linalg.vector_norm(values)
    if len(parts) > 1:
        tiled = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(part) for part in parts]))
    return norm, tiled
