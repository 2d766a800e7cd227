"""Norms of gradients: computed in float32 like PyTorch's, but also correct where squares overflow float32.

A sum of squares is measured twice: of the values, and of the values times `REDUCED`, a power of two. The second one is
used where the first overflows. A float64 norm is Inf or NaN only if an element is.
"""

import torch
from torch import Tensor

# The squares of finite float32 values times this, and sums of up to 2⁶³ of them, do not overflow float32.
REDUCED = 2.0**-96

# Rules with a mean of squares in float32 support gradients whose sum of squares is less than this.
LARGEST_SUM = 2.0**126


def exact(square_sum: Tensor, reduced: Tensor) -> Tensor:
    """Returns the float64 sum of squares, from float32 sums for the values and for the values times `REDUCED`."""
    return torch.where(square_sum.isfinite(), square_sum.double(), reduced.double() / REDUCED**2)


def norm_over(norms: Tensor, order: float = 2.0) -> Tensor:
    """Returns the norm over several tensors from their float64 norms, summed in float32 unless squares overflow."""
    single = torch.linalg.vector_norm(norms.float(), order)
    return torch.where(single.isfinite(), single.double(), torch.linalg.vector_norm(norms, order))


def summable(square_sums: Tensor, limit: Tensor | None = None, count: int | Tensor = 0) -> Tensor:
    """Returns whether squares of gradients can be summed in float32, given their exact sums.

    limit: the gradients, of `count` elements each, will be clamped to +-`limit`.
    """
    if limit is not None:
        square_sums = torch.minimum(square_sums, limit.double().square() * count)
    return square_sums < LARGEST_SUM
