"""What the sharded placements share: each rank holds a range of every parameter's elements."""

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowmem.errors import UnsupportedError
from lowmem.placements.agreement import refuse_other_settings
from lowmem.placements.base import Placement, Reducer, Shard
from lowmem.placements.ranks import Ranks
from lowmem.placements.record import ParamRecord
from lowmem.tiles.layout import Layout, Span, View


class FlatShard(Shard):
    """A range of the elements, in the order of the dimensions, as a flat tensor.

    Raises:
        UnsupportedError: a parameter is sharded over other ranks than the first one.
    """

    def admit(self, name: str, param: Tensor) -> None:
        ranks = self.ranks_of(param)
        self.ranks = self.ranks or ranks
        if ranks.members != self.ranks.members:
            raise UnsupportedError(
                f"parameter {name!r} is sharded over other ranks than those before it; make an optimizer for each set "
                "of ranks"
            )

    def form(self, param: Tensor) -> tuple[Any, ...]:
        return (param.dtype,)

    @abstractmethod
    def ranks_of(self, param: Any) -> Ranks:
        """The ranks that hold a shard of a parameter."""

    def layout(self, record: ParamRecord, view: View) -> Layout:
        return Layout.of(record.span.shape, view, record.span.start, record.span.stop)

    def full_tensor(self, param: Tensor) -> Tensor:
        return _gather(self.ranks_of(param), self.read(param), self.span(param))

    def fill(self, param: Tensor, full: Tensor) -> None:
        shard = self.read(param)
        shard.copy_(self.cut(full, self.span(param)))
        self.write(param, shard)

    def gather(self, shard: Tensor, span: Span) -> Tensor:
        assert self.ranks is not None
        return _gather(self.ranks, shard, span)

    def cut(self, full: Tensor, span: Span) -> Tensor:
        return full.reshape(-1)[span.start : span.stop]


def _gather(ranks: Ranks, shard: Tensor, span: Span) -> Tensor:
    return ranks.all_gather(shard, span.size)[: span.numel].view(span.shape)


class ShardedReducer(Reducer):
    """Gradients are averaged over the ranks as they are cut, and micro-batches summed shard by shard."""

    accumulates_first = False


class Sharded(Placement):
    """A placement whose graphs have gathered parameters as leaves, which come and go."""

    def confirm(self, records: Collection[ParamRecord], settings: Mapping[str, Any]) -> None:
        if self.shard.ranks is not None:
            refuse_other_settings(settings, self.shard.ranks.group)

    def leaves(self, params: Sequence[Tensor]) -> Sequence[Tensor] | None:
        return None


def span_of_rank(rank: int, shape: tuple[int, ...], size: int) -> Span:
    """The range of a rank of a parameter that is cut into shards of `size` elements."""
    numel = torch.Size(shape).numel()
    return Span(shape, min(rank * size, numel), min((rank + 1) * size, numel), size)
