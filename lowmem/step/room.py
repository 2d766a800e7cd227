"""The free memory of a device."""

import torch

# The fraction of a device's memory that gradients leave free for other allocations of backward.
HEADROOM = 1 / 16


def free_memory(device: torch.device) -> tuple[int, int]:
    """Returns the bytes that tensors can use on a device now, and the bytes of all its memory."""
    module = torch.get_device_module(device)
    free, total = module.mem_get_info(device)
    return free + module.memory_reserved(device) - module.memory_allocated(device), total


def peak_memory(device: torch.device) -> int:
    """Returns the peak of the tensors on a GPU since the process started, or since a training loop has reset it."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def unused_memory(device: torch.device, peak: int) -> int:
    """Returns the bytes of a GPU that were free even at the peak of the tensors, except for `HEADROOM`.

    peak: an earlier peak, because a training loop may have reset torch's.
    """
    if device.type != "cuda":
        return 0
    free, total = free_memory(device)
    used = max(peak, peak_memory(device)) - torch.cuda.memory_allocated(device)
    return free - used - int(total * HEADROOM)
