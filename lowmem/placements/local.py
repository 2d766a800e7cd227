"""One device holds the whole parameter and its whole gradient."""

import torch
from torch import Tensor

from lowmem.errors import UnsupportedError
from lowmem.rules.rule import StateSpec
from lowmem.sweep import Layout


class Local:
    """Parameters on one device (or several, each parameter whole on one)."""

    def reduce(self, param: Tensor) -> Tensor:
        """Takes the finished gradient off the parameter: the caller's reference is the only one."""
        grad = param.grad
        assert grad is not None
        param.grad = None
        if grad.layout != torch.strided:
            raise UnsupportedError("has a sparse gradient; make its module with sparse=False")
        return grad

    def layout(self, param: Tensor, shape: tuple[int, int, int]) -> Layout:
        """The piece of a parameter, seen as [batch, rows, cols], that is here: all of it."""
        try:
            param.view(shape)
        except RuntimeError:
            raise UnsupportedError(
                f"lies in memory with strides {param.stride()}, which cannot be seen as {list(shape)} without a copy; "
                "make it contiguous first: param.data = param.data.contiguous()"
            ) from None
        return Layout.whole(shape)

    def new_state(self, spec: StateSpec, param: Tensor) -> Tensor:
        """A zero state where its parameter lives."""
        return torch.zeros(spec.shape, dtype=spec.dtype, device=param.device)
