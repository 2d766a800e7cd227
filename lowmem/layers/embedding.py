"""Embeddings whose full gradient is never materialized: indices and the gradient of the output are stored instead."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowmem.layers.head_tiles import Head
from lowmem.step import hooks
from lowmem.tiles.gradients import Contribution


class ComputedEmbedding(nn.Embedding):
    """An `nn.Embedding` whose optimizer computes the gradient of the weight as it reads it.

    `compute_gradient` gives this class, or a subclass of it and of the module's class, to existing modules.
    """

    memory: int | None

    def forward(self, input: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and self.weight.requires_grad) or torch.compiler.is_compiling():
            return super().forward(input)
        output: Tensor = _Embedding.apply(input, self.weight, self.padding_idx, self.memory)  # type: ignore[no-untyped-call]
        return output


def compute_gradient(module: nn.Module, memory: int | None = None) -> bool:
    """Changes an embedding in place so that the optimizer computes its gradient as it reads it, in blocks of rows.

    Args:
        memory: bytes of temporaries. None is the default of `linear_cross_entropy`.

    Returns:
        Whether the module was changed. A module that is not an `nn.Embedding`, or one with `max_norm`,
        `scale_grad_by_freq` or `sparse`, stays as it is.
    """
    if not isinstance(module, nn.Embedding) or module.max_norm is not None:
        return False
    if module.scale_grad_by_freq or module.sparse:
        return False
    if not isinstance(module, ComputedEmbedding):
        module.__class__ = _computed(type(module))  # type: ignore[arg-type]
    module.memory = memory  # type: ignore[assignment]
    return True


@functools.cache
def _computed(cls: type[nn.Embedding]) -> type[ComputedEmbedding]:
    """Returns a subclass of `cls`, whose forward may scale the result of super().forward(), and `ComputedEmbedding`.

    It has the name of `cls`, by which pickle would not find it, so its instances are pickled as instances of `cls`.
    """
    if cls is nn.Embedding:
        return ComputedEmbedding
    attributes = {"__module__": cls.__module__, "__reduce__": lambda self: (_new, (cls,), self.__dict__)}
    return type(cls.__name__, (cls, ComputedEmbedding), attributes)


def _new(cls: type[nn.Embedding]) -> nn.Module:
    computed = _computed(cls)  # type: ignore[arg-type]
    return computed.__new__(computed)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight: Tensor, padding: int | None, memory: int | None) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.weight = weight  # not saved: its values are not needed, and may change until backward, as in nn.Embedding
        ctx.rows, ctx.padding, ctx.memory = len(weight), padding, memory
        return F.embedding(indices, weight, padding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (indices,) = ctx.saved_tensors
        padding = -1 if ctx.padding is None else ctx.padding  # no index is -1
        flat = indices.reshape(-1).long()
        flat = flat.masked_fill(flat == padding, -1)
        memory = Head(memory=ctx.memory).available(grad.device)
        if hooks.offer(ctx.weight, EmbeddingGradient(flat, grad.reshape(-1, grad.shape[-1]), memory)):
            return None, None, None, None
        return None, torch.ops.aten.embedding_dense_backward(grad, indices, ctx.rows, padding, False), None, None


@dataclass(frozen=True, eq=False)
class EmbeddingGradient(Contribution):
    """The gradient of the weight of an embedding, in one backward.

    Attributes:
        indices: int64 [tokens]; negative for tokens without a gradient.
        grad: of the output, [tokens, size].
        memory: bytes of a block, of the float32 copy of a part of `grad`, and of stored rows (up to half of it).
    """

    indices: Tensor
    grad: Tensor
    memory: int

    @property
    def stored_bytes(self) -> int:
        return self.memory // 2

    @property
    def block_rows(self) -> int:
        return max(1, self.memory // (4 * 4 * self.grad.shape[1]))

    def add_to(self, rows: Tensor, start: int) -> None:
        for (at, groups), grad in zip(self._grouped, self.grad.split(self.block_rows), strict=True):
            sums = torch.ops.aten.embedding_dense_backward(grad.float(), groups, len(groups), -1, False)
            here = (at >= start) & (at < start + len(rows))
            sums.masked_fill_(~here[:, None], 0.0)
            rows.index_add_(0, (at - start).remainder_(len(rows)), sums)  # other indices add zeros to any row

    @functools.cached_property
    def _grouped(self) -> Sequence[tuple[Tensor, Tensor]]:
        """`_distinct` for each block of tokens. Memory and time depend on tokens only, and there is no device sync."""
        return [_distinct(indices) for indices in self.indices.split(self.block_rows)]


def _distinct(indices: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the distinct indices, padded with -1 to [tokens], and for each token the number of its index among them.

    [5, 3, 5] → [3, 5, -1], [1, 0, 1]
    """
    ordered, order = indices.sort(stable=True)
    numbers = (ordered[1:] != ordered[:-1]).cumsum(0)  # of the index at each place of `ordered` except the first
    groups = torch.zeros_like(indices).scatter_(0, order[1:], numbers)
    return torch.full_like(indices, -1).scatter_(0, groups, indices), groups
