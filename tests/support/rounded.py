"""Comparisons on a real GPU, where kernels of torch that compute the same round otherwise.

Its fused and foreach optimizers fuse multiply-adds that separate operations round twice, and a sum of rows depends on
how many rows there are. On an H200 most float32 tensors differed by less than 1e-6 of their norm.
"""

import torch

_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 1e-2, torch.float16: 1e-3}

_equal = torch.equal


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same values up to rounding."""
    if one.device != other.device or _equal(one, other):
        return one.device == other.device
    if one.shape != other.shape or one.dtype != other.dtype or one.dtype not in _TOLERANCE:
        return False
    apart = (one.detach().double() - other.detach().double()).norm()
    return bool(apart <= _TOLERANCE[one.dtype] * other.detach().double().norm())
