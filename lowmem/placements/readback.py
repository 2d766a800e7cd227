"""Values that the host reads without waiting for what was queued after them."""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake


class Readback:
    """Starts to copy a small tensor to the host; `values` waits for that copy only, not for what was queued since."""

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
        """The numbers; None in a dry run with fake tensors, which have none."""
        if is_fake(self._copy):
            return None
        if self._event is not None:
            self._event.synchronize()
        return self._copy.tolist()  # type: ignore[no-any-return]
