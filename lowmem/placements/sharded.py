"""Base class of ZeRO-3 and FSDP2 shards: each rank has a range of every parameter's elements.

The elements (#) on rank 1 of 3, for a parameter of shape [5, 4]:

    ZeRO-3: slices of 7 elements    FSDP2: blocks of 2 rows
    . . . .                         . . . .
    . . . #                         . . . .
    # # # #                         # # # #
    # # . .                         # # # #
    . . . .                         . . . .
"""

from abc import abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowmem.errors import UnsupportedError
from lowmem.placements.base import ParamEntry, Shard
from lowmem.placements.ranks import Ranks
from lowmem.tiles.layout import Layout, Span, View
from lowmem.tiles.quantized import QuantizedWeight


class FlatShard(Shard):
    """A shard that is a range of a parameter's elements in row-major order, read as a flat tensor."""

    sharded = True

    def __init__(self) -> None:
        self._ranks: dict[dist.ProcessGroup, Ranks] = {}
        self.process_groups: dict[dist.ProcessGroup, None] = {}

    def admit(self, name: str, param: Tensor) -> None:
        ranks = self.ranks_of(param)
        if ranks.members != next(iter(self._ranks.values())).members:
            raise UnsupportedError(
                f"parameter {name!r} is sharded over other ranks than earlier parameters. Create one optimizer per set"
            )

    def form(self, param: Tensor) -> tuple[Any, ...]:
        return (param.dtype,)

    @abstractmethod
    def group_of(self, param: Any) -> tuple[dist.ProcessGroup, torch.device]:
        """Returns the process group over which a parameter is sharded, and the device of its collectives."""

    def replicas_of(self, param: Any) -> list[dist.ProcessGroup]:
        """Returns groups of ranks that have the same shard of a parameter as this rank."""
        return []

    def ranks_of(self, param: Tensor) -> Ranks:
        group, device = self.group_of(param)
        if group not in self._ranks:
            self._ranks[group] = Ranks(group, device)
            self.process_groups.update(dict.fromkeys([group, *self.replicas_of(param)]))
        return self._ranks[group]

    def layout(self, record: ParamEntry, view: View) -> Layout:
        return Layout.of(record.span.shape, view, record.span.start, record.span.stop)

    def gather(self, param: Tensor, shard: Tensor, span: Span) -> Tensor:
        if isinstance(shard, QuantizedWeight):
            return shard.by_group(lambda part, group: self.gather(param, part, span.grouped(group)))
        return self.ranks_of(param).all_gather(shard, span.size)[: span.numel].view(span.shape)

    def cut(self, full: Tensor, span: Span) -> Tensor:
        return full.reshape(-1)[span.start : span.stop]


def span_of_rank(rank: int, shape: tuple[int, ...], size: int) -> Span:
    """Returns the range of a rank. Each rank has `size` elements, except that the last ranks may have fewer or none."""
    numel = torch.Size(shape).numel()
    return Span(shape, min(rank * size, numel), min((rank + 1) * size, numel), size)
