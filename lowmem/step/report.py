"""How a step ended: its report, what the loss scale learns of it, what the host must know before the next one."""

import functools
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from lowmem.errors import StepError
from lowmem.placements.record import ParamRecord
from lowmem.rules import UpdateRule
from lowmem.step.clipping import Clipping
from lowmem.step.policies import Policy
from lowmem.step.updates import Updates


@dataclass(frozen=True)
class LastStep:
    """What the last step was. The numbers stay on the device until they are asked for.

    norms: the 2-norm of each parameter's unscaled, unclipped gradient, float32 [parameters], in parameter order.
    names: the parameters that got a gradient, in the same order.
    clip_coef: what `clip_norm` multiplied every gradient with, a float32 scalar; None if nothing is clipped so.
    replay: what the second pass of `two_pass` was: "graph" or "forward".
    """

    step: int
    policy: str
    norms: Tensor
    names: tuple[str, ...]
    clip_coef: Tensor | None = None
    replay: str | None = None
    _scale: Tensor | None = None
    _describe: Callable[[], dict[str, float | str]] = dict

    @property
    def statistics(self) -> dict[str, float | str]:
        """What the rule itself has to say of the step, for the log; empty for most rules."""
        return self._describe()

    @property
    def grad_norm(self) -> Tensor:
        """The 2-norm over all gradients, a float32 scalar."""
        return torch.linalg.vector_norm(self.norms)

    @property
    def loss_scale(self) -> float | None:
        """What its loss was multiplied with; None if there is no scaling."""
        return None if self._scale is None else float(self._scale)

    @property
    def nonfinite(self) -> list[str]:
        """Parameters whose gradient held Inf or NaN."""
        return [name for name, norm in zip(self.names, self.norms.tolist(), strict=True) if not math.isfinite(norm)]

    @property
    def skipped(self) -> bool:
        """Whether the step was left out as a whole, as an overflow does under `two_pass` and `deferred`."""
        return self.policy != "immediate" and bool(self.nonfinite)

    @property
    def skipped_params(self) -> int:
        """How many parameters were left untouched: all, or, under `immediate`, those that `nonfinite` names."""
        return len(self.names) if self.skipped else len(self.nonfinite)


class Readback:
    """Begins to copy a small tensor to the host; `values` waits for that copy alone, not for what was queued since."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.Event | None = None
        if tensor.device.type == "cpu":
            self._copy = tensor.detach().clone()
            return
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=not is_fake(tensor))
        self._copy.copy_(tensor.detach(), non_blocking=True)
        if not is_fake(tensor):
            self._event = torch.Event(device=tensor.device)
            self._event.record()

    def values(self) -> list[float] | None:
        """The numbers; None where there are none, in a dry run with fake tensors."""
        if is_fake(self._copy):
            return None
        if self._event is not None:
            self._event.synchronize()
        return self._copy.tolist()  # type: ignore[no-any-return]


logger = logging.getLogger(__name__)


class Outcome:
    """Closes steps without waiting for the device, and has the host learn of them when the next one begins.

    Attributes:
        last: the report of the last step, None before the first.
        nonfinite, nonfinite_steps: gradients with Inf or NaN so far, and steps that met one: int64 scalars on the
            device.
    """

    def __init__(self, updates: Updates, clipping: Clipping, device: torch.device) -> None:
        self._updates, self._clipping, self._device = updates, clipping, device
        self.last: LastStep | None = None
        self.nonfinite = torch.zeros((), dtype=torch.int64, device=device)
        self.nonfinite_steps = torch.zeros_like(self.nonfinite)
        self._flags: Readback | None = None
        self._hopeless: str | None = None

    def close(self, records: Collection[ParamRecord], policy: Policy, replay: str | None, loss: Tensor | None) -> None:
        """Reports the step that has just ended.

        Args:
            records: of every parameter, in the order of the report.
            policy, replay: how it was taken.
            loss: not scaled; None after a plain backward.
        """
        decision, scale = self._updates.decision, self._clipping.scale
        fired = [record for record in records if self._updates.cycle.has_fired(record.name)]
        if decision is None:
            norms = torch.stack([cast(Tensor, record.square_sum).to(self._device) for record in fired]).sqrt()
        else:
            norms = torch.stack([decision.measured[record.name].raw.to(self._device) for record in fired])
        self.last = LastStep(
            self._updates.cycle.step,
            policy.name,
            norms,
            tuple(record.name for record in fired),
            clip_coef=None if decision is None else decision.factor,
            replay=replay,
            _scale=scale.value,
            _describe=self._described(records),
        )
        nonfinite = norms.isfinite().logical_not().sum()
        finite = nonfinite == 0
        self.nonfinite = self.nonfinite + nonfinite
        self.nonfinite_steps = self.nonfinite_steps + ~finite
        yes = torch.ones_like(finite)
        flags = (finite, policy.replayed(), None if loss is None else loss.isfinite().all(), scale.at_least())
        self._flags = Readback(torch.stack([yes if flag is None else flag.to(self._device) for flag in flags]).float())
        scale.update(finite)

    def _described(self, records: Iterable[ParamRecord]) -> Callable[[], dict[str, float | str]]:
        """The rule's statistics of this step, worked out when they are asked for."""
        rule: UpdateRule = self._updates.rule
        measured = [record for record in records if record.measured]
        if not measured:
            return dict
        names = [record.name for record in measured]
        values = {
            name: torch.stack([record.measured[name].to(self._device) for record in measured])
            for name in measured[0].measured
        }
        for record in measured:
            record.measured = {}
        kept = [dict(self._clipping.group_states[n]) for n in sorted(self._clipping.group_states)]
        return functools.partial(rule.statistics, names, values, kept)

    def state_dict(self) -> dict[str, int]:
        """The counts, for a run that is resumed to go on with."""
        return {"nonfinite": int(self.nonfinite), "nonfinite_steps": int(self.nonfinite_steps)}

    def load_state_dict(self, saved: Mapping[str, int] | None) -> None:
        """Goes on counting from what `state_dict` gave; what happened last does not matter any more."""
        self._flags = self._hopeless = None
        saved = saved or {"nonfinite": 0, "nonfinite_steps": 0}
        self.nonfinite = torch.full_like(self.nonfinite, saved["nonfinite"])
        self.nonfinite_steps = torch.full_like(self.nonfinite_steps, saved["nonfinite_steps"])

    def settle(self) -> None:
        """The host learns how the last step ended: one that was held back as a whole does not count."""
        values = None if self._flags is None else self._flags.values()
        self._flags = None
        if values is None:
            return
        finite, replayed, loss_finite, least = map(bool, values)
        if not replayed:
            self._updates.cycle.tear(
                "its second pass had other gradients than the one that was measured, so it was clipped by a norm that "
                "was not its own. Something in the model or the loss is not the same twice; use policy='deferred'"
            )
        if not finite:
            self._tell_of_overflow(loss_finite, least)

    def refuse_hopeless(self) -> None:
        """Raises `StepError` if gradients overflow though the loss scale is as small as it may become."""
        if self._hopeless is not None:
            reason, self._hopeless = self._hopeless, None
            raise StepError(reason)

    def _tell_of_overflow(self, loss_finite: bool, least: bool) -> None:
        last, dynamic = cast(LastStep, self.last), self._clipping.scale.dynamic
        what = (
            "was held back as a whole" if last.skipped else f"met {last.skipped_params} gradient(s) that are not finite"
        )
        cause = "" if loss_finite else "; its loss is not finite either"
        told = f"step {last.step} {what}: that of {_some(last.nonfinite)} is not finite{cause}"
        if last.skipped:
            self._updates.cycle.take_back()
        if dynamic and least:
            self._hopeless = (
                f"{told}, and the loss scale cannot back off below its least value. The gradients overflow by "
                "themselves: look at the data of this step, or take a lower learning rate"
            )
        usual = dynamic or int(self.nonfinite_steps) > 1  # one line is enough; the count goes on
        logger.log(logging.INFO if usual else logging.WARNING, "%s", told)


def _some(names: list[str]) -> str:
    """A few names for a message."""
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
