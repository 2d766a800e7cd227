"""Hooks on parameters, which autograd calls when a gradient is complete. Each parameter has at most one optimizer."""

import contextvars
import functools
import gc
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from lowmem.errors import StepError
from lowmem.step.cycle import StepCycle
from lowmem.step.record import ParamRecord

# The hooks of all optimizers that exist and were not removed.
_LIVE: "weakref.WeakSet[Hooks]" = weakref.WeakSet()

_TWO_OPTIMIZERS = (
    "this backward reaches parameter {name!r} of another FusedOptimizer, which would update it too. To leave its "
    "parameters unchanged, write `with other.paused(): opt.backward(loss)`. To train both in one backward, create one "
    "optimizer whose param groups have different rules (groups=...)"
)


class Caller:
    """The training thread and its context variables, which autograd's threads do not inherit. Since torch 2.12 they
    include the settings of `torch.compile` (utils/_config_module.py), which affect optimizers that compile their step.
    """

    def __init__(self) -> None:
        self.note()

    def note(self) -> None:
        """Records the current thread and its context variables."""
        self._thread, self._context = threading.get_ident(), contextvars.copy_context()

    def run(self, function: Callable[..., None], *args: Any) -> None:
        """Calls a function with the context variables of the recorded thread."""
        if threading.get_ident() == self._thread:
            function(*args)
        else:
            self._context.copy().run(function, *args)


class Hooks:
    """The hooks of one optimizer on its parameters, including frozen ones, which may be unfrozen later.

    They refer to the optimizer's loop weakly. When it is garbage-collected, they are removed, and another optimizer may
    take its parameters. Autograd runs hooks on one thread per device, but only one of them updates at a time.

    Args:
        records: the records of all parameters of the optimizer.
        cycle: the life cycle of the step.

    Attributes:
        caller: the thread that created the optimizer, or the last one that called `backward` or `step`.
        paused: whether gradients are freed without an update.
        in_accumulate: whether the training loop is inside `FusedOptimizer.accumulate`.
        prepared: whether Accelerate has prepared the optimizer.
        removed: whether `remove` was called.
    """

    def __init__(self, records: Mapping[Tensor, ParamRecord], cycle: StepCycle) -> None:
        self._records, self._cycle = records, cycle
        self._handles: dict[Tensor, RemovableHandle] = {}
        self._lock = threading.RLock()
        self.caller = Caller()
        self._backward: int | None = None  # the graph task of the last backward() of this optimizer
        self.paused = self.in_accumulate = self.prepared = self.removed = False
        _LIVE.add(self)

    def connect(self, arrived: Callable[[ParamRecord], None]) -> None:
        """Sets the method of the loop that takes a record when the gradient in its parameter's `.grad` is complete."""
        self._arrived = weakref.WeakMethod(arrived)
        weakref.finalize(arrived.__self__, self._abandon).atexit = False  # type: ignore[attr-defined]

    @property
    def accumulating(self) -> bool:
        """True if the next backward is a micro-batch that does not complete its step."""
        return self.in_accumulate or self.postponed

    @property
    def postponed(self) -> bool:
        """True if Accelerate is accumulating gradients in the middle of a step, so `step` and `zero_grad` do nothing.

        It is False for optimizers that are not prepared: Accelerate's state is global, and outlives a training loop.
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
            param.requires_grad_(True)  # torch registers hooks only on tensors that require gradients, but keeps them
            self._handles[param] = param.register_post_accumulate_grad_hook(functools.partial(self._fire, record))
        finally:
            param.requires_grad_(requires_grad)

    def own(self, record: ParamRecord) -> None:
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
        arrived = self._arrived()
        assert arrived is not None  # hooks are removed with their optimizer
        with self._lock:
            if self.paused:
                param.grad = None
            else:
                self.caller.run(arrived, record)

    def alone(self, loss: Tensor) -> AbstractContextManager[Any]:
        """Returns a context in which the backward of `loss` raises `StepError` before the first update if it reaches
        parameters of another optimizer that is not paused.
        """
        return nullcontext() if len(_LIVE) == 1 else loss.register_hook(self._raise_for_others)

    def _raise_for_others(self, _: Tensor) -> None:
        self._backward = torch._C._current_graph_task_id()
        for other, record in reached():
            if other is not self:
                raise StepError(_TWO_OPTIMIZERS.format(name=record.name))

    def require_single_optimizer(self, record: ParamRecord) -> None:
        """Raises `StepError` if the running backward belongs to another optimizer, or is a micro-batch of one optimizer
        and a complete step of another. record: the parameter with the first gradient.
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
    """Returns whether the gradient of a parameter has hooks besides the hook of its optimizer."""
    return bool(param._backward_hooks) or len(param._post_accumulate_grad_hooks) > 1  # type: ignore[attr-defined]


def _owner(param: Tensor) -> Hooks | None:
    """Returns the hooks of the optimizer that updates a parameter."""
    for hooks in list(_LIVE):
        record = hooks._records.get(param)
        if record is not None and record.claimed and param in hooks._handles:
            return hooks
    return None


def is_hooked(param: Tensor) -> bool:
    """Returns whether the parameter belongs to an optimizer, which updates it unless it is frozen."""
    return any(param in hooks._handles for hooks in list(_LIVE))


def name_of(param: Any) -> str | None:
    """Returns the name of a parameter in the optimizer that updates it, or None."""
    hooks = _owner(param)
    return None if hooks is None else hooks._records[param].name


def reached() -> Iterator[tuple[Hooks, ParamRecord]]:
    """Yields the parameters that the running backward will update, with the hooks of their optimizer."""
    with _disable_current_modes():  # a dry run may run next to an optimizer with real tensors
        for hooks in list(_LIVE):
            for record in () if hooks.paused else list(hooks._records.values()):
                if record.reached:
                    yield hooks, record
