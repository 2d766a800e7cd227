"""Lets `step()` use gradients that the training loop has written to `.grad`, as if a backward had computed them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowmem.errors import StepError
from lowmem.step.hooks import has_other_hooks
from lowmem.step.loop import StepLoop
from lowmem.step.record import ParamRecord


class _Loss(torch.autograd.Function):
    """A zero loss with given gradients, which hooks, policies and placements handle like any others."""

    @staticmethod
    def forward(ctx: Any, grads: Sequence[Tensor], leaf: Tensor, *params: Tensor) -> Tensor:
        ctx.grads = grads  # autograd copies a gradient that is referenced elsewhere
        return torch.zeros_like(leaf)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return None, None, *ctx.grads


def complete_step(loop: StepLoop, records: Sequence[ParamRecord]) -> None:
    """Completes a step with the gradients in `.grad` of `records`. If `records` is empty, completes the micro-batches.

    Raises:
        StepError: a gradient cannot be used.
    """
    for record in records:
        _refuse(record, scaled=loop.clipping.scaler.value is not None)
    loop.cycle.loop_steps = True
    params, grads = [record.param for record in records], [record.param.grad for record in records]
    for param in params:
        param.grad = None
    try:
        with torch.inference_mode(False), torch.enable_grad():
            leaf = torch.zeros((), device=next(iter(loop.records)).device, requires_grad=True)
            loop.backward(lambda: _Loss.apply(grads, leaf, *params), last=True)
    except BaseException:
        for param, grad in zip(params, grads, strict=True):
            if grad is not None and param.shape == grad.shape:  # unless ZeRO-3 has partitioned the parameter
                param.grad = grad
        raise


def _refuse(record: ParamRecord, scaled: bool) -> None:
    """Raises `StepError` if a step cannot use the gradient in `.grad`. scaled: the optimizer has a loss scale."""
    for wrong, reason in (
        (scaled, "it has not been multiplied by the loss scale: omit loss_scale, call opt.backward(loss)"),
        (not record.param.requires_grad, "the parameter is frozen: call requires_grad_() on it"),
        (has_other_hooks(record.param), "other hooks on the parameter would run once more: remove them"),
    ):
        if wrong:
            raise StepError(
                f"step() would update parameter {record.name!r} with the gradient in .grad, but {reason}, or set .grad "
                "to None before step()"
            )
