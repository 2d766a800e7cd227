"""Whether all ranks of the default process group hold the same parameters."""

import hashlib
from collections.abc import Collection
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lowmem.errors import UnsupportedError
from lowmem.placements.record import ParamRecord

# Elements that are summed at once, as 64-bit integers.
_CHUNK = 1 << 20

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Summary(NamedTuple):
    """What a rank holds: the number of its parameters, and checksums of their kinds and of their values."""

    params: int
    kinds: str
    values: str


def refuse_different(records: Collection[ParamRecord]) -> None:
    """Raises `UnsupportedError` on every rank unless all of them hold parameters of equal names, shapes and values.

    Every rank of the default process group calls it. It sends a few bytes.
    """
    summaries: list[_Summary | None] = [None] * dist.get_world_size()
    dist.all_gather_object(summaries, _summary(records))
    first = summaries[0]
    assert first is not None
    for rank, other in enumerate(summaries):
        assert other is not None
        if other != first:
            raise UnsupportedError(
                f"placement='auto' in a process group of {len(summaries)} ranks: {_difference(rank, other, first)}. "
                "Write placement='replicated' to train one model (the weights of rank 0 are broadcast, every rank has "
                "all parameters, and gradients are averaged), or placement='local' where each rank trains parameters "
                "of its own (pipeline stages, independent models: nothing is averaged)"
            )


def _difference(rank: int, other: _Summary, first: _Summary) -> str:
    if other.params != first.params:
        return f"rank 0 has {first.params} parameter(s) and rank {rank} has {other.params}"
    what = "names, shapes or dtypes" if other.kinds != first.kinds else "values"
    return f"the parameters of rank {rank} have other {what} than those of rank 0"


def _summary(records: Collection[ParamRecord]) -> _Summary:
    kinds = [(record.name, tuple(record.param.shape), str(record.param.dtype)) for record in records]
    sums = [_checksum(record.param).cpu() for record in records]  # on several devices, perhaps
    return _Summary(len(records), _digest(kinds), _digest([int(total) for total in sums]))


def _digest(values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()


def _checksum(param: Tensor) -> Tensor:
    """A sum of a parameter's bits, each element times an odd number of its own: an int64 scalar, modulo 2**64."""
    bits = param.detach().reshape(-1).view(_BITS[param.element_size()])
    odd = 2 * torch.arange(min(_CHUNK, bits.numel()), device=bits.device) + 1
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for chunk in bits.split(_CHUNK):
        total = 31 * total + (chunk * odd[: len(chunk)]).sum()
    return total
