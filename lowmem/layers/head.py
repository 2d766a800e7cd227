"""The output head: computes the cross-entropy with one tile of logits in memory at a time.

Logits are the product of hidden states [tokens, hidden] and a weight [vocabulary, hidden]. Forward processes some
tokens at a time, and stores the log-sum-exp of each token and the gradient of its hidden state up to a factor. The
gradient of a weight row depends only on that row, hidden states and log-sum-exps, so backward also works with tiles.
"""

from collections.abc import Collection, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lowmem.errors import ConfigError, UnsupportedError
from lowmem.layers.autocast import autocast, autocast_dtype
from lowmem.layers.head_tiles import Head, HeadTile, add_product
from lowmem.layers.tied import record_head_gradient
from lowmem.placements.zero3 import gathered
from lowmem.tiles.layout import block_starts
from lowmem.tiles.quantized import rows_of

__all__ = ["METRICS", "Head", "linear_cross_entropy", "token_losses"]

# Metrics of a token, without gradients: the entropy of its distribution p, log(Σ p²), the mean of its logits, and
# whether its label has the largest logit.
METRICS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


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

    Args:
        hidden: [..., size], float32 or 16-bit.
        weight: [vocabulary, size].
        labels: [...], integers, not shifted. The loss of tokens with the label `ignore_index` is 0.
        bias: [vocabulary].
        reduction: "mean" over the tokens that are not ignored, "sum", or "none".
        num_items: if set, divides the sum: the number of tokens over all micro-batches and ranks.
        options: options of `Head`, such as `softcap`, `label_smoothing` and `memory`.

    Returns:
        A float32 scalar, or [...] without reduction.

    Raises:
        ConfigError: a value is out of range, or `memory` is not enough for one row.
        IndexError: on a CPU, if a label is neither `ignore_index` nor the index of a row. A GPU stops with an
            assertion, as in `torch.nn.functional.cross_entropy`.
        UnsupportedError: in a backward with `create_graph=True`.
    """
    head = Head(**options)
    if reduction not in ("mean", "sum", "none"):
        raise ConfigError(f"reduction={reduction!r} is not valid. Expected 'mean', 'sum' or 'none'")
    if reduction == "none" and num_items is not None:
        raise ConfigError("reduction='none' does not divide the losses, so num_items has no effect. Omit it")
    counted = labels != ignore_index
    targets = labels.masked_fill(~counted, 0).reshape(-1)
    losses, *_ = token_losses(hidden.reshape(-1, hidden.shape[-1]), weight, bias, targets, head)
    losses = losses.view(labels.shape).masked_fill(~counted, 0.0)
    if reduction == "none":
        return losses
    if reduction == "sum" and num_items is None:
        return losses.sum()
    return losses.sum() / (counted.sum().clamp(min=1) if num_items is None else num_items)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def token_losses(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    head: Head,
    metrics: Sequence[str] = (),
    caches_probabilities: bool = False,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Computes the loss of each token.

    Args:
        hidden: [tokens, size].
        weight, bias: [vocabulary, size] and [vocabulary]. Under ZeRO-3 the caller has gathered them, and backward
            gathers them again.
        targets: integers [tokens], the label of each token.
        metrics: names of `METRICS`.
        caches_probabilities: store the probabilities if they fit into half of the head's memory, so that backward does
            not recompute logits for the gradient of the weight.

    Returns:
        The losses and the log-sum-exps of the logits, float32 [tokens], and the metrics, each [tokens].
    """
    if not torch.is_grad_enabled():
        hidden = hidden.detach()
    losses, log_sums, *values = _TokenLosses.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, head, metrics, caches_probabilities
    )
    return losses, log_sums, dict(zip(metrics, values, strict=True))


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: Head,
        metrics: Sequence[str],
        caches_probabilities: bool,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.head = head
        if hidden.device.type != "cpu":
            dtype = autocast_dtype(hidden.device) or hidden.dtype
        else:  # a CPU, where float16 products are slow
            dtype = torch.bfloat16 if hidden.dtype == weight.dtype == torch.bfloat16 else torch.float32
        ctx.dtype = dtype
        tokens, vocabulary = len(hidden), len(weight)
        probabilities = None
        results = {
            name: hidden.new_empty(tokens, dtype=torch.bool if name == "is_top1" else torch.float32)
            for name in ("losses", "log_sums", *metrics)
        }
        if ctx.needs_input_grad[0]:
            results["directions"] = torch.empty_like(hidden)
        with autocast(hidden.device, None):
            tile = HeadTile(head, weight, bias, dtype, 0, vocabulary)
            targets = _checked(targets, vocabulary)
            caches = caches_probabilities and ctx.needs_input_grad[0] and ctx.needs_input_grad[1]
            caches &= bias is None and dtype == weight.dtype != torch.float16
            nbytes = tokens * vocabulary * weight.dtype.itemsize
            if caches and 2 * nbytes <= head.available(hidden.device):
                probabilities = hidden.new_empty(tokens, vocabulary, dtype=weight.dtype)
            step = tile.tokens(in_use=0 if probabilities is None else nbytes)
            for start in block_starts(tokens, step, hidden):
                part = slice(start, start + step)
                out = None if probabilities is None else probabilities[part]
                scanned = _scan(tile, hidden[part].to(dtype), targets[part], results.keys(), out)
                for name, result in results.items():
                    result[part] = scanned[name]
        directions = results.pop("directions", None)
        ctx.save_for_backward(
            hidden, weight, bias, targets, results["losses"], results["log_sums"], directions, probabilities
        )
        ctx.mark_non_differentiable(*(results[name] for name in metrics))
        return tuple(results.values())

    @staticmethod
    def backward(
        ctx: Any, grad_losses: Tensor | None, grad_log_sums: Tensor | None, *_: Any
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, losses, log_sums, directions, probabilities = ctx.saved_tensors
        head = ctx.head
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_hidden = grad_weight = grad_bias = None
        if grad_losses is None and grad_log_sums is None:
            return (None,) * 7
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "create_graph=True: the tiled head does not support second derivatives. Compute the loss from all "
                "logits: torch.nn.functional.cross_entropy(hidden @ weight.T, labels)"
            )
        grad_targets = torch.zeros_like(log_sums) if grad_losses is None else grad_losses.float()
        grad = grad_targets if grad_log_sums is None else grad_targets + grad_log_sums
        if needs_hidden:
            grad_hidden = torch.mul(directions, grad[:, None], out=torch.empty_like(hidden))
            if grad_log_sums is not None:  # directions include the gradient of the label's logit, log-sum-exps do not
                assert not head.label_smoothing  # directions would also include other logits
                slope = grad_log_sums * head.slope_at(log_sums - losses)
                with gathered(weight, bias):
                    grad_hidden += rows_of(weight, targets) * slope[:, None].to(hidden.dtype)
        del directions
        if probabilities is not None and grad_log_sums is None:
            with autocast(hidden.device, None):
                grad_weight = probabilities.t() @ (hidden * grad[:, None]).to(probabilities.dtype)
        elif needs_weight or needs_bias:
            del probabilities
            with gathered(weight, bias), autocast(hidden.device, None):
                tile = HeadTile(head, weight, bias, ctx.dtype, 0, len(weight))
                grad_weight, grad_bias = _parameter_gradients(
                    tile, hidden, targets, log_sums, grad, grad_targets, needs_weight, needs_bias
                )
        if grad_weight is not None:
            record_head_gradient(weight, grad_weight)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _scan(
    head: HeadTile, hidden: Tensor, targets: Tensor, names: Collection[str], out: Tensor | None
) -> dict[str, Tensor]:
    """Computes the losses of some tokens from all of their logits.

    Args:
        head: the tile of all rows.
        hidden: [tokens, size], in the dtype of products.
        targets: int64 [tokens].
        names: names of the results to compute.
        out: output for the gradient of each loss with respect to its token's products, [tokens, vocabulary].

    Returns:
        "losses" and "log_sums", float32 [tokens]; the metrics, each [tokens]; and "directions" [tokens, size], the
        gradient of each loss with respect to its token's hidden state.
    """
    smoothing = head.options.label_smoothing
    z, slope = head.logits(hidden)
    results = {}
    label = z.gather(1, targets[:, None])[:, 0]
    largest, top_row = z.max(-1)
    if smoothing or "mean_logits" in names:
        results["mean_logits"] = z.mean(-1)
    if "is_top1" in names:
        results["is_top1"] = top_row == targets
    if "entropy" in names:
        e = (z - largest[:, None]).exp_()
        sum_exp_z = z.mul_(e).sum(-1)
    else:
        e = z.sub_(largest[:, None]).exp_()
    del z
    sum_exp = e.sum(-1)
    log_sums = results["log_sums"] = largest + sum_exp.log()
    results["losses"] = log_sums - (1 - smoothing) * label
    if smoothing:
        results["losses"] -= smoothing * results["mean_logits"]
    if "entropy" in names:
        results["entropy"] = log_sums - sum_exp_z / sum_exp
    if "log_sum_sq_probs" in names:
        results["log_sum_sq_probs"] = e.square().sum(-1).log() - 2 * sum_exp.log()
    if "directions" in names:
        scale = 1024.0 if hidden.dtype == torch.float16 else 1.0  # small probabilities would underflow in float16
        grads = torch.full_like(sum_exp, scale)
        grad_products = head.grad_products(e.mul_((1 / sum_exp)[:, None]), slope, grads, grads, targets)
        factors = grad_products.to(hidden.dtype) if out is None else out.copy_(grad_products)
        del e, slope, grad_products
        results["directions"] = head.times(factors) / scale
    return results


def _parameter_gradients(
    head: HeadTile,
    hidden: Tensor,
    targets: Tensor,
    log_sums: Tensor,
    grad: Tensor,
    grad_targets: Tensor,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Computes the gradients of the weight and the bias if they are needed. Sums are in float32 and are rounded once.

    Args:
        head: the tile of all rows.
        hidden: [tokens, size].
        targets: int64 [tokens].
        log_sums: log-sum-exp of each token's logits, float32 [tokens].
        grad, grad_targets: see `HeadTile.grad_products`.
    """
    weight, bias = head.weight, head.bias
    grad_weight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device) if needs_weight else None
    bias_sums = torch.zeros(len(weight) if needs_bias else 0, dtype=torch.float32, device=weight.device)
    token_step, row_step = head.shape(len(hidden))
    for start in block_starts(len(weight), row_step, weight):
        rows = slice(start, start + row_step)
        tile = head.rows(rows)
        sums = torch.zeros(tile.weight.shape if needs_weight else 0, dtype=torch.float32, device=weight.device)
        for first in range(0, len(hidden), token_step):
            tokens = slice(first, first + token_step)
            part = hidden[tokens].to(head.dtype)
            z, slope = tile.logits(part)
            p = z.sub_(log_sums[tokens, None]).exp_()
            del z
            grad_products = tile.grad_products(p, slope, grad[tokens], grad_targets[tokens], targets[tokens])
            if needs_weight:
                add_product(sums, grad_products.t(), part)
            if needs_bias:
                bias_sums[rows] += grad_products.sum(0)
        if grad_weight is not None:
            grad_weight[rows] = sums
    return grad_weight, bias_sums.to(bias.dtype) if bias is not None and needs_bias else None


def _checked(targets: Tensor, vocabulary: int) -> Tensor:
    """Returns labels as int64. Raises `IndexError` if one is out of range, without a device sync."""
    try:
        targets.new_zeros(()).expand(vocabulary).index_select(0, targets)
    except IndexError:
        raise IndexError(f"a label is neither in [0, {vocabulary}) nor ignore_index") from None
    return targets.long()
