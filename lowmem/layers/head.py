"""The output head: computes the cross-entropy with one tile of logits in memory at a time.

Logits are the product of hidden states [tokens, hidden] and a weight [vocabulary, hidden]. Forward processes some
tokens at a time, and stores the log-sum-exp of each token and the gradient of its hidden state up to a factor. The
gradient of a weight row depends only on that row, hidden states and log-sum-exps, so backward also works with tiles.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lowmem.errors import ConfigError, UnsupportedError
from lowmem.layers.autocast import autocast, autocast_dtype
from lowmem.layers.head_tiles import Head, add_product
from lowmem.layers.tied import record_head_gradient
from lowmem.tiles.layout import block_starts
from lowmem.tiles.quantized import plain, rows_of

__all__ = ["METRICS", "Gather", "Head", "linear_cross_entropy", "token_losses"]

# Metrics of a token, without gradients: the entropy of its distribution p, log(Σ p²), the mean of its logits, and
# whether its label has the largest logit.
METRICS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")

# Returns a context in which the weight and the bias are gathered.
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


@dataclass(frozen=True)
class _Options:
    """Arguments of `_TokenLosses` that are not tensors, because `Function.apply` does not take keyword arguments."""

    head: Head
    metrics: Sequence[str]
    gather: Gather
    dtype: torch.dtype  # of the operands of products
    needs_hidden_grad: bool
    caches_probabilities: bool  # see `token_losses`


@torch.compiler.disable  # type: ignore[untyped-decorator]
def token_losses(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    head: Head,
    metrics: Sequence[str] = (),
    gather: Gather = nullcontext,
    caches_probabilities: bool = False,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Computes the loss of each token.

    Args:
        hidden: [tokens, size].
        weight, bias: [vocabulary, size] and [vocabulary].
        targets: integers [tokens], the label of each token.
        metrics: names of `METRICS`.
        gather: returns a context in which the weight and the bias are gathered, for backward. During this call they are
            already gathered.
        caches_probabilities: store the probabilities if they fit into half of the head's memory, so that backward does
            not recompute logits for the gradient of the weight.

    Returns:
        The losses and the log-sum-exps of the logits, float32 [tokens], and the metrics, each [tokens].
    """
    needs_hidden_grad = torch.is_grad_enabled() and hidden.requires_grad
    if hidden.device.type != "cpu":
        dtype = autocast_dtype(hidden.device) or hidden.dtype
    else:  # a CPU, where float16 products are slow
        dtype = torch.bfloat16 if hidden.dtype == weight.dtype == torch.bfloat16 else torch.float32
    losses, log_sums, *values = _TokenLosses.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, _Options(head, metrics, gather, dtype, needs_hidden_grad, caches_probabilities)
    )
    return losses, log_sums, dict(zip(metrics, values, strict=True))


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: _Options
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        tokens, size = hidden.shape
        head = options.head
        probabilities = None
        results = {
            name: hidden.new_empty(tokens, dtype=torch.bool if name == "is_top1" else torch.float32)
            for name in ("losses", "log_sums", *options.metrics)
        }
        if options.needs_hidden_grad:
            results["directions"] = torch.empty_like(hidden)
        with autocast(hidden.device, None):
            rows = len(weight)
            targets = _checked(targets, rows)
            caches = options.caches_probabilities and options.needs_hidden_grad and weight.requires_grad
            caches &= bias is None and options.dtype == weight.dtype != torch.float16
            nbytes = tokens * rows * weight.dtype.itemsize
            if caches and 2 * nbytes <= head.available(hidden.device):
                probabilities = hidden.new_empty(tokens, rows, dtype=weight.dtype)
            step = head.tokens(rows, size, hidden.device, in_use=0 if probabilities is None else nbytes)
            for start in block_starts(tokens, step, hidden):
                part = slice(start, start + step)
                out = None if probabilities is None else probabilities[part]
                scanned = _scan(hidden[part].to(options.dtype), weight, bias, targets[part], options, out)
                for name, result in results.items():
                    result[part] = scanned[name]
        directions = results.pop("directions", None)
        ctx.save_for_backward(
            hidden, weight, bias, targets, results["losses"], results["log_sums"], directions, probabilities
        )
        ctx.options = options
        ctx.mark_non_differentiable(*(results[name] for name in options.metrics))
        return tuple(results.values())

    @staticmethod
    def backward(
        ctx: Any, grad_losses: Tensor | None, grad_log_sums: Tensor | None, *_: Any
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, losses, log_sums, directions, probabilities = ctx.saved_tensors
        head = ctx.options.head
        gather = ctx.options.gather
        grad_hidden = grad_weight = grad_bias = None
        if grad_losses is None and grad_log_sums is None:
            return None, None, None, None, None
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "create_graph=True: the tiled head does not support second derivatives. Compute the loss from all "
                "logits: torch.nn.functional.cross_entropy(hidden @ weight.T, labels)"
            )
        grad_targets = torch.zeros_like(log_sums) if grad_losses is None else grad_losses.float()
        grad = grad_targets if grad_log_sums is None else grad_targets + grad_log_sums
        if ctx.needs_input_grad[0]:
            grad_hidden = torch.mul(directions, grad[:, None], out=torch.empty_like(hidden))
            if grad_log_sums is not None:  # directions include the gradient of the label's logit, log-sum-exps do not
                assert not head.label_smoothing  # directions would also include other logits
                slope = grad_log_sums * head.slope_at(log_sums - losses)
                with gather():
                    grad_hidden += rows_of(weight, targets) * slope[:, None].to(hidden.dtype)
        del directions
        if probabilities is not None and grad_log_sums is None:
            with autocast(hidden.device, None):
                grad_weight = probabilities.t() @ (hidden * grad[:, None]).to(probabilities.dtype)
        elif ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            del probabilities
            with gather():
                grads = HeadGradient(
                    hidden, weight.detach(), bias, targets, log_sums, grad, grad_targets, head, ctx.options.dtype
                )
                if ctx.needs_input_grad[1]:
                    grad_weight = grads.of_weight()
                if ctx.needs_input_grad[2]:
                    grad_bias = grads.of_bias().to(bias.dtype)
        if grad_weight is not None:
            record_head_gradient(weight, grad_weight)
        return grad_hidden, grad_weight, grad_bias, None, None


def _scan(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: _Options, out: Tensor | None
) -> dict[str, Tensor]:
    """Computes the losses of some tokens from all of their logits.

    Args:
        hidden: [tokens, size], in the dtype of products.
        weight, bias: [vocabulary, size] and [vocabulary].
        targets: int64 [tokens].
        out: output for the gradient of each loss with respect to its token's products, [tokens, vocabulary].

    Returns:
        "losses" and "log_sums", float32 [tokens]; the metrics, each [tokens]; and if hidden states need gradients,
        "directions" [tokens, size], the gradient of each loss with respect to its token's hidden state.
    """
    head = options.head
    metrics = options.metrics
    smoothing = head.label_smoothing
    z, slope = head.logits(hidden, weight, bias)
    results = {}
    label = z.gather(1, targets[:, None])[:, 0]
    largest, top_row = z.max(-1)
    if smoothing or "mean_logits" in metrics:
        results["mean_logits"] = z.mean(-1)
    if "is_top1" in metrics:
        results["is_top1"] = top_row == targets
    if "entropy" in metrics:
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
    if "entropy" in metrics:
        results["entropy"] = log_sums - sum_exp_z / sum_exp
    if "log_sum_sq_probs" in metrics:
        results["log_sum_sq_probs"] = e.square().sum(-1).log() - 2 * sum_exp.log()
    if options.needs_hidden_grad:
        scale = 1024.0 if hidden.dtype == torch.float16 else 1.0  # small probabilities would underflow in float16
        grads = torch.full_like(sum_exp, scale)
        grad_products = head.grad_products(e.mul_((1 / sum_exp)[:, None]), slope, grads, grads, targets, 0, len(weight))
        factors = grad_products.to(hidden.dtype) if out is None else out.copy_(grad_products)
        del e, slope, grad_products
        results["directions"] = head.times(factors, weight) / scale
    return results


@dataclass(frozen=True, eq=False)
class HeadGradient:
    """Computes the gradients of a head's weight and bias in one backward.

    Attributes:
        hidden: [tokens, size].
        weight, bias: [vocabulary, size] and [vocabulary].
        targets: int64 [tokens].
        log_sums: log-sum-exp of each token's logits, float32 [tokens].
        grad, grad_targets: see `Head.grad_products`.
        dtype: dtype of products.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    log_sums: Tensor
    grad: Tensor
    grad_targets: Tensor
    head: Head
    dtype: torch.dtype

    @property
    def _tile(self) -> tuple[int, int]:
        vocabulary, size = self.weight.shape
        return self.head.tile(len(self.hidden), vocabulary, size, self.hidden.device)

    def of_weight(self) -> Tensor:
        """Returns the gradient of the weight, [vocabulary, size] in its dtype, rounded once."""
        weight = self.weight
        _, step = self._tile
        grad = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        with autocast(grad.device, None):
            for start, out in zip(range(0, len(grad), step), grad.split(step), strict=True):
                rows = torch.zeros(out.shape, dtype=torch.float32, device=grad.device)
                for part in self.head.slices(weight[start : start + len(rows)], self.dtype):
                    block = rows[part]
                    for hidden, grad_products in self._tiles(start + (part.start or 0), len(block)):
                        add_product(block, grad_products.t(), hidden)
                out.copy_(rows)
        return grad

    def of_bias(self) -> Tensor:
        """Returns the gradient of the bias, float32 [vocabulary]."""
        _, step = self._tile
        grad = torch.zeros(len(self.weight), dtype=torch.float32, device=self.hidden.device)
        with autocast(grad.device, None):
            for start in range(0, len(grad), step):
                for _, grad_products in self._tiles(start, step):
                    grad[start : start + step] += grad_products.sum(0)
        return grad

    def _tiles(self, start: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields, for consecutive blocks of tokens, the hidden states [tokens, size] and the gradient of their products
        with `count` weight rows from `start` on, float32 [tokens, rows].
        """
        rows = slice(start, start + count)
        step, _ = self._tile
        weight = plain(self.weight[rows]).to(self.dtype)
        bias = None if self.bias is None else self.bias[rows]
        for first in range(0, len(self.hidden), step):
            tokens = slice(first, first + step)
            hidden = self.hidden[tokens].to(self.dtype)
            z, slope = self.head.logits(hidden, weight, bias)
            p = z.sub_(self.log_sums[tokens, None]).exp_()
            del z
            grad, grad_targets, targets = self.grad[tokens], self.grad_targets[tokens], self.targets[tokens]
            yield hidden, self.head.grad_products(p, slope, grad, grad_targets, targets, start, len(self.weight))


def _checked(targets: Tensor, vocabulary: int) -> Tensor:
    """Returns labels as int64. Raises `IndexError` if one is out of range, without a device sync."""
    try:
        targets.new_zeros(()).expand(vocabulary).index_select(0, targets)
    except IndexError:
        raise IndexError(f"a label is neither in [0, {vocabulary}) nor ignore_index") from None
    return targets.long()
