"""Queries and sets autocast per device."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Returns the dtype of products under autocast, or None outside autocast."""
    enabled = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if enabled else None


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Returns a context in which products use this dtype, or the dtype of their operands if it is None.

    Casts of weights are not cached, because inside another autocast region they would stay in memory until it ends.
    """
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, dtype, enabled=dtype is not None, cache_enabled=False)
