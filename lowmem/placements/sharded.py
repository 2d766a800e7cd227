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
    def groups_of(self, param: Any) -> tuple[list[dist.ProcessGroup], torch.device]:
        """Returns the process group over which a parameter is sharded, followed by the groups of ranks that have the
        same shard as this rank, and the device of their collectives.
        """

    def ranks_of(self, param: Tensor) -> Ranks:
        groups, device = self.groups_of(param)
        if groups[0] not in self._ranks:
            self._ranks[groups[0]] = Ranks(groups[0], device)
            self.process_groups.update(dict.fromkeys(groups))
        return self._ranks[groups[0]]

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
