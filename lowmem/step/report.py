"""The end of a step: its report, the update of the loss scale, and the checks before the next step."""

import functools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lowmem.errors import StepError
from lowmem.placements.readback import Readback
from lowmem.placements.record import ParamRecord
from lowmem.rules import UpdateRule
from lowmem.step.clipping import Decision, sums_squares
from lowmem.step.policies import Policy
from lowmem.step.updates import Updates
from lowmem.tiles.norms import norm_over, summable

logger = logging.getLogger(__name__)

Statistics = dict[str, float | str]


@dataclass(frozen=True)
class LastStep:
    """The report of the last step. The numbers stay on the device until they are read.

    Attributes:
        names: the parameters that got a gradient, in parameter order.
        clip_coef: what `clip_norm` multiplied every gradient by, a float32 scalar; None if nothing is clipped by norm.
        replay: how "two_pass" got its second pass: "graph" or "forward".
        changed_share: share of the weights that the step has changed, among those that had a gradient, a float32
            scalar: of a sample of this rank's weights. NaN if none of them had a gradient, or none was updated.
    """

    step: int
    policy: str
    names: tuple[str, ...]
    clip_coef: Tensor | None = None
    replay: str | None = None
    changed_share: Tensor = field(default_factory=lambda: torch.full((), torch.nan))
    _norms: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    _takes_nonfinite: frozenset[str] = frozenset()
    _summed: tuple[str, ...] = ()  # parameters whose rule sums squares
    _fits: Tensor = field(default_factory=lambda: torch.ones(0, dtype=torch.bool))  # whether float32 can, of each
    _scale: Tensor | None = None
    _describe: Callable[[], Statistics] = dict

    @property
    def statistics(self) -> Statistics:
        """What the rules report about the step, for the log; empty for most rules."""
        return self._describe()

    @property
    def norms(self) -> Tensor:
        """The 2-norm of each parameter's unscaled, unclipped gradient, float32 [parameters], in the order of `names`.
        A norm beyond 3.4e38 is shown as Inf.
        """
        return self._norms.float()

    @property
    def grad_norm(self) -> Tensor:
        """The 2-norm over all gradients, a float32 scalar."""
        return norm_over(self._norms).float()

    @property
    def loss_scale(self) -> float | None:
        """What the loss was multiplied by; None if there is no scaling."""
        return None if self._scale is None else float(self._scale)

    @property
    def nonfinite(self) -> list[str]:
        """Parameters whose gradient had Inf or NaN."""
        return [name for name, norm in zip(self.names, self._norms.tolist(), strict=True) if not math.isfinite(norm)]

    @property
    def overflowed(self) -> list[str]:
        """Parameters that were left as they are because the squares of their finite gradient overflow float32, in which
        their rule sums them.
        """
        nonfinite = set(self.nonfinite)
        fits = zip(self._summed, self._fits.tolist(), strict=True)
        return [name for name, fit in fits if not fit and name not in nonfinite]

    @property
    def skipped(self) -> bool:
        """Whether the whole step was skipped, as "two_pass" and "deferred" do for a gradient that is not finite."""
        guarded = self.policy != "immediate" and not self._takes_nonfinite.issuperset(self.names)
        return guarded and bool(self.nonfinite)

    @property
    def skipped_params(self) -> int:
        """How many parameters were not updated: all, or those of `overflowed`, and under "immediate" of `nonfinite`
        unless their rule says itself what an element that is not finite does.
        """
        if self.skipped:
            return len(self.names)
        return len(self.overflowed) + len(set(self.nonfinite) - self._takes_nonfinite)


class Report:
    """Closes steps without waiting for the device; the host learns how a step ended when the next one begins.

    Args:
        updates: of the optimizer.
        device: where the counts are.
        limit: how many steps with a gradient that is not finite may follow one another; None for any number.

    Attributes:
        last: the report of the last step, None before the first.
        nonfinite_gradients, nonfinite_steps: gradients with Inf or NaN so far, and steps that met one: int64 scalars on
            the device.
    """

    def __init__(self, updates: Updates, device: torch.device, limit: int | None) -> None:
        self._cycle, self._clipping, self._changes = updates.cycle, updates.clipping, updates.changes
        self._device, self._limit = device, limit
        self.last: LastStep | None = None
        self.nonfinite_gradients = torch.zeros((), dtype=torch.int64, device=device)
        self.nonfinite_steps = torch.zeros_like(self.nonfinite_gradients)
        self._flags: Readback | None = None
        self._hopeless: str | None = None
        self._streak = 0  # non-finite steps up to the last one
        self._first: list[str] = []  # the parameters whose gradient was not finite in the first of them
        self._searching = self._clipping.scaler.dynamic  # a dynamic loss scale has not had a finite step yet

    def close(self, policy: Policy, decision: Decision | None, loss: Tensor | None) -> None:
        """Reports the step that has just ended. `loss` is not scaled, and None after a plain backward."""
        scaler, groups = self._clipping.scaler, self._clipping.groups
        fired = [record for record in self._clipping.records.values() if self._cycle.has_fired(record.name)]
        takes_nonfinite: list[ParamRecord] = []
        if decision is None or not decision.guarded:
            takes_nonfinite = _where_group(fired, lambda record: record.rule.takes_nonfinite(record.group))
        if decision is None:
            squares, summing = self._squares(fired), _where_group(fired, sums_squares)
            norms, summed = squares.sqrt(), tuple(record.name for record in summing)
            fits = self._summable(summing, squares if len(summing) == len(fired) else self._squares(summing))
        else:
            norms = self._stack(decision.norms[record.name].raw for record in fired)
            summed, fits = tuple(decision.summable), self._stack(decision.summable.values()).bool()
        changed_share, changed_by_nearest = self._changes.take(groups)
        self.last = LastStep(
            self._cycle.step,
            policy.name,
            tuple(record.name for record in fired),
            clip_coef=None if decision is None else decision.clip_coef,
            replay=policy.replay,
            changed_share=changed_share,
            _norms=norms,
            _takes_nonfinite=frozenset(record.name for record in takes_nonfinite),
            _summed=summed,
            _fits=fits,
            _scale=scaler.value,
            _describe=self._statistics(),
        )
        nonfinite = norms.isfinite().logical_not().sum()
        finite = nonfinite == 0
        self.nonfinite_gradients = self.nonfinite_gradients + nonfinite
        self.nonfinite_steps = self.nonfinite_steps + ~finite
        yes = torch.ones_like(finite)
        loss_finite = None if loss is None else loss.isfinite().all()
        flags = (finite, policy.replayed(), loss_finite, scaler.at_minimum(), fits.all())
        values = [*(yes if flag is None else flag.to(self._device) for flag in flags), changed_by_nearest]
        self._flags = Readback(torch.stack([value.float() for value in values]))
        scaler.update(finite)

    def _squares(self, records: Sequence[ParamRecord]) -> Tensor:
        """The sum of squares of each gradient that has been applied, float64 [records]."""
        return self._stack(record.square_sum for record in records)

    def _summable(self, records: Sequence[ParamRecord], squares: Tensor) -> Tensor:
        """Whether float32 can sum the squares of each gradient as its rule has read it, boolean [records]."""
        limit = self._clipping.limit(self._device)
        if limit is None:
            return summable(squares)
        counts = torch.tensor([record.span.numel for record in records], dtype=torch.float64)
        return summable(squares, limit, counts.to(self._device, non_blocking=True))

    def _stack(self, scalars: Iterable[Tensor | None]) -> Tensor:
        """Scalars of parameters, from their devices, as one tensor; where there are none, an empty one."""
        there = [scalar.to(self._device) for scalar in scalars if scalar is not None]
        return torch.stack(there) if there else torch.zeros(0, dtype=torch.float64, device=self._device)

    def _statistics(self) -> Callable[[], Statistics]:
        """The rules' statistics of this step, computed when they are read."""
        updated: dict[UpdateRule, list[ParamRecord]] = {}
        for record in self._clipping.records.values():
            if record.size is not None:
                updated.setdefault(record.rule, []).append(record)
        parts = []
        for rule, members in updated.items():
            names, sizes = [record.name for record in members], self._stack(record.size for record in members)
            numbered = [(n, group) for n, group in enumerate(self._clipping.groups) if group["rule"] == rule.name]
            groups = [(group, dict(self._clipping.memory.get(n, {}))) for n, group in numbered]
            parts.append(functools.partial(rule.statistics, names, self._squares(members), sizes, groups))
            for record in members:
                record.size = None
        return lambda: {key: value for part in parts for key, value in part().items()}

    def state_dict(self) -> dict[str, int]:
        """The counts, with which a resumed run continues."""
        counts = {"gradients": int(self.nonfinite_gradients), "steps": int(self.nonfinite_steps)}
        return {**counts, "streak": self.streak}

    def load_state_dict(self, saved: Mapping[str, int] | None) -> None:
        """Continues to count from what `state_dict` returned, and forgets how the last step ended."""
        self._flags = self._hopeless = None
        saved = {"gradients": 0, "steps": 0, **(saved or {})}
        self.nonfinite_gradients = torch.full_like(self.nonfinite_gradients, saved["gradients"])
        self.nonfinite_steps = torch.full_like(self.nonfinite_steps, saved["steps"])
        self._streak, self._first = saved.get("streak", 0), []

    @property
    def streak(self) -> int:
        """How many steps up to the last one had a gradient that is not finite, one after the other."""
        self.settle()
        return self._streak

    def settle(self) -> None:
        """The host learns how the last step ended: one that was skipped does not count."""
        values = None if self._flags is None else self._flags.values()
        self._flags = None
        if values is None:
            return
        finite, replayed, loss_finite, at_minimum, all_fit = map(bool, values[:-1])
        if not replayed:
            self._cycle.tear(
                "its second pass had other gradients than the one that was measured, so it was clipped by a wrong "
                "norm. Something in the model or the loss is not the same twice; use policy='deferred'"
            )
        if not finite:
            self._count_nonfinite(loss_finite, at_minimum)
            return
        self._streak, self._searching = 0, False
        self._changes.watch(values[-1])
        if not all_fit:
            self._log_overflow()

    def refuse_hopeless(self) -> None:
        """The next step begins.

        Raises:
            StepError: the last `limit` steps had gradients that are not finite, or those of the last step overflowed
                although the loss scale cannot back off any further.
        """
        self.settle()
        if self._hopeless is not None:
            reason, self._hopeless = self._hopeless, None
            self._streak = 0  # whoever goes on gets as many steps again
            raise StepError(reason)

    def _count_nonfinite(self, loss_finite: bool, at_minimum: bool) -> None:
        last, dynamic = self.last, self._clipping.scaler.dynamic
        assert last is not None
        skipped = f"skipped {last.skipped_params} parameter(s)" if last.skipped_params else "left elements as they were"
        what = "was skipped" if last.skipped else skipped
        cause = "" if loss_finite else ", and its loss is not finite either"
        message = f"step {last.step} {what}: the gradient of {_some(last.nonfinite)} is not finite{cause}"
        if last.skipped:
            self._cycle.step -= 1  # it does not count
        if not self._searching:
            self._first = self._first if self._streak else last.nonfinite
            self._streak += 1
        if dynamic and at_minimum:
            self._hopeless = (
                f"{message}, and the loss scale cannot back off below its minimum. The gradients overflow without it: "
                "inspect the data of this step, or lower the learning rate"
            )
        elif self._limit is not None and self._streak >= self._limit:
            self._hopeless = self._lost(loss_finite)
        usual = dynamic or int(self.nonfinite_steps) > 1  # one warning is enough; the count goes on
        logger.log(logging.INFO if usual else logging.WARNING, "%s", message)

    def _lost(self, loss_finite: bool) -> str:
        loss = "" if loss_finite else "; the loss is not finite either"
        begun = f", first those of {_some(self._first)}" if self._first else ""
        return (
            f"the last {self._streak} steps had gradients that are not finite{begun}{loss}. Continue from a checkpoint "
            "from before them, and inspect the data of those steps, lower the learning rate, or clip gradients "
            "(clip_norm; in a trainer max_grad_norm). max_nonfinite_steps=None never stops"
        )

    def _log_overflow(self) -> None:
        assert self.last is not None
        names = self.last.overflowed
        logger.warning(
            "step %d skipped %d parameter(s): the rule sums squares in float32, which those of the gradient of %s "
            "overflow. Clip gradients by clip_norm or clip_value",
            self.last.step,
            len(names),
            _some(names),
        )


def _where_group(records: Sequence[ParamRecord], holds: Callable[[ParamRecord], bool]) -> list[ParamRecord]:
    """The records for whose group something holds: one record of each group is asked."""
    groups = {id(record.group): record for record in records}
    holding = {group for group, record in groups.items() if holds(record)}
    return [record for record in records if id(record.group) in holding] if holding else []


def _some(names: list[str]) -> str:
    """A few names for a message."""
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
