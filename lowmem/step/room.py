"""The free memory of a device."""

import torch

# The fraction of a device's memory that gradients leave free for other allocations of backward.
HEADROOM = 1 / 16


def free_memory(device: torch.device) -> tuple[int, int]:
    """Returns the bytes that tensors can use on a device now, and the bytes of all its memory."""
    module = torch.get_device_module(device)
    free, total = module.mem_get_info(device)
    return free + module.memory_reserved(device) - module.memory_allocated(device), total


def unused_memory(device: torch.device) -> int:
    """Returns the bytes of a GPU that were free even at the peak of this process, except for `HEADROOM`."""
    if device.type != "cuda":
        return 0
    free, total = free_memory(device)
    return free - torch.cuda.max_memory_allocated(device) + torch.cuda.memory_allocated(device) - int(total * HEADROOM)
