"""Copies small values between host and device without synchronization."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake


def to_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copies numbers to a device as a tensor [values]. They are pinned, because CUDA might otherwise synchronize."""
    host = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=device.type in ("cuda", "xpu"))
    return host.to(device, non_blocking=True)


class Readback:
    """Starts copying a small tensor to the host. `values` waits for this copy, but not for later work."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.Event | None = None
        if tensor.device.type == "cpu":
            self._copy = tensor.detach().clone()
            return
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=not is_fake(tensor))
        self._copy.copy_(tensor.detach(), non_blocking=True)
        if not is_fake(tensor):  # torch.Event(device) would use the current device
            self._event = torch.accelerator.current_stream(tensor.device).record_event()

    def values(self) -> list[float] | None:
        """Returns the numbers, or None in a dry run with fake tensors."""
        if is_fake(self._copy):
            return None
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._copy.tolist()  # type: ignore[no-any-return]
