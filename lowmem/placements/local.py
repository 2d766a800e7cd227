"""One device holds the whole parameter and its whole gradient."""

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from lowmem.errors import UnsupportedError
from lowmem.layout import Layout, View
from lowmem.rules.rule import StateSpec
from lowmem.slots import Slot

Reduced = Iterator[tuple[Slot, Tensor]]


class Local:
    """Parameters on one device (or several, each parameter whole on one)."""

    def adopt(self, slots: Collection[Slot]) -> None:
        """Takes in parameters that an optimizer is to update."""

    def begin(self, slots: Collection[Slot]) -> None:
        """A backward begins in which gradients are reduced; `slots` are all that may get one."""

    def take(self, param: Tensor) -> Tensor:
        """Takes the finished gradient off the parameter: the caller's reference is the only one."""
        grad = param.grad
        assert grad is not None
        param.grad = None
        if grad.layout != torch.strided:
            raise UnsupportedError("has a sparse gradient; make its module with sparse=False")
        return grad

    def reduce(self, slot: Slot, grad: Tensor) -> Reduced:
        """Takes a finished gradient in, and gives those that are ready by now, averaged over ranks."""
        yield slot, grad

    def flush(self) -> Reduced:
        """Gives the rest: the backward has ended."""
        yield from ()

    def drop(self) -> None:
        """Forgets what is under way: the backward died."""

    def layout(self, param: Tensor, view: View) -> Layout:
        """The piece of a parameter that is here: all of it."""
        layout = Layout.whole(tuple(param.shape), view)
        try:
            layout.views(param)
        except RuntimeError:
            raise UnsupportedError(
                f"lies in memory with strides {param.stride()}, which cannot be seen as {list(layout.shape)} without a "
                "copy; make it contiguous first: param.data = param.data.contiguous()"
            ) from None
        return layout

    def new_state(self, spec: StateSpec, param: Tensor, view: View) -> Tensor:
        """A state as it is before the first update, where its parameter lives."""
        if spec.master:
            return param.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        shape = view.kept(spec.extent, tuple(param.shape)) + spec.extra
        return torch.zeros(shape, dtype=spec.dtype or param.dtype, device=param.device)
