"""Data parallelism without a wrapper: every rank has the full parameters, and gradients are averaged in the hooks."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lowmem.errors import UnsupportedError
from lowmem.placements.agreement import refuse_different, refuse_other_settings
from lowmem.placements.all_reduce import AllReduce
from lowmem.placements.base import Placement, Shard
from lowmem.placements.placed import Placed
from lowmem.placements.wrappers import WRAPPED
from lowmem.tiles.quantized import tensors_of


class Replicated(Placement):
    """The same parameters on every rank of the default process group, with different data on each rank.

    Buffers are not synchronized, as on a single device.

    Args:
        broadcasts: broadcast the weights of rank 0 first. Otherwise `adopt` raises `UnsupportedError` unless all ranks
            have equal parameters.
    """

    name = "replicated"

    def __init__(self, *, broadcasts: bool) -> None:
        super().__init__(Shard(), AllReduce())
        self._broadcasts = broadcasts

    def adopt(self, records: Collection[Placed], model: nn.Module | None) -> None:
        super().adopt(records, model)
        if not self._broadcasts:
            refuse_different(records)
            return
        with torch.no_grad():
            for record in records:
                for tensor in tensors_of(record.param.detach()):
                    dist.broadcast(tensor, src=0)

    def confirm(self, records: Collection[Placed], settings: Mapping[str, Any]) -> None:
        super().confirm(records, settings)
        refuse_other_settings(settings)

    def free_copies(self, records: Collection[Placed], *, updated: bool) -> None:
        """Raises `UnsupportedError` if a wrapper, which the model got after the first step, has written to `.grad`."""
        if any(record.param.grad is not None for record in records if record.trained):
            raise UnsupportedError(WRAPPED)
