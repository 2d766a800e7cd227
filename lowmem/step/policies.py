"""When an update happens: in the hook, in a second backward, or when the gradients of a whole step are there."""

import functools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from lowmem.errors import ConfigError, StepError, UnsupportedError, did_you_mean
from lowmem.placements.record import ParamRecord
from lowmem.step.clipping import Clipping, Measured
from lowmem.step.cycle import StepCycle
from lowmem.step.offload import ACCUMULATION_DTYPES, STORES, GradientStore
from lowmem.step.offload import make as make_store
from lowmem.step.updates import Updates
from lowmem.tiles.sweep import add

REPLAYS = ("auto", "graph", "forward")


def repeatable(forward: Callable[[], Tensor], devices: Iterable[torch.device]) -> Callable[[], Tensor]:
    """`forward` that draws the same random numbers in every call: those that it would draw now."""
    state = RandomState(devices)

    def again() -> Tensor:
        state.restore()
        return forward()

    return again


class RandomState:
    """The state of every generator that a forward may draw from: Python's, torch's, and those of the devices in use."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._python = random.getstate()
        self._torch = torch.get_rng_state()
        others = {device for device in devices if device.type != "cpu"}
        self._devices = {device: torch.get_device_module(device).get_rng_state(device) for device in others}

    def restore(self) -> None:
        """Puts them back as they were."""
        random.setstate(self._python)
        torch.set_rng_state(self._torch)
        for device, state in self._devices.items():
            torch.get_device_module(device).set_rng_state(state, device)


POLICIES = ("immediate", "two_pass", "deferred")


@dataclass(frozen=True)
class PolicySettings:
    """What a user says of policies.

    Raises:
        ConfigError: a value that is not allowed, or that has no effect.
    """

    policy: str = "auto"
    replay: str = "auto"
    store: str | None = None
    store_dir: str | None = None
    accumulation_dtype: str = "float32"

    def __post_init__(self) -> None:
        for option, value, known in (
            ("policy", self.policy, ("auto", *POLICIES)),
            ("replay", self.replay, REPLAYS),
            ("store", self.store, (None, *STORES)),
            ("accumulation_dtype", self.accumulation_dtype, ACCUMULATION_DTYPES),
        ):
            if value not in known:
                names = [name for name in known if name is not None]
                hint = did_you_mean(str(value), names)
                raise ConfigError(f"{option} {value!r} is unknown.{hint} Known are {', '.join(names)}")
        if self.store_dir is not None and self.store != "disk":
            raise ConfigError(f"store_dir={self.store_dir!r} has no effect without store='disk'")
        if self.store_dir is not None and not Path(self.store_dir).is_dir():
            raise ConfigError(
                f"store_dir={self.store_dir!r} is no folder; make it, or leave it out for a temporary one"
            )
        if self.policy in ("immediate", "two_pass") and (
            self.store is not None or self.accumulation_dtype != "float32"
        ):
            raise ConfigError(
                f"store and accumulation_dtype have no effect under policy {self.policy!r}; they are of 'deferred'"
            )
        if self.policy in ("immediate", "deferred") and self.replay != "auto":
            raise ConfigError(f"replay has no effect under policy {self.policy!r}; it is of 'two_pass'")
        if self.policy == "auto" and self.replay != "auto" and self.store is not None:
            raise ConfigError("replay is of policy 'two_pass' and store of 'deferred'; give one of them")

    def replay_of(self, policy: str, *, graph_stays: bool) -> str | None:
        """How the second pass is had under `policy`, if it has one.

        Raises:
            UnsupportedError: it is to be the graph's, which does not stay.
        """
        if policy != "two_pass":
            return None
        if self.replay == "graph" and not graph_stays:
            raise UnsupportedError(
                "replay='graph': DeepSpeed ZeRO-3 gathers parameters for one backward of each forward, so the graph "
                "cannot be replayed. Use replay='forward' with opt.backward(lambda: loss), or policy='deferred'"
            )
        return ("graph" if graph_stays else "forward") if self.replay == "auto" else self.replay


@dataclass(frozen=True)
class Wish:
    """What is asked of a policy.

    norm: the option that needs the norm over all gradients before the first update.  skips: what needs a step with an
    overflow to be left out as a whole.  prefers_whole: what is exact only if it is.  accumulates: several micro-batches
    are one step.
    """

    norm: str | None = None
    skips: str | None = None
    prefers_whole: str | None = None
    accumulates: bool = False


def choose(wanted: PolicySettings, wish: Wish, *, on_cpu: bool, graph_stays: bool = True) -> tuple[str, str]:
    """The policy asked for, or with `auto` the cheapest that is exact for what was asked; and why.

    With accumulation that is `deferred`; without anything to know beforehand `immediate`. In between it is `deferred`
    on a GPU, whose gradients wait on the host, and where the graph cannot be replayed; else `two_pass` on a CPU, where
    gradients would take as much as the weights.

    Raises:
        UnsupportedError: the policy cannot keep the promise that was asked of it.
    """
    if wanted.policy == "auto":
        return _cheapest(wanted, wish, on_cpu and graph_stays, graph_stays)
    if wanted.policy == "immediate" and wish.norm is not None:
        raise UnsupportedError(
            f"{wish.norm}: policy 'immediate' updates a parameter before the norm over all gradients is known, so it "
            "cannot clip by it. Use policy='two_pass', 'deferred' or 'auto', or leave the option out (in a Hugging "
            "Face trainer: max_grad_norm=0); clip_value and a rule's own update clipping work."
        )
    if wanted.policy == "immediate" and wish.skips is not None:
        raise UnsupportedError(
            f"{wish.skips}: under policy 'immediate' an overflowing update must be left out parameter by parameter, "
            "which that optimizer cannot do. Use policy='two_pass' or 'deferred', a rule of lowmem, or bfloat16 "
            "without a loss scale."
        )
    if wanted.policy != "deferred" and wish.accumulates:
        raise UnsupportedError(
            f"policy {wanted.policy!r} cannot accumulate gradients: it keeps none. Use policy='deferred' (or 'auto'), "
            "which sums them in its store, or one larger batch."
        )
    return wanted.policy, "as asked"


def _cheapest(wanted: PolicySettings, wish: Wish, replays: bool, graph_stays: bool) -> tuple[str, str]:
    whole = wish.norm or wish.skips or wish.prefers_whole
    if wish.accumulates:
        return "deferred", "gradients of several micro-batches have to be summed"
    if wanted.store is not None:
        return "deferred", f"store={wanted.store!r} asks for it"
    if whole is None:
        return "immediate", "nothing asked for needs more than one gradient at a time"
    reason = f"{whole} needs every gradient to be known before the first update"
    if replays or wanted.replay != "auto":
        replayed = wanted.replay_of("two_pass", graph_stays=graph_stays)
        return "two_pass", f"{reason}; they are measured in a backward of their own, and the {replayed} is replayed"
    return "deferred", f"{reason}; they wait in a store"


# A second pass whose gradients have other norms than this, relative and in parts of the norm over all, is no replay.
_SAME_NORM = {"rtol": 2e-2, "atol": 1e-4}


def make(
    name: str, wanted: PolicySettings, updates: Updates, clipping: Clipping, records: Mapping[Tensor, ParamRecord]
) -> "Policy":
    """The policy of that name."""
    if name != "deferred":
        return {"immediate": Immediate, "two_pass": TwoPass}[name](updates, clipping, records)
    sums = torch.float32 if wanted.accumulation_dtype == "float32" else None
    made = functools.partial(make_store, wanted.store or "host", wanted.store_dir, records, sums)
    return Deferred(updates, clipping, records, make_store=made, sums=sums)


class Policy(ABC):
    """When gradients become updates. The engine calls `run` for a backward, and `take` for each gradient in it."""

    name: ClassVar[str]
    adds: ClassVar[bool] = False  # gradients that come in parts are summed

    def __init__(self, updates: Updates, clipping: Clipping, records: Mapping[Tensor, ParamRecord]) -> None:
        self._updates, self._clipping, self._records = updates, clipping, records

    @property
    def _cycle(self) -> StepCycle:
        return self._updates.cycle

    def allow_plain_backward(self) -> None:
        """Raises `StepError` if a plain `loss.backward()` is not enough."""
        raise StepError(
            f"policy {self.name!r} has more to do than one plain loss.backward(): nothing has been measured, so "
            "nothing is updated. Call opt.backward(loss)."
        )

    @abstractmethod
    def run(self, loss: Tensor, again: Callable[[], Tensor] | None, last: bool) -> bool:
        """Runs the backward of a loss; True if the step is complete with it.

        Args:
            loss: a scalar, not scaled.
            again: computes it anew, with the same random numbers; None if the graph is there to be replayed.
            last: False for a micro-batch that others of the same step will follow.
        """

    def begin(self) -> None:
        """A backward begins, whose gradients are reduced."""
        self._updates.placement.begin(self._records.values())

    def take(self, record: ParamRecord, grad: Tensor) -> None:
        """The gradient of a parameter is complete on this rank, and the caller's reference the only one."""
        for ready, reduced in self._updates.placement.reduce(record, grad):
            self.arrived(ready, reduced)

    @abstractmethod
    def arrived(self, record: ParamRecord, grad: Tensor) -> None:
        """A gradient is what it is to be over all ranks."""

    def complete(self) -> None:
        """Every gradient of the step has come: finishes its updates."""
        decision = self._updates.decision
        if decision is None or not decision.dropped:
            self._updates.put_zeros(self._records.values())
        self._updates.flush()

    def replayed(self) -> Tensor | None:
        """Whether what was measured is what was applied, a boolean scalar; None where it is the same thing."""
        return None

    def drop(self) -> None:
        """Forgets the gradients of the step: their backward died."""
        self._updates.drop()
        self._updates.placement.drop()
        self._updates.decision = None

    @torch.no_grad()
    def flush(self) -> None:
        """Lets what is still under way arrive: a backward has ended."""
        for record, grad in self._updates.placement.flush():
            self._cycle.notice(record.name)
            self.arrived(record, grad)

    def _backward(self, loss: Tensor) -> None:
        self.begin()
        self._clipping.scale.scaled(loss).backward()
        self.flush()


class Immediate(Policy):
    """In the hook. Nothing is known of the step before its first update."""

    name = "immediate"

    def allow_plain_backward(self) -> None:
        if self._clipping.scale.value is not None:
            raise StepError("with a loss scale the loss must be scaled: call opt.backward(loss)")

    def run(self, loss: Tensor, again: Callable[[], Tensor] | None, last: bool) -> bool:
        self._updates.decision = None
        self._backward(loss)
        return True

    def arrived(self, record: ParamRecord, grad: Tensor) -> None:
        self._updates.put(record, grad)


class TwoPass(Policy):
    """Backward twice: the first measures each gradient and drops it, the second updates."""

    name = "two_pass"
    _measured: dict[str, Measured] | None = None  # while measuring

    def run(self, loss: Tensor, again: Callable[[], Tensor] | None, last: bool) -> bool:
        self._updates.decision = None
        self._measured = {}
        try:
            self._measure(loss, retain_graph=again is None)
            self._cycle.next_pass()
            decision = self._clipping.decide(self._measured, prepared=False)
        finally:
            self._measured = None
        if decision.dropped:
            self._updates.decision = decision
            return True
        if again is not None:
            loss = again()
        self._updates.decision = decision
        self._backward(loss)
        if missed := self._cycle.missed():
            self._cycle.moved = True
            raise StepError(
                f"the second pass gave no gradient to {missed[0]!r}, which had one in the first: the two are not the "
                "same computation. Use policy='deferred'"
            )
        return True

    def _measure(self, loss: Tensor, retain_graph: bool) -> None:
        own = [record.param for record in self._records.values() if record.handle is not None]
        self.begin()
        if own:  # other leaves of the graph are to get their gradient once, in the second pass
            scaled, leaves = self._clipping.scale.scaled(loss), self._updates.placement.measured_leaves(own)
            torch.autograd.backward(scaled, inputs=leaves, retain_graph=retain_graph)
        self.flush()

    def arrived(self, record: ParamRecord, grad: Tensor) -> None:
        if self._measured is not None:
            self._measured[record.name] = self._clipping.measure(grad)
            return
        decision = self._updates.decision
        if decision is None or record.name not in decision.measured:
            raise StepError(
                f"parameter {record.name!r} got a gradient in the second pass and none in the first, which reentrant "
                "activation checkpointing hides it from. Use checkpoint(..., use_reentrant=False), or policy='deferred'"
            )
        self._updates.put(record, grad)

    def replayed(self) -> Tensor | None:
        """By the norms of both passes."""
        decision = self._updates.decision
        assert decision is not None
        if decision.dropped:
            return None
        device = decision.finite.device
        fired = [record for record in self._records.values() if record.name in decision.measured]
        first = torch.stack([decision.measured[record.name].raw.to(device) for record in fired])
        second = torch.stack([cast(Tensor, record.square_sum).to(device) for record in fired]).sqrt()
        allowed = _SAME_NORM["rtol"] * first + _SAME_NORM["atol"] * torch.linalg.vector_norm(first)
        return ((first - second).abs() <= allowed).all() | ~decision.finite


class Deferred(Policy):
    """Gradients wait in a store, where those of several micro-batches are summed, until the step is decided.

    Args:
        make_store: makes what they wait in, when the first one comes.
        sums: the dtype of sums of micro-batches; None: that of the gradient. A single one keeps its own.
    """

    name = "deferred"
    adds = True

    def __init__(self, *args: Any, make_store: Callable[[], GradientStore], sums: torch.dtype | None) -> None:
        super().__init__(*args)
        self._make_store, self._sums = make_store, sums
        self._sums_whole = self._updates.placement.sums_whole
        self._last = True
        self._measured: dict[str, Measured] = {}
        self._came: set[str] = set()  # in the last micro-batch

    @functools.cached_property
    def _store(self) -> GradientStore:
        return self._make_store()

    def run(self, loss: Tensor, again: Callable[[], Tensor] | None, last: bool) -> bool:
        self._updates.decision = None
        self._last = last
        self._measured, self._came = {}, set()
        if last:
            self.begin()
        self._clipping.scale.scaled(loss).backward()
        if not last:
            self._cycle.wait()
            return False
        with torch.no_grad():
            for record in self._records.values():  # what came in earlier micro-batches alone
                if record.name not in self._came and (total := self._store.get(record)) is not None:
                    self._go_on(record, total)
        self.flush()
        return True

    def take(self, record: ParamRecord, grad: Tensor) -> None:
        if self._sums_whole:
            self._add_up(record, grad)
        else:
            super().take(record, grad)

    def arrived(self, record: ParamRecord, grad: Tensor) -> None:
        if self._sums_whole:
            self._collect(record, grad)
        else:
            self._add_up(record, grad)

    def _add_up(self, record: ParamRecord, grad: Tensor) -> None:
        """Adds a gradient to what came of it in earlier micro-batches; in the last one the sum goes on."""
        self._came.add(record.name)
        before = self._store.get(record)
        if before is not None and record.name in self._measured and self._clipping.prepares(before):
            raise StepError(
                f"parameter {record.name!r} got its gradient in two parts within one backward, and the first part has "
                "been unscaled or clamped for the whole already. Use checkpoint(..., use_reentrant=False)"
            )
        total = grad if before is None else self._sum(before, grad)
        if self._last:
            self._go_on(record, total)
        else:
            self._store.keep(record, total)

    def _go_on(self, record: ParamRecord, total: Tensor) -> None:
        if self._sums_whole:
            super().take(record, total)
        else:
            self._collect(record, total)

    def _collect(self, record: ParamRecord, total: Tensor) -> None:
        """Measures what is complete over micro-batches and ranks, and keeps it until the step is decided."""
        self._measured[record.name] = self._clipping.measure(total)
        self._store.keep(record, total)

    def _sum(self, before: Tensor, grad: Tensor) -> Tensor:
        total = before if self._sums is None else before.to(torch.promote_types(before.dtype, self._sums))
        add(total, grad)
        return total

    def complete(self) -> None:
        """Decides the step, and updates parameter by parameter."""
        records = list(self._records.values())
        decision = self._updates.decision = self._clipping.decide(self._measured, prepared=True)
        if decision.dropped:
            self._store.clear()
        for record, grad in self._store.drain(records):
            self._updates.put(record, grad)
            del grad  # not to be held while the store fetches the next one
        super().complete()

    def drop(self) -> None:
        super().drop()
        self._store.clear()
