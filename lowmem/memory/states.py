"""What an optimizer keeps beside the weights, measured by letting it take a step."""

from typing import Any

import torch
from torch import Tensor

from lowmem.optimizer import FusedOptimizer


def state_bytes(rule: Any, rounding: str = "nearest", size: int = 1024, **hyper: Any) -> float:
    """Bytes that are kept for each element of a `size` × `size` bfloat16 matrix after its first update.

    Args:
        rule, rounding, hyper: as `FusedOptimizer` takes them.
    """
    param = torch.nn.Parameter(torch.ones(size, size, dtype=torch.bfloat16))
    opt = FusedOptimizer([("weight", param)], rule=rule, rounding=rounding, compile=False, **hyper)
    opt.backward(param.sum())
    kept = opt.state_dict()["state"].get("weight", {})
    return sum(t.nbytes for t in kept.values() if isinstance(t, Tensor)) / param.numel()
