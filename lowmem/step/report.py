"""The end of a step: its report, the update of the loss scale, and what the host learns before the next step."""

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowmem.errors import StepError
from lowmem.step.clipping import Decision
from lowmem.step.parameters import Parameters
from lowmem.step.policies import Policy
from lowmem.step.updates import Updates
from lowmem.tiles.norms import norm_over
from lowmem.tiles.transfers import Readback

logger = logging.getLogger(__name__)

Statistics = dict[str, float | str]

_FLAGS = 5  # of `Report.close`


@dataclass(frozen=True)
class LastStep:
    """The report of the last step. The numbers stay on the device until they are read; what became of the step and of
    each parameter is copied to the host as it ends.

    Attributes:
        names: the parameters that got a gradient, in parameter order.
        clip_coef: what `clip_norm` multiplied every gradient by, a float32 scalar; None if nothing is clipped by norm.
        changed_share: share of the weights that the step has changed, among those that had a gradient, a float32
            scalar: of a sample of this rank's weights. NaN if none of them had a gradient, or none was updated.
    """

    step: int
    policy: str
    names: tuple[str, ...]
    clip_coef: Tensor | None
    changed_share: Tensor
    _decision: Decision
    _scale: Tensor | None
    _statistics: Sequence[Callable[[], Statistics]]
    _ended: Readback  # the flags of `Report.close`; which norms are finite; which parameters are updated

    @property
    def statistics(self) -> Statistics:
        """Figures that rules report about the step, for the log; empty for most rules."""
        return {key: value for of_rule in self._statistics for key, value in of_rule().items()}

    @property
    def norms(self) -> Tensor:
        """The 2-norm of each parameter's unscaled, unclipped gradient, float32 [parameters], in the order of `names`.
        A norm beyond 3.4e38 is shown as Inf.
        """
        return self._decision.norms.float()

    @property
    def grad_norm(self) -> Tensor:
        """The 2-norm over all gradients, a float32 scalar."""
        return norm_over(self._decision.norms).float()

    @property
    def loss_scale(self) -> float | None:
        """The factor of the loss; None if there is no scaling."""
        return None if self._scale is None else float(self._scale)

    @property
    def nonfinite(self) -> list[str]:
        """Parameters whose gradient had Inf or NaN."""
        return [name for name, finite, _ in self._each if not finite]

    @property
    def overflowed(self) -> list[str]:
        """Parameters that were left as they are because the squares of their finite gradient overflow float32, in which
        their rule sums them.
        """
        return [name for name, finite, updated in self._each if finite and not updated and not self.skipped]

    @property
    def skipped(self) -> bool:
        """Returns whether the whole step was skipped, as "two_pass" and "deferred" do for a gradient that is not
        finite.
        """
        return not self._values[0]

    @property
    def skipped_params(self) -> int:
        """The number of parameters that were not updated: all, or those of `overflowed`, and under "immediate" of
        `nonfinite` unless their rule says itself what an element that is not finite does.
        """
        return sum(not updated for *_, updated in self._each)

    @functools.cached_property
    def _values(self) -> list[float]:
        values = self._ended.values()
        assert values is not None  # a dry run does not ask
        return values

    @property
    def _each(self) -> Iterable[tuple[str, float, float]]:
        """The parameters, whether their gradient was finite, and whether they were updated."""
        of_each = self._values[_FLAGS:]
        return zip(self.names, of_each[: len(self.names)], of_each[len(self.names) :], strict=True)


class Report:
    """Closes steps without waiting for the device; the host learns how a step ended when the next one begins.

    Args:
        parameters, updates: of the optimizer.

    Attributes:
        last: the report of the last step, None before the first.
        nonfinite_gradients, nonfinite_steps: gradients with Inf or NaN so far, and steps that met one: int64 scalars on
            the device, changed in place: another stream may still read memory that would be given back.
        streak: how many steps up to the last one had a gradient that is not finite, one after the other; not while a
            dynamic loss scale has not had a finite step yet.
    """

    def __init__(self, parameters: Parameters, updates: Updates) -> None:
        self._parameters, self._device = parameters, parameters.device
        self._cycle, self._clipping, self._changes = updates.cycle, updates.clipping, updates.changes
        self._limit = parameters.config.max_nonfinite_steps  # in a row
        self.last: LastStep | None = None
        self.nonfinite_gradients = torch.zeros((), dtype=torch.int64, device=self._device)
        self.nonfinite_steps = torch.zeros_like(self.nonfinite_gradients)
        self.streak = 0
        self._first: list[str] = []  # the parameters whose gradient was not finite in the first of them
        self._ended = False  # a step of which the host does not know yet how
        self._diverged: str | None = None
        self._searching = self._clipping.scaler.dynamic

    def close(self, policy: Policy, decision: Decision | None, loss: Tensor | None) -> None:
        """Reports the step that has just ended. `loss` is not scaled, and None after a plain backward."""
        clipping, scaler = self._clipping, self._clipping.scaler
        if decision is None:
            records = clipping.records.values()
            decision = clipping.review([record for record in records if self._cycle.has_fired(record.name)])
        scale = None if scaler.value is None else scaler.value.clone()
        said = decision.names, decision.clip_coef, self._changes.take(), decision, scale, self._statistics()
        nonfinite = decision.norms.isfinite().logical_not().sum()
        finite = nonfinite == 0
        self.nonfinite_gradients += nonfinite
        self.nonfinite_steps += ~finite
        yes = torch.ones_like(finite)
        loss_finite = None if loss is None else loss.isfinite().all()
        flags = (decision.finite, policy.replayed(), loss_finite, scaler.at_minimum(), self.nonfinite_steps)
        values = torch.stack([(yes if flag is None else flag.to(self._device)).float() for flag in flags])
        ended = Readback(torch.cat((values, decision.norms.isfinite().float(), decision.updated.float())))
        self.last, self._ended = LastStep(self._cycle.step, policy.name, *said, ended), True
        scaler.update(finite)

    def _statistics(self) -> Sequence[Callable[[], Statistics]]:
        """Returns the statistics of each rule for this step, computed when they are read."""
        clipping, parameters = self._clipping, self._parameters
        sized = [record for record in parameters.records.values() if record.size is not None]
        parts = []
        for rule in dict.fromkeys(record.rule for record in sized):
            members = [record for record in sized if record.rule is rule]
            squares = clipping.gather(record.square_sum for record in members)
            sizes = clipping.gather(record.size for record in members)
            groups = [
                (group.live, {name: tensor.clone() for name, tensor in parameters.group_memory.get(n, {}).items()})
                for n, group in enumerate(parameters.groups)
                if group.rule is rule
            ]
            parts.append(functools.partial(rule.statistics, [each.name for each in members], squares, sizes, groups))
        return parts

    def state_dict(self) -> dict[str, int]:
        """The counts, with which a resumed run continues."""
        counts = {"gradients": int(self.nonfinite_gradients), "steps": int(self.nonfinite_steps)}
        return {**counts, "streak": self.streak}

    def load_state_dict(self, saved: Mapping[str, int] | None) -> None:
        """Continues to count from what `state_dict` returned, and forgets how the last step ended."""
        self._ended, self._diverged = False, None
        saved = {"gradients": 0, "steps": 0, "streak": 0, **(saved or {})}
        self.nonfinite_gradients.fill_(saved["gradients"])
        self.nonfinite_steps.fill_(saved["steps"])
        self.streak, self._first = saved["streak"], []

    def settle(self) -> tuple[bool, bool]:
        """The host learns how the last step ended. Returns whether it was skipped, and whether its second pass had the
        gradients that the first one measured; (False, True) if the host knows about it already.
        """
        ended, self._ended = self._ended, False
        if not ended or self.last is None or (values := self.last._ended.values()) is None:
            return False, True
        _, replayed, loss_finite, at_minimum = map(bool, values[:4])
        if self.last.nonfinite:
            self._count_nonfinite(self.last, loss_finite, at_minimum and self._clipping.scaler.dynamic)
            return self.last.skipped, replayed
        self.streak, self._searching = 0, False
        if names := self.last.overflowed:
            logger.warning(
                "step %d skipped %d parameter(s): the squared gradient of %s overflows float32, in which the rule sums "
                "squares. Clip gradients by clip_norm or clip_value", self.last.step, len(names), _some(names)
            )  # fmt: skip
        return False, replayed

    def _count_nonfinite(self, last: LastStep, loss_finite: bool, lowest_scale: bool) -> None:
        names, count = last.nonfinite, last.skipped_params
        left_out = f"skipped {count} parameter(s)" if count else "left some elements unchanged"
        what = "was skipped" if last.skipped else left_out
        cause = "" if loss_finite else ", and the loss is not finite either"
        message = f"step {last.step} {what}: the gradient of {_some(names)} is not finite{cause}"
        usual = self._clipping.scaler.dynamic or last._values[4] > 1  # one warning is enough
        logger.log(logging.INFO if usual else logging.WARNING, "%s", message)
        if not self._searching:
            self._first = self._first if self.streak else names
            self.streak += 1
        if lowest_scale:
            self._diverged = (
                f"{message}, and the loss scale cannot back off below its minimum. The gradients overflow without it: "
                "inspect the data of this step, or lower the learning rate"
            )
        elif self._limit is not None and self.streak >= self._limit:
            first = f", first in {_some(self._first)}" if self._first else ""
            cause = "" if loss_finite else ", and the loss is not finite either"
            self._diverged = (
                f"the last {self.streak} steps had non-finite gradients{first}{cause}. Continue from an earlier "
                "checkpoint, and inspect the data of those steps, lower the learning rate, or clip gradients "
                "(clip_norm; in a trainer max_grad_norm). max_nonfinite_steps=None never stops"
            )

    def raise_if_diverged(self) -> None:
        """Raises `StepError`, once, if the last `limit` steps had gradients that are not finite, or those of the last
        step overflowed although the loss scale cannot back off any further.
        """
        if self._diverged is not None:
            reason, self._diverged = self._diverged, None
            self.streak = 0  # whoever goes on gets as many steps again
            raise StepError(reason)


def _some(names: list[str]) -> str:
    """A few names for a message."""
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
