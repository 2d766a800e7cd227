"""The output head: the cross-entropy of logits of which one tile exists at a time.

Logits are the product of hidden states [tokens, hidden] and a weight [vocabulary, hidden]. Forward stores the
log-sum-exp of each token, and the gradient of its hidden state up to a factor, which it sums in the same pass. The
gradient of rows of the weight depends only on those rows, the hidden states and the log-sum-exps. It is computed when
the optimizer reads it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lowmem.errors import ConfigError, UnsupportedError
from lowmem.layers.autocast import autocast, autocast_dtype
from lowmem.layers.head_gradient import HeadGradient
from lowmem.layers.head_tiles import Head, add_product, find_labels
from lowmem.step import hooks
from lowmem.tiles.gradients import ComputedGradient
from lowmem.tiles.layout import block_starts
from lowmem.tiles.quantized import plain, rows_of

__all__ = ["METRICS", "Gather", "Head", "linear_cross_entropy", "token_losses"]

# Metrics of a token, without a gradient: the entropy of its distribution p; log(Σ p²); the mean of its logits; whether
# its label has the largest logit.
METRICS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")

# Returns a context in which weight and bias are complete.
Gather = Callable[[], AbstractContextManager[Any]]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    num_items: int | Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Computes the cross-entropy of `hidden @ weight.T + bias` with `labels`, one tile of logits at a time.

    If a `FusedOptimizer` updates `weight` on one device by a rule of lowmem, the full gradient of `weight` is never
    materialized: the optimizer computes it as it reads it.

    Args:
        hidden: [..., size], float32 or 16-bit.
        weight: [vocabulary, size].
        labels: [...], integers, not shifted. Tokens whose label is `ignore_index` have loss 0.
        bias: [vocabulary].
        reduction: "mean" over the tokens that are not ignored, "sum", or "none".
        num_items: divides the sum instead of the number of tokens: the number over all micro-batches and ranks.
        options: options of `Head`, such as `softcap`, `label_smoothing` and `memory`.

    Returns:
        A float32 scalar, or [...] without reduction.

    Raises:
        ConfigError: a value is out of range, or `memory` is not enough for one row.
        IndexError: on a CPU, a label that is neither `ignore_index` nor the number of a row; a GPU stops with an
            assertion, as in `torch.nn.functional.cross_entropy`.
        UnsupportedError: in a backward with `create_graph=True`.
    """
    head = Head(**options)
    if reduction not in ("mean", "sum", "none"):
        raise ConfigError(f"reduction={reduction!r}; allowed are 'mean', 'sum' and 'none'")
    counted = labels != ignore_index
    targets = labels.masked_fill(~counted, 0).reshape(-1)
    losses, *_ = token_losses(hidden.reshape(-1, hidden.shape[-1]), weight, bias, targets, head)
    losses = losses.view(labels.shape).masked_fill(~counted, 0.0)
    if reduction == "none":
        return losses
    if reduction == "sum" and num_items is None:
        return losses.sum()
    return losses.sum() / (counted.sum().clamp(min=1) if num_items is None else num_items)


@dataclass(frozen=True)
class _Options:
    """Arguments of `_TokenLosses` that are not tensors. dtype: of products.  learns: hidden states need a gradient."""

    head: Head
    metrics: Sequence[str]
    gather: Gather
    dtype: torch.dtype
    learns: bool


@torch.compiler.disable  # type: ignore[untyped-decorator]
def token_losses(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    head: Head,
    metrics: Sequence[str] = (),
    gather: Gather = nullcontext,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Computes the loss of each token.

    Args:
        hidden: [tokens, size].  weight: [vocabulary, size].  bias: [vocabulary].
        targets: integers [tokens], the label of each token.
        metrics: names of `METRICS`.
        gather: returns a context in which weight and bias are complete.

    Returns:
        The losses and the log-sum-exps of the logits, float32 [tokens], and the metrics, each [tokens].
    """
    learns = torch.is_grad_enabled() and hidden.requires_grad
    # only CUDA has 16-bit products that return float32
    dtype = (autocast_dtype(hidden.device) or hidden.dtype) if hidden.device.type == "cuda" else torch.float32
    losses, log_sums, *values = _TokenLosses.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, _Options(head, metrics, gather, dtype, learns)
    )
    return losses, log_sums, dict(zip(metrics, values, strict=True))


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: _Options
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        tokens, size = hidden.shape
        results = {
            name: hidden.new_empty(tokens, dtype=torch.bool if name == "is_top1" else torch.float32)
            for name in ("losses", "log_sums", *options.metrics)
        }
        if options.learns:
            results["directions"] = torch.empty_like(hidden)
        with options.gather(), autocast(hidden.device, None):
            targets = _checked(targets, len(weight))
            step, rows = options.head.tile(tokens, len(weight), size, hidden.device)
            for start in block_starts(tokens, step, hidden):
                part = slice(start, start + step)
                scanned = _scan(hidden[part].to(options.dtype), weight, bias, targets[part], rows, options)
                for name, result in results.items():
                    result[part] = scanned[name]
                del scanned  # before the sums of the next tokens are allocated
        directions, losses, log_sums = results.pop("directions", None), results["losses"], results["log_sums"]
        ctx.save_for_backward(hidden, weight, bias, targets, losses, log_sums, directions)
        ctx.options = options
        ctx.mark_non_differentiable(*(results[name] for name in options.metrics))
        return tuple(results.values())

    @staticmethod
    def backward(ctx: Any, of_losses: Tensor | None, of_log_sums: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, losses, log_sums, directions = ctx.saved_tensors
        head, gather = ctx.options.head, ctx.options.gather
        grad_hidden = grad_weight = grad_bias = None
        if of_losses is None and of_log_sums is None:
            return None, None, None, None, None
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "create_graph=True: the tiled head does not support second derivatives. Compute the loss from all "
                "logits: torch.nn.functional.cross_entropy(hidden @ weight.T, labels)"
            )
        of_targets = torch.zeros_like(log_sums) if of_losses is None else of_losses.float()
        grad = of_targets if of_log_sums is None else of_targets + of_log_sums
        if ctx.needs_input_grad[0]:
            grad_hidden = torch.mul(directions, grad[:, None], out=torch.empty_like(hidden))
            if of_log_sums is not None:  # directions depend on the logit of the label, and log-sum-exps do not
                slope = of_log_sums * head.slope_at(log_sums - losses)
                with gather():
                    grad_hidden += rows_of(weight, targets) * slope[:, None].to(hidden.dtype)
        del directions
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            with gather():
                full = weight.detach()
                part = HeadGradient(hidden, full, bias, targets, log_sums, grad, of_targets, head, ctx.options.dtype)
                if ctx.needs_input_grad[1] and not hooks.offer(weight, part):
                    grad_weight = ComputedGradient(full.shape, full.device, [part]).dense(full.dtype)
                if ctx.needs_input_grad[2]:
                    grad_bias = part.of_bias().to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None


def _scan(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, rows: int, options: _Options
) -> dict[str, Tensor]:
    """Computes the losses of some tokens in one pass over the vocabulary, `rows` rows at a time.

    Exponentials are relative to the largest logit so far. When a larger one comes, sums shrink, as in flash attention.

    Args:
        hidden: [tokens, size], in the dtype of products.  weight: [vocabulary, size].  bias: [vocabulary].
        targets: int64 [tokens].

    Returns:
        "losses" and "log_sums", float32 [tokens]; `METRICS`, [tokens] each, of which those that `options` does not name
        have no meaning; and "directions", float32 [tokens, size], if hidden states learn: the gradient of each loss
        with respect to the hidden state of its token.
    """
    head, metrics, smoothing = options.head, options.metrics, options.head.label_smoothing
    zeros = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
    largest = torch.full_like(zeros, torch.finfo(zeros.dtype).min)  # finite, to which −inf can be compared
    top_row = torch.zeros_like(targets)
    label = label_slope = zeros  # the logit of the label, and the derivative of tanh there
    sum_z = sum_exp = sum_exp_z = sum_squares = zeros  # of z, of e = exp(z − largest), of e · z and e²
    # sums of rows of the weight, times e or times 1
    weighted = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device) if options.learns else None
    unweighted = torch.zeros_like(weighted) if weighted is not None and smoothing else None
    for first in block_starts(len(weight), rows, hidden):
        part = slice(first, first + rows)
        block = plain(weight[part]).to(hidden.dtype)
        z, slope = head.logits(hidden, block, None if bias is None else bias[part])
        here, at = find_labels(targets, first, len(block))
        label = torch.where(here, z.gather(1, at)[:, 0], label)
        if slope is not None:
            label_slope = torch.where(here, slope.gather(1, at)[:, 0], label_slope)
        if smoothing or "mean_logits" in metrics:
            sum_z = sum_z + z.sum(-1)
        top, index = z.max(-1)
        if "is_top1" in metrics:
            top_row = torch.where(top > largest, index + first, top_row)
        before, largest = largest, torch.maximum(largest, top)
        shrink = (before - largest).exp_()
        if "entropy" in metrics:
            e = (z - largest[:, None]).exp_()
            sum_exp_z = sum_exp_z * shrink + z.mul_(e).sum(-1)
        else:
            e = z.sub_(largest[:, None]).exp_()
        del z
        sum_exp = sum_exp * shrink + e.sum(-1)
        if "log_sum_sq_probs" in metrics:
            sum_squares = sum_squares * shrink.square() + e.square().sum(-1)
        if weighted is not None:
            weighted.mul_(shrink[:, None])
            e = e if slope is None else e.mul_(slope)
            add_product(weighted, e.to(block.dtype), block)
        if unweighted is not None:
            if slope is None:
                unweighted += block.sum(0, dtype=torch.float32)
            else:
                add_product(unweighted, slope.to(block.dtype), block)
        del e, slope, block  # before the next tile is allocated
    log_sums = largest + sum_exp.log()
    losses = log_sums - (1 - smoothing) * label
    if smoothing:
        losses = losses - smoothing / len(weight) * sum_z
    if weighted is not None:
        weighted.mul_((1 / sum_exp)[:, None])
        slope_there = torch.ones_like(sum_exp) if head.softcap is None else label_slope
        weighted.addcmul_(rows_of(weight, targets), slope_there[:, None], value=smoothing - 1)
        if unweighted is not None:
            weighted.add_(unweighted, alpha=-smoothing / len(weight))
        weighted.mul_(head.slope)
    results = {
        "losses": losses,
        "log_sums": log_sums,
        "entropy": log_sums - sum_exp_z / sum_exp,
        "log_sum_sq_probs": sum_squares.log() - 2 * sum_exp.log(),
        "mean_logits": sum_z / len(weight),
        "is_top1": top_row == targets,
    }
    return results if weighted is None else {**results, "directions": weighted}


def _checked(targets: Tensor, vocabulary: int) -> Tensor:
    """Returns labels as int64. Raises `IndexError` for one that is not the number of a row, without a device sync."""
    try:
        targets.new_zeros(()).expand(vocabulary).index_select(0, targets)
    except IndexError:
        raise IndexError(f"a label is neither in [0, {vocabulary}) nor ignore_index") from None
    return targets.long()
