"""Hooks on parameters, which autograd calls when a gradient is complete. Each parameter has at most one optimizer.

Layers may offer contributions to a gradient during backward, to be computed as they are read.
"""

import functools
import gc
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from lowmem.errors import StepError
from lowmem.step.cycle import StepCycle
from lowmem.step.record import ParamRecord
from lowmem.tiles.gradients import Contribution, saves_memory

Offered = Sequence[Contribution]

# The hooks of all optimizers that exist and were not removed.
_LIVE: "weakref.WeakSet[Hooks]" = weakref.WeakSet()

_TWO_OPTIMIZERS = (
    "this backward reaches parameter {name!r} of another FusedOptimizer, which would update it too. To leave its "
    "parameters unchanged, write `with other.paused(): opt.backward(loss)`. To train both in one backward, create one "
    "optimizer whose param groups have different rules (groups=...)"
)


class _Running(dict[Tensor, list[Contribution]]):
    """The contributions of one backward, by parameter.

    Attributes:
        task: the graph task of the backward. Its thread may hold the contributions for a moment after it has failed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.task = torch._C._current_graph_task_id()

    def __call__(self) -> None: ...


class Offers:
    """The contributions that one optimizer has accepted in the running backward.

    Only autograd refers to them, by a callback at the end of the backward: a failed one leaves none, a nested one adds.
    """

    def __init__(self, cycle: StepCycle) -> None:
        self._cycle = cycle
        self._weak: Callable[[], _Running | None] = lambda: None

    def add(self, param: Tensor, contribution: Contribution) -> None:
        """Accepts a contribution to the gradient of a parameter."""
        if (running := self._running()) is None:
            running = _Running()
            self._weak = weakref.ref(running)
            torch.autograd.Variable._execution_engine.queue_callback(running)  # type: ignore[attr-defined]
        running.setdefault(param, []).append(contribution.copy())

    def take(self, param: Tensor) -> Offered:
        """Returns the contributions to the gradient of a parameter, and forgets them."""
        running = self._running()
        return [] if running is None else running.pop(param, [])

    def drop(self) -> None:
        """Forgets the contributions of a failed backward."""
        self._weak = lambda: None

    def _running(self) -> _Running | None:
        """The contributions of the running backward or of one around it, but not of a plain one that has failed."""
        running = self._weak()
        failed = running is not None and running.task != torch._C._current_graph_task_id() and self._cycle.idle
        return None if failed else running


class Hooks:
    """The hooks of one optimizer on its parameters, including frozen ones, which may be unfrozen later.

    They refer to the optimizer weakly. When it is garbage-collected, they are removed, and another optimizer may take
    its parameters. Autograd runs hooks on one thread per device, but only one of them updates at a time.

    Args:
        records: of all parameters of the optimizer.
        cycle: the life cycle of the step.
        update: the method of the optimizer that takes complete gradients: the record of a parameter, and contributions
            that are computed as they are read. The rest of the gradient is in `.grad`.

    Attributes:
        offers: contributions of layers in the running backward.
        paused: whether gradients are freed without an update.
        in_accumulate: whether the training loop is inside `FusedOptimizer.accumulate`.
        prepared: whether Accelerate has prepared the optimizer.
        removed: whether `remove` was called.
    """

    def __init__(
        self, records: Mapping[Tensor, ParamRecord], cycle: StepCycle, update: Callable[[ParamRecord, Offered], None]
    ) -> None:
        self._records, self._cycle, self._update = records, cycle, weakref.WeakMethod(update)
        self._handles: dict[Tensor, RemovableHandle] = {}
        self._lock = threading.RLock()
        self._backward: int | None = None  # the graph task of the last backward() of this optimizer
        self.offers = Offers(cycle)
        self.paused = self.in_accumulate = self.prepared = self.removed = False
        _LIVE.add(self)
        weakref.finalize(update.__self__, self._abandon).atexit = False  # type: ignore[attr-defined]

    @property
    def accumulating(self) -> bool:
        """True if the next backward is a micro-batch that does not complete its step."""
        return self.in_accumulate or self.postponed

    @property
    def postponed(self) -> bool:
        """True if a loop of Accelerate is in the middle of a step, where `step` and `zero_grad` do nothing.

        This holds only for prepared optimizers: the state of Accelerate belongs to the process, and outlives a loop.
        """
        state = sys.modules.get("accelerate.state") if self.prepared else None
        return state is not None and not state.GradientState().sync_gradients

    @contextmanager
    def during(self, **flags: bool) -> Iterator[None]:
        """Sets `paused` or `in_accumulate` inside the context."""
        outer = {name: getattr(self, name) for name in flags}
        vars(self).update(flags)
        try:
            yield
        finally:
            vars(self).update(outer)

    def add(self, record: ParamRecord) -> None:
        """Registers the hook of a parameter that has elements and can get a gradient, now or when it is unfrozen."""
        param = record.param
        if not record.span.numel or not param.is_floating_point() or param.is_inference():
            return
        requires_grad = param.requires_grad
        try:
            param.requires_grad_(True)  # torch registers hooks on no other tensors, but keeps them
            self._handles[param] = param.register_post_accumulate_grad_hook(functools.partial(self._fire, record))
        finally:
            param.requires_grad_(requires_grad)

    def _offer(self, record: ParamRecord, contribution: Contribution) -> bool:
        """See `offer`."""
        span, param = record.span, record.param
        sharded = span.held < span.numel  # all ranks decide alike, whatever their batches are
        saves = sharded or saves_memory(contribution.inputs.values(), span.numel * param.element_size())
        if not (record.computes and saves and record.reached) or has_other_hooks(param):
            return False
        with self._lock:
            if not self.paused:
                self.offers.add(param, contribution)
        return True

    def claim(self, record: ParamRecord) -> None:
        """Makes this optimizer the only one that updates a parameter. Raises `StepError` if another one does."""
        if _owner(record.param) not in (None, self):
            gc.collect()  # an unused optimizer may be part of a reference cycle, as it is with an LR scheduler
        if _owner(record.param) not in (None, self):
            raise StepError(
                f"parameter {record.name!r} is already updated by another FusedOptimizer, and would be updated twice. "
                "Call remove() on that optimizer first"
            )
        record.claimed = True

    def discard(self, record: ParamRecord) -> None:
        """Removes the hook of a parameter."""
        if (handle := self._handles.pop(record.param, None)) is not None:
            handle.remove()

    def remove(self) -> None:
        """Removes every hook."""
        self.removed = True
        for record in self._records.values():
            self.discard(record)
        _LIVE.discard(self)

    def _abandon(self) -> None:
        """Called when the optimizer is garbage-collected."""
        if not self.removed and not self._cycle.step and self._handles:
            warnings.warn(
                "a FusedOptimizer was deleted before its first step, and its hooks with it, so backward updates "
                "nothing. Keep a reference to it: opt = lowmem.FusedOptimizer(...)",
                stacklevel=2,
            )
        self.remove()

    def _fire(self, record: ParamRecord, param: Tensor) -> None:
        update = self._update()
        assert update is not None  # hooks are removed with their optimizer
        with self._lock:
            if self.paused:
                param.grad = None
            else:
                update(record, self.offers.take(param))

    def alone(self, loss: Tensor) -> AbstractContextManager[Any]:
        """Returns a context in which the backward of `loss` raises `StepError` before the first update if it reaches
        parameters of another optimizer that is not paused.
        """
        return nullcontext() if len(_LIVE) == 1 else loss.register_hook(self._refuse_others)

    def _refuse_others(self, _: Tensor) -> None:
        self._backward = torch._C._current_graph_task_id()
        for other, record in reached():
            if other is not self:
                raise StepError(_TWO_OPTIMIZERS.format(name=record.name))

    def require_single_optimizer(self, record: ParamRecord) -> None:
        """Raises `StepError` if the running backward belongs to another optimizer, or is a micro-batch of one optimizer
        and a complete step of another. record: of the first gradient.
        """
        if len(_LIVE) == 1:
            return
        backward = torch._C._current_graph_task_id()
        if any(other._backward == backward for other in _LIVE):  # fully_shard hid the parameter from `reached`
            raise StepError(_TWO_OPTIMIZERS.format(name=record.name))
        for other, reached_record in reached():
            if other.accumulating is not self.accumulating:
                raise StepError(
                    "this backward is a micro-batch for one FusedOptimizer but a complete step for another, which "
                    f"updates {reached_record.name!r}. Run it inside accumulate() of both, or create one optimizer "
                    "whose param groups have different rules (groups=...)"
                )


def has_other_hooks(param: Tensor) -> bool:
    """Returns whether the gradient of a parameter has hooks besides the hook of its optimizer. They take tensors."""
    return bool(param._backward_hooks) or len(param._post_accumulate_grad_hooks) > 1  # type: ignore[attr-defined]


def _owner(param: Tensor) -> Hooks | None:
    """Returns the hooks of the optimizer that updates a parameter."""
    for hooks in list(_LIVE):
        record = hooks._records.get(param)
        if record is not None and record.claimed and param in hooks._handles:
            return hooks
    return None


def name_of(param: Any) -> str | None:
    """Returns the name of a parameter in the optimizer that updates it, or None."""
    hooks = _owner(param)
    return None if hooks is None else hooks._records[param].name


def offer(param: Tensor, contribution: Contribution) -> bool:
    """Offers a contribution to the gradient of a parameter to the optimizer that updates it. Called during backward.

    Returns:
        Whether the optimizer has taken it. Otherwise the caller has to return the gradient to autograd as a tensor. An
        optimizer takes a contribution if its rule and placement read gradients block by block, if this saves memory,
        and if the backward ends in the hook of the parameter.
    """
    hooks = _owner(param)
    return hooks is not None and hooks._offer(hooks._records[param], contribution)


def reached() -> Iterator[tuple[Hooks, ParamRecord]]:
    """Yields the parameters that the running backward will update, with the hooks of their optimizer."""
    with _disable_current_modes():  # a dry run may be in progress beside an optimizer of real tensors
        for hooks in list(_LIVE):
            for record in () if hooks.paused else list(hooks._records.values()):
                if record.reached:
                    yield hooks, record
