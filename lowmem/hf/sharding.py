"""A trainer's model cut over the ranks where it stands, by DeepSpeed ZeRO-3 or FSDP2, as its arguments ask for.

The Trainer and Accelerate would wrap the model and replace the optimizer. Here the arguments are theirs, and so is the
code that cuts; but the model stays one object, which `lowmem.placements` finds cut.
"""

import copy
import os
from abc import ABC, abstractmethod
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from transformers import TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from lowmem import placements
from lowmem.errors import ConfigError, UnsupportedError
from lowmem.step.loss_scaler import DynamicScale

# Parts of a DeepSpeed configuration that another part of a run does: what they are where they ask for nothing, and what
# to use instead.
_ELSEWHERE: dict[str, tuple[tuple[Any, ...], str]] = {
    "optimizer": ((), "updates are those of the rule; name it in optimizer.rule of a run, or FusedConfig(rule=...)"),
    "scheduler": ((), "the schedule is the trainer's: set lr_scheduler_type and warmup_steps there"),
    "zero_optimization.offload_optimizer.device": (
        ("none",),
        "updates happen where the model computes, and their states stay there, of which AdaLomo has next to none. "
        "offload_param is available",
    ),
    "zero_optimization.mics_shard_size": (
        (-1, 0),
        "each group of ranks would train a model of its own. zero_hpz_partition_size keeps gathering inside a node too",
    ),
    "zero_optimization.zero_quantized_gradients": ((False,), "gradients are averaged in their own dtype"),
    "communication_data_type": ((), "gradients are averaged in their own dtype"),
    "prescale_gradients": ((False,), "gradients are always divided by the number of ranks before they are summed"),
    "gradient_predivide_factor": ((1.0,), "gradients are always divided by the number of ranks before they are summed"),
    "amp.enabled": ((False,), "use bf16 or fp16 of the trainer"),
    "torch_autocast.enabled": ((False,), "use bf16 of the trainer, with weights in bfloat16"),
    "tensor_parallel.autotp_size": ((0, 1), "matrices are cut by ZeRO-3 alone"),
    "data_types.grad_accum_dtype": ((), "micro-batches are summed in what optimizer.accumulation_dtype says"),
}


class Sharding(ABC):
    """How a trainer's model is cut.

    Raises:
        ConfigError, UnsupportedError: an argument, or a part of an engine's configuration, that cannot be honoured.
    """

    def __init__(self, args: TrainingArguments) -> None:
        self._args = args

    @abstractmethod
    def prepare(self, dtype: torch.dtype) -> None:
        """Before a model with weights of that dtype is made."""

    @abstractmethod
    def cut(self, model: nn.Module, accelerator: Any) -> None:
        """Cuts a model, if it is not cut yet."""

    @abstractmethod
    def release(self, model: nn.Module) -> None:
        """Gives back what a forward without a backward has left gathered."""

    def loss_scale(self) -> float | Literal["dynamic"] | DynamicScale:
        """The loss scale of fp16."""
        return "dynamic"


def of(args: TrainingArguments) -> Sharding | None:
    """What a trainer's arguments ask for; None where they ask for no sharding.

    Raises:
        ConfigError: `accelerate launch` asks for it, and the arguments do not.
    """
    for variable, argument in (("ACCELERATE_USE_DEEPSPEED", "deepspeed"), ("ACCELERATE_USE_FSDP", "fsdp")):
        if os.environ.get(variable) == "true" and not getattr(args, argument):
            raise ConfigError(
                f"accelerate launch was told to use {argument}, and the trainer's arguments were not: set {argument} "
                "there, before the model is made"
            )
    if args.deepspeed:
        return Zero3Sharding(args)
    return FSDP2Sharding(args) if args.fsdp else None


def _refuse_one_process(asked: str) -> None:
    if not dist.is_initialized():
        raise ConfigError(
            f"{asked}: this process was started alone, and has nobody to share a model with. Start it with a launcher: "
            "deepspeed --num_gpus N --module lowmem train ..., or torchrun --nproc_per_node N -m lowmem train ..."
        )


class Zero3Sharding(Sharding):
    """By a DeepSpeed engine without an optimizer; its JSON means what it means in Hugging Face's trainer, or raises."""

    _engine: Any = None

    def __init__(self, args: TrainingArguments) -> None:
        super().__init__(args)
        self._config = args.hf_deepspeed_config
        stage = self._config.get_value("zero_optimization.stage")
        if stage != 3:
            raise UnsupportedError(
                f"deepspeed: zero_optimization.stage is {stage}; set it to 3. Without deepspeed every rank holds the "
                "whole model"
            )
        for key, (nothing, instead) in _ELSEWHERE.items():
            if self._config.get_value(key) not in (None, *nothing):
                raise UnsupportedError(f"deepspeed: {key!r} has no effect here: {instead}. Leave it out")
        clipping = self._config.get_value("gradient_clipping")
        if clipping is not None and clipping != args.max_grad_norm:
            raise ConfigError(
                f"deepspeed: gradient_clipping is {clipping}, and max_grad_norm {args.max_grad_norm}; set it to 'auto'"
            )

    def prepare(self, dtype: torch.dtype) -> None:
        """DeepSpeed makes weights in the dtype of its own configuration, whatever the model's says."""
        for section, own in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            described = self._config.config.setdefault(section, {})
            if described.get("enabled") is True and dtype != own:
                raise ConfigError(
                    f"deepspeed: {section} is enabled, and the weights are {dtype}; DeepSpeed keeps them in what it "
                    f"computes in. Set {section}.enabled to 'auto', or the model's dtype to {own}"
                )
            described["enabled"] = dtype == own
            told = self._config.mismatches  # Hugging Face compares it with bf16 and fp16, which ask for autocast
            self._config.mismatches = [one for one in told if f"{section}.enabled" not in one]
        self._start()

    def _start(self) -> None:
        import deepspeed

        if not dist.is_initialized():
            unset_hf_deepspeed_config()  # else transformers would cut the next model that this process makes
        _refuse_one_process("deepspeed")
        if self._args.device.type == "cpu":
            # it would be compiled, for half a minute, and a process that is killed leaves a lock for which all wait
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)

    def cut(self, model: nn.Module, accelerator: Any) -> None:
        if self._engine is not None:
            return
        import deepspeed

        self._start()
        try:
            self._config.trainer_config_finalize(self._args, model, 0)
            config = copy.deepcopy(self._config.config)
            config.setdefault("train_micro_batch_size_per_gpu", self._args.per_device_train_batch_size)
            self._engine = deepspeed.initialize(model=model, config=config)[0]
        except (ValueError, AssertionError) as error:
            raise ConfigError(f"deepspeed: {error}") from error
        narrow = self._args.bf16 or self._args.fp16
        if narrow and any(p.dtype == torch.float32 and p.requires_grad for p in model.parameters()):
            raise UnsupportedError(
                "bf16 and fp16: under ZeRO-3 DeepSpeed computes in the dtype of the weights, which are float32. Make "
                "the model after the trainer's arguments, in that dtype, or leave bf16 and fp16 out"
            )

    def release(self, model: nn.Module) -> None:
        for param in model.parameters():
            placements.release(param)

    def loss_scale(self) -> float | Literal["dynamic"] | DynamicScale:
        described = self._config.config.get("fp16", {})
        if fixed := described.get("loss_scale"):
            return float(fixed)
        return DynamicScale(
            init_scale=2.0 ** described.get("initial_scale_power", 16),
            growth_interval=described.get("loss_scale_window", 1000),
            min_scale=float(described.get("min_loss_scale", 1)),
            hysteresis=described.get("hysteresis", 2),
        )


class FSDP2Sharding(Sharding):
    """By Accelerate's own `fully_shard`ing, with its settings; weights keep their dtype."""

    def __init__(self, args: TrainingArguments) -> None:
        super().__init__(args)
        self._settings = args.fsdp_plugin_args
        if self._settings["fsdp_version"] != 2:
            raise UnsupportedError(
                f"fsdp: version {self._settings['fsdp_version']} keeps flat copies of its own; set fsdp_config.version "
                "to 2, or leave it out"
            )
        if args.fsdp_config.get("xla"):
            raise UnsupportedError("fsdp: xla is not available; leave it out")
        if self._settings.get("cpu_offload") and args.device.type == "cpu":
            raise UnsupportedError("fsdp: cpu_offload wants an accelerator to offload from; leave it out")

    def prepare(self, dtype: torch.dtype) -> None:
        _refuse_one_process("fsdp")
        if self._settings["cpu_ram_efficient_loading"]:
            os.environ["ACCELERATE_USE_FSDP"] = "true"  # with which rank 0 alone reads weights

    def cut(self, model: nn.Module, accelerator: Any) -> None:
        from accelerate.utils import FullyShardedDataParallelPlugin
        from accelerate.utils.fsdp_utils import fsdp2_apply_ac, fsdp2_prepare_model
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule

        if isinstance(model, FSDPModule):
            return
        _refuse_one_process("fsdp")
        plugin = FullyShardedDataParallelPlugin(**self._settings)
        if self._args.bf16 or self._args.fp16:
            plugin.set_mixed_precision("bf16" if self._args.bf16 else "fp16")
        mesh = init_device_mesh(self._args.device.type, (dist.get_world_size(),), mesh_dim_names=("fsdp",))
        # what Accelerate's functions look at; told of mixed precision, they would widen the weights
        asked = SimpleNamespace(
            state=SimpleNamespace(fsdp_plugin=plugin),
            mixed_precision="no",
            is_main_process=accelerator.is_main_process,
            device=accelerator.device,
            torch_device_mesh={("fsdp",): mesh},
            parallelism_config=SimpleNamespace(fsdp_dim_names=["fsdp"]),
        )
        try:
            plugin.set_auto_wrap_policy(model)
        except ValueError as error:
            raise ConfigError(f"fsdp: {error}") from error
        if plugin.activation_checkpointing:
            fsdp2_apply_ac(asked, model)
        fsdp2_prepare_model(asked, model)

    def release(self, model: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
