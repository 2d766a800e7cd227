"""The ranks that parameters are sharded over, and their collectives."""

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lowmem.tiles.layout import Span

# torch 2.13 renamed these collectives and warns about the old names
_NEW_NAMES = hasattr(dist, "all_gather_single")


def in_group() -> bool:
    """Returns whether this process is a rank of a process group."""
    return dist.is_available() and dist.is_initialized()


def on_rank() -> str:
    """Returns " on rank 1" (with this rank's number), or an empty string outside of a process group."""
    return f" on rank {dist.get_rank()}" if in_group() else ""


def set_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    """Sets the timeout for collectives of a process group (default: the default group)."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)


class Ranks:
    """A process group that parameters are sharded over. Its methods are collectives, which every rank must call.

    Args:
        group: the process group. Group rank i has shard i.
        device: the device for collectives. Other tensors are moved there and back.

    Attributes:
        world_size, rank: the size of the group, and this process's rank in it.
        members: global ranks of the group.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self._device = device
        self.world_size = dist.get_world_size(group)
        self.members = dist.get_process_group_ranks(group)
        self._scatters_by_reducing = dist.get_backend(group) == "gloo"  # gloo does not support reduce-scatter
        self.rank = dist.get_rank(group)

    def all_reduce(self, tensors: Sequence[Tensor], *, largest: bool = False) -> list[Tensor]:
        """Returns the sums, or the elementwise maxima, of tensors of one dtype over the ranks, in one collective."""
        packed = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(self._device)
        dist.all_reduce(packed, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=self.group)
        split = packed.to(tensors[0].device).split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(split, tensors, strict=True)]

    def reduce_scatter_mean(self, full: Tensor, span: Span) -> Callable[[], Tensor]:
        """Launches a reduce-scatter of the mean over ranks, which overwrites `full`.

        Args:
            full: a flat tensor.
            span: the elements of this rank.

        Returns:
            A function that waits for this rank's elements and returns them. On a GPU, only the stream waits.
        """
        full.div_(self.world_size)  # before the sum, which might overflow in float16
        if self._scatters_by_reducing:
            shard = full[span.start : span.stop]
            work = dist.all_reduce(full, group=self.group, async_op=True)
        else:
            if missing := self.world_size * span.size - span.numel:
                full = torch.nn.functional.pad(full, (0, missing))
            shard = full.new_empty(span.size)
            scatter = dist.reduce_scatter_single if _NEW_NAMES else dist.reduce_scatter_tensor
            work = scatter(shard, full, group=self.group, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return shard.clone() if self._scatters_by_reducing else shard[: span.held]

        return wait

    def all_gather(self, shard: Tensor, size: int) -> Tensor:
        """Gathers flat shards of at most `size` elements, each padded to `size`.

        Returns:
            [world_size * size], on the device of the group.
        """
        shard = shard.to(self._device)
        if shard.numel() < size:
            shard = torch.nn.functional.pad(shard, (0, size - shard.numel()))
        full = shard.new_empty(self.world_size * size)
        gather = dist.all_gather_single if _NEW_NAMES else dist.all_gather_into_tensor
        gather(full, shard.contiguous(), group=self.group)
        return full
