"""Lazy logits, for losses and metrics of trainers that read a matrix of logits.

A `LazyHead` replaces a model's output embedding and returns `Logits`: a tensor that stores hidden states and a weight
instead of elements. It records scales, caps, casts and selections of rows. Losses are computed by `lowmem.layers.head`,
and reductions over the vocabulary for some rows at a time. Every other operation computes the matrix.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from lowmem import placements
from lowmem.layers.autocast import autocast_dtype
from lowmem.layers.head import token_losses
from lowmem.layers.head_tiles import Head
from lowmem.placements.zero3 import gathered


@dataclass(eq=False, repr=False)
class LogitsSource:
    """The tensors that logits are computed from, with a method for each torch function that does not need the matrix.

    Attributes:
        hidden: [..., size].
        weight, bias: [vocabulary, size] and [vocabulary]. DeepSpeed may have partitioned them.
        dtype: dtype of the logits.
        normalized: whether the logits are log-probabilities.
        attached: whether the weight and the bias get gradients. (Detached tensors could not be gathered later.)
        log_sum: log-sum-exp, [..., 1], once it is known.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    vocabulary: int
    dtype: torch.dtype
    head: Head
    normalized: bool = False
    attached: bool = True
    log_sum: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.vocabulary))

    def parameters(self) -> tuple[Tensor, Tensor | None]:
        """Returns the weight and the bias."""
        if self.attached:
            return self.weight, self.bias
        return self.weight.detach(), None if self.bias is None else self.bias.detach()

    def matrix(self, hidden: Tensor) -> Tensor:
        """Computes the logits of hidden states as an ordinary tensor, [..., size] → [..., vocabulary]."""
        with gathered(self.weight, self.bias):
            weight, bias = self.parameters()
            bias = None if bias is None else bias.to(hidden.dtype)
            z = F.linear(hidden, weight.to(hidden.dtype), bias).to(self.dtype)
        head = self.head
        if head.softcap is None:
            z = z * head.slope
        else:
            z = torch.tanh(z * (head.logit_scale / head.softcap)) * (head.softcap / head.temperature)
        return z.log_softmax(-1) if self.normalized else z

    def losses(
        self,
        targets: Tensor,
        metrics: Sequence[str] = (),
        label_smoothing: Any = 0.0,
        caches_probabilities: bool = False,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Computes losses, log-sum-exps and `METRICS` with the shape of `targets`; see `token_losses`."""
        head = replace(self.head, label_smoothing=label_smoothing)
        hidden = self.hidden.flatten(0, -2)
        with gathered(self.weight, self.bias):
            weight, bias = self.parameters()
            losses, log_sums, values = token_losses(
                hidden, weight, bias, targets.flatten(), head, metrics, caches_probabilities
            )
        shape = self.hidden.shape[:-1]
        return losses.view(shape), log_sums.view(shape), {name: value.view(shape) for name, value in values.items()}

    def over_vocabulary(self, dim: Any) -> bool:
        """Returns whether a dimension is the last one."""
        return dim in (-1, self.hidden.ndim - 1)

    def replaced(self, **changes: Any) -> "Logits":
        """Returns logits with these attributes replaced."""
        return Logits.of(replace(self, **changes))

    def map_rows(self, change: Callable[[Tensor], Any]) -> Any:
        """Applies a function that does not change the last dimension, and returns `Logits` or a tuple of `Logits`.
        Returns NotImplemented if the result would have no token dimension.
        """
        hidden = change(self.hidden)
        if any(each.ndim < 2 for each in ([hidden] if isinstance(hidden, Tensor) else hidden)):
            return NotImplemented
        log_sum = None if self.log_sum is None else change(self.log_sum)
        if isinstance(hidden, Tensor):
            return self.replaced(hidden=hidden, log_sum=log_sum)
        log_sums = [None] * len(hidden) if log_sum is None else log_sum
        return tuple(self.replaced(hidden=h, log_sum=s) for h, s in zip(hidden, log_sums, strict=True))

    # -- torch functions. NotImplemented means that the result is computed from the matrix -----------------------------

    def cast(self, func: Any, *args: Any, **options: Any) -> Any:
        before = torch.zeros((), dtype=self.dtype, device=self.hidden.device)
        after = func(before, *args, **options)
        known = after.device == before.device and after.dtype != torch.float64
        return self.replaced(dtype=after.dtype) if known else NotImplemented

    def scale(self, func: Any, factor: Any, **options: Any) -> Any:
        if options or not isinstance(factor, int | float) or factor <= 0 or self.normalized:
            return NotImplemented
        if func.__name__ == "div_" and factor != 1:  # would also have to modify other logits that share these rows
            return NotImplemented
        head = self.head
        if "div" in func.__name__:
            factor = 1 / factor
        if head.softcap is None:
            return self.replaced(head=replace(head, logit_scale=head.logit_scale * factor), log_sum=None)
        return self.replaced(head=replace(head, temperature=head.temperature / factor), log_sum=None)

    def tanh(self, func: Any) -> Any:
        capped = self.head.softcap is not None or self.normalized
        return NotImplemented if capped else self.replaced(head=replace(self.head, softcap=1.0), log_sum=None)

    def detach(self, func: Any) -> Any:
        log_sum = None if self.log_sum is None else self.log_sum.detach()
        return self.replaced(hidden=self.hidden.detach(), log_sum=log_sum, attached=False)

    def reshape(self, func: Any, *args: Any, **options: Any) -> Any:
        after = func(torch.empty(self.shape, dtype=self.dtype, device="meta"), *args, **options)
        if after.dtype != self.dtype or after.shape[-1] != self.vocabulary:
            return NotImplemented
        return self.map_rows(lambda tensor: tensor.reshape(*after.shape[:-1], tensor.shape[-1]))

    def select(self, func: Any, *args: Any, **options: Any) -> Any:
        at = int(func.__name__ in ("split", "chunk"))  # the position of `dim` among the arguments
        dim = options.get("dim", args[at] if len(args) > at else 0)
        return NotImplemented if self.over_vocabulary(dim) else self.map_rows(lambda t: func(t, *args, **options))

    def index(self, func: Any, index: Any) -> Any:
        items = index if isinstance(index, tuple) else (index,)
        if not items:
            return NotImplemented
        indexed = sum(item.ndim if isinstance(item, Tensor) and item.dtype == torch.bool else 1 for item in items)
        may_be_last = indexed >= self.hidden.ndim or any(item is ... for item in items[:-1])
        whole = items[-1] is ... or (isinstance(items[-1], slice) and items[-1] == slice(None))
        if any(item is None for item in items) or (may_be_last and not whole):
            return NotImplemented
        return self.map_rows(lambda tensor: tensor[index])

    def log_softmax(self, func: Any, dim: Any = None, *rest: Any, dtype: Any = None, **_: Any) -> Any:
        if not self.over_vocabulary(dim) or self.normalized:
            return NotImplemented
        dtypes = [each for each in (*rest, dtype) if isinstance(each, torch.dtype)]
        return self.replaced(normalized=True, dtype=dtypes[0] if dtypes else self.dtype)

    def gather(self, func: Any, dim: int, index: Tensor) -> Any:
        if not self.over_vocabulary(dim) or index.shape != (*self.hidden.shape[:-1], 1):
            return NotImplemented
        losses, log_sums, _ = self.losses(index)
        self.log_sum = log_sums[..., None]  # usually read next
        return (-losses if self.normalized else log_sums - losses)[..., None].to(self.dtype)

    def logsumexp(self, func: Any, dim: Any, keepdim: bool = False) -> Any:
        if not self.over_vocabulary(dim) or self.normalized:
            return NotImplemented
        log_sum = self.log_sum
        if log_sum is None or (torch.is_grad_enabled() and not log_sum.requires_grad):
            targets = torch.zeros(self.hidden.shape[:-1], dtype=torch.long, device=self.hidden.device)
            log_sum = self.losses(targets)[1][..., None]
        return (log_sum if keepdim else log_sum[..., 0]).to(self.dtype)

    def cross_entropy(
        self, func: Any, target: Tensor, *, ignore_index: int, reduction: str, label_smoothing: float, **others: Any
    ) -> Any:  # torch passes all options, by name
        unusual = any(value is not None for value in others.values()) or target.ndim != 1
        if unusual or self.hidden.ndim != 2 or self.normalized:
            return NotImplemented
        counted = target != ignore_index
        losses = self.losses(target.masked_fill(~counted, 0), label_smoothing=label_smoothing)[0]
        losses = losses.masked_fill(~counted, 0.0).to(self.dtype)
        if reduction == "none":
            return losses
        if reduction == "mean":
            return losses.sum() / counted.sum()
        return losses.sum()

    def reduce(self, func: Any, dim: Any = None, *rest: Any, **options: Any) -> Any:
        if rest or options or not (self.over_vocabulary(dim) or (dim is None and func.__name__ != "argmax")):
            return NotImplemented
        memory = self.head.available(self.hidden.device)
        parts = self.hidden.flatten(0, -2).split(max(1, memory // (12 * self.vocabulary)))
        options = {"use_reentrant": False, "preserve_rng_state": False}
        values = torch.cat([checkpoint(lambda part: func(self.matrix(part), -1), part, **options) for part in parts])
        return func(values) if dim is None else values.view(self.hidden.shape[:-1])


# Name of a torch function → the method that replaces it.
_METHODS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("float", "half", "bfloat16", "to"), LogitsSource.cast),
    **dict.fromkeys(("mul", "__mul__", "__rmul__", "div", "div_", "__truediv__"), LogitsSource.scale),
    **dict.fromkeys(("view", "reshape", "flatten", "contiguous"), LogitsSource.reshape),
    **dict.fromkeys(("split", "chunk", "unbind", "index_select"), LogitsSource.select),
    **dict.fromkeys(("argmax", "mean", "sum", "nansum"), LogitsSource.reduce),
    "__getitem__": LogitsSource.index,
    "tanh": LogitsSource.tanh,
    "detach": LogitsSource.detach,
    "log_softmax": LogitsSource.log_softmax,
    "gather": LogitsSource.gather,
    "logsumexp": LogitsSource.logsumexp,
    "cross_entropy": LogitsSource.cross_entropy,
}


class Logits(Tensor):
    """Lazy logits as a tensor, for autograd a product. Operations that are not in `_METHODS` compute the elements."""

    source: LogitsSource
    _node: Any
    _matrix: Tensor | None

    @staticmethod
    def of(source: LogitsSource) -> "Logits":
        logits: Logits = _Product.apply(source.hidden, *source.parameters(), source)  # type: ignore[no-untyped-call]
        logits.source = source
        logits._matrix = None
        logits._node = logits.grad_fn
        return logits

    @property
    def pending(self) -> bool:
        """True if `source` still describes the tensor. After in-place changes it has another autograd node."""
        return self._matrix is None and self._node is self.grad_fn

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        logits = args[0] if args else None
        method = _METHODS.get(getattr(func, "__name__", ""))
        if method is not None and isinstance(logits, Logits) and logits.pending:
            result = method(logits.source, func, *args[1:], **kwargs)
            if result is not NotImplemented:
                return result
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(Logits, Logits.matrix, (args, kwargs or {}))
        return func(*args, **kwargs)

    def matrix(self) -> Tensor:
        """Returns the elements. The first call computes and stores them, because they may be modified in-place."""
        if self._matrix is None:
            with torch.no_grad():
                self._matrix = self.source.matrix(self.source.hidden)
        return self._matrix


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, source: LogitsSource) -> Any:
        ctx.source = source
        make: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        return make(Logits, source.shape, dtype=source.dtype, device=hidden.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = dict(zip(("hidden", "weight", "bias"), ctx.needs_input_grad, strict=False))
        with gathered(ctx.source.weight, ctx.source.bias), torch.enable_grad():
            leaves = {name: getattr(ctx.source, name).detach().requires_grad_() for name in needed if needed[name]}
            source = replace(ctx.source, **leaves)
            grads = torch.autograd.grad(source.matrix(source.hidden), list(leaves.values()), grad)
        by_name = dict(zip(leaves, grads, strict=True))
        return by_name.get("hidden"), by_name.get("weight"), by_name.get("bias"), None


class LazyHead(nn.Module):
    """Replaces the output embedding of a model, which is a linear layer. Its attributes can be read from this module.

    Args:
        options: options of `Head`.
    """

    def __init__(self, linear: Any, **options: Any) -> None:
        super().__init__()
        self.linear = linear
        self._head = Head(**options)

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "linear" else getattr(self.linear, name)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, hidden: Tensor) -> Tensor:
        weight, bias = self.linear.weight, self.linear.bias
        if hasattr(weight, "device_mesh"):  # FSDP2 shards this layer separately, and gathers it only in its forward
            if weight.requires_grad:
                return self.linear(hidden)  # type: ignore[no-any-return]
            weight, bias = (None if param is None else placements.full_tensor(param) for param in (weight, bias))
        hidden = hidden.to(weight.device, autocast_dtype(weight.device) or hidden.dtype)
        return Logits.of(LogitsSource(hidden, weight, bias, self.linear.out_features, hidden.dtype, self._head))
