"""Records the memory of a training step by kind: predicted with fake tensors, or measured with real tensors."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from lowmem.optimizer import FusedOptimizer
from lowmem.placements import shard_of, streaming_of
from lowmem.step.program import Program
from lowmem.step.results import Result
from lowmem.step.updates import Observer
from lowmem.tiles.quantized import QuantizedWeight, tensors_of
from lowmem.tiles.stored import StoredTiles


def state_bytes(rule: Any, rounding: str = "auto", size: int = 1024, **options: Any) -> float:
    """Returns the bytes of state per element of a `size` × `size` bfloat16 matrix, measured after one update."""
    param = nn.Parameter(torch.ones(size, size, dtype=torch.bfloat16))
    opt = FusedOptimizer([("weight", param)], rule=rule, rounding=rounding, compile=False, **options)
    opt.backward(param.sum())
    state = opt.named_state_dict()["state"].get("weight", {})
    return sum(value.nbytes for value in state.values() if isinstance(value, Tensor)) / param.numel()


# The kinds of memory, in the order of tables.
WEIGHTS, STATES, BUFFERS = "weights", "optimizer states", "buffers and batch"
GRADIENTS, ACTIVATIONS, TEMPORARIES = "gradients", "activations", "temporaries"
KINDS = (WEIGHTS, STATES, BUFFERS, GRADIENTS, ACTIVATIONS, TEMPORARIES)

_RESIZE = torch.UntypedStorage.resize_


@dataclass(eq=False)
class _Allocation:
    """A storage, which several tensors may share, from its allocation to its release."""

    nbytes: int
    device: torch.device
    born: int  # a moment on the tracker's clock
    died: int | None = None
    kind: str = ""  # one of KINDS; empty until it is known


class _Tracker(TorchDispatchMode, Observer):
    """Records the storage of every tensor that an operation returns, but not the memory that a kernel uses internally.

    PyTorch's MemTracker finds the same peak, but it recognizes optimizer states only by hooks of `Optimizer.step`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0  # a clock that advances by one with every allocation and every release
        self.allocations: list[_Allocation] = []
        self.backwards: list[range] = []  # the moments of each backward
        self._by_storage = WeakIdKeyDictionary()
        self._firsts: dict[Any, tuple[Result, int, list[tuple[_Allocation, int, int]]]] = {}  # first updates by program

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if QuantizedWeight in types or DTensor in types:  # only their operations on plain tensors are recorded
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for value in filter(torch.is_tensor, tree_leaves(result)):
            self._allocation(value)
        return result

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """Replaces `UntypedStorage.resize_`, which frees weights, but is not dispatched."""
        _RESIZE(storage, size)
        old = self._by_storage.get(storage)
        if old is None:
            self._allocate(storage, storage.device)
        elif old.nbytes != storage.nbytes():
            self._release(old)
            new = self._allocate(storage, old.device)
            new.kind = WEIGHTS if old.kind == WEIGHTS else ""  # a streamed layer

    def label(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Sets the kind of the tensors' storages. Weights, states and buffers count from the beginning."""
        for tensor in tensors:
            for part in tensors_of(tensor):
                allocation = self._allocation(part)
                allocation.kind = kind
                if kind in (WEIGHTS, STATES, BUFFERS):
                    allocation.born = 0

    def label_unknown(self, kind: str, since: int) -> None:
        """Sets the kind of all live storages of unknown kind that were allocated at `since` or later."""
        for allocation in self.allocations:
            if allocation.born >= since and allocation.died is None and not allocation.kind:
                allocation.kind = kind

    def micro_batch(self, optimizer: FusedOptimizer, loss: Callable[[], Tensor], *, last: bool) -> None:
        """Records the forward and backward of a micro-batch. last: the optimizer steps after it."""
        forward = self.now
        with nullcontext() if last else optimizer.accumulate():
            value = loss()
            self.label_unknown(ACTIVATIONS, since=forward)
            backward = self.now
            optimizer.backward(value)
            del value
        if not last:
            self.label_unknown(GRADIENTS, since=backward)  # accumulated gradients
        self.backwards.append(range(backward, self.now + 1))

    def gradient(self, grad: Tensor) -> None:
        self.label([grad], GRADIENTS)

    def update(self, program: Program, tiles: StoredTiles, state: dict[str, Any]) -> Result:
        """Runs an update. With fake gradients, only the first update of a program runs. For other parameters, its
        storages are recorded again, unless it creates storages that stay, such as states of a third-party optimizer.
        """
        if not is_fake(tiles.grad):
            return super().update(program, tiles, state)
        key, start, count = (program, tiles.grad.dtype), self.now, len(self.allocations)
        if key in self._firsts:
            result, moments, freed = self._firsts[key]
            self.allocations += [replace(a, born=start + born, died=start + died) for a, born, died in freed]
            self.now += moments
            return result
        result = program.run(tiles, state)
        new = self.allocations[count:]
        freed = [(a, a.born - start, a.died - start) for a in new if a.died is not None]
        if sum(a.nbytes for a in new if a.died is None) <= 16 * program.members:  # the result
            self._firsts[key] = result, self.now - start, freed
        return result

    def changes(self, device: torch.device) -> tuple[Any, Counter[str]]:
        """Returns the change of memory at each moment, int64 [kinds on `device`, and the host; moments], and the bytes
        of all storages on the host by kind.
        """
        end = self.now + 1
        changes, on_host = np.zeros((len(KINDS) + 1, end + 1), dtype=np.int64), Counter[str]()
        for each in self.allocations:
            here = each.device.type == device.type
            stays = not here and each.died is None  # the memory of offloaded gradients
            kind = each.kind or (GRADIENTS if stays else TEMPORARIES)
            row = KINDS.index(kind) if here else -1
            changes[row, each.born] += each.nbytes
            changes[row, end if each.died is None else min(each.died, end)] -= each.nbytes  # it may be collected later
            if not here:
                on_host[kind] += each.nbytes
        return changes[:, :-1], on_host

    def _allocation(self, tensor: Tensor) -> _Allocation:
        storage = tensor.untyped_storage()
        allocation: _Allocation | None = self._by_storage.get(storage)
        if allocation is None:
            allocation = self._allocate(storage, tensor.device)  # the storage of a fake tensor is on "meta"
        return allocation

    def _allocate(self, storage: torch.UntypedStorage, device: torch.device) -> _Allocation:
        allocation = _Allocation(storage.nbytes(), device, self._tick())
        self._by_storage[storage] = allocation
        self.allocations.append(allocation)
        weakref.finalize(storage, self._release, allocation).atexit = False
        return allocation

    def _release(self, allocation: _Allocation) -> None:
        if allocation.died is None:  # not resized before
            allocation.died = self._tick()

    def _tick(self) -> int:
        self.now += 1
        return self.now


@dataclass(frozen=True)
class StepMemory:
    """Bytes of tensors at the peak of one training step, including all optimizer states."""

    items: dict[str, int]  # kind → bytes on the model's device
    during: str  # the part of the step with the peak
    host_peak: int  # bytes on the host, if the model is on a GPU
    on_host: Counter[str]  # kind → bytes of all storages on the host; of gradients, those that are offloaded
    largest_gradient: int
    # bytes of streamed weights and states: to the device, back, and to the device per micro-batch except the last
    copied: tuple[int, int, int] = (0, 0, 0)
    evaluation: int = 0  # bytes at the peak of an evaluation after the step; 0 without one

    @property
    def peak(self) -> int:
        return sum(self.items.values())

    @property
    def rest(self) -> int:
        """The bytes of weights, states, buffers and the batch, which stay between steps."""
        return sum(self.items[kind] for kind in (WEIGHTS, STATES, BUFFERS))

    def figures(self) -> dict[str, Any]:
        names = ("peak", "during", "host_peak", "items", "largest_gradient", "evaluation")
        return {name.removesuffix("_peak"): getattr(self, name) for name in names}


def step_memory(
    model: nn.Module,
    make_optimizer: Callable[[], FusedOptimizer],
    losses: Sequence[Callable[[], Tensor]],
    batch: Sequence[Tensor],
    others: Sequence[nn.Module] = (),
    evaluate: Callable[[], None] | None = None,
    steps: int = 1,
) -> StepMemory:
    """Records every tensor of an optimizer's first steps. Optimizer states count from the beginning.

    Args:
        model: in training mode, and sharded. Its parameters have no optimizer hooks yet.
        losses: one callable per micro-batch, which computes its loss.
        batch: tensors that exist during the whole step.
        others: models that are not trained, such as a reference model.
        evaluate: evaluates a batch after the steps.
        steps: 2 if the first step differs, as in DeepSpeed, which determines then which parameters to prefetch.
    """
    models = (model, *others)
    streamings = [streaming for each in models if (streaming := streaming_of(each)) is not None]
    tracker = _Tracker()
    tracker.label((shard_of(param).stored(param) for each in models for param in each.parameters()), WEIGHTS)
    tracker.label((param for streaming in streamings for param in streaming.owners), WEIGHTS)  # on the device
    tracker.label([*(buffer for each in models for buffer in each.buffers()), *batch], BUFFERS)
    tracker.now = 0
    fetched = list[int]()  # bytes of streamed weights up to the end of each micro-batch
    resizing = patch.object(torch.UntypedStorage, "resize_", lambda storage, size: tracker.resize(storage, size))
    with tracker, resizing:
        optimizer = make_optimizer()
        optimizer._updates.observer = tracker
        for number, loss in enumerate([*losses] * steps, start=1):
            tracker.micro_batch(optimizer, loss, last=number % len(losses) == 0)
            fetched.append(sum(streaming.fetched for streaming in streamings))
        tracker.label(_states(optimizer), STATES)
        end = tracker.now
        # the first layers are still on the device when the next step begins
        there = sum(unit.nbytes for streaming in streamings for unit in streaming.units[:2] if unit.present)
        again = fetched[1] - fetched[0] if len(losses) > 2 else 0
        copied = fetched[-1] - there, sum(streaming.written for streaming in streamings), again
        if evaluate is not None:
            evaluate()
    device = batch[0].device if batch else next(model.parameters()).device
    changes, on_host = tracker.changes(device)
    *live, host = changes.cumsum(axis=1)
    total = sum(live)
    peak = int(total[: end + 1].argmax())
    return StepMemory(
        items={kind: int(row[peak]) for kind, row in zip(KINDS, live, strict=True)},
        during="backward" if any(peak in moments for moments in tracker.backwards) else "forward",
        host_peak=int(host.max()),
        on_host=on_host,
        largest_gradient=max((each.nbytes for each in tracker.allocations if each.kind == GRADIENTS), default=0),
        copied=copied,
        evaluation=0 if evaluate is None else int(total[end:].max()),
    )


def _states(optimizer: FusedOptimizer) -> Iterable[Tensor]:
    """Returns the tensors of the optimizer's states, and other tensors that it keeps between steps."""
    extras = [list(record.extra.values()) for record in optimizer._records.values()]
    memories = [group.memory for group in optimizer._parameters.groups]
    return filter(torch.is_tensor, tree_leaves([list(optimizer.state.values()), extras, memories]))
