"""Policies: whether updates happen in the hook, in a second backward, or when all gradients of a step are complete."""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lowmem.errors import StepError, UnsupportedError
from lowmem.options import FusedConfig
from lowmem.placements.base import MicroBatch, ParamEntry
from lowmem.step.clipping import Decision
from lowmem.step.offload import GradientStore
from lowmem.step.parameters import Parameters
from lowmem.step.record import ParamRecord
from lowmem.step.updates import Updates
from lowmem.tiles.stored import add
from lowmem.tiles.transfers import to_device

# Relative error of a norm from the order in which the 2¹⁷ squares of a tile are added. There are at least 8 vector
# lanes with 2¹⁴ additions each. On average, each addition is off by 2⁻²⁴ of half the sum. The root halves the error.
_SUMMED = 2.0**-12

# If large terms cancel in a gradient, it may differ by this fraction of the tolerance for the norm over all gradients.
_CANCELLED = 2.0**-4

_NO_SUMS = (
    "policy {policy!r} cannot accumulate gradients, because it does not store them. Use policy='deferred' (or 'auto'), "
    "which stores their sums, or use one larger batch."
)

# The leaves for which a backward computes gradients (None: all), and whether to retain the graph.
Pass = tuple[Sequence[Tensor] | None, bool]


class Policy:
    """Decides when a gradient updates its parameter. This base class updates at once, in the hook of the parameter.

    The loop runs the backwards that `passes` yields. The placement's reducer takes each gradient, sums micro-batches
    according to `begin`, and returns it to `ready`. `complete` decides the step.

    Attributes:
        reason: why the policy was chosen.
        accumulates: whether gradients are summed over micro-batches, or over several parts within a backward.
        when: the time of updates, for users.
        unmet: the names of the `Needs` that the policy does not meet, with their error messages.
    """

    name: ClassVar[str] = "immediate"
    when: ClassVar[str] = "during backward, each parameter as soon as its gradient is complete"
    accumulates: ClassVar[bool] = False
    unmet: ClassVar[Mapping[str, str]] = {
        "norm": "{need}: policy 'immediate' updates a parameter before the norm over all gradients is known, so it "
        "cannot clip by this norm. Use policy='two_pass', 'deferred' or 'auto', or omit the option (in a Hugging Face "
        "trainer: max_grad_norm=0). clip_value and update clipping by the rule are supported.",
        "skip": "{need}: under policy 'immediate', an overflowing update must be skipped parameter by parameter, which "
        "this optimizer does not support. Use policy='two_pass' or 'deferred', a rule of lowmem, or bfloat16 without a "
        "loss scale.",
        "accumulation": _NO_SUMS,
    }

    def __init__(self, parameters: Parameters, updates: Updates, reason: str) -> None:
        self.config, self.records, self.reason = parameters.config, parameters.records, reason
        self.updates, self.clipping, self.cycle = updates, updates.clipping, updates.cycle
        self._measured: dict[str, Tensor] = {}  # results of `Clipping.measure`, by parameter
        self._decision: Decision | None = None  # made before the first update

    def allow_plain_backward(self) -> None:
        """Raises `StepError` if a plain `loss.backward()` is not enough."""
        if self.clipping.scaler.value is not None:
            raise StepError("with a loss scale the loss must be scaled: call opt.backward(loss)")

    def passes(self) -> Iterator[Pass]:
        """Yields the backwards of a loss. The loop runs each backward before the next one is yielded."""
        yield None, False

    def begin(self) -> MicroBatch:
        """Called before each backward. Returns how its gradients are summed over micro-batches."""
        return MicroBatch()

    def ready(self, record: ParamRecord, grad: Tensor) -> None:
        """Takes a gradient that is summed over micro-batches, averaged over ranks, and cut to this rank's shard."""
        self.updates.put(record, grad, self._decision)

    def complete(self) -> Decision | None:
        """Called when all gradients of a step are ready. Applies stored gradients. Returns the decision, if any."""
        return self._decision

    def replayed(self) -> Tensor | None:
        """Returns whether both passes had the same gradients, a boolean scalar, or None if there is only one pass."""
        return None

    def drop(self) -> None:
        """Drops the gradients of the step."""
        self._measured.clear()
        self._decision = None


class TwoPass(Policy):
    """Runs backward twice. The first pass measures each gradient and frees it. The second pass updates parameters."""

    name = "two_pass"
    when = "during a second backward; the first one measures the gradients"
    unmet: ClassVar[Mapping[str, str]] = {
        "unmeasurable": "policy 'two_pass' measures gradients in a separate backward, which {need} does not allow. Use "
        "policy='deferred' (or 'auto'), or checkpoint(..., use_reentrant=False)",
        "sharded": "policy 'two_pass' runs backward twice, so sharded parameters would be gathered and reduced twice. "
        "Use policy='deferred' (or 'auto'), which stores the gradients of this rank's shards",
        "accumulation": _NO_SUMS,
    }

    def allow_plain_backward(self) -> None:
        raise StepError(
            f"policy {self.name!r} needs more than one plain loss.backward(): no gradients have been measured, so "
            "nothing is updated. Call opt.backward(loss), or use policy='deferred', for which loss.backward() is "
            "enough."
        )

    def passes(self) -> Iterator[Pass]:
        self.drop()
        hooked = [record.param for record in self.records.values() if record.trained]
        if hooked:  # the other leaves of the graph get their gradient in the second pass
            yield hooked, True
        self.cycle.next_pass()
        self._decision = self.clipping.decide(self._measured, prepared=False)
        if self._decision.skipped:
            return
        yield None, False
        if missed := self.cycle.missed():
            self.cycle.moved = True
            raise StepError(
                f"the second pass computed no gradient for {min(missed)!r}, but the first pass did, so the two passes "
                "are not the same computation. Use policy='deferred'"
            )

    def ready(self, record: ParamRecord, grad: Tensor) -> None:
        if self._decision is None:
            self._measured[record.name] = self.clipping.measure(record, grad)
            return
        if record.name not in self._measured:
            raise StepError(
                f"parameter {record.name!r} got a gradient in the second pass but not in the first, because reentrant "
                "activation checkpointing hides it there. Use checkpoint(..., use_reentrant=False), or "
                "policy='deferred'"
            )
        super().ready(record, grad)

    def replayed(self) -> Tensor | None:
        """Compares the norms of each gradient in both passes."""
        decision = self._decision
        assert decision is not None and decision.first_pass is not None
        if decision.skipped:
            return None
        fired = [record for record in self.records.values() if record.name in self._measured]
        first = decision.first_pass
        second = self.updates.results.gather("square_sums", fired, first.device).sqrt()
        tolerance = to_device([_tolerance(record.param) for record in fired], torch.float64, first.device)
        total = torch.linalg.vector_norm(torch.where(first.isfinite(), first, 0.0))
        allowed = tolerance * (first + _CANCELLED * total)
        same = ((first - second).abs() <= allowed) | ~(first.isfinite() | second.isfinite())
        return same.all() | ~decision.finite


def _tolerance(param: Tensor) -> float:
    """Returns the relative tolerance for the norm of a gradient that is computed twice.

    On a CPU, the same kernels give the same bits. On a GPU they may add in a different order, so that some elements
    round to a neighboring value. These errors average out. The tolerance is the unit roundoff, 2⁻⁸ for bfloat16 and
    2⁻¹¹ for float16. Under autocast, a float32 gradient may have been computed in bfloat16.
    """
    roundoff = torch.finfo(param.dtype).eps / 2
    if param.device.type != "cpu" and param.dtype == torch.float32:
        roundoff = torch.finfo(torch.bfloat16).eps / 2
    return _SUMMED + roundoff


class Deferred(Policy):
    """Sums gradients over micro-batches, and stores them until all gradients of the step are known."""

    name = "deferred"
    when = "after backward, when the gradients of the whole step are known"
    accumulates = True
    unmet: ClassVar[Mapping[str, str]] = {}

    @functools.cached_property
    def _store(self) -> GradientStore:
        on_cpu = all(param.device.type == "cpu" for param in self.records)  # host and device are the same memory
        return GradientStore(math.inf if on_cpu else self.config.store_bytes)

    @property
    def _wide(self) -> bool:
        return self.config.accumulation_dtype == "float32"

    def begin(self) -> MicroBatch:
        last = self.cycle.last
        self._store.begin(last=last, width=4 if self._wide and not last else 0)
        earlier = {record.name: functools.partial(self._store.get, record) for record in self._missed() if last}
        return MicroBatch(self._add, last, earlier, wide=self._wide and bool(earlier))

    def _missed(self) -> list[ParamRecord]:
        """Returns the parameters that got a gradient in an earlier micro-batch but not in this one."""
        missed = self.cycle.missed()
        return [record for record in self.records.values() if record.name in missed]

    def _add(self, record: ParamEntry, grad: Tensor) -> Tensor | None:
        if record in self._store:
            total = self._store.get(record, wide=self._wide)
            if record.name in self._measured and self.clipping.changes(total):
                raise StepError(
                    f"parameter {record.name!r} got its gradient in two parts within one backward, and the first part "
                    "has already been unscaled or clamped. Use checkpoint(..., use_reentrant=False)"
                )
            add(total, grad)
            grad = total
        if self.cycle.last:
            return grad
        self._store.keep(record, grad)
        return None

    def ready(self, record: ParamRecord, grad: Tensor) -> None:
        self._measured[record.name] = self.clipping.measure(record, grad)
        self._store.keep(record, grad)

    def complete(self) -> Decision | None:
        for record in self._missed():
            self.ready(record, self._store.get(record))
        decision = self.clipping.decide(self._measured, prepared=True)
        if not decision.skipped:
            largest = self.updates.largest
            for record, grad in self._store.drain(list(self.records.values())):
                self.updates.put(record, grad, decision, may_wait=largest)
                del grad  # frees it before the store fetches the next one
        self.drop()
        return decision

    def drop(self) -> None:
        super().drop()
        if "_store" in vars(self):
            self._store.clear()


POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (Policy, TwoPass, Deferred)}


@dataclass(frozen=True)
class Needs:
    """Requirements that determine which policies are possible.

    norm: the option that needs the norm over all gradients before the first update.
    skip: the feature that needs an overflowing step to be skipped as a whole.
    exact_skip: the feature that is exact only if such a step is skipped as a whole.
    accumulation: whether a step has several micro-batches.
    unmeasurable: the feature, such as reentrant activation checkpointing, that does not allow a backward that only
        measures gradients.
    sharded: whether parameters are sharded.
    """

    norm: str | None = None
    skip: str | None = None
    exact_skip: str | None = None
    accumulation: bool = False
    unmeasurable: str | None = None
    sharded: bool = False


def choose(config: FusedConfig, needs: Needs, *, on_cpu: bool) -> tuple[str, str]:
    """Chooses the requested policy, or with "auto" the cheapest one that meets all needs.

    On a CPU, "auto" prefers "two_pass", because offloaded gradients would take as much memory as the weights.

    Returns:
        The name of the policy, and the reason.

    Raises:
        UnsupportedError: the requested policy does not meet a need.
    """
    if config.policy != "auto":
        for name, message in POLICIES[config.policy].unmet.items():
            if need := getattr(needs, name):
                raise UnsupportedError(message.format(policy=config.policy, need=need))
        return config.policy, "as requested"
    if needs.accumulation:
        return "deferred", "gradients of several micro-batches are summed"
    if config.store != "auto":
        return "deferred", f"store={config.store!r} requires it"
    beforehand = needs.norm or needs.skip or needs.exact_skip
    if beforehand is None:
        return "immediate", "updates during backward, without storing all gradients"
    reason = f"{beforehand} needs all gradients before the first update"
    if needs.unmeasurable:
        reason += f", and {needs.unmeasurable} does not allow a backward that only measures them"
    if needs.unmeasurable or needs.sharded or not on_cpu:
        return "deferred", f"{reason}, so gradients are stored until all of them are ready"
    return "two_pass", f"{reason}, so they are measured in a first backward, and the graph is replayed"
