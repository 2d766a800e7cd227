"""Detects wrappers that reduce gradients themselves, and models that were sharded after their optimizer was created."""

import weakref
from collections.abc import Collection
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from lowmem.errors import UnsupportedError

WRAPPED = (
    "the model is inside DistributedDataParallel, which also averages gradients, so they would be averaged twice. "
    "Remove the wrapper: the hooks of this optimizer average over ranks. With Accelerate, write model = "
    "accelerator.prepare_model(model, evaluation_mode=True)"
)

_ENGINE = (
    "DeepSpeed (ZeRO stage 1 or 2) reduces gradients in its buckets, but lowmem frees them in hooks. Use the model "
    "without the engine (lowmem averages gradients over ranks), or use stage 3 without a DeepSpeed optimizer and "
    "create the FusedOptimizer after deepspeed.initialize"
)

_LATER = (
    "{} sharded the model after its optimizer was created. The optimizer refers to the original parameters and would "
    "update nothing. Call {} first, then FusedOptimizer(model.named_parameters(), model=model, ...)"
)

# Attributes of a parameter that was converted (DeepSpeed 0.19, runtime/zero/partition_parameters.py), linked to a flat
# copy (utils/mixed_precision_linkage.py), or replaced (torch 2.12, distributed/fsdp/_fully_shard/_fsdp_param.py)
_MARKS = {
    "ds_id": _LATER.format("deepspeed.initialize", "deepspeed.initialize(model=model, config=...)"),
    "_hp_mapping": _ENGINE,
    "_fsdp_orig_uid": _LATER.format("fully_shard", "fully_shard(model)"),
}

_DDP: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def _record_ddp(module: nn.Module, name: str, submodule: Any) -> None:
    if isinstance(module, nn.parallel.DistributedDataParallel):
        _DDP.add(module)


# At import, because a model may be wrapped before its optimizer is created, and DistributedDataParallel leaves no other
# trace before its first forward.
register_module_module_registration_hook(_record_ddp)


def require_unwrapped(params: Collection[Tensor]) -> None:
    """Raises `UnsupportedError` if parameters are in a wrapper, or were sharded after their optimizer was created."""
    if any(not set(params).isdisjoint(module.parameters()) for module in _DDP):
        raise UnsupportedError(WRAPPED)
    for mark, message in _MARKS.items():
        if any(hasattr(param, mark) for param in params):
            raise UnsupportedError(message)
