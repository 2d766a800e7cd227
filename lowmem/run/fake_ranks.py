"""The process group of a plan: this process is rank 0, and only this process is simulated.

PyTorch's "fake" backend does nothing in a collective, so a plan needs neither processes nor a launcher. FSDP2 and
DeepSpeed ZeRO-3 run their own code, and treat "meta", the device of fake tensors, as an accelerator.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_param_group, _fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from lowmem.hf import sharding
from lowmem.placements import agreement

# An object, the name of an attribute, and its replacement.
Patch = tuple[Any, str, Any]


@contextmanager
def patched(patches: Iterable[Patch]) -> Iterator[None]:
    """A context with these replacements. It creates torch.meta."""
    with ExitStack() as stack:
        for place, name, replacement in patches:
            stack.enter_context(patch.object(place, name, replacement, create=name == "meta"))
        yield


@contextmanager
def fake_ranks(count: int, device: torch.device, *, zero3: bool) -> Iterator[None]:
    """A context in which this process is rank 0 of `count`, including trainers' arguments that are parsed in it. If
    `zero3`, DeepSpeed shards the model. `OMP_NUM_THREADS` and a default backend prevent warnings of libraries.
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    values = ("0", "0", str(count), str(count), "localhost", "0", os.environ.get("OMP_NUM_THREADS", "1"))
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, dict(zip(names, values, strict=True)), ACCELERATE_USE_CPU="true"))
        dist.init_process_group("cpu:fake,meta:fake", store=FakeStore(), rank=0, world_size=count)
        dist.group.WORLD._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)  # type: ignore[union-attr]
        AcceleratorState._reset_state(reset_partial_state=True)  # left by a plan of one device
        stack.callback(AcceleratorState._reset_state, reset_partial_state=True)
        stack.callback(dist.destroy_process_group)
        stack.enter_context(patched((*_PATCHES, *(_of_deepspeed(device) if zero3 else ()))))
        yield


def _mesh(device_type: str, *shape: Any, **names: Any) -> Any:
    with _disable_current_modes():  # it reads the values of a tensor with ranks
        return init_device_mesh(device_type, *shape, **names)


_PATCHES: tuple[Patch, ...] = (
    (agreement, "_gathered", lambda value, _: [value]),
    (sharding, "init_device_mesh", _mesh),
    (torch, "meta", torch.cpu),  # its streams and events do nothing
    (_fully_shard, "_get_device_from_mesh", lambda mesh: torch.device(mesh.device_type)),
    (_fsdp_param_group.FSDPParamGroup, "_validate_no_meta_params", lambda group: None),
)


def _of_deepspeed(device: torch.device) -> Iterator[Patch]:
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero import partitioned_param_coordinator

    for name in ("device_name", "current_device_name", "current_device"):
        yield get_accelerator(), name, lambda *_: device.type
    yield torch.nn.functional, "linear", torch.nn.functional.linear  # zero.Init replaces it permanently
    yield deepspeed.comm.comm, "cdb", None  # an earlier plan may have had more ranks
    yield partitioned_param_coordinator, "assert_ints_same_as_other_ranks", lambda ints: None
