"""Patches functions of torch to raise an error where ordinary training loops would silently go wrong with lowmem.

Functions are wrapped once per process. They behave as before for parameters that no `FusedOptimizer` updates.
"""

import functools
import logging
import math
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves

from lowmem.errors import StepError
from lowmem.step import hooks
from lowmem.step.record import ParamRecord

logger = logging.getLogger(__name__)


@functools.cache
def watch() -> None:
    """Wraps `GradScaler.scale`, torch's functions that clip gradients, and reentrant checkpointing.

    Logs a warning if this version of torch does not have a function in the expected place.
    """
    for habit, wrap in (
        ("a loss that a GradScaler has scaled", _wrap_scaling),
        ("clip_grad_norm_() after backward", _wrap_clipping),
        ("reentrant activation checkpointing", _wrap_checkpointing),
    ):
        try:
            wrap()
        except (AttributeError, ValueError):
            logger.warning("lowmem does not know torch %s and will not detect %s", torch.__version__, habit)


def _wrap_scaling() -> None:
    scalers: list[Any] = [torch.amp.GradScaler, *torch.amp.GradScaler.__subclasses__()]
    for scaler in scalers:
        if "scale" in vars(scaler):
            scaler.scale = _watch_scaling(scaler.scale)


def _watch_scaling(scale: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(scale)
    def watched(self: torch.amp.GradScaler, outputs: Any) -> Any:
        if not self.is_enabled():
            return scale(self, outputs)
        several = isinstance(outputs, Iterable) and not isinstance(outputs, Tensor | list | tuple)
        scaled = scale(self, list(outputs) if several else outputs)
        for loss in tree_leaves(scaled):
            if loss.requires_grad:
                loss.register_hook(_raise_for_scaled)
        return scaled

    return watched


def _raise_for_scaled(grad: Tensor) -> None:
    """Raises `StepError` before the first update of a backward whose loss a `GradScaler` has scaled."""
    for _, record in hooks.reached():
        raise StepError(
            f"a GradScaler has scaled the loss, and its backward would update {record.name!r} with scaled gradients. "
            'Pass the unscaled loss and let the optimizer scale it: FusedOptimizer(..., loss_scale="dynamic") and '
            "opt.backward(loss), without scaler.step(opt) and scaler.update()"
        )


def _wrap_clipping() -> None:
    """Replaces clipping functions inside their `torch.no_grad()` decorator, because loops import them by name."""
    for function in (clip_grad.clip_grad_norm_, nn.utils.clip_grads_with_norm_, clip_grad.clip_grad_value_):
        cell = (function.__closure__ or ())[function.__code__.co_freevars.index("func")]
        cell.cell_contents = _watch_clipping(cell.cell_contents)


def _watch_clipping(clip: Callable[..., Any]) -> Callable[..., Any]:
    option = "clip_value" if "value" in clip.__name__ else "clip_norm"

    @functools.wraps(clip)
    def watched(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        limit = args[0] if args else kwargs.get("clip_value", kwargs.get("max_norm"))
        updated = {param: name for param in params if (name := hooks.name_of(param)) is not None}
        if updated and all(param.grad is None for param in updated):
            clips = limit != math.inf and f"Write FusedOptimizer(..., {option}={limit!r}), which clips exactly"
            raise StepError(
                f"{clip.__name__.lstrip('_')}(): parameter {next(iter(updated.values()))!r} has no gradient, because "
                f"backward has already used it, or stored it inside accumulate(). {clips or 'Omit this call'}. "
                "opt.last_step.grad_norm is the norm before clipping"
            )
        return clip(params or parameters, *args, **kwargs)

    return watched


_REENTRANT: "weakref.WeakSet[Any]" = weakref.WeakSet()  # nodes of reentrant checkpointing in existing graphs


def unmeasurable(loss: Tensor | None) -> str | None:
    """Returns the feature in the graph of a loss that does not allow a backward that only measures, or None."""
    donates = "torch._dynamo" in sys.modules and torch._functorch.config.donated_buffer
    ahead, seen = list[Any]([loss.grad_fn] if (_REENTRANT or donates) and loss is not None else []), set[Any]((None,))
    while ahead:
        if (node := ahead.pop()) not in seen:
            seen.add(node)
            ahead += [following for following, _ in node.next_functions]
    if not seen.isdisjoint(_REENTRANT):
        return "reentrant activation checkpointing"
    # in torch 2.13, _functorch/_aot_autograd/runtime_wrappers.py: its backward reuses memory of the graph
    compiled = donates and any(type(node).__name__ == "CompiledFunctionBackward" for node in seen)
    return "torch.compile" if compiled else None


def nests(records: Iterable[ParamRecord]) -> bool:
    """Returns whether the running backward will run nested backwards, which may update some of these parameters."""
    nested = any(map(torch._C._will_engine_execute_node, list(_REENTRANT)))
    return nested and any(record.trained and not record.reached for record in records)


def _wrap_checkpointing() -> None:
    forward = checkpoint.CheckpointFunction.forward

    def noted(ctx: Any, *args: Any) -> Any:
        _REENTRANT.add(ctx)
        return forward(ctx, *args)

    checkpoint.CheckpointFunction.forward = staticmethod(noted)  # type: ignore[method-assign]
