"""Logits that are computed where they are read, for losses and metrics that others compute from a matrix of logits.

A `LazyHead` in place of a model's output embedding returns `Logits`: a tensor with hidden states and the weight instead
of elements. Scales, caps, casts and selections of rows are remembered, losses are those of `lowmem.layers.head`, and
what is reduced over the vocabulary is computed for some rows at a time. Every other operation gets the matrix.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from lowmem.layers.head import Gather, Head, default_memory, token_losses


@dataclass(eq=False)
class Source:
    """What logits are computed from.

    Attributes:
        hidden: [..., size].  weight: [vocabulary, size] where `gather` has completed it.  bias: [vocabulary].
        dtype: of the logits.  normalized: they are log-probabilities.
        log_sum: [..., 1], their log-sum-exp, once it is known.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    vocabulary: int
    dtype: torch.dtype
    head: Head
    gather: Gather = nullcontext
    normalized: bool = False
    log_sum: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.vocabulary))

    def matrix(self, hidden: Tensor) -> Tensor:
        """The logits of some hidden states as an ordinary tensor."""
        with self.gather():
            bias = None if self.bias is None else self.bias.to(hidden.dtype)
            z = F.linear(hidden, self.weight.to(hidden.dtype), bias).to(self.dtype)
        cap, scale = self.head.softcap, self.head.logit_scale
        z = z * scale if cap is None else torch.tanh(z * (scale / cap)) * (cap / self.head.temperature)
        return z.log_softmax(-1) if self.normalized else z

    def losses(
        self, targets: Tensor, metrics: Sequence[str] = (), **options: Any
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The loss of each row, its log-sum-exp, and what `METRICS` are asked for. Options are those of `Head`."""
        head, shape = replace(self.head, **options), self.hidden.shape[:-1]
        arguments = self.hidden.flatten(0, -2), self.weight, self.bias, targets.flatten(), head, metrics, self.gather
        with self.gather():
            losses, log_sums, values = token_losses(*arguments)
        return losses.view(shape), log_sums.view(shape), {name: value.view(shape) for name, value in values.items()}

    def over_vocabulary(self, dim: Any) -> bool:
        return dim in (-1, self.hidden.ndim - 1)


class Logits(Tensor):
    """Logits as a tensor: `source` as long as nothing needs the matrix. Autograd knows it as the product that it is."""

    source: Source
    _made_by: Any
    _matrix: Tensor | None

    @staticmethod
    def of(source: Source) -> "Logits":
        logits: Logits = _Product.apply(source.hidden, source.weight, source.bias, source)  # type: ignore[no-untyped-call]
        logits.source, logits._matrix, logits._made_by = source, None, logits.grad_fn
        return logits

    @property
    def pending(self) -> bool:
        """Returns whether `source` still says what it is. What was changed in place, or has passed an autograd function
        of somebody else, has another node of the graph.
        """
        return self._matrix is None and self._made_by is self.grad_fn

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        compute, logits = _COMPUTED.get(getattr(func, "__name__", "")), args[0] if args else None
        if compute is not None and isinstance(logits, Logits) and logits.pending:
            result = compute(logits.source, func.__name__, *args[1:], **(kwargs or {}))
            if result is not NotImplemented:
                return result
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Logits, Logits.matrix, (args, kwargs or {}))
        return func(*args, **kwargs)

    def matrix(self) -> Tensor:
        """The elements, which stay from now on, as they may be changed in place."""
        if self._matrix is None:
            with torch.no_grad():
                self._matrix = self.source.matrix(self.source.hidden)
        return self._matrix


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, source: Source) -> Tensor:
        ctx.source = source
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            Logits, source.shape, dtype=source.dtype, device=hidden.device
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = dict(zip(("hidden", "weight", "bias"), ctx.needs_input_grad, strict=False))
        names = [name for name in needed if needed[name]]
        leaves = {name: getattr(ctx.source, name).detach().requires_grad_() for name in names}
        with torch.enable_grad():
            source = replace(ctx.source, **leaves)
            z = source.matrix(source.hidden)
        grads = dict(zip(names, torch.autograd.grad(z, list(leaves.values()), grad), strict=True))
        return grads.get("hidden"), grads.get("weight"), grads.get("bias"), None


class LazyHead(nn.Module):
    """Stands in for an output embedding, a linear layer, while losses are computed."""

    def __init__(self, linear: Any, memory: int | None, gather: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self._head, self._gather = linear, Head(memory=memory), gather

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "linear" else getattr(self.linear, name)

    def forward(self, hidden: Tensor) -> Tensor:
        weight, bias = self.linear.weight, self.linear.bias
        hidden = hidden.to(weight.device)
        if torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        vocabulary, gather = self.linear.out_features, lambda: self._gather(weight, bias)
        return Logits.of(Source(hidden, weight, bias, vocabulary, hidden.dtype, self._head, gather))


# -- what operations return; NotImplemented: the matrix is needed ------------------------------------------------------


def _cast(source: Source, name: str, *args: Any, **options: Any) -> Any:
    before = torch.empty((), dtype=source.dtype, device=source.hidden.device)
    after = getattr(before, name)(*args, **options)
    if after.device != before.device or after.dtype == torch.float64:
        return NotImplemented
    return Logits.of(replace(source, dtype=after.dtype))


def _scale(source: Source, name: str, factor: Any, **options: Any) -> Any:
    if options or not isinstance(factor, int | float) or factor <= 0 or source.normalized:
        return NotImplemented
    head, factor = source.head, 1 / factor if "div" in name else factor
    changed = {"logit_scale": head.logit_scale * factor}
    if head.softcap is not None:
        changed = {"temperature": head.temperature / factor}
    return Logits.of(replace(source, head=replace(head, **changed), log_sum=None))


def _tanh(source: Source, name: str) -> Any:
    if source.head.softcap is not None or source.normalized:
        return NotImplemented
    return Logits.of(replace(source, head=replace(source.head, softcap=1.0), log_sum=None))


def _detach(source: Source, name: str) -> Any:
    tensors = {key: getattr(source, key) for key in ("hidden", "weight", "bias", "log_sum")}
    return Logits.of(replace(source, **{key: t if t is None else t.detach() for key, t in tensors.items()}))


def _reshape(source: Source, name: str, *args: Any, **options: Any) -> Any:
    after = getattr(torch.empty(source.shape, dtype=source.dtype, device="meta"), name)(*args, **options)
    if after.dtype != source.dtype or after.shape[-1] != source.vocabulary:
        return NotImplemented
    return _of_rows(source, lambda tensor: tensor.reshape(*after.shape[:-1], tensor.shape[-1]))


def _index(source: Source, name: str, index: Any) -> Any:
    items = index if isinstance(index, tuple) else (index,)
    indexed = sum(item.ndim if isinstance(item, Tensor) and item.dtype == torch.bool else 1 for item in items)
    may_be_last = indexed > source.hidden.ndim - 1 or any(item is ... for item in items[:-1])
    whole = items[-1] is ... or (isinstance(items[-1], slice) and items[-1] == slice(None))
    if any(item is None for item in items) or (may_be_last and not whole):
        return NotImplemented
    return _of_rows(source, lambda tensor: tensor[index])


def _split(source: Source, name: str, parts: Any, dim: int = 0) -> Any:
    return NotImplemented if source.over_vocabulary(dim) else _of_rows(source, lambda t: getattr(t, name)(parts, dim))


def _unbind(source: Source, name: str, dim: int = 0) -> Any:
    return NotImplemented if source.over_vocabulary(dim) else _of_rows(source, lambda tensor: tensor.unbind(dim))


def _of_rows(source: Source, change: Callable[[Tensor], Any]) -> Any:
    """Logits of other rows, or parts of them: `change` leaves the last dimension of a tensor as it is."""
    hidden, log_sum = change(source.hidden), None if source.log_sum is None else change(source.log_sum)
    if isinstance(hidden, Tensor):
        return Logits.of(replace(source, hidden=hidden, log_sum=log_sum))
    log_sums = [None] * len(hidden) if log_sum is None else log_sum
    return tuple(Logits.of(replace(source, hidden=h, log_sum=s)) for h, s in zip(hidden, log_sums, strict=True))


def _log_softmax(source: Source, name: str, dim: Any = None, *_: Any, dtype: Any = None, **__: Any) -> Any:
    if not source.over_vocabulary(dim) or source.normalized:
        return NotImplemented
    return Logits.of(replace(source, normalized=True, dtype=dtype or source.dtype))


def _gather(source: Source, name: str, dim: int, index: Tensor, **options: Any) -> Any:
    if not source.over_vocabulary(dim) or index.shape != (*source.hidden.shape[:-1], 1):
        return NotImplemented
    losses, log_sums, _ = source.losses(index)
    source.log_sum = log_sums[..., None]  # which mostly is what is asked for next
    return (-losses if source.normalized else log_sums - losses)[..., None].to(source.dtype)


def _logsumexp(source: Source, name: str, dim: Any, keepdim: bool = False) -> Any:
    if not source.over_vocabulary(dim) or source.normalized:
        return NotImplemented
    log_sum = source.log_sum
    if log_sum is None or (torch.is_grad_enabled() and not log_sum.requires_grad):
        targets = torch.zeros(source.hidden.shape[:-1], dtype=torch.long, device=source.hidden.device)
        log_sum = source.losses(targets)[1][..., None]
    return (log_sum if keepdim else log_sum[..., 0]).to(source.dtype)


def _cross_entropy(
    source: Source, name: str, target: Tensor, weight: Tensor | None = None, size_average: Any = None,
    ignore_index: int = -100, reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    if source.hidden.ndim != 2 or target.ndim != 1 or source.normalized or weight is not None:
        return NotImplemented
    if size_average is not None or reduce is not None:
        return NotImplemented
    counted = target != ignore_index
    losses = source.losses(target.masked_fill(~counted, 0), label_smoothing=label_smoothing)[0]
    losses = losses.masked_fill(~counted, 0.0).to(source.dtype)
    if reduction == "mean":
        return losses.sum() / counted.sum()
    return losses.sum() if reduction == "sum" else losses


def _reduce(source: Source, name: str, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
    if options or not (source.over_vocabulary(dim) or (dim is None and name != "argmax")):
        return NotImplemented

    def of_rows(hidden: Tensor) -> Any:
        return getattr(source.matrix(hidden), name)(-1, keepdim=keepdim)

    memory = source.head.memory or default_memory(source.hidden.device)
    parts = source.hidden.flatten(0, -2).split(max(1, memory // (12 * source.vocabulary)))
    values = torch.cat([checkpoint(of_rows, part, use_reentrant=False, preserve_rng_state=False) for part in parts])
    return getattr(values, name)() if dim is None else values.view(*source.hidden.shape[:-1], *values.shape[1:])


_COMPUTED: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("float", "half", "bfloat16", "to"), _cast),
    **dict.fromkeys(("mul", "__mul__", "__rmul__", "div", "__truediv__", "true_divide"), _scale),
    **dict.fromkeys(("view", "reshape", "flatten", "contiguous"), _reshape),
    **dict.fromkeys(("split", "chunk"), _split),
    **dict.fromkeys(("argmax", "mean", "sum", "nansum"), _reduce),
    "tanh": _tanh, "detach": _detach, "__getitem__": _index, "unbind": _unbind, "log_softmax": _log_softmax,
    "gather": _gather, "logsumexp": _logsumexp, "cross_entropy": _cross_entropy,
}  # fmt: skip
