"""Checks a trainer's arguments. Raises an error before training for arguments without effect or with a wrong effect."""

import inspect
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from accelerate.utils import parse_flag_from_env
from torch import nn
from transformers import TrainingArguments
from transformers.trainer_utils import has_length

from lowmem.errors import ConfigError, StepError, UnsupportedError
from lowmem.hf import optim, sharding
from lowmem.hf.sharding import FSDP2Sharding, Sharding, StreamedSharding, Zero3Sharding
from lowmem.optimizer import FusedOptimizer
from lowmem.options import FusedConfig
from lowmem.rules import require, resolve
from lowmem.step.policies import Needs, choose

logger = logging.getLogger(__name__)

_UNSUPPORTED = {
    "auto_find_batch_size": "it retries after a backward that ran out of memory, but a fused backward has updated "
    "some weights by then. Find the batch size in a separate short run",
    "enable_jit_checkpoint": "it saves between backward and the optimizer's step, but a fused backward has updated "
    "the weights by then. Omit it, and set control.should_save in a callback's on_step_end",
    "parallelism_config": "tensor, context and sequence parallelism are not supported. Set fsdp or deepspeed, or start "
    "one process per device for data parallelism",
    "ddp_broadcast_buffers": "without DistributedDataParallel, each rank has separate buffers. Omit it",
    "save_on_each_node": "rank 0 saves for all machines, on a shared disk. Omit it",
}

# Callbacks of TRL that average the weights of the model into another model.
_AVERAGES = {"SyncRefModelCallback", "PEFTAdapterEMACallback", "BEMACallback"}

# Valid numbers by argument. For other numbers, transformers and TRL do not raise, or fail only after some steps.
_NUMBERS = {
    **dict.fromkeys((
        "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "max_length",
        "eval_accumulation_steps", "precompute_ref_batch_size", "generation_batch_size", "num_iterations", "lora_r",
        "lora_alpha", "ref_model_sync_steps", "max_completion_length", "num_generations", "num_generations_eval",
    ), require.number(">= 1", whole=True)),
    **dict.fromkeys(
        ("save_steps", "eval_steps", "logging_steps", "num_train_epochs", "temperature"), require.number("> 0")
    ),
    **dict.fromkeys((
        "learning_rate", "weight_decay", "warmup_steps", "eval_delay", "neftune_noise_alpha", "dataloader_num_workers",
    ), require.number(">= 0")),
    **dict.fromkeys(
        ("label_smoothing", "label_smoothing_factor", "ref_model_mixup_alpha"), require.number(">= 0", "<= 1")
    ),
    "lora_dropout": require.rate,
    **dict.fromkeys(("seed", "data_seed"), require.number(">= 0", f"< {2**32}", whole=True)),
    "max_steps": require.check(lambda steps: steps == -1 or steps > 0, "a whole number > 0, or -1 for epochs"),
}  # fmt: skip


@dataclass(frozen=True)
class Inputs:
    """The arguments of a fused trainer's constructor that lowmem reads, and properties that depend only on them."""

    model: Any  # the model or its name
    args: Any  # the trainer's arguments; None if its class creates them
    optimizer: Any  # the optimizer in `optimizers`
    fused: FusedConfig | None

    @classmethod
    def from_call(
        cls, bases: tuple[type, ...], args: tuple[Any, ...], kwargs: dict[str, Any], fused: FusedConfig | None
    ) -> "Inputs":
        """Reads them from the arguments of a trainer's constructor, which is inherited from `bases`."""
        signatures = (inspect.signature(base.__init__).parameters for base in bases)  # type: ignore[misc]
        # a constructor that forwards all arguments does not name them
        names = next(names for names in signatures if all(p.kind is not p.VAR_POSITIONAL for p in names.values()))
        values = dict(zip([*names][1:], args, strict=False)) | kwargs
        options = next((value for value in values.values() if isinstance(value, TrainingArguments)), None)
        optimizers = values.get("optimizers") or (None, None)
        return cls(values.get("model"), options, optimizers[0], fused)

    @cached_property
    def sharding(self) -> Sharding | None:
        """The sharding or streaming that the arguments request, or None. Raises an error for unsupported options of
        DeepSpeed and FSDP, and if `accelerate launch` requests sharding that the arguments do not request.
        """
        args, fused = self.args, self.fused
        for variable, argument in (("ACCELERATE_USE_DEEPSPEED", "deepspeed"), ("ACCELERATE_USE_FSDP", "fsdp")):
            if parse_flag_from_env(variable) and not getattr(args, argument):
                raise ConfigError(
                    f"accelerate launch requests {argument}, but the trainer's arguments do not. Set {argument} in "
                    "them, before the model is created"
                )
        # transformers 5.6 (training_args.py) always sets some of the other keys
        if not args.fsdp and {*(args.fsdp_config or ())} - {*sharding.OTHER_FSDP_KEYS}:
            raise ConfigError("fsdp_config has no effect without fsdp. Set fsdp: true, or omit fsdp_config")
        if fused is not None and fused.placement == "streamed":
            return StreamedSharding(args, fused)
        if args.deepspeed:
            return Zero3Sharding(args)
        return FSDP2Sharding(args) if args.fsdp else None

    @property
    def sharded(self) -> bool:
        """True if parameters are sharded over ranks."""
        return bool(self.args.fsdp or self.args.deepspeed)

    @property
    def clips(self) -> bool:
        """True if lowmem clips in a custom training loop."""
        return self.optimizer is not None or (self.fused is not None and self.fused.clip_norm is not None)

    def check_before_loading(self) -> None:
        """Checks the arguments before data is tokenized and the model is loaded."""
        check_devices(self.model, self.args)
        if (offload := offloading(self.args)) and self.args.device.type == "cpu":  # TRL would fail
            raise ConfigError(f"{offload}: this run computes on the CPU, where its activations already are; omit it")
        if self.optimizer is None:
            optim.with_learning_rate(self.args, self.options(self.args), self.model)

    def prepare(self) -> None:
        """Checks the arguments, and prepares this process for a constructor that loads the model by name."""
        self.check_before_loading()
        quantizes = self.fused is not None and self.fused.weight_format is not None
        sharding.prepare_loading(self.sharding, self.model, self.args, quantizes=quantizes)

    def check(self, trainer: Any) -> None:
        """Checks the model, the data and the optimizer of the trainer that was constructed with these arguments."""
        args = trainer.args
        check_devices(trainer.model, args)  # a trainer of TRL may have loaded it
        by_epoch = args.save_strategy == "epoch" and not has_length(trainer.train_dataset)
        if by_epoch and args.gradient_accumulation_steps > 1:
            raise UnsupportedError(
                "save_strategy='epoch': an epoch of unknown length may end in the middle of an accumulation, and "
                "checkpoints cannot store accumulated gradients. Set save_strategy='steps' and save_steps"
            )
        if trainer.optimizer_cls_and_kwargs is not None:
            raise ConfigError("optimizer_cls_and_kwargs: name the class in fused.rule instead")
        if self.optimizer is None:
            return
        check_optimizer(self.optimizer, args)
        if self.fused is not None:
            raise ConfigError("fused=... has no effect on the optimizer in `optimizers`; give only one of them")
        for name, value in optim.changed_arguments(args).items():
            raise ConfigError(f"{name}={value!r} has no effect on the optimizer in `optimizers`; omit it")

    def options(self, args: TrainingArguments) -> FusedConfig:
        """Returns the options of the optimizer, completed by the trainer's arguments. Raises as `complete` does."""
        return complete(optim.choose_rule(args, self.fused), args, self.sharding)


def check_number(name: str, value: Any) -> None:
    """Raises `ConfigError` if the value of an argument is an invalid number."""
    if isinstance(value, int | float):
        require.that(value == value, name, value, "a number")
        _NUMBERS.get(name, require.anything)(name, value)


def check_arguments(args: TrainingArguments, fused: FusedConfig) -> None:
    """Raises an error for trainer arguments that would be ignored, contradict `fused` or are not supported."""
    for name, value in vars(args).items():
        check_number(name, value)
    rule = resolve(fused.rule)
    if rule.decay not in rule.defaults and args.weight_decay:
        raise ConfigError(f"weight_decay={args.weight_decay}: rule {rule.name!r} has no weight decay; omit it")
    counterparts = {
        "weight_decay": (rule.decay, fused.hyper.get(rule.decay)),
        "max_grad_norm": ("clip_norm", fused.clip_norm),
    }
    for argument, (option, value) in counterparts.items():
        if value is not None and value != (setting := getattr(args, argument)):
            hint = " (its default is 1.0, and 0 does not clip)" if argument == "max_grad_norm" else ""
            raise ConfigError(f"fused.{option}={value!r} contradicts {argument}={setting!r}. Set only {argument}{hint}")
    if args.fp16 and args.device.type == "cpu":
        raise ConfigError("fp16=True: Accelerate ignores fp16 autocast on a CPU. Use bf16=True, or bfloat16 weights")
    for name, reason in _UNSUPPORTED.items():
        if value := getattr(args, name, None):
            raise UnsupportedError(f"{name}={value!r}: {reason}")
    if args.deepspeed and hasattr(args, "num_generations"):
        raise UnsupportedError(
            "deepspeed: this trainer generates text between steps, after which DeepSpeed ZeRO-3 does not gather the "
            "weights for backward. Set fsdp instead"
        )
    if args.label_smoothing_factor and (loss := getattr(args, "loss_type", "nll")) != "nll":  # of TRL's trainers
        raise ConfigError(
            f"label_smoothing_factor={args.label_smoothing_factor} has no effect with loss_type={loss!r}; omit it"
        )
    if args.max_grad_norm is None or args.max_grad_norm < 0:
        raise ConfigError(f"max_grad_norm={args.max_grad_norm} is not a number >= 0; set 0 for no clipping")
    started = int(os.environ.get("WORLD_SIZE", 1))
    if started > 1 and args.world_size == 1:
        raise ConfigError(
            f"{started} processes were started, but Accelerate sees only this one, so each would train a separate "
            "model. On a CPU, set use_cpu=True"
        )


def check_devices(model: Any, args: TrainingArguments) -> None:
    """Raises an error if one process would use several devices: with a device map, offloading or `DataParallel`."""
    devices = {*(getattr(model, "hf_device_map", None) or {}).values()}
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules()) if isinstance(model, nn.Module) else ()
    if len(devices) > 1 or any(getattr(hook, "offload", False) for hook in hooks):
        places = ", ".join(map(str, devices)) or "cpu_offload"
        raise UnsupportedError(
            f"the model is split or offloaded ({places}), but each process trains on one device. Load it with "
            "device_map=None (in arguments of TRL: model_init_kwargs={'device_map': None}). A model larger than a "
            "GPU needs fused.weight_format, fused.placement='streamed', or several GPUs: set fsdp or deepspeed, and "
            "start one process per GPU"
        )
    if args.n_gpu > 1:
        raise UnsupportedError(
            f"one process sees {args.n_gpu} GPUs, and DataParallel would split each batch across them. Start one "
            f"process per GPU (torchrun --nproc_per_node {args.n_gpu} ...), or make only one visible "
            "(CUDA_VISIBLE_DEVICES=0)"
        )


def offloading(args: TrainingArguments) -> str | None:
    """Returns the argument that offloads activations to the host, with its value; None if there is none."""
    if getattr(args, "activation_offloading", False):
        return "activation_offloading=True"
    offloads = (args.gradient_checkpointing_kwargs or {}).get("offload")
    return "gradient_checkpointing_kwargs={'offload': True}" if offloads else None


def check_replay(args: TrainingArguments) -> None:
    """Raises `UnsupportedError` for options that do not allow a second backward through the same graph."""
    once = [f"{name}=True" for name in ("torch_compile", "activation_offloading") if getattr(args, name, False)]
    if (args.gradient_checkpointing_kwargs or {}).get("selective"):
        once.append("gradient_checkpointing_kwargs={'selective': True}")
    for argument in once:
        raise UnsupportedError(
            f"policy 'two_pass' reads activations twice, but {argument} allows only one backward. Use "
            "policy='deferred' or max_grad_norm=0, or offload with gradient_checkpointing_kwargs={'offload': True}"
        )


def check_optimizer(optimizer: Any, args: TrainingArguments) -> None:
    """Raises an error unless the trainer's optimizer has its hooks and agrees with the arguments."""
    if not isinstance(optimizer, FusedOptimizer):
        raise ConfigError(
            f"optimizers=({type(optimizer).__name__}, ...): a fused trainer needs a FusedOptimizer: set fused.rule"
        )
    if optimizer.removed:
        raise StepError("a later trainer of this model has removed this optimizer's hooks. Create a new trainer")
    if (args.max_grad_norm or None) != optimizer.config.clip_norm:
        raise ConfigError(
            f"max_grad_norm={args.max_grad_norm}, but the optimizer has clip_norm={optimizer.config.clip_norm}. Set "
            "both to the same value (max_grad_norm=0 and clip_norm=None do not clip)"
        )
    if args.fp16 and optimizer.loss_scale is None:
        raise ConfigError('fp16=True, but the optimizer has no loss scale; create it with loss_scale="dynamic"')


def check_callbacks(callbacks: Iterable[Any], *, resumed: bool) -> None:
    """Warns about callbacks that may read gradients, which are already freed, and, in a resumed run, about callbacks
    that average weights into a model that checkpoints do not contain.
    """
    for callback in callbacks:
        if resumed and _AVERAGES & {cls.__name__ for cls in type(callback).__mro__}:
            logger.warning(
                "%s: checkpoints do not contain its reference model, teacher or average, which starts from the initial "
                "weights again, so the resumed run differs from one that was not stopped", type(callback).__name__
            )  # fmt: skip
        method = type(callback).on_pre_optimizer_step
        if method.__module__.partition(".")[0] not in ("transformers", "lowmem"):
            logger.warning(
                "%s is called after backward has updated the weights, when .grad is None. Use "
                "FusedConfig(log_norms=True) to log gradient norms", method.__qualname__
            )  # fmt: skip


def complete(fused: FusedConfig, args: TrainingArguments, sharded: Sharding | None) -> FusedConfig:
    """Checks the trainer's arguments. Returns `fused` with their clipping and loss scale.

    Raises:
        ConfigError: an argument has no effect or contradicts `fused`.
        UnsupportedError: an argument is not supported, or not together with the sharding or the policy in `fused`.
    """
    if sharded is not None and args.torch_compile:
        raise UnsupportedError("torch_compile=True: with fsdp or deepspeed the model is not compiled; omit it")
    check_arguments(args, fused)
    scale = fused.loss_scale
    if scale is None and args.fp16:
        scale = "dynamic" if sharded is None else sharded.loss_scale()
    try:
        completed = replace(fused, clip_norm=args.max_grad_norm or None, loss_scale=scale)
        norm = None if completed.clip_norm is None else f"clip_norm={completed.clip_norm}"
        choose(completed, Needs(norm=norm, accumulation=args.gradient_accumulation_steps > 1), on_cpu=True)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"{error} (max_grad_norm={args.max_grad_norm}, "
            f"gradient_accumulation_steps={args.gradient_accumulation_steps})"
        ) from None
    return completed
