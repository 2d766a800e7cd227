"""Streams the layers of a trainer's model through its device."""

from typing import Any

from torch import nn
from transformers import TrainingArguments

from lowmem import placements
from lowmem.errors import ConfigError, UnsupportedError
from lowmem.hf.sharding import Sharding
from lowmem.options import FusedConfig
from lowmem.placements.homes import FileHome
from lowmem.placements.streamed import stream
from lowmem.placements.streaming import Streaming

# Arguments that compile the model, or that read or convert weights that are not on the device.
_NOT_STREAMED = ("torch_compile", "use_vllm", "sync_ref_model", "fp16_full_eval", "bf16_full_eval")


class StreamedSharding(Sharding):
    """Streams the layers of a model through the device of a run."""

    def __init__(self, args: TrainingArguments, fused: FusedConfig) -> None:
        self._args, self._fused = args, fused
        for argument in ("deepspeed", "fsdp"):
            if getattr(args, argument):
                raise ConfigError(f"fused.placement='streamed' contradicts {argument}. Set only one of them")
        if args.world_size > 1:
            raise UnsupportedError(
                f"fused.placement='streamed' supports one process, but there are {args.world_size}. Set fsdp or "
                "deepspeed, or start one process"
            )
        if not args.gradient_checkpointing:
            raise ConfigError(
                "fused.placement='streamed' needs gradient_checkpointing=True. Otherwise the activations of all layers "
                "are on the device"
            )
        for name in _NOT_STREAMED:
            if getattr(args, name, False):
                raise UnsupportedError(f"{name}=True is not supported with fused.placement='streamed'; omit it")

    def shard(self, model: nn.Module, accelerator: Any = None, *, reference: bool = False) -> None:
        """Streams a model unless it is streamed already. Layers of a reference model do not stay on the device."""
        memory = None if reference else self._fused.device_bytes
        stream(model, self._args.device, home=self._fused.home, device_memory=memory)


def in_words(streaming: Streaming, model: nn.Module) -> str:
    """Describes the streamed layers, and the weights that stay on the device."""
    sizes = [unit.nbytes for unit in streaming.units]
    stays = sum(map(placements.nbytes, model.parameters())) - sum(sizes)
    if not sizes:
        return f"no layer, because all {stays / 2**20:,.1f} MiB of weights fit on the device"
    home = streaming.units[0].home
    text = (
        f"{len(sizes)} layers of up to {max(sizes) / 2**20:,.1f} MiB in {home}, two of them on the device at a time, "
        f"where {stays / 2**20:,.1f} MiB of other weights stay"
    )
    if isinstance(home, FileHome):
        text += ". Each step writes the trained layers to the disk, which wears it out"
    return text
