"""What one training step takes, itemised: of fake tensors a plan, of real ones a measurement."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from lowmem.optimizer import FusedOptimizer


def state_bytes(rule: Any, rounding: str = "nearest", size: int = 1024, **hyper: Any) -> float:
    """Bytes that are kept for each element of a `size` × `size` bfloat16 matrix after its first update.

    Args:
        rule, rounding, hyper: as `FusedOptimizer` takes them.
    """
    param = torch.nn.Parameter(torch.ones(size, size, dtype=torch.bfloat16))
    opt = FusedOptimizer([("weight", param)], rule=rule, rounding=rounding, compile=False, **hyper)
    opt.backward(param.sum())
    kept = opt.state_dict()["state"].get("weight", {})
    return sum(t.nbytes for t in kept.values() if isinstance(t, Tensor)) / param.numel()


@dataclass(eq=False)
class Storage:
    """Memory that one or several tensors share.

    born, died: when, on the clock of the `LiveBytes` that saw it; died is None while it lives.
    kind: what it is; "" until it is named.  like: dtype and shape of the tensor that it was first seen in.
    """

    nbytes: int
    device: torch.device
    born: int
    like: str
    kind: str = ""
    died: int | None = None


class LiveBytes(TorchDispatchMode):
    """While it is active, sees each storage that an operation makes.

    Views share their storage and are counted once. What a kernel takes for itself and gives back is no tensor, and not
    seen.

    Attributes:
        now: a clock that goes on by one with every birth and every death.
        seen: every storage, in order of birth.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.seen: list[Storage] = []
        self._known = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, Tensor):
                self._of(made)
        return result

    def name(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Says what the memory of some tensors is; it is counted from here on if it was not seen before."""
        for tensor in tensors:
            self._of(tensor).kind = kind

    def name_living(self, kind: str, since: int) -> None:
        """Says what everything is that was born at `since` or later, lives, and has no name."""
        for storage in reversed(self.seen):
            if storage.born < since:
                break
            if storage.died is None and not storage.kind:
                storage.kind = kind

    def _of(self, tensor: Tensor) -> Storage:
        held = tensor.untyped_storage()
        storage: Storage | None = self._known.get(held)
        if storage is None:
            like = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            storage = self._known[held] = Storage(held.nbytes(), tensor.device, self._tick(), like)
            self.seen.append(storage)
            weakref.finalize(held, self._end, storage).atexit = False
        return storage

    def _end(self, storage: Storage) -> None:
        storage.died = self._tick()

    def _tick(self) -> int:
        self.now += 1
        return self.now


# What memory is for, in the order of tables and pictures.
WEIGHTS, STATES, GIVEN = "weights", "optimizer states", "buffers and batch"
GRADIENTS, ACTIVATIONS, TEMPORARIES = "gradients", "activations", "temporaries"
KINDS = (WEIGHTS, STATES, GIVEN, GRADIENTS, ACTIVATIONS, TEMPORARIES)


@dataclass(frozen=True)
class StepMemory:
    """Bytes of tensors through one training step, once the optimizer has its states.

    live: kind → bytes on the model's device, [moments]; a moment is the birth or death of a tensor.
    host: bytes on the host, where that is another memory, [moments].
    backwards: the moments at which each micro-batch's backward begins and ends.
    largest_gradient: bytes.  temporaries: dtype, shape and bytes of the largest at the peak, largest first.
    """

    live: dict[str, np.ndarray]
    host: np.ndarray
    backwards: tuple[tuple[int, int], ...]
    largest_gradient: int
    temporaries: tuple[tuple[str, int], ...]

    @property
    def moment(self) -> int:
        """When the peak is."""
        return _peak(self.live)

    @property
    def items(self) -> dict[str, int]:
        """Kind → bytes at the peak."""
        return {kind: int(count[self.moment]) for kind, count in self.live.items()}

    @property
    def peak(self) -> int:
        """The most bytes on the device at any moment."""
        return sum(self.items.values())

    @property
    def floor(self) -> int:
        """What no way of training in this package goes below: weights, states, buffers, batch and one gradient."""
        return sum(self.items[kind] for kind in (WEIGHTS, STATES, GIVEN)) + self.largest_gradient

    @property
    def host_peak(self) -> int:
        """The most bytes on the host at any moment."""
        return int(self.host.max())

    @property
    def during(self) -> str:
        """In which part of the step the peak is."""
        return "backward" if any(start <= self.moment <= end for start, end in self.backwards) else "forward"

    def figures(self) -> dict[str, Any]:
        """All of it but the course of the step, for a file."""
        sums = {"peak": self.peak, "during": self.during, "floor": self.floor, "host": self.host_peak}
        return {**sums, "items": self.items, "largest_gradient": self.largest_gradient, "temporaries": self.temporaries}


def step_memory(
    model: nn.Module,
    make_optimizer: Callable[[], FusedOptimizer],
    losses: Sequence[Callable[[], Tensor]],
    batch: Sequence[Tensor],
) -> StepMemory:
    """Takes an optimizer's first step and accounts for every tensor in it.

    What the first step leaves behind, states above all, later ones begin with: it is counted from the beginning.

    Args:
        model: in training mode; its parameters have no hooks of an optimizer yet.
        make_optimizer: makes the one that takes the step.
        losses: the losses of the step's micro-batches, each computed when it is called.
        batch: tensors that live through the step.
    """
    live = LiveBytes()
    live.name(model.parameters(), WEIGHTS)
    live.name([*model.buffers(), *batch], GIVEN)
    # before the optimizer's own hooks, which take the gradient away
    hooks = [
        param.register_post_accumulate_grad_hook(lambda param: live.name([param.grad], GRADIENTS))
        for param in model.parameters()
        if param.requires_grad
    ]
    began, backwards = live.now, []
    try:
        with live:
            optimizer = make_optimizer()
            for n, loss in enumerate(losses, start=1):
                start = live.now
                with optimizer.accumulate() if n < len(losses) else nullcontext():
                    value = loss()
                    live.name_living(ACTIVATIONS, since=start)
                    turn = live.now
                    optimizer.backward(value)
                    del value
                if n < len(losses):
                    live.name_living(GRADIENTS, since=turn)  # sums that wait
                backwards.append((turn - began, live.now - began))
            live.name((entry.whole() for entry in optimizer.entries()), STATES)
    finally:
        for hook in hooks:
            hook.remove()
    return _accounted(live, began, next(model.parameters()).device, tuple(backwards))


def _peak(counts: dict[str, np.ndarray]) -> int:
    """The moment at which most is there."""
    return int(np.sum(list(counts.values()), axis=0).argmax())


def _accounted(live: LiveBytes, began: int, device: torch.device, backwards: tuple[tuple[int, int], ...]) -> StepMemory:
    """The storages that were seen, as bytes by kind and moment."""
    changes = {kind: np.zeros(live.now - began + 2, dtype=np.int64) for kind in (*KINDS, "host")}

    def lives(storage: Storage) -> tuple[int, int]:
        kept = storage.kind in (WEIGHTS, STATES, GIVEN)
        ends = live.now + 1 if storage.died is None else storage.died
        return (0 if kept else storage.born - began), ends - began

    def kind_of(storage: Storage) -> str:
        return "host" if storage.device.type != device.type else storage.kind or TEMPORARIES

    for storage in live.seen:
        born, died = lives(storage)
        changes[kind_of(storage)][born] += storage.nbytes
        changes[kind_of(storage)][died] -= storage.nbytes
    counts = {kind: change.cumsum()[:-1] for kind, change in changes.items()}
    host = counts.pop("host")
    moment = _peak(counts)
    there = [s for s in live.seen if lives(s)[0] <= moment < lives(s)[1] and kind_of(s) == TEMPORARIES]
    there.sort(key=lambda storage: storage.nbytes, reverse=True)
    return StepMemory(
        counts,
        host,
        backwards,
        max((s.nbytes for s in live.seen if s.kind == GRADIENTS), default=0),
        tuple((storage.like, storage.nbytes) for storage in there[:3]),
    )
