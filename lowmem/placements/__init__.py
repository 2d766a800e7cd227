"""Where a parameter lives and how its gradient gets there. `find` tells a model's placement from its parameters."""

from collections.abc import Iterable
from typing import Any

from lowmem.errors import ConfigError, UnsupportedError
from lowmem.placements.local import Local

PLACEMENTS = {"local": Local}


def find(placement: str, params: Iterable[Any]) -> Local:
    """The placement asked for, or with `auto` the one that the parameters, or (name, parameter) pairs, are in.

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
    return Local()
