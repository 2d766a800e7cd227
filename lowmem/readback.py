"""A number of the device that the host wants to know, later, without waiting for it now."""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake


class Readback:
    """Begins to copy a small tensor to the host; `values` waits for that copy alone, not for what was queued since."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.Event | None = None
        if tensor.device.type == "cpu":
            self._copy = tensor.detach().clone()
            return
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=not is_fake(tensor))
        self._copy.copy_(tensor.detach(), non_blocking=True)
        if not is_fake(tensor):
            self._event = torch.Event(device=tensor.device)
            self._event.record()

    def values(self) -> list[float] | None:
        """The numbers; None where there are none, in a dry run with fake tensors."""
        if is_fake(self._copy):
            return None
        if self._event is not None:
            self._event.synchronize()
        return self._copy.tolist()  # type: ignore[no-any-return]
