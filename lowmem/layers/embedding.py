"""Embeddings whose gradient never exists as a whole: indices and the gradient of the output are kept instead."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowmem.layers.head import default_memory
from lowmem.step import hooks


class ComputedEmbedding(nn.Embedding):
    """`nn.Embedding` whose weight has a gradient that is computed as the optimizer reads it.

    Modules get this class, or one of it and their own, by `compute_gradient`.
    """

    memory: int | None

    def forward(self, input: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and self.weight.requires_grad) or torch.compiler.is_compiling():
            return super().forward(input)
        output: Tensor = _Embedding.apply(input, self.weight, self.padding_idx, self.memory)  # type: ignore[no-untyped-call]
        return output


def compute_gradient(module: nn.Module, memory: int | None = None) -> bool:
    """Makes an embedding one whose gradient is computed as it is read, in blocks that need `memory` bytes; None is as
    many as `linear_cross_entropy` takes by default.

    Returns:
        Whether it could: a module that is no `nn.Embedding`, or one with `max_norm`, `scale_grad_by_freq` or `sparse`,
        stays as it is.
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
    """A class of embeddings with `ComputedEmbedding` behind it: its forward may scale what super().forward() returns.
    Pickle cannot find it by its name, which is that of `cls`, so its instances are made from `cls` again.
    """
    if cls is nn.Embedding:
        return ComputedEmbedding
    own = {"__module__": cls.__module__, "__reduce__": lambda self: (_new, (cls,), self.__dict__)}
    return type(cls.__name__, (cls, ComputedEmbedding), own)


def _new(cls: type[nn.Embedding]) -> nn.Module:
    computed = _computed(cls)  # type: ignore[arg-type]
    return computed.__new__(computed)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight: Tensor, padding: int | None, memory: int | None) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.weight = weight  # its values are not needed, so they may change until backward, as those of nn.Embedding
        ctx.rows, ctx.padding, ctx.memory = len(weight), padding, memory
        return F.embedding(indices, weight, padding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (indices,) = ctx.saved_tensors
        padding = -1 if ctx.padding is None else ctx.padding  # no index is -1
        flat = indices.reshape(-1).long()
        flat = flat.masked_fill(flat == padding, -1)
        memory = ctx.memory or default_memory(grad.device)
        if hooks.offer(ctx.weight, EmbeddingGradient(flat, grad.reshape(-1, grad.shape[-1]), memory)):
            return None, None, None, None
        return None, torch.ops.aten.embedding_dense_backward(grad, indices, ctx.rows, padding, False), None, None


@dataclass(frozen=True, eq=False)
class EmbeddingGradient:
    """The gradient of the weight of an embedding, row by row.

    Attributes:
        indices: int64 [tokens], below 0 where nothing is learned.  grad: of the output, [tokens, size].
        memory: bytes of a block and of the float32 copy of some of `grad`.
    """

    indices: Tensor
    grad: Tensor
    memory: int

    @property
    def kept(self) -> Sequence[Tensor]:
        return self.indices, self.grad

    def copy(self) -> "EmbeddingGradient":
        return replace(self, indices=self.indices.clone(), grad=self.grad.detach().clone())

    @property
    def block_rows(self) -> int:
        return max(1, self.memory // (3 * 4 * self.grad.shape[1]))

    def add_to(self, rows: Tensor, start: int) -> None:
        for (at, groups), grad in zip(self._grouped, self.grad.split(self.block_rows), strict=True):
            sums = torch.ops.aten.embedding_dense_backward(grad.float(), groups, len(groups), -1, False)
            here = (at >= start) & (at < start + len(rows))
            sums.masked_fill_(~here[:, None], 0.0)
            rows.index_add_(0, (at - start).remainder_(len(rows)), sums)  # others add zero, and anywhere will do

    @functools.cached_property
    def _grouped(self) -> Sequence[tuple[Tensor, Tensor]]:
        """Of each block of tokens the distinct indices, followed by -1 to the number of tokens, and which of them each
        token has. It costs as much as there are tokens, however many rows the weight has, and the host does not wait.
        """
        return [_distinct(indices) for indices in self.indices.split(self.block_rows)]


def _distinct(indices: Tensor) -> tuple[Tensor, Tensor]:
    ordered, order = indices.sort(stable=True)
    numbers = (ordered[1:] != ordered[:-1]).cumsum(0)  # of the distinct index at each place but the first
    groups = torch.zeros_like(indices).scatter_(0, order[1:], numbers)
    return torch.full_like(indices, -1).scatter_(0, groups, indices), groups
