"""Each rank holds a piece of every parameter: a range of its elements, in the order of its dimensions."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from lowmem.errors import UnsupportedError
from lowmem.placements.local import Local
from lowmem.placements.ranks import Ranks
from lowmem.placements.record import ParamRecord
from lowmem.tiles.layout import Layout, Span, View


class Sharded(Local):
    """What the sharded placements share. Pieces are flat, and gradients are averaged over the ranks as they are cut.

    Raises:
        UnsupportedError: parameters are sharded over other ranks than the first one.
    """

    sums_whole = False

    def admit(self, name: str, param: Tensor) -> None:
        own = self._ranks_of(param)
        self.ranks = self.ranks or own
        if own.members != self.ranks.members:
            raise UnsupportedError(
                f"parameter {name!r} is sharded over other ranks than those before it; make an optimizer for each set "
                "of ranks"
            )

    @abstractmethod
    def _ranks_of(self, param: Tensor) -> Ranks:
        """Those over which a parameter is cut."""

    def layout(self, record: ParamRecord, view: View) -> Layout:
        return Layout.of(record.span.shape, view, record.span.start, record.span.stop)

    def measured_leaves(self, params: Sequence[Tensor]) -> Sequence[Tensor] | None:
        return None  # the leaves of the graph are gathered parameters, which come and go

    def full_tensor(self, param: Tensor) -> Tensor:
        return self._gather(self._ranks_of(param), self.read(param), self.span(param))

    def fill(self, param: Tensor, whole: Tensor) -> None:
        piece = self.read(param)
        piece.copy_(self.cut(whole, self.span(param)))
        self.write(param, piece)

    def gather(self, piece: Tensor, span: Span) -> Tensor:
        assert self.ranks is not None
        return self._gather(self.ranks, piece, span)

    @staticmethod
    def _gather(ranks: Ranks, piece: Tensor, span: Span) -> Tensor:
        return ranks.gather(piece, span.size)[: span.numel].view(span.shape)

    def cut(self, whole: Tensor, span: Span) -> Tensor:
        return whole.reshape(-1)[span.start : span.stop]


def held_by(rank: int, shape: tuple[int, ...], size: int) -> Span:
    """What a rank holds of a parameter that is cut into pieces of `size` elements."""
    numel = torch.Size(shape).numel()
    return Span(shape, min(rank * size, numel), min((rank + 1) * size, numel), size)
