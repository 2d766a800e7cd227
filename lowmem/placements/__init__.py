"""Where parameters are stored, and how their gradients are reduced. `find` determines the placement of a model."""

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from lowmem.errors import ConfigError, UnsupportedError
from lowmem.placements.base import Placement, Reducer, Shard
from lowmem.placements.ranks import Ranks, in_group
from lowmem.placements.replicated import Replicated
from lowmem.placements.streamed import Streamed, streaming_of

__all__ = [
    "Choice",
    "Placement",
    "Ranks",
    "fill",
    "find",
    "full_tensor",
    "in_group",
    "nbytes",
    "shape_of",
    "shard_of",
    "streaming_of",
]

Choice = Literal["auto", "local", "replicated", "zero3", "fsdp2", "streamed"]


def find(placement: Choice, params: Iterable[Any]) -> Placement:
    """Returns the requested placement, or with `auto` the current placement of the parameters.

    In a process group with several ranks, parameters that are not sharded are replicated. With `auto`, adopting them
    raises an error unless they are equal on all ranks.

    Args:
        params: parameters, or (name, parameter) pairs.

    Raises:
        ConfigError: the parameters are in a different placement.
        UnsupportedError: the parameters are not all sharded in the same way.
    """
    tensors = [item[1] if isinstance(item, tuple) else item for item in params]
    kinds = set(map(_kind, tensors))
    placed = [kind if kind == "streamed" else f"sharded by {kind}" for kind in sorted(filter(None, kinds))]
    if len(kinds) > 1:
        others = placed[1] if len(placed) > 1 else "not"
        raise UnsupportedError(
            f"some parameters are {placed[0]} and others are {others}. Use one placement for all trained parameters"
        )
    kind = kinds.pop() if kinds else None
    if kind is None and placement in ("zero3", "fsdp2"):
        raise ConfigError(f"placement={placement!r}, but the parameters are not sharded; shard the model first")
    if kind is None and placement == "streamed":
        raise ConfigError("placement='streamed', but the model is not streamed. Call lowmem.stream(model, device)")
    if kind is not None and placement not in ("auto", kind):
        raise ConfigError(f"placement={placement!r}, but the parameters are {placed[0]}")
    if placement == "replicated" and not in_group():
        raise ConfigError("placement='replicated' needs a process group: call torch.distributed.init_process_group()")
    if kind is not None:
        sharded = _sharded(kind, tensors[0])
        sharded.shard.ranks_of(tensors[0])  # records the process groups, which `agree` needs
        return sharded
    several = in_group() and dist.get_world_size() > 1
    if placement == "replicated" or (placement == "auto" and several):
        return Replicated(broadcasts=placement == "replicated")
    return Placement(Shard(), Reducer())


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Returns the full shape of a parameter or buffer, which may be sharded."""
    return shard_of(tensor).span(tensor).shape


def nbytes(tensor: Tensor) -> int:
    """Returns the size in bytes of a full parameter or buffer, which may be sharded."""
    quantized = shard_of(tensor).quantized(tensor)
    each = tensor.element_size() if quantized is None else quantized.format.bytes_per_element
    return round(math.prod(shape_of(tensor)) * each)


def full_tensor(tensor: Tensor) -> Tensor:
    """Returns a full parameter or buffer. Every rank with a shard of it must call this function."""
    return shard_of(tensor).full_tensor(tensor)


def fill(tensor: Tensor, full: Tensor) -> None:
    """Copies a full tensor into a parameter or buffer. Each rank copies its shard."""
    shard_of(tensor).fill(tensor, full)


def shard_of(tensor: Tensor) -> Shard:
    """Returns the object that reads and writes this rank's shard of a parameter or buffer."""
    kind = _kind(tensor)
    return Shard() if kind is None else _sharded(kind, tensor).shard


def _sharded(kind: str, param: Any) -> Placement:
    if kind == "zero3":
        from lowmem.placements.zero3 import Zero3

        return Zero3()
    if kind == "streamed":
        return Streamed(param.streaming)
    from lowmem.placements.fsdp2 import FSDP2

    return FSDP2()


def _kind(param: Any) -> str | None:
    """Returns the name of the placement that shards a parameter, or None."""
    marks = {"ds_id": "zero3", "device_mesh": "fsdp2", "streaming": "streamed"}
    return next((kind for mark, kind in marks.items() if hasattr(param, mark)), None)
