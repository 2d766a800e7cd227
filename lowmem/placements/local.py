"""One device holds the whole parameter and its whole gradient."""

from collections.abc import Collection, Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from lowmem.errors import UnsupportedError
from lowmem.placements.ranks import Ranks
from lowmem.placements.record import ParamRecord
from lowmem.tiles.layout import Layout, Span, View

Reduced = Iterator[tuple[ParamRecord, Tensor]]


class Local:
    """Parameters on one device (or several, each parameter whole on one).

    Attributes:
        ranks: those that hold a piece of each parameter; None where each is whole.
        sums_whole: micro-batches are summed before their gradient is reduced; else each one's is reduced.
        graph_stays: a second backward may go through the graph of a forward.
    """

    name: ClassVar[str] = "local"
    sums_whole: ClassVar[bool] = True
    graph_stays: ClassVar[bool] = True
    ranks: Ranks | None = None

    def admit(self, name: str, param: Tensor) -> None:
        """Raises `UnsupportedError` for a parameter that cannot be updated where it is."""

    def adopt(self, records: Collection[ParamRecord]) -> None:
        """Takes in parameters that an optimizer is to update."""

    def begin(self, records: Collection[ParamRecord]) -> None:
        """A backward begins in which gradients are reduced; `records` are all that may get one."""

    def take(self, param: Tensor) -> Tensor:
        """Takes the finished gradient off the parameter: the caller's reference is the only one."""
        grad = param.grad
        assert grad is not None
        param.grad = None
        if grad.layout != torch.strided:
            raise UnsupportedError("has a sparse gradient; make its module with sparse=False")
        return grad

    def reduce(self, record: ParamRecord, grad: Tensor) -> Reduced:
        """Takes a finished gradient in, and gives those that are ready by now, averaged over ranks."""
        yield record, grad

    def flush(self) -> Reduced:
        """Gives the rest: the backward has ended."""
        yield from ()

    def drop(self) -> None:
        """Forgets what is under way: the backward died."""

    def settle(self, records: Collection[ParamRecord]) -> None:
        """The updates of a step are done: nothing of the weights before it may stay."""

    def measured_leaves(self, params: Sequence[Tensor]) -> Sequence[Tensor] | None:
        """What a measuring backward is to reach: these parameters and no other leaf, or None for every leaf."""
        return params

    # -- the piece of a parameter that is here -----------------------------------------------------------------------

    def span(self, param: Tensor) -> Span:
        """Which elements of a parameter are here."""
        return Span(tuple(param.shape), 0, param.numel(), param.numel())

    def read(self, param: Tensor) -> Tensor:
        """The piece, where it is computed with."""
        return param.detach()

    def write(self, param: Tensor, piece: Tensor) -> None:
        """Puts the piece that `read` gave, and that has changed since, where it is kept."""

    def full_tensor(self, param: Tensor) -> Tensor:
        """All of a parameter. Every rank calls it."""
        return param.detach()

    @torch.no_grad()
    def fill(self, param: Tensor, whole: Tensor) -> None:
        """Gives a parameter the values of `whole`."""
        param.copy_(whole)

    def release(self, param: Tensor) -> None:
        """Gives back what is gathered of a parameter."""

    def gather(self, piece: Tensor, span: Span) -> Tensor:
        """All of a tensor that is cut as a parameter is. Every rank calls it."""
        return piece

    def cut(self, whole: Tensor, span: Span) -> Tensor:
        """The piece of a tensor as a parameter is cut."""
        return whole

    def died(self) -> None:
        """A backward ended with an error: lets the next one begin anew."""

    def layout(self, record: ParamRecord, view: View) -> Layout:
        """The rectangles of the piece."""
        layout, param = Layout.of(record.span.shape, view), record.param
        try:
            layout.views(param)
        except RuntimeError:
            raise UnsupportedError(
                f"lies in memory with strides {param.stride()}, which cannot be seen as {list(layout.shape)} without a "
                "copy; make it contiguous first: param.data = param.data.contiguous()"
            ) from None
        return layout
