"""The ranks of a process group that hold a shard of each parameter, and their collectives."""

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 has given them new names, and warns of the old ones
_NEW_NAMES = hasattr(dist, "all_gather_single")


def in_group() -> bool:
    """Returns whether this process is a rank of a process group."""
    return dist.is_available() and dist.is_initialized()


def set_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    """Sets how long a collective of a group, or of the default one, waits for its ranks."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)


class Ranks:
    """One process group, in whose order parameters are sharded. Each method is a collective: every rank calls it.

    Args:
        group: the process group.
        device: where its tensors have to be; others are moved there and back.

    Attributes:
        world_size, rank: of the group.
        members: global ranks of its members.
        scatters_by_reducing: the backend has no reduce-scatter of its own (gloo), so all of a copy is reduced and cut.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self._device = group, device
        self.world_size = dist.get_world_size(group)
        self.members = dist.get_process_group_ranks(group)
        self.scatters_by_reducing = dist.get_backend(group) == "gloo"
        self.rank = dist.get_rank(group)

    def all_reduce(self, tensors: Sequence[Tensor], *, largest: bool = False) -> list[Tensor]:
        """Each tensor summed over the ranks, or its elementwise maximum if `largest`; all have one dtype."""
        packed = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(self._device)
        dist.all_reduce(packed, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=self.group)
        split = packed.to(tensors[0].device).split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(split, tensors, strict=True)]

    def reduce_scatter_mean(self, full: Tensor, size: int) -> Callable[[], Tensor]:
        """Launches the mean over ranks of a flat tensor, of which rank i gets the elements from i * size on, at most
        `size` of them. The memory of the tensor is reused.

        Returns:
            A function that waits for this rank's elements and returns them. On a GPU, the stream waits.
        """
        numel, start = full.numel(), self.rank * size
        full.div_(self.world_size)  # before it is summed: float16 would overflow
        if self.scatters_by_reducing:
            shard = full[start : start + size]
            work = dist.all_reduce(full, group=self.group, async_op=True)
        else:
            if missing := self.world_size * size - numel:
                full = torch.nn.functional.pad(full, (0, missing))
            shard = full.new_empty(size)
            scatter = dist.reduce_scatter_single if _NEW_NAMES else dist.reduce_scatter_tensor
            work = scatter(shard, full, group=self.group, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return shard.clone() if self.scatters_by_reducing else shard[: max(0, min(size, numel - start))]

        return wait

    def all_gather(self, shard: Tensor, size: int) -> Tensor:
        """Flat shards of at most `size` elements one after the other, each padded to `size`: [world_size * size], on
        the device of the group.
        """
        shard = shard.to(self._device)
        if shard.numel() < size:
            shard = torch.nn.functional.pad(shard, (0, size - shard.numel()))
        full = shard.new_empty(self.world_size * size)
        gather = dist.all_gather_single if _NEW_NAMES else dist.all_gather_into_tensor
        gather(full, shard.contiguous(), group=self.group)
        return full
