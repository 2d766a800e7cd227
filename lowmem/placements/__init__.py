"""Where a parameter lives and how its gradient gets there. `find` tells a model's placement from its parameters."""

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from lowmem.errors import ConfigError, UnsupportedError
from lowmem.placements.base import Local, Placement, Shard
from lowmem.placements.ranks import Ranks, in_group
from lowmem.placements.replicated import Replicated

__all__ = ["Choice", "Placement", "Ranks", "fill", "find", "full_tensor", "in_group", "nbytes", "release", "shape_of"]

Choice = Literal["auto", "local", "replicated", "zero3", "fsdp2"]


def find(placement: Choice, params: Iterable[Any]) -> Placement:
    """The placement that was asked for, or with `auto` the one of the parameters, or (name, parameter) pairs.

    Parameters that are not sharded are replicated where there is a process group of several ranks; with `auto` only if
    all ranks hold the same ones already.

    Raises:
        ConfigError: the parameters are in another placement.
        UnsupportedError: some parameters are sharded and others are not.
    """
    kinds = {_kind(item[1] if isinstance(item, tuple) else item) for item in params}
    if len(kinds) > 1:
        named = " and others ".join(sorted(kind or "not at all" for kind in kinds))
        raise UnsupportedError(f"some parameters are sharded by {named}. Shard all trained parameters in the same way")
    kind = kinds.pop() if kinds else None
    if kind is None and placement in ("zero3", "fsdp2"):
        raise ConfigError(f"placement={placement!r}, but the parameters are not sharded; shard the model first")
    if kind is not None and placement not in ("auto", kind):
        raise ConfigError(f"placement={placement!r}, but the parameters are sharded by {kind}")
    if placement == "replicated" and not in_group():
        raise ConfigError("placement='replicated' needs a process group: call torch.distributed.init_process_group()")
    if kind is not None:
        return _sharded(kind)
    several = in_group() and dist.get_world_size() > 1
    if placement == "replicated" or (placement == "auto" and several):
        return Replicated(broadcasts=placement == "replicated")
    return Local()


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """The logical shape of a parameter or buffer, sharded or not."""
    return _shard_of(tensor).span(tensor).shape


def nbytes(tensor: Tensor) -> int:
    """Bytes of all of a parameter or buffer, sharded or not."""
    quantized = _shard_of(tensor).quantized(tensor)
    each = tensor.element_size() if quantized is None else quantized.format.bytes_per_element
    return round(math.prod(shape_of(tensor)) * each)


def full_tensor(tensor: Tensor) -> Tensor:
    """All of a parameter or buffer. Every rank that holds a shard of it calls it."""
    return _shard_of(tensor).full_tensor(tensor)


def fill(tensor: Tensor, full: Tensor) -> None:
    """Copies the values of a full tensor into a parameter or buffer; each rank takes its shard."""
    _shard_of(tensor).fill(tensor, full)


def release(tensor: Tensor) -> None:
    """Frees what is gathered of a parameter or buffer."""
    _shard_of(tensor).release(tensor)


def _shard_of(tensor: Tensor) -> Shard:
    kind = _kind(tensor)
    return Shard() if kind is None else _sharded(kind).shard


def _sharded(kind: str) -> Placement:
    if kind == "zero3":
        from lowmem.placements.zero3 import Zero3

        return Zero3()
    from lowmem.placements.fsdp2 import FSDP2

    return FSDP2()


def _kind(param: Any) -> str | None:
    """The name of the placement that shards a parameter; None if none does."""
    return "zero3" if hasattr(param, "ds_id") else "fsdp2" if hasattr(param, "device_mesh") else None
