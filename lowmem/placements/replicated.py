"""Data parallel without a wrapper: every rank holds every parameter, and gradients are averaged in the hooks."""

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
    """The same parameters on every rank of the default process group, each rank with data of its own.

    Buffers are not synchronized, as on a single device.

    Args:
        broadcasts: the weights of rank 0 are broadcast first; otherwise all ranks have to hold the same ones already.

    Raises:
        UnsupportedError: ranks hold other parameters, or the model is in a `DistributedDataParallel` wrapper, which
            would average once more.
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
        """A wrapper that the model got after the first step writes its own averages into `.grad` when backward ends."""
        if any(record.param.grad is not None for record in records if record.trained):
            raise UnsupportedError(WRAPPED)
