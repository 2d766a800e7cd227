"""Norms of a gradient, as PyTorch computes them, also where float32 overflows."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from lowmem.tiles.gradients import Gradient
from lowmem.tiles.norms import REDUCED, norm_over
from lowmem.tiles.stored import tiles


class Norms(NamedTuple):
    """Norms of gradients, float64. They are Inf or NaN only if an element is.

    unscaled: 2-norm without the loss scale.  clamped: 2-norm after `clip_value`.  clipped: the norm that `clip_norm`
    limits.  tiled: as `unscaled`, but summed in tiles. On a CPU, PyTorch's norm of a large float32 tensor may be off by
    a percent.
    """

    unscaled: Tensor
    clamped: Tensor
    clipped: Tensor
    tiled: Tensor


def measure(
    grad: Gradient,
    inverse_scale: Tensor | None,
    limit: Tensor | None,
    *,
    norm_type: float,
    norm_before_clamp: bool,
) -> Tensor:
    """Returns the `Norms` of a gradient, float64 [4].

    A float32 gradient is unscaled and clamped in place, as by PyTorch. A 16-bit gradient is read tile by tile and does
    not change. A computed gradient is read block by block.

    Args:
        grad: a gradient, or this rank's shard of it, any shape.
        inverse_scale: the factor that unscales it, a float32 scalar, or None.
        limit: of `clip_value`, a float32 scalar, or None.
        norm_type: of `clip_norm`, 2 or inf.
        norm_before_clamp: `clip_norm` limits the norm before `clip_value` is applied.
    """
    if 0 in grad.shape:  # the shard is empty
        return torch.zeros(4, dtype=torch.float64, device=grad.device)
    parts = []
    for part in _float32_parts(grad):
        if inverse_scale is not None:
            part.mul_(inverse_scale)
        norms = _norms(part, norm_type)
        if limit is not None:
            part.clamp_(-limit, limit)
            after = _norms(part, norm_type)
            norms = norms._replace(clamped=after.clamped, clipped=(norms if norm_before_clamp else after).clipped)
        parts.append(torch.stack(norms))
    if len(parts) == 1:
        return parts[0]
    orders = 2.0, 2.0, norm_type, 2.0
    norms_of_parts = torch.stack(parts, 1).unbind()
    return torch.stack([norm_over(norm, order) for norm, order in zip(norms_of_parts, orders, strict=True)])


def _norms(values: Tensor, norm_type: float) -> Norms:
    """Computes 2-norms in float32. Where they overflow, they are computed again from smaller multiples."""
    parts = tiles(values)
    single = tiled = torch.linalg.vector_norm(values)
    if len(parts) > 1:
        tiled = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(part) for part in parts]))
    buffer = torch.empty_like(parts[0])  # stays in the cache
    products = (torch.mul(part, REDUCED, out=buffer[: part.numel()]) for part in parts)
    reduced = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(product) for product in products]))
    large = reduced.double() / REDUCED
    norm, norm_in_tiles = (torch.where(each.isfinite(), each.double(), large) for each in (single, tiled))
    of_type = norm if norm_type == 2 else torch.linalg.vector_norm(values, torch.inf).double()
    return Norms(norm, norm, of_type, norm_in_tiles)


def is_float32(grad: Gradient) -> bool:
    """Returns whether a gradient is a float32 tensor. Such gradients are unscaled and clamped in place."""
    return isinstance(grad, Tensor) and grad.dtype == torch.float32


def _float32_parts(grad: Gradient) -> Iterable[Tensor]:
    """Returns the gradient itself if it is a float32 tensor, or else its tiles or computed blocks in float32."""
    if not isinstance(grad, Tensor):
        return (block for _, block in grad.blocks())
    return [grad] if is_float32(grad) else (tile.float() for tile in tiles(grad))
