"""The ranks that hold a piece of each parameter, and what they do together."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 gave them other names
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class Ranks:
    """One process group, in whose order parameters are cut. Each method is a collective: every rank calls it.

    Args:
        group: in which they are.
        device: where its tensors have to be; those that are elsewhere go there and back.

    Attributes:
        members: numbers of its ranks in the default group.
        reduces_copies: scattering what is reduced, the group would reduce all of a copy and cut that.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self._device = group, device
        self.count = dist.get_world_size(group)
        self.members = dist.get_process_group_ranks(group)
        self.reduces_copies = dist.get_backend(group) == "gloo"
        self.rank = dist.get_rank(group)

    def totals(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Each tensor summed over the ranks; all are of one dtype."""
        return self._together(parts, dist.ReduceOp.SUM)

    def largest(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Each tensor's largest values over the ranks; all are of one dtype."""
        return self._together(parts, dist.ReduceOp.MAX)

    def _together(self, parts: Sequence[Tensor], op: dist.ReduceOp.RedOpType) -> list[Tensor]:
        packed = torch.cat([part.reshape(-1) for part in parts]).to(self._device)
        dist.all_reduce(packed, op=op, group=self.group)
        split = packed.to(parts[0].device).split([part.numel() for part in parts])
        return [own.view(part.shape) for own, part in zip(split, parts, strict=True)]

    def scatter_mean(self, whole: Tensor, size: int) -> Tensor:
        """The mean over ranks of a flat tensor, of which rank i gets the elements from i·size on, at most `size` of
        them. Takes the tensor's memory.
        """
        numel = whole.numel()
        whole.div_(self.count)  # before it is summed: float16 would overflow
        if self.reduces_copies:
            dist.all_reduce(whole, group=self.group)
            return whole[self.rank * size : (self.rank + 1) * size].clone()
        if missing := self.count * size - numel:
            whole = torch.nn.functional.pad(whole, (0, missing))
        piece = whole.new_empty(size)
        _reduce_scatter(piece, whole, group=self.group)
        return piece[: max(0, min(size, numel - self.rank * size))]

    def gather(self, piece: Tensor, size: int) -> Tensor:
        """Flat pieces of at most `size` elements one after the other, each padded to `size`: [count * size], on the
        device of the group.
        """
        piece = piece.to(self._device)
        if piece.numel() < size:
            piece = torch.nn.functional.pad(piece, (0, size - piece.numel()))
        whole = piece.new_empty(self.count * size)
        _all_gather(whole, piece.contiguous(), group=self.group)
        return whole
