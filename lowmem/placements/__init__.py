"""Where a parameter lives and how its gradient gets there. `find` tells a model's placement from its parameters."""

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from lowmem.errors import ConfigError, UnsupportedError
from lowmem.placements.local import Local
from lowmem.placements.replicated import Replicated

__all__ = ["PLACEMENTS", "Local", "Replicated", "find", "in_group"]

PLACEMENTS = {"local": Local, "replicated": Replicated}


def in_group() -> bool:
    """Whether this process is a rank of a process group."""
    return dist.is_available() and dist.is_initialized()


def find(placement: str, params: Iterable[Any]) -> Local:
    """The placement asked for, or with `auto` the one that the parameters, or (name, parameter) pairs, are in.

    Whole parameters are replicated where there is a process group of several ranks.

    Raises:
        ConfigError: there is no placement of that name.
        UnsupportedError: the parameters are sharded.
    """
    for item in params:
        param = item[1] if isinstance(item, tuple) else item
        sharding = "DeepSpeed ZeRO-3" if hasattr(param, "ds_id") else "FSDP2" if hasattr(param, "device_mesh") else None
        if sharding is not None:
            raise UnsupportedError(
                f"a parameter of shape {list(param.shape)} is sharded by {sharding}, and lowmem updates whole "
                "parameters. Build the model on one device, without sharding it."
            )
    if placement not in ("auto", *PLACEMENTS):
        raise ConfigError(f"placement {placement!r} is unknown; known are auto, {', '.join(PLACEMENTS)}")
    several = in_group() and dist.get_world_size() > 1
    if placement == "replicated" and not in_group():
        raise ConfigError("placement='replicated' needs a process group: call torch.distributed.init_process_group()")
    return Replicated() if placement == "replicated" or (placement == "auto" and several) else Local()
