"""Compares tensors on a real GPU, where torch kernels for the same computation round differently.

Fused and foreach optimizers use fused multiply-adds, which separate operations round twice, and the sum of a row
depends on the number of rows. On an H200, most float32 tensors differed by less than 1e-6 of their norm.
"""

import torch

_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 1e-2, torch.float16: 1e-3}

_equal = torch.equal


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two tensors on the same device are equal up to rounding errors."""
    if one.device != other.device or _equal(one, other):
        return one.device == other.device
    if one.shape != other.shape or one.dtype != other.dtype or one.dtype not in _TOLERANCE:
        return False
    distance = (one.detach().double() - other.detach().double()).norm()
    return bool(distance <= _TOLERANCE[one.dtype] * other.detach().double().norm())
