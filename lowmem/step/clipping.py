"""Norms of gradients, and what a step clips by them: measured before the first update, decided once for all.

The order is that of a loop which calls `scaler.unscale_`, `clip_grad_value_` and `clip_grad_norm_`: gradients are
unscaled, clamped by value, and multiplied with one factor from the norm of what that leaves.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowmem.errors import ConfigError
from lowmem.placements import Local, Ranks
from lowmem.placements.record import ParamRecord
from lowmem.rules import GroupNorms, OwnClip, UpdateRule
from lowmem.step.loss_scaler import LossScale
from lowmem.tiles.sweep import tiles


class Measured(NamedTuple):
    """Norms of one parameter's gradient, float32 scalars on its device.

    raw: 2-norm of the unscaled gradient.  clamped: the same after the clip by value.  counted: what `clip_norm` is of.
    """

    raw: Tensor
    clamped: Tensor
    counted: Tensor


@dataclass(frozen=True)
class Decision:
    """What is settled about a step before its first update.

    finite: boolean scalar; False holds every update back.  factor: `clip_norm`'s, float32 scalar, or None.
    own: id of a parameter group → its rule's own clipping.  measured: parameter → its norms.
    prepared: float32 gradients have been unscaled and clamped in place.
    dropped: the host knows that the step is held back, and nothing needs to be run.
    """

    finite: Tensor
    factor: Tensor | None = None
    own: Mapping[int, OwnClip] = field(default_factory=dict)
    measured: Mapping[str, Measured] = field(default_factory=dict)
    prepared: bool = False
    dropped: bool = False


class Clipping:
    """What is asked of the gradients of a step, and what they are measured and clipped by.

    Args:
        rule: of the optimizer; it may have clipping by norm of its own.
        groups, records, states: of the optimizer, as they are at any time.
        clip_norm, norm_type: the norm over all gradients is at most `clip_norm`; 2.0 or inf.
        clip_value: gradients are clamped to ± this.
        scale: the loss scale that they come with.
        placement: where parameters live; norms of pieces are summed over their ranks.

    Raises:
        ConfigError: a value out of range.
    """

    def __init__(
        self,
        rule: UpdateRule,
        groups: Sequence[Mapping[str, Any]],
        records: Mapping[Tensor, ParamRecord],
        states: Mapping[Tensor, Mapping[str, Any]],
        *,
        clip_norm: float | None,
        norm_type: float,
        clip_value: float | None,
        scale: LossScale,
        placement: Local,
    ) -> None:
        for option, value in (("clip_norm", clip_norm), ("clip_value", clip_value)):
            if value is not None and not value > 0:
                raise ConfigError(f"{option}={value!r} is not a number > 0; leave it out for no clipping")
        if norm_type not in (2, math.inf):
            raise ConfigError(f"norm_type={norm_type!r} is neither 2 nor inf")
        self.rule, self.scale, self._placement = rule, scale, placement
        self._groups, self._records, self._states = groups, records, states
        self.norm, self.norm_type, self.value = clip_norm, float(norm_type), clip_value
        self.group_states: dict[int, dict[str, Tensor]] = {}  # number of a group → what its own clipping keeps
        self._limits: dict[torch.device, Tensor] = {}

    def limit(self, device: torch.device) -> Tensor | None:
        """`clip_value` as a float32 scalar on `device`."""
        if self.value is None:
            return None
        if device not in self._limits:
            self._limits[device] = torch.full((), self.value, dtype=torch.float32, device=device)
        return self._limits[device]

    def prepares(self, grad: Tensor) -> bool:
        """Whether `measure` changes the gradient."""
        return grad.dtype == torch.float32 and (self.scale.value is not None or self.value is not None)

    def measure(self, grad: Tensor) -> Measured:
        """The norms of a gradient, or of the piece that is here. One in float32 is unscaled and clamped in place, as
        PyTorch would; a narrower one keeps its bits and is read tile by tile.
        """
        if not grad.numel():  # nothing of the parameter is here
            zero = torch.zeros((), dtype=torch.float32, device=grad.device)
            return Measured(zero, zero, zero)
        factor, limit = self.scale.inverse(grad.device), self.limit(grad.device)
        parts = [self._measure(piece, factor, limit) for piece in _pieces(grad)]
        if len(parts) == 1:
            return parts[0]
        raw, clamped, counted = (torch.stack(norms) for norms in zip(*parts, strict=True))
        return Measured(torch.linalg.vector_norm(raw), torch.linalg.vector_norm(clamped), self._total(counted))

    def _measure(self, piece: Tensor, factor: Tensor | None, limit: Tensor | None) -> Measured:
        if factor is not None:
            piece.mul_(factor)
        raw = clamped = torch.linalg.vector_norm(piece)
        counted = self._counted(piece, raw)
        if limit is not None:
            piece.clamp_(-limit, limit)
            clamped = torch.linalg.vector_norm(piece)
            if not self.rule.norm_before_clip_value:
                counted = self._counted(piece, clamped)
        return Measured(raw, clamped, counted)

    def _counted(self, values: Tensor, two_norm: Tensor) -> Tensor:
        return two_norm if self.norm_type == 2 else self._total(values)

    def _total(self, values: Tensor) -> Tensor:
        return torch.linalg.vector_norm(values, self.norm_type)

    def decide(self, measured: Mapping[str, Measured], *, prepared: bool) -> Decision:
        """Settles a step, with no value read back but for an optimizer from elsewhere, which cannot be held back.

        Args:
            measured: name → norms, of each parameter that got a gradient (of the piece that is here).
            prepared: the gradients are those that were measured, not others of the same values.
        """
        # norms are summed in parameter order, which decides their last bits
        in_order = {record.name: measured[record.name] for record in self._records.values() if record.name in measured}
        if self._placement.ranks is not None:
            in_order = self._over_ranks(in_order, self._placement.ranks)
        device = next(iter(in_order.values())).raw.device
        finite = torch.stack([norms.raw.to(device) for norms in in_order.values()]).isfinite().all()
        factor = None
        if self.norm is not None:
            total = self._total(torch.stack([norms.counted.to(device) for norms in in_order.values()]))
            factor = (self.norm / (total + 1e-6)).clamp(max=1.0)
        return Decision(
            finite,
            factor,
            self._own_clips(in_order, finite, factor),
            in_order,
            prepared,
            dropped=not self.rule.can_be_held_back and not bool(finite),
        )

    def _over_ranks(self, measured: Mapping[str, Measured], ranks: Ranks) -> dict[str, Measured]:
        """The norms of whole gradients, from those of their pieces."""
        device = next(iter(measured.values())).raw.device
        norms = torch.stack([torch.stack([norm.to(device) for norm in own]) for own in measured.values()]).double()
        (squares,) = ranks.totals([norms.square()])  # in float32 they would overflow where the norms do not
        total = squares.sqrt()
        if self.norm_type != 2:
            (total[:, 2],) = ranks.largest([norms[:, 2]])
        rows = total.float().unbind()
        return {name: Measured(*row.unbind()) for name, row in zip(measured, rows, strict=True)}

    def _own_clips(self, measured: Mapping[str, Measured], finite: Tensor, factor: Tensor | None) -> dict[int, OwnClip]:
        """What the rule's own clipping says of each group, given the gradients as `clip_norm` leaves them."""
        wanting = [n for n, group in enumerate(self._groups) if self.rule.needs_norm(group) is not None]
        if not wanting:
            return {}
        zero = torch.zeros_like(finite, dtype=torch.float32)
        norms = {name: n.clamped.to(zero.device) * (1.0 if factor is None else factor) for name, n in measured.items()}
        total = torch.linalg.vector_norm(torch.stack(list(norms.values())))
        found = {}
        for n in wanting:
            group = self._groups[n]
            members = [
                record for record in self._records.values() if record.group is group and record.handle is not None
            ]
            if not members:
                continue
            own = found[id(group)] = self.rule.clip_by_norm(
                GroupNorms(
                    hyper=group,
                    norms=torch.stack([norms.get(record.name, zero) for record in members]),
                    total=total,
                    states=[self._states.get(record.param, {}) for record in members],
                    kept=self.group_states.get(n, {}),
                )
            )
            # a step that is held back leaves no trace here either
            self.group_states[n] = {name: torch.where(finite, new, own.before[name]) for name, new in own.kept.items()}
        return found


def _pieces(grad: Tensor) -> Iterable[Tensor]:
    """The gradient itself if it is float32, else float32 copies of its tiles."""
    return [grad] if grad.dtype == torch.float32 else (tile.float() for tile in tiles(grad))
