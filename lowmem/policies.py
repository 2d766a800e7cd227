"""When an update happens: in the hook, in a second backward, or when the gradients of a whole step are there."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from lowmem.choice import PolicySettings
from lowmem.clipping import Clipping, Measured
from lowmem.cycle import StepCycle
from lowmem.dense import add
from lowmem.errors import StepError
from lowmem.slots import Slot
from lowmem.store import GradientStore
from lowmem.store import make as make_store
from lowmem.updates import Updates

# A second pass whose gradients have other norms than this, relative and in parts of the norm over all, is no replay.
_SAME_NORM = {"rtol": 2e-2, "atol": 1e-4}


def make(
    name: str, wanted: PolicySettings, updates: Updates, clipping: Clipping, slots: Mapping[Tensor, Slot]
) -> "Policy":
    """The policy of that name."""
    if name != "deferred":
        return {"immediate": Immediate, "two_pass": TwoPass}[name](updates, clipping, slots)
    sums = torch.float32 if wanted.sums == "float32" else None
    made = functools.partial(make_store, wanted.store or "host", wanted.store_dir, slots, sums)
    return Deferred(updates, clipping, slots, make_store=made, sums=sums)


class Policy(ABC):
    """When gradients become updates. The engine calls `run` for a backward, and `take` for each gradient in it."""

    name: ClassVar[str]
    adds: ClassVar[bool] = False  # gradients that come in parts are summed

    def __init__(self, updates: Updates, clipping: Clipping, slots: Mapping[Tensor, Slot]) -> None:
        self._updates, self._clipping, self._slots = updates, clipping, slots

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
        self._updates.placement.begin(self._slots.values())

    def take(self, slot: Slot, grad: Tensor) -> None:
        """The gradient of a parameter is complete on this rank, and the caller's reference the only one."""
        for ready, reduced in self._updates.placement.reduce(slot, grad):
            self.arrived(ready, reduced)

    @abstractmethod
    def arrived(self, slot: Slot, grad: Tensor) -> None:
        """A gradient is what it is to be over all ranks."""

    def complete(self) -> None:
        """Every gradient of the step has come: finishes its updates."""
        decision = self._updates.decision
        if decision is None or not decision.dropped:
            self._updates.put_zeros(self._slots.values())
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
        for slot, grad in self._updates.placement.flush():
            self._cycle.notice(slot.name)
            self.arrived(slot, grad)

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

    def arrived(self, slot: Slot, grad: Tensor) -> None:
        self._updates.put(slot, grad)


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
        own = [slot.param for slot in self._slots.values() if slot.handle is not None]
        self.begin()
        if own:  # other leaves of the graph are to get their gradient once, in the second pass
            scaled, leaves = self._clipping.scale.scaled(loss), self._updates.placement.measured_leaves(own)
            torch.autograd.backward(scaled, inputs=leaves, retain_graph=retain_graph)
        self.flush()

    def arrived(self, slot: Slot, grad: Tensor) -> None:
        if self._measured is not None:
            self._measured[slot.name] = self._clipping.measure(grad)
            return
        decision = self._updates.decision
        if decision is None or slot.name not in decision.measured:
            raise StepError(
                f"parameter {slot.name!r} got a gradient in the second pass and none in the first, which reentrant "
                "activation checkpointing hides it from. Use checkpoint(..., use_reentrant=False), or policy='deferred'"
            )
        self._updates.put(slot, grad)

    def replayed(self) -> Tensor | None:
        """By the norms of both passes."""
        decision = self._updates.decision
        assert decision is not None
        if decision.dropped:
            return None
        device = decision.finite.device
        fired = [slot for slot in self._slots.values() if slot.name in decision.measured]
        first = torch.stack([decision.measured[slot.name].raw.to(device) for slot in fired])
        second = torch.stack([cast(Tensor, slot.square_sum).to(device) for slot in fired]).sqrt()
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
            for slot in self._slots.values():  # what came in earlier micro-batches alone
                if slot.name not in self._came and (total := self._store.get(slot)) is not None:
                    self._go_on(slot, total)
        self.flush()
        return True

    def take(self, slot: Slot, grad: Tensor) -> None:
        if self._sums_whole:
            self._add_up(slot, grad)
        else:
            super().take(slot, grad)

    def arrived(self, slot: Slot, grad: Tensor) -> None:
        if self._sums_whole:
            self._collect(slot, grad)
        else:
            self._add_up(slot, grad)

    def _add_up(self, slot: Slot, grad: Tensor) -> None:
        """Adds a gradient to what came of it in earlier micro-batches; in the last one the sum goes on."""
        self._came.add(slot.name)
        before = self._store.get(slot)
        if before is not None and slot.name in self._measured and self._clipping.prepares(before):
            raise StepError(
                f"parameter {slot.name!r} got its gradient in two parts within one backward, and the first part has "
                "been unscaled or clamped for the whole already. Use checkpoint(..., use_reentrant=False)"
            )
        total = grad if before is None else self._sum(before, grad)
        if self._last:
            self._go_on(slot, total)
        else:
            self._store.keep(slot, total)

    def _go_on(self, slot: Slot, total: Tensor) -> None:
        if self._sums_whole:
            super().take(slot, total)
        else:
            self._collect(slot, total)

    def _collect(self, slot: Slot, total: Tensor) -> None:
        """Measures what is complete over micro-batches and ranks, and keeps it until the step is decided."""
        self._measured[slot.name] = self._clipping.measure(total)
        self._store.keep(slot, total)

    def _sum(self, before: Tensor, grad: Tensor) -> Tensor:
        total = before if self._sums is None else before.to(torch.promote_types(before.dtype, self._sums))
        add(total, grad)
        return total

    def complete(self) -> None:
        """Decides the step, and updates parameter by parameter."""
        slots = list(self._slots.values())
        decision = self._updates.decision = self._clipping.decide(self._measured, prepared=True)
        if decision.dropped:
            self._store.clear()
        for slot, grad in self._store.drain(slots):
            self._updates.put(slot, grad)
            del grad  # not to be held while the store fetches the next one
        super().complete()

    def drop(self) -> None:
        super().drop()
        self._store.clear()
