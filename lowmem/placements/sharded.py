"""Common parts of the sharded placements: each rank holds a range of every parameter's elements."""

from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowmem.errors import UnsupportedError
from lowmem.placements.agreement import refuse_other_settings
from lowmem.placements.base import Placement, Shard
from lowmem.placements.placed import Placed
from lowmem.placements.ranks import Ranks
from lowmem.tiles.layout import Layout, Span, View
from lowmem.tiles.quantized import QuantizedWeight, plain


class FlatShard(Shard):
    """A range of the elements, in the order of the dimensions, as a flat tensor.

    Raises:
        UnsupportedError: a parameter is sharded over other ranks than the first one.
    """

    sharded = True

    def __init__(self) -> None:
        self._ranks: dict[dist.ProcessGroup, Ranks] = {}

    def admit(self, name: str, param: Tensor) -> None:
        ranks = self.ranks_of(param)
        if ranks.members != next(iter(self._ranks.values())).members:
            raise UnsupportedError(
                f"parameter {name!r} is sharded over different ranks than earlier parameters. Create one optimizer for "
                "each set of ranks"
            )

    def form(self, param: Tensor) -> tuple[Any, ...]:
        return (param.dtype,)

    @abstractmethod
    def group_of(self, param: Any) -> tuple[dist.ProcessGroup, torch.device]:
        """The process group whose ranks hold a shard of a parameter, and the device of its tensors."""

    def ranks_of(self, param: Tensor) -> Ranks:
        group, device = self.group_of(param)
        if group not in self._ranks:
            self._ranks[group] = Ranks(group, device)
        return self._ranks[group]

    def layout(self, record: Placed, view: View) -> Layout:
        return Layout.of(record.span.shape, view, record.span.start, record.span.stop)

    def full_tensor(self, param: Tensor) -> Tensor:
        return plain(self.gather(param, self.read(param), self.span(param)))

    def fill(self, param: Tensor, full: Tensor) -> None:
        shard = self.read(param)
        shard.copy_(self.cut(full, self.span(param)))
        self.write(param, shard)

    def gather(self, param: Tensor, shard: Tensor, span: Span) -> Tensor:
        if isinstance(shard, QuantizedWeight):
            return shard.by_group(lambda part, group: self.gather(param, part, span.grouped(group)))
        return self.ranks_of(param).all_gather(shard, span.size)[: span.numel].view(span.shape)

    def cut(self, full: Tensor, span: Span) -> Tensor:
        return full.reshape(-1)[span.start : span.stop]


class Sharded(Placement):
    """A placement whose graphs have gathered parameters as leaves, which come and go."""

    def confirm(self, records: Collection[Placed], settings: Mapping[str, Any]) -> None:
        for ranks in dict.fromkeys(self.shard.ranks_of(record.param) for record in records):  # a set has no order
            assert ranks is not None
            refuse_other_settings(settings, ranks.group)


def span_of_rank(rank: int, shape: tuple[int, ...], size: int) -> Span:
    """The range of a rank of a parameter that is cut into shards of `size` elements."""
    numel = torch.Size(shape).numel()
    return Span(shape, min(rank * size, numel), min((rank + 1) * size, numel), size)
