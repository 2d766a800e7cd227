"""Wrappers and shards that a model got after its optimizer: torch and DeepSpeed tell nobody, so a search finds them."""

import gc
import sys
from collections.abc import Collection, Iterator
from typing import TypeVar

from torch import nn

from lowmem.errors import UnsupportedError
from lowmem.placements.record import ParamRecord

T = TypeVar("T")

WRAPPED = (
    "the model is inside DistributedDataParallel, which averages gradients in buckets of its own, so they would be "
    "averaged twice. Remove the wrapper: ranks average in the hooks of this optimizer. With Accelerate, write model = "
    "accelerator.prepare_model(model, evaluation_mode=True)"
)

_ENGINE = (
    "the model is inside a DeepSpeed engine of ZeRO stage {}, which reduces gradients in buckets of its own and would "
    "find none. Use the model without the engine, since ranks average in the hooks of this optimizer; or set stage 3 "
    "and no optimizer, and make this one after deepspeed.initialize"
)


def refuse_wrapped(records: Collection[ParamRecord]) -> None:
    """Raises `UnsupportedError` if the parameters of an optimizer were wrapped or sharded after it was made.

    Looks at every object that the garbage collector knows, so it is called once, in the first backward.
    """
    if any(hasattr(record.param, "ds_id") for record in records):
        raise UnsupportedError(_later("deepspeed.initialize", "deepspeed.initialize(model=model, config=...)"))
    params = {record.param for record in records}
    modules = list(instances(nn.Module))
    engine = getattr(sys.modules.get("deepspeed"), "DeepSpeedEngine", ())
    for module in modules:
        if isinstance(module, nn.parallel.DistributedDataParallel) and not params.isdisjoint(module.parameters()):
            raise UnsupportedError(WRAPPED)
        stage = module.zero_optimization_stage() if isinstance(module, engine) else 0
        if stage in (1, 2) and not params.isdisjoint(module.parameters()):
            raise UnsupportedError(_ENGINE.format(stage))
    if "torch.distributed.fsdp" not in sys.modules:
        return
    from torch.distributed.fsdp import FSDPModule

    # fully_shard puts parameters of its own in the place of those that the optimizer has
    in_modules = {param for module in modules for param in module.__dict__.get("_parameters", {}).values()}
    orphans = {record.name: record for record in records if record.param not in in_modules}
    for module in modules if orphans else ():
        if isinstance(module, FSDPModule):
            assert isinstance(module, nn.Module)
            for name, param in module.named_parameters():
                if name in orphans and tuple(param.shape) == orphans[name].span.shape:
                    raise UnsupportedError(_later("fully_shard", "fully_shard(model)"))


def instances(cls: type[T]) -> Iterator[T]:
    """Every object of a class that the garbage collector knows."""
    for item in gc.get_objects():
        if issubclass(type(item), cls):  # isinstance would ask proxies for their class
            yield item


def _later(what: str, call: str) -> str:
    return (
        f"{what} sharded the model after its optimizer was made, which holds the parameters from before and would "
        f"update nothing. Call {call} first, and then "
        "FusedOptimizer(model.named_parameters(), model=model, ...)"
    )
