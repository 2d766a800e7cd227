"""The report of a step: norms, the number of skipped parameters, and divergence, without waiting for the device."""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lowmem.errors import StepError
from lowmem.step.clipping import Decision, norm_over
from lowmem.step.parameters import Parameters
from lowmem.step.policies import Policy
from lowmem.step.updates import Updates
from lowmem.tiles.transfers import Readback

logger = logging.getLogger(__name__)

Statistics = dict[str, float | str]


class Outcome(NamedTuple):
    """The numbers that are copied to the host when a step ends.

    each: name, whether the gradient was finite, and whether the parameter was updated.  finite: no gradient had Inf or
    NaN, or the updates ran anyway.  replayed: a second pass had the same gradients.  can_back_off: a dynamic loss scale
    is above its minimum.  All flags are 1 where they do not apply.
    """

    each: list[tuple[str, float, float]]
    finite: float
    replayed: float
    loss_finite: float
    can_back_off: float


@dataclass(frozen=True)
class LastStep:
    """The report of the last step. Its numbers stay on the device until they are read. Whether the step and each
    parameter were updated is copied to the host when the step ends.

    Attributes:
        names: the parameters that got a gradient, in parameter order.
        clip_coef: the factor by which `clip_norm` multiplied each gradient, a float32 scalar; None without it.
        changed_share: the share of weights that the step changed, among sampled elements of this rank's weights with a
            nonzero gradient; NaN if there were none. A float32 scalar. It is measured in the first two steps and in
            every 20th step. Other steps report the last value.
    """

    step: int
    policy: str
    names: tuple[str, ...]
    clip_coef: Tensor | None
    changed_share: Tensor
    _decision: Decision
    _scale: Tensor | None
    _statistics: Sequence[Callable[[], Statistics]]
    _readback: Readback  # the numbers of `Outcome`

    @property
    def statistics(self) -> Statistics:
        """Metrics that rules report about the step; empty for most rules."""
        return {key: value for of_rule in self._statistics for key, value in of_rule().items()}

    @property
    def norms(self) -> Tensor:
        """The 2-norm of each parameter's gradient before clipping, without the loss scale, float32 [parameters], in the
        order of `names`. A norm above 1.8e19 is Inf.
        """
        return self._decision.norms.float()

    @property
    def grad_norm(self) -> Tensor:
        """The 2-norm over all gradients, a float32 scalar."""
        return norm_over(self._decision.norms)

    @property
    def loss_scale(self) -> float | None:
        """The loss scale of the step, or None."""
        return None if self._scale is None else float(self._scale)

    @property
    def nonfinite(self) -> list[str]:
        """The parameters whose gradient had Inf or NaN, or a norm above 1.8e19, whose square overflows float32."""
        return [name for name, finite, _ in self._outcome.each if not finite]

    @property
    def skipped(self) -> bool:
        """True if the whole step was skipped because a gradient was not finite, under "two_pass" or "deferred"."""
        return not self._outcome.finite

    @property
    def skipped_params(self) -> int:
        """The number of parameters with a gradient that were not updated: all of them in a skipped step. Otherwise,
        under "immediate", it counts the parameters in `nonfinite`, except for rules that handle Inf and NaN
        themselves, and for third-party optimizers, whose updates cannot be undone.
        """
        return sum(not updated for *_, updated in self._outcome.each)

    @functools.cached_property
    def _outcome(self) -> Outcome:
        values, count = self._readback.values(), len(self.names)
        assert values is not None  # a dry run does not read them
        each = zip(self.names, values[-2 * count : -count], values[-count:], strict=True)
        return Outcome([*each], *values[: -2 * count])


class Report:
    """Closes steps without waiting for the device. The host learns how a step ended when the next one begins.

    Args:
        parameters, updates: the parameters and updates of the optimizer.

    Attributes:
        last: the report of the last step, None before the first.
        nonfinite_gradients, nonfinite_steps: the number of gradients with Inf or NaN, and of steps that had one, up to
            the last settled step.
        streak: the number of consecutive steps, up to the last settled one, with a non-finite gradient. Steps in which
            a dynamic loss scale still searches for its first value do not count.
    """

    def __init__(self, parameters: Parameters, updates: Updates) -> None:
        self._parameters = parameters
        self._cycle, self._clipping = updates.cycle, updates.clipping
        self._changes, self._results = updates.changes, updates.results
        self._limit = parameters.config.max_nonfinite_steps  # maximum consecutive steps
        self.last: LastStep | None = None
        self._unsettled: LastStep | None = None  # the last step, until `settle` has read its outcome
        self._drifted = False
        self.load_state_dict(None)

    def close(self, policy: Policy, decision: Decision | None, loss: Tensor | None) -> None:
        """Creates the report of the step that has just ended, and updates the loss scale.

        Args:
            policy: the policy of the step.
            decision: the decision of the step; None if gradients were applied without one.
            loss: the loss without the loss scale; None after a plain backward.
        """
        clipping, scaler = self._clipping, self._clipping.scaler
        if decision is None:
            records = clipping.records.values()
            fired = [record for record in records if self._cycle.has_fired(record.name)]
            decision = clipping.review(fired, self._results.gather("square_sums", fired, clipping.device))
        finite_each = decision.norms.isfinite()
        finite = finite_each.all()
        yes = torch.ones_like(finite)
        loss_finite = None if loss is None else loss.isfinite().all()
        flags = (decision.finite, policy.replayed(), loss_finite, scaler.can_back_off())
        values = [(yes if flag is None else flag.to(clipping.device)).view(1) for flag in flags]
        self.last = self._unsettled = LastStep(
            step=self._cycle.step,
            policy=policy.name,
            names=decision.names,
            clip_coef=decision.clip_coef,
            changed_share=self._changes.take(),
            _decision=decision,
            _scale=None if scaler.value is None else scaler.value.clone(),
            _statistics=self._statistics(),
            _readback=Readback(torch.cat((*values, finite_each, decision.updated)).float()),
        )
        scaler.update(finite)

    def _statistics(self) -> Sequence[Callable[[], Statistics]]:
        """Returns the statistics of each rule for this step, computed when they are read."""
        device, parameters = self._clipping.device, self._parameters
        sized, parts = self._results.sized, []
        for rule in dict.fromkeys(group.rule for group in parameters.groups):
            members = [record for record in parameters.records.values() if record.rule is rule and record in sized]
            if not members:
                continue
            squares = self._results.gather("square_sums", members, device)
            sizes = self._results.gather("sizes", members, device).float()
            groups = [
                (group.live, {name: tensor.clone() for name, tensor in group.memory.items()})
                for group in parameters.groups
                if group.rule is rule
            ]
            parts.append(functools.partial(rule.statistics, [each.name for each in members], squares, sizes, groups))
        return parts

    def state_dict(self) -> dict[str, int]:
        """Returns the counters, with which a resumed run continues."""
        return {"gradients": self.nonfinite_gradients, "steps": self.nonfinite_steps, "streak": self.streak}

    def load_state_dict(self, saved: Mapping[str, int] | None) -> None:
        """Restores the counters from the result of `state_dict`, and discards the outcome of the last step."""
        self._unsettled = None
        self._diverged: str | None = None
        self._first: list[str] = []  # parameters with a non-finite gradient in the first step of the streak
        self._searching = saved is None and self._clipping.scaler.dynamic is not None
        counts = saved or {}
        self.nonfinite_gradients, self.nonfinite_steps = counts.get("gradients", 0), counts.get("steps", 0)
        self.streak = counts.get("streak", 0)

    def settle(self) -> None:
        """Reads the outcome of the last step, unless the host knows it already, and passes it to the life cycle."""
        last, self._unsettled = self._unsettled, None
        if last is None or last._readback.values() is None:  # a dry run has no numbers
            return
        self.nonfinite_gradients += len(last.nonfinite)
        self.nonfinite_steps += bool(last.nonfinite)
        if last.nonfinite or last.skipped:
            self._count_nonfinite(last)
        else:
            self.streak, self._searching = 0, False
        self._cycle.settle(last.skipped, bool(last._outcome.replayed))

    def _count_nonfinite(self, last: LastStep) -> None:
        names, count, flags = last.nonfinite, last.skipped_params, last._outcome
        outcome = f"skipped {count} parameter(s)" if count and not last.skipped else "was skipped"
        outcome = outcome if count else "was not skipped"
        cause = "" if flags.loss_finite else ", and the loss is not finite either"
        what = f"the gradient of {_some(names)}" if names else "the norm over all gradients"
        message = f"step {last.step} {outcome}: {what} is not finite{cause}"
        usual = self._clipping.scaler.dynamic or self.nonfinite_steps > 1  # one warning is enough
        logger.log(logging.INFO if usual else logging.WARNING, "%s", message)
        if not self._searching:
            self._first = self._first if self.streak else names
            self.streak += 1
        if self._limit is None:
            return
        if not flags.can_back_off:
            self._diverged = (
                f"{message}, and the loss scale cannot back off below its minimum. The gradients overflow without it: "
                "inspect the data of this step, or lower the learning rate"
            )
        elif self.streak >= self._limit:
            first = f", first in {_some(self._first)}" if self._first else ""
            self._diverged = (
                f"the last {self.streak} steps had non-finite gradients{first}{cause}. Continue from an earlier "
                "checkpoint, and inspect the data of those steps, lower the learning rate, or clip gradients "
                "(clip_norm; in a trainer max_grad_norm). max_nonfinite_steps=None never stops"
            )

    def compare_replicas(self) -> None:
        """Warns once if a sample of the weights shows that ranks differ but should be equal. Every rank calls it."""
        self.settle()  # ranks must agree on the number of the step
        names = self._parameters.placement.drifted(self._parameters.records.values(), self._cycle.step)
        if names and not self._drifted:
            self._drifted = True
            logger.warning(
                "after step %d, weights of %s differ between ranks. They should be equal; checkpoints contain rank 0's "
                "weights. Possible causes: different processors or package versions, or code that changes weights on "
                "some ranks only. Resuming from a checkpoint makes them equal again", self._cycle.step, _some(names),
            )  # fmt: skip

    def raise_if_diverged(self) -> None:
        """Raises `StepError`, once, if `max_nonfinite_steps` consecutive steps had non-finite gradients, or if the last
        step overflowed although the loss scale is at its minimum.
        """
        if self._diverged is not None:
            reason, self._diverged = self._diverged, None
            self.streak = 0  # a loop that continues gets as many steps again
            raise StepError(reason)


def _some(names: list[str]) -> str:
    """Formats the first names for a message."""
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
