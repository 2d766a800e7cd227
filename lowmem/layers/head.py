"""The output head: cross-entropy of logits that never exist as a whole, nor does the gradient of their weight.

Logits are a product of hidden states [tokens, hidden] and a weight [vocabulary, hidden]. They are computed tile by
tile. Forward keeps the log-sum-exp of each token, and the direction of the gradient of its hidden state, which is
summed in the same pass as in flash attention. The gradient of rows of the weight depends on those rows, the hidden
states and the log-sum-exp alone: it is computed when the optimizer reads it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from lowmem.errors import ConfigError, UnsupportedError
from lowmem.rules import require
from lowmem.step import hooks
from lowmem.tiles.gradients import ComputedGradient
from lowmem.tiles.layout import block_starts
from lowmem.tiles.quantized import plain, rows_of

# Bytes of temporaries that a head or an embedding may need unless told otherwise. With smaller tiles a GPU waits for
# the host: four times the memory halves the time of a step of 1B parameters on an H200.
MEMORY, GPU_MEMORY = 128 << 20, 512 << 20

# Bytes per element of a tile of logits: the logits, their exponentials, and the product of both.
_TILE = 12

# Bytes per element of the rows of hidden states and of the weight that a tile is computed from: the sums, and float32
# copies where the device has no product of 16-bit matrices that is summed and returned in float32.
_ROW = 8

# Bytes of the float32 copy of rows of the weight that a CPU multiplies at a time. A larger one is memory that the
# allocator takes from the system and returns each time, and for few tokens that takes longer than the products.
_CPU_SLICE = 8 << 20

# What is computed on request for each token, without gradient: the entropy of its distribution; log(Σ p²); the mean of
# its logits; whether the label has the largest one.
METRICS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")

# Allowed options of a head. A tensor, which might be learned, would not get a gradient.
_CHECKS = {
    "logit_scale": require.number(),
    "softcap": require.number("> 0", optional=True),
    "temperature": require.number("> 0"),
    "label_smoothing": require.number(">= 0", "<= 1"),
}

Gather = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Head:
    """The way from the product y of hidden states and weight to logits z, and from these to a loss.

    z = softcap · tanh(s · y / softcap) / temperature, without `softcap` z = s · y / temperature, with s = logit_scale.
    The loss of a token with label l is logsumexp(z) − (1 − ε) z_l − ε mean(z), with ε = label_smoothing.

    Attributes:
        memory: bytes of temporaries, which decide how large tiles are; None is 128 MiB on a CPU and 512 MiB on a GPU.

    Raises:
        ConfigError: a value out of range.
    """

    logit_scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0
    label_smoothing: float = 0.0
    memory: int | None = None

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            check(name, getattr(self, name))

    @property
    def slope(self) -> float:
        """The derivative of logits with respect to y, without that of tanh."""
        return self.logit_scale / self.temperature

    def logits(self, product: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits from y, in its memory, and the derivative of tanh where there is one."""
        if self.softcap is None:
            return product.mul_(self.slope) if self.slope != 1 else product, None
        tanh = product.mul_(self.logit_scale / self.softcap).tanh_()
        derivative = 1 - tanh.square()
        return tanh.mul_(self.softcap / self.temperature), derivative

    def slope_at(self, z: Tensor) -> Tensor | float:
        """The derivative of a logit z with respect to y."""
        if self.softcap is None:
            return self.slope
        return self.slope * (1 - (z * (self.temperature / self.softcap)).square())

    def tile(self, tokens: int, vocabulary: int, size: int, device: torch.device) -> tuple[int, int]:
        """The numbers of tokens and rows of the vocabulary that a tile has, whose hidden states have `size` elements.

        Raises:
            ConfigError: `memory` is not enough for one of each.
        """
        memory, needed = self.memory or default_memory(device), 2 * _ROW * size + _TILE
        if memory < needed:
            raise ConfigError(
                f"head_memory={memory:,} bytes is not enough for one row of a vocabulary matrix with {size} columns, "
                f"which needs {needed:,}. The default is larger"
            )
        side, row = memory / _TILE, _ROW * size / _TILE
        square = int(math.sqrt(row**2 + side) - row)
        parts = -(-tokens // max(square, 1))
        tokens = max(1, -(-tokens // max(parts, 1)))
        rows = max(1, int((side - row * tokens) / (row + tokens)))
        return tokens, min(rows if rows < 64 else rows // 64 * 64, vocabulary)


def default_memory(device: torch.device) -> int:
    """Bytes of temporaries for a head or an embedding."""
    return MEMORY if device.type == "cpu" else GPU_MEMORY


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
    """The cross-entropy of `hidden @ weight.T + bias` with `labels`, of which tiles exist at a time.

    The gradient of `weight` never exists as a whole if a `FusedOptimizer` updates it on one device, by a rule of
    lowmem: the optimizer computes it as it reads it.

    Args:
        hidden: [..., size], float32 or 16-bit.
        weight: [vocabulary, size].
        labels: [...], integers, not shifted; tokens whose label is `ignore_index` have loss 0.
        bias: [vocabulary].
        reduction: "mean" over the tokens that are not ignored, "sum", or "none".
        num_items: divides the sum instead of the number of tokens: those of all micro-batches and ranks.
        options: those of `Head`, such as `softcap`, `label_smoothing` and `memory`.

    Returns:
        A float32 scalar, or [...] without reduction.

    Raises:
        ConfigError: a value out of range, or `memory` that is not enough for one row.
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
    """The loss of each token and the log-sum-exp of its logits, float32 [tokens], and what `METRICS` are asked for.

    Args:
        hidden: [tokens, size].  weight: [vocabulary, size].  bias: [vocabulary].
        targets: integers [tokens], the label of each token.
        gather: makes a context in which weight and bias are complete.
    """
    learns = torch.is_grad_enabled() and hidden.requires_grad
    device = hidden.device.type
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else hidden.dtype
    dtype = dtype if device == "cuda" else torch.float32  # elsewhere no 16-bit product returns float32
    losses, log_sums, *values = _TokenLosses.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, head, dtype, tuple(metrics), gather, learns
    )
    return losses, log_sums, dict(zip(metrics, values, strict=True))


def _product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right`, summed and returned in float32."""
    return left @ right if left.dtype == torch.float32 else torch.mm(left, right, out_dtype=torch.float32)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds `left @ right` to a float32 total."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    else:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: Head,
        dtype: torch.dtype,
        metrics: tuple[str, ...],
        gather: Gather,
        learns: bool,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        tokens, size = hidden.shape
        losses = torch.empty(tokens, dtype=torch.float32, device=hidden.device)
        log_sums, directions = torch.empty_like(losses), torch.empty_like(hidden) if learns else None
        values = [torch.empty_like(losses, dtype=torch.bool if name == "is_top1" else None) for name in metrics]
        with gather(), _no_autocast(hidden.device):
            targets = _checked(targets, len(weight))
            step, rows = head.tile(tokens, len(weight), size, hidden.device)
            for start in block_starts(tokens, step, hidden):
                part = slice(start, start + step)
                scores = _Scores(head, hidden[part].to(dtype), targets[part], metrics, learns)
                for row in block_starts(len(weight), rows, hidden):
                    scores.add(plain(weight[row : row + rows]), None if bias is None else bias[row : row + rows], row)
                losses[part], log_sums[part] = scores.losses(len(weight)), scores.log_sum()
                for name, value in zip(metrics, values, strict=True):
                    value[part] = scores.metric(name, len(weight))
                if directions is not None:
                    directions[part] = scores.directions(weight)
                del scores  # frees its sums before those of the next tokens are allocated
        ctx.save_for_backward(hidden, weight, bias, targets, losses, log_sums, directions)
        ctx.head, ctx.dtype, ctx.gather = head, dtype, gather
        ctx.mark_non_differentiable(*values)
        return losses, log_sums, *values

    @staticmethod
    def backward(ctx: Any, of_losses: Tensor | None, of_log_sums: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, losses, log_sums, directions = ctx.saved_tensors
        grad_hidden = grad_weight = grad_bias = None
        if of_losses is None and of_log_sums is None:
            return (None,) * 9
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "create_graph=True: the tiled head does not support second derivatives. Compute the loss from all "
                "logits: torch.nn.functional.cross_entropy(hidden @ weight.T, labels)"
            )
        of_targets = torch.zeros_like(log_sums) if of_losses is None else of_losses.float()
        grad = of_targets if of_log_sums is None else of_targets + of_log_sums
        if ctx.needs_input_grad[0]:
            grad_hidden = torch.mul(directions, grad[:, None], out=torch.empty_like(hidden))
            if of_log_sums is not None:  # which does not depend on the logit of the label, as directions do
                slope = of_log_sums * ctx.head.slope_at(log_sums - losses)
                with ctx.gather():
                    grad_hidden += rows_of(weight, targets) * slope[:, None].to(hidden.dtype)
        del directions
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            with ctx.gather():
                full = weight.detach()
                part = HeadGradient(hidden, full, bias, targets, log_sums, grad, of_targets, ctx.head, ctx.dtype)
                if ctx.needs_input_grad[1] and not hooks.offer(weight, part):
                    grad_weight = ComputedGradient(full.shape, full.device, [part]).dense(full.dtype)
                if ctx.needs_input_grad[2]:
                    grad_bias = part.of_bias().to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None, None


class _Scores:
    """The sums of a pass over the vocabulary for some tokens, from one block of rows of the weight after another.

    Args:
        hidden: [tokens, size], in the dtype of products.  targets: int64 [tokens].  metrics: what else is asked for.
        learns: sum the direction of the gradient of hidden states, too.
    """

    def __init__(self, head: Head, hidden: Tensor, targets: Tensor, metrics: Sequence[str], learns: bool) -> None:
        self._head, self._hidden, self._targets, self._metrics = head, hidden, targets, metrics
        zeros = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
        self._largest = torch.full_like(zeros, torch.finfo(zeros.dtype).min)  # finite, to which −inf can be compared
        self._sum = zeros.clone()  # of exp(z − largest)
        self._target, self._target_slope = zeros.clone(), zeros.clone()
        self._sum_z, self._sum_exp_z, self._sum_squares = zeros.clone(), zeros.clone(), zeros.clone()
        self._best = torch.zeros_like(targets)
        smooths = head.label_smoothing > 0
        self._weighted, self._plain = (
            torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device) if needed else None
            for needed in (learns, learns and smooths)
        )
        self._needs_sum = smooths or "mean_logits" in metrics

    def add(self, weight: Tensor, bias: Tensor | None, first: int) -> None:
        """Adds the logits of rows of the vocabulary, of which `first` is the number of the first."""
        weight = weight.to(self._hidden.dtype)
        product = _product(self._hidden, weight.t())
        z, slope = self._head.logits(product if bias is None else product.add_(bias))
        del product
        local = self._targets - first
        here, at = (local >= 0) & (local < len(weight)), local.clamp(0, len(weight) - 1)[:, None]
        self._target = torch.where(here, z.gather(1, at)[:, 0], self._target)
        if slope is not None:
            self._target_slope = torch.where(here, slope.gather(1, at)[:, 0], self._target_slope)
        if self._needs_sum:
            self._sum_z += z.sum(-1)
        top, index = z.max(-1)
        if "is_top1" in self._metrics:
            self._best = torch.where(top > self._largest, index + first, self._best)
        largest = torch.maximum(self._largest, top)
        shrink, self._largest = (self._largest - largest).exp_(), largest
        if "entropy" in self._metrics:
            exp = (z - largest[:, None]).exp_()
            self._sum_exp_z.mul_(shrink).add_(z.mul_(exp).sum(-1))
        else:
            exp = z.sub_(largest[:, None]).exp_()
        del z
        self._sum.mul_(shrink).add_(exp.sum(-1))
        if "log_sum_sq_probs" in self._metrics:
            self._sum_squares.mul_(shrink.square()).add_(exp.square().sum(-1))
        if self._weighted is not None:
            self._weighted.mul_(shrink[:, None])
            exp = exp if slope is None else exp.mul_(slope)
            _add_product(self._weighted, exp.to(weight.dtype), weight)
        if self._plain is not None:
            if slope is None:
                self._plain += weight.sum(0, dtype=torch.float32)
            else:
                _add_product(self._plain, slope.to(weight.dtype), weight)

    def log_sum(self) -> Tensor:
        return self._largest + self._sum.log()

    def losses(self, vocabulary: int) -> Tensor:
        smoothing = self._head.label_smoothing
        losses = self.log_sum() - (1 - smoothing) * self._target
        return losses - smoothing / vocabulary * self._sum_z if smoothing else losses

    def metric(self, name: str, vocabulary: int) -> Tensor:
        if name == "entropy":
            return self.log_sum() - self._sum_exp_z / self._sum
        if name == "log_sum_sq_probs":
            return self._sum_squares.log() - 2 * self._sum.log()
        return self._sum_z / vocabulary if name == "mean_logits" else self._best == self._targets

    def directions(self, weight: Tensor) -> Tensor:
        """The gradient of the loss of each token with respect to its hidden state."""
        assert self._weighted is not None
        head = self._head
        total = self._weighted.mul_((1 / self._sum)[:, None])
        slope = torch.ones_like(self._sum) if head.softcap is None else self._target_slope
        total.addcmul_(rows_of(weight, self._targets), slope[:, None], value=head.label_smoothing - 1)
        if self._plain is not None:
            total.add_(self._plain, alpha=-head.label_smoothing / len(weight))
        return total.mul_(head.slope)


@dataclass(frozen=True, eq=False)
class HeadGradient:
    """The gradient of the weight of a head, row by row.

    Attributes:
        hidden: [tokens, size].  weight: [vocabulary, size].  bias: [vocabulary].  targets: int64 [tokens].
        log_sums: log-sum-exp of the logits of each token.  grad, of_targets: of the loss of each token with respect to
            that, and to minus the logit of its label: float32 [tokens].
        dtype: of products.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    log_sums: Tensor
    grad: Tensor
    of_targets: Tensor
    head: Head
    dtype: torch.dtype

    @property
    def kept(self) -> Sequence[Tensor]:
        bias = [] if self.bias is None else [self.bias]
        return self.hidden, *bias, self.targets, self.log_sums, self.grad, self.of_targets

    def copy(self) -> "HeadGradient":
        bias = None if self.bias is None else self.bias.clone()
        hidden, targets, grad = self.hidden.clone(), self.targets.clone(), self.grad.clone()
        return replace(self, hidden=hidden, bias=bias, targets=targets, grad=grad, of_targets=self.of_targets.clone())

    @property
    def block_rows(self) -> int:
        return self._tile[1]

    @property
    def _tile(self) -> tuple[int, int]:
        vocabulary, size = self.weight.shape
        return self.head.tile(len(self.hidden), vocabulary, size, self.hidden.device)

    def add_to(self, rows: Tensor, start: int) -> None:
        with _no_autocast(rows.device):
            at_a_time = max(1, _CPU_SLICE // (4 * rows.shape[1])) if rows.device.type == "cpu" else len(rows)
            for part in rows.split(at_a_time):
                for hidden, of_products in self._tiles(start, len(part)):
                    _add_product(part, of_products.to(self.dtype).t(), hidden)
                start += len(part)

    def of_bias(self) -> Tensor:
        """The gradient of the bias: float32 [vocabulary]."""
        grad = torch.zeros(len(self.weight), dtype=torch.float32, device=self.hidden.device)
        with _no_autocast(grad.device):
            for start in range(0, len(grad), self.block_rows):
                for _, of_products in self._tiles(start, self.block_rows):
                    grad[start : start + self.block_rows] += of_products.sum(0)
        return grad

    def _tiles(self, start: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Hidden states [tokens, size] of some tokens after others, and the gradient of their products with `count`
        rows of the weight, [tokens, rows].
        """
        step = self._tile[0]
        weight = plain(self.weight[start : start + count]).to(self.dtype)
        for first in range(0, len(self.hidden), step):
            tokens = slice(first, first + step)
            hidden = self.hidden[tokens].to(self.dtype)
            yield hidden, self._of_products(hidden, weight, tokens, start)

    def _of_products(self, hidden: Tensor, weight: Tensor, tokens: slice, start: int) -> Tensor:
        """The gradient of the products of these hidden states and rows of the weight: [tokens, rows]."""
        head, log_sums = self.head, self.log_sums[tokens]
        grad, of_targets = self.grad[tokens] * head.slope, self.of_targets[tokens] * head.slope
        product = _product(hidden, weight.t())
        if self.bias is not None:
            product.add_(self.bias[start : start + len(weight)])
        z, slope = head.logits(product)
        p = z.sub_(log_sums[:, None]).exp_().mul_(grad[:, None])
        if head.label_smoothing:
            p.sub_(grad[:, None], alpha=head.label_smoothing / len(self.weight))
        local = self.targets[tokens] - start
        here, at = (local >= 0) & (local < len(weight)), local.clamp(0, len(weight) - 1)
        p.scatter_add_(1, at[:, None], torch.where(here, (head.label_smoothing - 1) * of_targets, 0.0)[:, None])
        return p if slope is None else p.mul_(slope)


def _checked(targets: Tensor, vocabulary: int) -> Tensor:
    """Labels as int64, each of which is the number of a row. The host does not wait for a GPU."""
    try:
        targets.new_zeros(()).expand(vocabulary).index_select(0, targets)
    except IndexError:
        raise IndexError(f"a label is neither in [0, {vocabulary}) nor ignore_index") from None
    return targets.long()


def _no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Products have the dtype that was chosen for them."""
    available = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if available else nullcontext()
