"""One gradient for a weight that an output head and an embedding share.

Autograd sums the gradients of a weight before its hooks run, so the gradient of the head waits for the gradient of the
embedding. A tied embedding adds its rows to the waiting gradient in-place, and returns None.
"""

import functools
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# The graph task of a backward, the weight of a head, and a weak reference to its gradient, which autograd owns.
_waiting: tuple[int, "weakref.ref[Tensor]", "weakref.ref[Tensor]"] | None = None


def record_head_gradient(weight: Tensor, grad: Tensor) -> None:
    """Called in the backward of a head. Records the gradient that it will return, unless one is already waiting."""
    global _waiting
    if weight.is_leaf and waiting(weight) is None:
        _waiting = torch._C._current_graph_task_id(), weakref.ref(weight), weakref.ref(grad)


def waiting(weight: Tensor) -> Tensor | None:
    """Returns the head gradient that waits for other uses of the weight in the current backward, or None."""
    if _waiting is None or torch.is_grad_enabled():
        return None
    task, of_weight, grad = _waiting
    return grad() if task == torch._C._current_graph_task_id() and of_weight() is weight else None


class TiedEmbedding(nn.Embedding):
    """An `nn.Embedding` that adds its gradient to the gradient of a head with the same weight.

    `share_gradient` changes existing modules to this class, or to a subclass of it and of the module's class.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and self.weight.requires_grad) or torch.compiler.is_compiling():
            return super().forward(input)
        output: Tensor = _Embedding.apply(input, self.weight, self.padding_idx)  # type: ignore[no-untyped-call]
        return output


def share_gradient(module: nn.Module) -> bool:
    """Modifies an embedding so that it adds its gradient to the gradient that `linear_cross_entropy` has computed
    for the same weight. Then one gradient exists instead of two.

    Returns:
        True, or False if the module is unchanged, because it is not an `nn.Embedding`, or uses `max_norm`,
        `scale_grad_by_freq` or `sparse`.
    """
    if not isinstance(module, nn.Embedding) or module.max_norm is not None:
        return False
    if module.scale_grad_by_freq or module.sparse:
        return False
    if not isinstance(module, TiedEmbedding):
        module.__class__ = _tied(type(module))  # type: ignore[arg-type]
    return True


@functools.cache
def _tied(cls: type[nn.Embedding]) -> type[TiedEmbedding]:
    """Returns a subclass of `cls` (whose forward may scale the result of super().forward()) and `TiedEmbedding`.

    It has the name of `cls`. Pickle would not find it by this name, so instances are pickled as instances of `cls`.
    """
    if cls is nn.Embedding:
        return TiedEmbedding
    attributes = {"__module__": cls.__module__, "__reduce__": lambda self: (_new, (cls,), self.__dict__)}
    return type(cls.__name__, (cls, TiedEmbedding), attributes)


def _new(cls: type[nn.Embedding]) -> nn.Module:
    tied = _tied(cls)  # type: ignore[arg-type]
    return tied.__new__(tied)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.weight = weight  # not saved: as in nn.Embedding, its values are not needed and may change before backward
        ctx.rows = len(weight)
        ctx.padding = -1 if padding is None else padding  # -1 is not a valid index
        return F.embedding(indices, weight, padding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (indices,) = ctx.saved_tensors
        if (total := waiting(ctx.weight)) is None:
            return None, torch.ops.aten.embedding_dense_backward(grad, indices, ctx.rows, ctx.padding, False), None
        flat = indices.reshape(-1).long()
        at, groups = _distinct(flat.masked_fill(flat == ctx.padding, -1))
        sums = torch.ops.aten.embedding_dense_backward(grad.reshape(-1, grad.shape[-1]), groups, len(groups), -1, False)
        total.index_add_(0, at.clamp(min=0), sums.masked_fill_((at < 0)[:, None], 0.0))
        return None, None, None


def _distinct(indices: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the distinct indices, padded with -1 to [tokens], and the position of each token's index among them,
    without a device sync.

    [5, 3, 5] → [3, 5, -1], [1, 0, 1]
    """
    ordered, order = indices.sort(stable=True)
    numbers = (ordered[1:] != ordered[:-1]).cumsum(0)  # position of each index in `ordered` except the first
    groups = torch.zeros_like(indices).scatter_(0, order[1:], numbers)
    return torch.full_like(indices, -1).scatter_(0, groups, indices), groups
