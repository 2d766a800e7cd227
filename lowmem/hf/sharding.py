"""Shards the model of a trainer with DeepSpeed ZeRO-3 or FSDP2, or streams it, as the trainer's arguments request.

The Trainer and Accelerate would wrap the model and replace the optimizer. Here, their arguments have the same meaning
and their code shards the model, but the model is not wrapped, and `lowmem.placements` recognizes its shards.
"""

import copy
import os
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_apply_ac, fsdp2_prepare_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from lowmem import placements
from lowmem.errors import ConfigError, UnsupportedError, did_you_mean
from lowmem.hf import check_version
from lowmem.options import DynamicScale, FusedConfig
from lowmem.placements.ranks import set_timeout
from lowmem.placements.streamed import stream
from lowmem.tiles.quantized import has_quantized_weights

# Keys of a DeepSpeed configuration that are not supported: the accepted values, and the reason or alternative.
_WITHOUT_EFFECT: dict[str, tuple[tuple[Any, ...], str]] = {
    "optimizer": ((), "the optimizer is fused.rule"),
    "scheduler": ((), "the schedule is set by the trainer's lr_scheduler_type and warmup_steps"),
    "zero_optimization.offload_optimizer.device": (
        ("none",),
        "optimizer states stay on the device that updates the weights. offload_param is supported",
    ),
    "zero_optimization.mics_shard_size": (
        (-1, 0),
        "each group of ranks would train a different model. To gather within a node, use zero_hpz_partition_size",
    ),
    "zero_optimization.zero_quantized_gradients": ((False,), "gradients keep their dtype when they are averaged"),
    "communication_data_type": ((), "gradients keep their dtype when they are averaged"),
    "prescale_gradients": ((False,), "gradients are always divided by the number of ranks before they are summed"),
    "gradient_predivide_factor": ((1.0,), "gradients are always divided by the number of ranks before they are summed"),
    "amp.enabled": ((False,), "use the trainer's bf16 or fp16"),
    "torch_autocast.enabled": ((False,), "use the trainer's bf16, with weights in bfloat16"),
    "tensor_parallel.autotp_size": ((0, 1), "only ZeRO-3 shards the model"),
    "data_types.grad_accum_dtype": ((), "fused.accumulation_dtype is the dtype in which micro-batches are summed"),
}

# Keys of fsdp_config that affect FSDP2: the variable of `accelerate launch` for each key, and the default.
_FSDP2: dict[str, tuple[str, Any]] = {
    "version": ("VERSION", 2),
    "reshard_after_forward": ("RESHARD_AFTER_FORWARD", True),
    "cpu_offload": ("OFFLOAD_PARAMS", False),
    "auto_wrap_policy": ("AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP"),
    "transformer_layer_cls_to_wrap": ("TRANSFORMER_CLS_TO_WRAP", []),
    "state_dict_type": ("STATE_DICT_TYPE", "FULL_STATE_DICT"),
    "activation_checkpointing": ("ACTIVATION_CHECKPOINTING", False),
}

# Other accepted keys. `accelerate launch` always sets the variables of the first two.
OTHER_FSDP_KEYS = ("min_num_params", "cpu_ram_efficient_loading", "xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt")

# Arguments that compile the model, or that read or convert weights that are not on the device.
_NOT_STREAMED = ("torch_compile", "use_vllm", "sync_ref_model", "fp16_full_eval", "bf16_full_eval")


class Sharding:
    """Distributes the weights of a model over the devices of ranks, or over the memory of a host.

    Attributes:
        broadcasts: whether rank 0 loads the weights, and broadcasts them when they are sharded.
    """

    broadcasts = False

    def prepare(self, dtype: torch.dtype) -> None:
        """Prepares this process to load a model whose weights have `dtype`."""

    def shard(self, model: Any, accelerator: Any) -> None:
        """Shards a model unless it is sharded already."""
        raise NotImplementedError

    def release(self, model: nn.Module) -> None:
        """Frees parameters that are still gathered after a forward without backward."""

    def loss_scale(self) -> float | Literal["dynamic"] | DynamicScale:
        """Returns the loss scale for float16, unless the optimizer's options set it."""
        return "dynamic"


def prepare_loading(sharding: Sharding | None, model: Any, args: TrainingArguments, *, quantizes: bool) -> None:
    """Prepares this process for a TRL trainer that loads the model by name."""
    if not isinstance(model, str):
        return
    # TRL 1.16 (trainer/utils.py) sets "auto", so all weights would be on the GPUs before they are quantized or sharded.
    # Other weights are loaded on the GPU directly. Without a map, all converted weights would first be on the host.
    direct = sharding is None and not quantizes and args.device.type == "cuda" and args.n_gpu == 1 == args.world_size
    options: dict[str, Any] = {"device_map": {"": str(args.device)} if direct else None}
    options |= getattr(args, "model_init_kwargs", None) or {}
    if hasattr(args, "model_init_kwargs"):
        args.model_init_kwargs = options
    if sharding is None:
        return
    dtype = options.get("dtype", "float32")
    if dtype in (None, "auto"):
        # transformers 5.23 (dynamic_module_utils.py) asks on the terminal if `trust_remote_code` is None
        trusted, revision = options.get("trust_remote_code", False), options.get("revision")
        dtype = AutoConfig.from_pretrained(model, trust_remote_code=trusted, revision=revision).dtype or "float32"
    sharding.prepare(getattr(torch, dtype) if isinstance(dtype, str) else dtype)


def _require_process_group(argument: str) -> None:
    if not dist.is_initialized():
        raise ConfigError(
            f"{argument}: there is only one process, so the model cannot be sharded. Start it with "
            "a launcher: deepspeed --num_gpus N --module lowmem sft ..., or torchrun --nproc_per_node N -m lowmem sft "
            f"... . Or omit {argument}: a single device can resume checkpoints of sharded runs"
        )


class Zero3Sharding(Sharding):
    """Shards with a DeepSpeed engine that has no optimizer. Its configuration means the same as in the Trainer."""

    _engine: Any = None

    def __init__(self, args: TrainingArguments) -> None:
        self._args = args
        check_version("deepspeed")
        self._config = args.hf_deepspeed_config
        stage = self._config.get_value("zero_optimization.stage")
        if stage != 3:
            raise UnsupportedError(
                f"deepspeed: zero_optimization.stage is {stage!r}; set it to 3. Without deepspeed, every rank has the "
                "full model"
            )
        for key, (neutral, advice) in _WITHOUT_EFFECT.items():
            if self._config.get_value(key) not in (None, *neutral):
                raise UnsupportedError(f"deepspeed: {key!r} is not supported: {advice}. Remove it")
        clipping = self._config.get_value("gradient_clipping")
        if clipping is not None and clipping != args.max_grad_norm:
            raise ConfigError(
                f"deepspeed: gradient_clipping is {clipping}, but max_grad_norm is {args.max_grad_norm}. Set "
                "gradient_clipping to 'auto'"
            )

    def prepare(self, dtype: torch.dtype) -> None:
        # deepspeed.zero.Init (DeepSpeed 0.19, runtime/zero/partition_parameters.py) ignores the requested dtype, and
        # creates weights in the dtype of the configuration.
        for section, section_dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            settings = self._config.config.setdefault(section, {})
            if settings.get("enabled") not in (None, False, "auto") and dtype != section_dtype:
                raise ConfigError(
                    f"deepspeed: {section} is enabled, but the weights are {dtype}. DeepSpeed stores weights in the "
                    f"dtype in which it computes. Set {section}.enabled to 'auto', or the model's dtype to "
                    f"{section_dtype}"
                )
            settings["enabled"] = dtype == section_dtype
            # transformers 5.23 (integrations/deepspeed.py, trainer_config_finalize) requires the value to equal the
            # trainer's bf16 or fp16, but these request autocast and do not set the dtype of the weights.
            self._config.mismatches = [line for line in self._config.mismatches if f"{section}.enabled" not in line]
        self._start()

    def _start(self) -> None:
        import deepspeed

        if not dist.is_initialized():
            # transformers 5.23 (modeling_utils.py) would partition every later model of this process
            unset_hf_deepspeed_config()
        _require_process_group("deepspeed")
        # DeepSpeed 0.19 (comm/torch.py, build_shm_op) compiles this op for CPUs, which takes half a minute. A process
        # that is killed in this time leaves a lock behind, and every later process waits for it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)

    def shard(self, model: Any, accelerator: Any) -> None:
        if getattr(self._engine, "module", None) is model:
            return
        if has_quantized_weights(model):
            raise UnsupportedError(
                "deepspeed: ZeRO-3 cannot shard quantized weights. Use FSDP2 (fsdp), or omit weight_format"
            )
        import deepspeed

        self._start()
        try:
            self._config.trainer_config_finalize(self._args, model, 0)
            config = copy.deepcopy(self._config.config)
            config.setdefault("train_micro_batch_size_per_gpu", self._args.per_device_train_batch_size)
            self._engine = deepspeed.initialize(model=model, config=config)[0]
            params: list[Any] = list(model.parameters())
            for group in {param.ds_process_group for param in params}:
                set_timeout(self._args.ddp_timeout_delta, group)  # DeepSpeed 0.19 uses torch's default
        except (ValueError, AssertionError) as error:
            raise ConfigError(f"deepspeed: {error}") from error
        for buffer in model.buffers():
            buffer.data = buffer.data.to(self._args.device)
        half = self._args.bf16 or self._args.fp16
        if half and any(p.dtype == torch.float32 and p.requires_grad for p in model.parameters()):
            raise UnsupportedError(
                "bf16 and fp16: under ZeRO-3, DeepSpeed computes in the dtype of the weights, which are float32. "
                "Create the model after the trainer's arguments, in bfloat16 or float16, or omit bf16 and fp16"
            )

    def release(self, model: nn.Module) -> None:
        for param in model.parameters():
            placements.shard_of(param).release(param)

    def loss_scale(self) -> float | Literal["dynamic"] | DynamicScale:
        """Returns the loss scale of the `fp16` section."""
        fp16 = self._config.config.get("fp16", {})
        if fixed := fp16.get("loss_scale"):
            return float(fixed)
        return DynamicScale(
            init_scale=2.0 ** fp16.get("initial_scale_power", 16),
            growth_interval=fp16.get("loss_scale_window", 1000),
            min_scale=float(fp16.get("min_loss_scale", 1)),
            hysteresis=fp16.get("hysteresis", 2),
        )


def _check_fsdp2(config: dict[str, Any]) -> None:
    """Raises an error if a key of `fsdp_config`, or its environment variable, has no effect or is not supported."""
    known = (*_FSDP2, *OTHER_FSDP_KEYS)
    for key in config:
        if key not in known:
            raise ConfigError(f"fsdp_config.{key} has no effect with FSDP2.{did_you_mean(key, known)} Omit it")
    if (kind := str(config.get("state_dict_type", "FULL_STATE_DICT"))).upper() != "FULL_STATE_DICT":
        raise UnsupportedError(
            f"fsdp: state_dict_type is {kind}, but checkpoints have full tensors, which are gathered and written one "
            "at a time. Set fsdp_config.state_dict_type to FULL_STATE_DICT"
        )
    for variable in ("ACTIVATION_CHECKPOINTING_OFFLOAD", "IGNORED_MODULES"):
        if os.environ.get(f"FSDP_{variable}", "false") != "false":
            raise UnsupportedError(f"fsdp: accelerate launch --fsdp_{variable.lower()} is not supported; omit it")
    for key, (variable, default) in _FSDP2.items():
        value = config.get(key, default)
        text = ",".join(value) if isinstance(value, list) else str(value)
        if (launched := os.environ.get(f"FSDP_{variable}", text)).lower() != text.lower():
            raise ConfigError(
                f"fsdp: FSDP_{variable} of accelerate launch is {launched}, but fsdp_config.{key} is "
                f"{text or 'not set'}. Give both the same value"
            )


class FSDP2Sharding(Sharding):
    """Shards with Accelerate's functions and settings for FSDP2, except that weights keep their dtype."""

    def __init__(self, args: TrainingArguments) -> None:
        self._args = args
        settings = args.fsdp_plugin_args
        version = settings["fsdp_version"]
        if version != 2:
            raise UnsupportedError(
                f"fsdp: version {version} stores parameters in flat buffers, which lowmem does not support. Set "
                "fsdp_config.version to 2"
            )
        if args.fsdp_config.get("xla"):
            raise UnsupportedError("fsdp: xla is not supported; omit it")
        _check_fsdp2(args.fsdp_config)
        if settings.get("cpu_offload") and args.device.type == "cpu":
            raise UnsupportedError("fsdp: cpu_offload needs an accelerator to offload from; omit it")
        self.broadcasts = bool(settings.get("cpu_ram_efficient_loading"))

    def prepare(self, dtype: torch.dtype) -> None:
        _require_process_group("fsdp")
        if self.broadcasts:
            # transformers (distributed/fsdp.py) reads it: ranks other than 0 initialize only buffers. 5.23 loads
            # weights on every rank anyway. Sharding broadcasts the weights of rank 0
            os.environ["ACCELERATE_USE_FSDP"] = "true"

    def shard(self, model: Any, accelerator: Any) -> None:
        if isinstance(model, FSDPModule):
            return
        _require_process_group("fsdp")
        if self._args.fsdp_plugin_args.get("cpu_ram_efficient_loading") and has_quantized_weights(model):
            raise UnsupportedError(
                "fsdp: cpu_ram_efficient_loading can only broadcast ordinary weights. Set it to false with "
                "fused.weight_format"
            )
        settings = self._args.fsdp_plugin_args | {"cpu_ram_efficient_loading": self.broadcasts}
        plugin = FullyShardedDataParallelPlugin(**settings)
        if self._args.bf16 or self._args.fp16:
            plugin.set_mixed_precision("bf16" if self._args.bf16 else "fp16")
        mesh = init_device_mesh(self._args.device.type, (dist.get_world_size(),), mesh_dim_names=("fsdp",))
        # Accelerate 1.15 (utils/fsdp_utils.py, fsdp2_prepare_model) converts weights to float32 if the accelerator uses
        # mixed precision. So both functions get a stand-in with the attributes that they read and mixed_precision="no".
        stand_in = SimpleNamespace(
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
            fsdp2_apply_ac(stand_in, model)
        fsdp2_prepare_model(stand_in, model)

    def release(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


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
