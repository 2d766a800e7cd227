"""A dense tensor as flat tiles, so that what is done with it needs the temporary memory of one tile."""

from torch import Tensor

from lowmem.sweep import CPU_TILE, GPU_TILE


def flat(tensor: Tensor) -> Tensor:
    """The elements in the order of their memory, whatever the order of dimensions: a view of one dimension."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def tiles(tensor: Tensor) -> tuple[Tensor, ...]:
    """`flat` in pieces."""
    return flat(tensor).split(CPU_TILE if tensor.device.type == "cpu" else GPU_TILE)


def add(total: Tensor, grad: Tensor) -> None:
    """Adds a gradient to a sum in the same layout, to which it may be narrower.

    torch would make a copy of the whole gradient in the dtype of the sum, in four times the time on a CPU.
    """
    if grad.dtype == total.dtype or grad.stride() != total.stride():
        total.add_(grad)
        return
    for into, part in zip(tiles(total), tiles(grad), strict=True):
        into.add_(part)
