"""Compares the parameters and the optimizer settings of ranks that train one model."""

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowmem.errors import ConfigError, UnsupportedError
from lowmem.tiles.quantized import tensors_of
from lowmem.tiles.stored import flat

# Number of elements that a checksum converts to 64-bit integers at a time.
_CHUNK = 1 << 20

# Number of elements per parameter that are compared during training.
_SAMPLE = 1 << 10

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# A process group, or None for the default group.
Group = dist.ProcessGroup | None


def require_equal_parameters(params: Mapping[str, Tensor]) -> None:
    """Raises `UnsupportedError` on every rank unless the parameters are equal in name, shape, dtype and value.

    Every rank of the default process group calls it. The ranks exchange hashes.
    """
    kinds = [(name, tuple(param.shape), str(param.dtype)) for name, param in params.items()]
    sums = [_checksum(each).cpu() for param in params.values() for each in tensors_of(param.detach())]
    values = _digest([int(total) for total in sums])
    summary = {"number": len(params), "names, shapes or dtypes": _digest(kinds), "values": values}
    if (difference := _difference(summary, None)) is not None:
        name, rank, first, other = difference
        details = f"the {name} of the parameters differ between rank 0 and rank {rank}"
        if name == "number":
            details = f"rank 0 has {first} parameter(s) and rank {rank} has {other}"
        raise UnsupportedError(
            f"placement='auto' in a process group of {dist.get_world_size()} ranks: {details}. Write "
            "placement='replicated' to train one model (the weights of rank 0 are broadcast, every rank has all "
            "parameters, and gradients are averaged), or placement='local' if each rank trains different parameters "
            "(pipeline stages, independent models; nothing is averaged)"
        )


def require_equal_settings(settings: Mapping[str, Any], groups: Iterable[Group] = (None,)) -> None:
    """Raises `ConfigError` on every rank of the groups if their settings differ. Every rank calls it."""
    # addresses of objects differ between ranks
    shown = {name: re.sub(" at 0x[0-9a-f]+", "", repr(value)) for name, value in settings.items()}
    differences = [_difference(shown, group) for group in groups]  # collectives on every rank
    failure = None
    if (difference := next(filter(None, differences), None)) is not None:
        name, rank, first, other = difference
        failure = (
            f"{name} is {first} on rank 0 and {other} on rank {rank}. Ranks that train one model need the same options "
            "and hyperparameters"
        )
    if (failure := first_failure(failure, groups)) is not None:
        raise ConfigError(failure)


def first_failure(failure: str | None, groups: Iterable[Group]) -> str | None:
    """Returns the failure of this rank, or the first failure of all ranks of the groups. Every rank calls it."""
    for group in groups:
        failure = next((each for each in _gathered(failure, group) if each is not None), None)
    return failure


def drifted(params: Mapping[str, Tensor], step: int) -> list[str]:
    """Returns the names of parameters that differ between ranks of the default group. Every rank calls it.

    One collective compares `_SAMPLE` elements of each parameter, and different elements in each step.
    """

    def checksum(param: Tensor) -> Tensor:
        parts = [flat(part) for part in tensors_of(param)]
        apart = [max(1, part.numel() // _SAMPLE) for part in parts]
        return torch.stack([_checksum(part[step % n :: n]) for part, n in zip(parts, apart, strict=True)]).sum()

    sums = [checksum(param.detach()) for param in params.values()]
    own = torch.stack([each.to(sums[0].device) for each in sums])
    bounds = torch.stack((own, ~own))  # ~ reverses the order
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
    different = (bounds[0] != ~bounds[1]).tolist()
    return [name for name, differs in zip(params, different, strict=True) if differs]


def _difference(own: Mapping[str, Any], group: Group) -> tuple[str, int, Any, Any] | None:
    """Compares values, by name, between the first rank of a group and the others. Every rank calls it.

    Returns:
        (name, rank, value on the first rank, value on `rank`) for the first difference, or None.
    """
    everyones = _gathered(dict(own), group)
    first = everyones[0]
    for rank, other in enumerate(everyones):
        for name in first | other:
            if first.get(name) != other.get(name):
                return name, rank, first.get(name), other.get(name)
    return None


def _gathered(value: Any, group: Group) -> list[Any]:
    """Returns the values from all ranks of a group."""
    everyones: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, value, group=group)
    return everyones


def _digest(values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()


def _checksum(param: Tensor) -> Tensor:
    """Returns a checksum of a parameter, int64 scalar: sum of element bits times odd numbers, modulo 2**64."""
    bits = param.reshape(-1).view(_BITS[param.element_size()])
    odd = 2 * torch.arange(min(_CHUNK, bits.numel()), device=bits.device) + 1
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for chunk in bits.split(_CHUNK):
        total = 31 * total + (chunk * odd[: len(chunk)]).sum()
    return total
