"""When an update happens: in the hook, in a second backward, or when the gradients of a whole step are complete."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lowmem.errors import StepError, UnsupportedError
from lowmem.options import FusedConfig
from lowmem.placements.base import MicroBatch
from lowmem.placements.placed import Placed
from lowmem.step.clipping import Clipping, Decision
from lowmem.step.offload import GradientStore
from lowmem.step.parameters import AddedGroup, Parameters
from lowmem.step.record import ParamRecord
from lowmem.step.updates import Updates
from lowmem.tiles.gradients import Gradient
from lowmem.tiles.stored import add
from lowmem.tiles.transfers import to_device

# By how much a norm may be off because of the order in which the 2¹⁷ squares of a tile are added: in 8 vector lanes
# at least, with 2¹⁴ additions each, that are off by 2⁻²⁴ of half the sum on average. A norm is off by half of that.
_SUMMED = 2.0**-12

# A gradient in which larger terms cancel may differ by this part of the tolerance of the norm over all gradients.
_CANCELLED = 2.0**-4


# -- which policy ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Needs:
    """The requirements of a policy.

    norm: the option that needs the norm over all gradients before the first update.  skip: what needs a step with an
    overflow to be skipped as a whole.  exact_skip: what is exact only if it is.  accumulation: several micro-batches
    are one step.  reentrant: activation checkpointing that does not allow a backward which only measures.  sharded:
    parameters are.
    """

    norm: str | None = None
    skip: str | None = None
    exact_skip: str | None = None
    accumulation: bool = False
    reentrant: bool = False
    sharded: bool = False

    @classmethod
    def of(cls, groups: Iterable[AddedGroup], clipping: Clipping, **asked: bool) -> "Needs":
        """Collects the requirements of rules, clipping and loss scaling."""
        scaler, groups = clipping.scaler, list(groups)
        norms = (group.rule.needs_norm(group.live) for group in groups)
        norm = next((option for option in norms if option is not None), None)
        foreign = scaler.value is not None and any(group.rule.materializes for group in groups)
        return cls(
            norm=f"clip_norm={clipping.norm!r}" if clipping.norm is not None else norm,
            skip="loss_scale with a third-party optimizer" if foreign else None,
            exact_skip="a dynamic loss scale" if scaler.dynamic else None,
            **asked,
        )


# (policy, need) → why a policy that was asked for cannot.
_REFUSALS = {
    ("two_pass", "reentrant"): (
        "policy 'two_pass' measures gradients in a separate backward, which reentrant activation checkpointing does "
        "not allow. Use checkpoint(..., use_reentrant=False), or policy='deferred' (or 'auto')"
    ),
    ("two_pass", "sharded"): (
        "policy 'two_pass' runs backward twice, so sharded parameters would be gathered and reduced twice. Use "
        "policy='deferred' (or 'auto'), which stores the gradients of this rank's shards"
    ),
    ("immediate", "norm"): (
        "{need}: policy 'immediate' updates a parameter before the norm over all gradients is known, so it cannot "
        "clip by this norm. Use policy='two_pass', 'deferred' or 'auto', or omit the option (in a Hugging Face "
        "trainer: max_grad_norm=0). clip_value and a rule's own update clipping work."
    ),
    ("immediate", "skip"): (
        "{need}: under policy 'immediate', an overflowing update must be skipped parameter by parameter, which this "
        "optimizer does not support. Use policy='two_pass' or 'deferred', a rule of lowmem, or bfloat16 without a "
        "loss scale."
    ),
} | dict.fromkeys(
    (("immediate", "accumulation"), ("two_pass", "accumulation")),
    "policy {policy!r} cannot accumulate gradients, because it does not store them. Use policy='deferred' (or "
    "'auto'), which stores their sums, or use one larger batch.",
)


def choose(config: FusedConfig, needs: Needs, *, on_cpu: bool) -> tuple[str, str]:
    """The policy that was asked for, or with `auto` the cheapest that is exact for what is needed; and the reason.
    Raises `UnsupportedError` if it cannot do what is needed. On a CPU, `auto` prefers two passes, because offloaded
    gradients would take as much memory as the weights.
    """
    for (policy, name), why in _REFUSALS.items():
        if policy == config.policy and (need := getattr(needs, name)):
            raise UnsupportedError(why.format(policy=policy, need=need))
    beforehand = needs.norm or needs.skip or needs.exact_skip
    reason = f"{beforehand} needs all gradients before the first update"
    if config.policy != "auto":
        return config.policy, "as requested"
    if needs.accumulation:
        return "deferred", "gradients of several micro-batches are summed"
    if config.store is not None:
        return "deferred", f"store={config.store!r} requires it"
    if beforehand is None:
        return "immediate", "updates during backward, one gradient in memory at a time"
    if needs.reentrant:
        reason += ", and reentrant activation checkpointing does not allow a backward that only measures them"
    if needs.reentrant or needs.sharded or not on_cpu:
        return "deferred", f"{reason}, so gradients are offloaded until the step is decided"
    return "two_pass", f"{reason}, so they are measured in a first backward, and the graph is replayed"


# -- the policies ------------------------------------------------------------------------------------------------------


# The leaves to which a backward runs (None: all); whether to retain the graph.
Pass = tuple[Sequence[Tensor] | None, bool]


class Policy:
    """When gradients become updates: here in the hook. Nothing is known about the step before its first update.

    The loop runs the backwards that `passes` yields. Every gradient goes through the placement's reducer, which sums
    micro-batches as `begin` says, to `ready`; `complete` decides the step.

    Attributes:
        reason: why it was chosen.
        accumulates: it sums gradients, those of micro-batches and parts of one within a backward.
    """

    name: ClassVar[str] = "immediate"
    accumulates: ClassVar[bool] = False

    def __init__(self, parameters: Parameters, updates: Updates, reason: str) -> None:
        self.config, self.records, self.reason = parameters.config, parameters.records, reason
        self.updates, self.clipping, self.cycle = updates, updates.clipping, updates.cycle
        self._measured: dict[str, Tensor] = {}  # `Clipping.measure` of gradients before the first update
        self._decision: Decision | None = None  # before the first update

    def allow_plain_backward(self) -> None:
        """Raises `StepError` if a plain `loss.backward()` is not enough."""
        if self.name == "two_pass":
            raise StepError(
                f"policy {self.name!r} needs more than one plain loss.backward(): no gradients have been measured, so "
                "nothing is updated. Call opt.backward(loss), or use policy='deferred', for which loss.backward() is "
                "enough."
            )
        if self.clipping.scaler.value is not None:
            raise StepError("with a loss scale the loss must be scaled: call opt.backward(loss)")

    def passes(self) -> Iterator[Pass]:
        """The backwards of a loss, each of which has run when the next one is asked for."""
        yield None, False

    def begin(self) -> MicroBatch:
        """Called before each backward. Returns how its gradients are summed over micro-batches."""
        return MicroBatch(add=lambda record, grad: grad)

    def ready(self, record: ParamRecord, grad: Gradient) -> None:
        """A gradient is complete: summed over micro-batches, averaged over ranks and cut."""
        self.updates.put(record, grad, self._decision)

    def complete(self) -> Decision | None:
        """All gradients of the step are ready. Returns what was decided before its first update."""
        return self._decision

    def replayed(self) -> Tensor | None:
        """Returns whether both passes had the same gradients, boolean scalar; None if there is one pass."""
        return None

    def drop(self) -> None:
        """Forgets the gradients of the step."""
        self._measured.clear()
        self._decision = None


class TwoPass(Policy):
    """Backward twice: the first measures each gradient and drops it, the second updates."""

    name = "two_pass"

    def passes(self) -> Iterator[Pass]:
        self.drop()
        hooked = [record.param for record in self.records.values() if record.trained]
        if hooked:  # other leaves of the graph get their gradient in the second pass
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

    def ready(self, record: ParamRecord, grad: Gradient) -> None:
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
        """Compares the norms of both passes, of each parameter."""
        decision = self._decision
        assert decision is not None and decision.tiled is not None
        if decision.skipped:
            return None
        fired = [record for record in self.records.values() if record.name in self._measured]
        first, second = decision.tiled, self.clipping.gather(record.square_sum for record in fired).sqrt()
        tolerance = to_device([_tolerance(record.param) for record in fired], torch.float64, first.device)
        total = torch.linalg.vector_norm(torch.where(first.isfinite(), first, 0.0))
        allowed = tolerance * (first + _CANCELLED * total)
        same = ((first - second).abs() <= allowed) | ~(first.isfinite() | second.isfinite())
        return same.all() | ~decision.finite


def _tolerance(param: Tensor) -> float:
    """By how much the norm of a gradient may differ when it is computed again, relative.

    The same kernels give the same bits on a CPU. On a GPU they may add in another order, after which some elements
    round to a neighbour in the dtype in which they are computed. That averages out: the tolerance is the unit roundoff,
    2⁻⁸ for bfloat16 and 2⁻¹¹ for float16. A float32 gradient may have been computed in bfloat16, by autocast.
    """
    roundoff = torch.finfo(param.dtype).eps / 2
    if param.device.type != "cpu" and param.dtype == torch.float32:
        roundoff = torch.finfo(torch.bfloat16).eps / 2
    return _SUMMED + roundoff


class Deferred(Policy):
    """Gradients are offloaded, and those of several micro-batches summed, until the step is decided."""

    name = "deferred"
    accumulates = True

    @functools.cached_property
    def _store(self) -> GradientStore:
        on_cpu = all(param.device.type == "cpu" for param in self.records)  # host and device are the same memory
        return GradientStore(host=self.config.store != "device" and not on_cpu)

    @property
    def _wide(self) -> bool:
        return self.config.accumulation_dtype == "float32"

    def begin(self) -> MicroBatch:
        last = self.cycle.last
        self._store.begin(4 if self._wide and not last else 0)
        earlier = {record.name: functools.partial(self._sum_of, record) for record in self._missed() if last}
        return MicroBatch(self._add, last, earlier, wide=self._wide and bool(earlier))

    def _missed(self) -> list[ParamRecord]:
        """Parameters that got a gradient in an earlier micro-batch, and none in this one."""
        missed = self.cycle.missed()
        return [record for record in self.records.values() if record.name in missed]

    def _sum_of(self, record: ParamRecord) -> Gradient:
        """Returns the sum of earlier micro-batches for a parameter that gets no gradient in the last one."""
        self.cycle.notice(record.name)
        total = self._store.get(record)
        assert total is not None
        return total

    def _add(self, record: Placed, grad: Gradient) -> Gradient | None:
        before = self._store.get(record)
        if before is not None:
            if record.name in self._measured and self.clipping.changes(before):
                raise StepError(
                    f"parameter {record.name!r} got its gradient in two parts within one backward, and the first part "
                    "has already been unscaled or clamped. Use checkpoint(..., use_reentrant=False)"
                )
            total = self._dense(record, before)
            if isinstance(grad, Tensor):
                add(total, grad)
            else:
                grad.add_to(total)
            grad = total
        if self.cycle.last:
            return grad
        # what one is computed from may change between two backwards
        self._store.keep(record, grad if isinstance(grad, Tensor) else self._dense(record, grad))
        return None

    def _dense(self, record: Placed, grad: Gradient) -> Tensor:
        """A gradient as a tensor in the dtype of sums."""
        if isinstance(grad, Tensor):
            return grad.to(torch.promote_types(grad.dtype, torch.float32)) if self._wide else grad
        return grad.dense(torch.float32 if self._wide else record.param.dtype)

    def ready(self, record: ParamRecord, grad: Gradient) -> None:
        self._measured[record.name] = self.clipping.measure(record, grad)
        self._store.keep(record, grad)

    def complete(self) -> Decision | None:
        for record in self._missed():
            self.ready(record, self._sum_of(record))
        decision = self.clipping.decide(self._measured, prepared=True)
        if not decision.skipped:
            for record, grad in self._store.drain(list(self.records.values())):
                self.updates.put(record, grad, decision)
                del grad  # not to be held while the store fetches the next one
        self.drop()
        return decision

    def drop(self) -> None:
        super().drop()
        if "_store" in vars(self):
            self._store.clear()


POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (Policy, TwoPass, Deferred)}
