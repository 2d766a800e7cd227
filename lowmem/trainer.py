"""Fused updates inside Hugging Face and TRL trainers: a mixin, and the ready-made trainers.

    class FusedDPOTrainer(FusedTrainerMixin, trl.DPOTrainer): ...

The trainer keeps its loop, its arguments and its callbacks. What changes is where the update happens (the accelerator's
`backward` becomes the fused optimizer's) and how checkpoints are written.
"""

import functools
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import rotate_checkpoints
from transformers.utils import is_liger_kernel_available

from lowmem.errors import CheckpointError, ConfigError, UnsupportedError
from lowmem.hf import checkpoint, head, sharding
from lowmem.hf.weights import load_weights, save_weights
from lowmem.optimizer import FusedOptimizer
from lowmem.options import FusedConfig
from lowmem.rules import resolve
from lowmem.step import policies

if TYPE_CHECKING:
    from trl import SFTConfig, SFTTrainer

    class _Base(Trainer):
        optimizer: Any
else:
    _Base = object

logger = logging.getLogger(__name__)

# Arguments of an optimizer that is not built: setting one would be ignored without a word.
_REPLACED = ("optim", "optim_args", "optim_target_modules", "adam_beta1", "adam_beta2", "adam_epsilon")

_STAGING = ".saving"

# What the norm of a parameter's gradient is logged under, before the parameter's name.
PARAM_NORM = "grad_norm/"


class FusedTrainerMixin(_Base):
    """Mix in before a Trainer class: its updates happen in backward, by the rule of `fused`.

    Learning rate, weight decay, schedule, evaluation, logging, callbacks, saving and resuming are the trainer's own
    arguments and mean what they mean there. What cannot be kept exact raises before the first step.

    Args:
        fused: `FusedConfig`; AdaLomo with its defaults if None. Instead a ready `FusedOptimizer` may be handed over in
            the trainer's `optimizers`.

    Raises:
        ConfigError: an argument that belongs to the optimizer which this trainer replaces.
        UnsupportedError: an argument that cannot be honoured.
    """

    def __init__(self, *args: Any, fused: FusedConfig | None = None, **kwargs: Any) -> None:
        self.fused = fused or FusedConfig()
        self._staging: Path | None = None
        self._sharding: sharding.Sharding | None = None
        super().__init__(*args, **kwargs)
        # the model is cut where it stands, and the trainer's own ways with DeepSpeed and FSDP are not taken
        self.is_deepspeed_enabled = self.is_fsdp_enabled = False
        _check_arguments(self.args, self.fused)
        self.fused = _completed(self.fused, self.args, self._sharding)
        self.add_callback(_RefuseFinished())
        if self.optimizer_cls_and_kwargs is not None:
            raise ConfigError("optimizer_cls_and_kwargs: name the class in fused=FusedConfig(rule=...) instead")
        if self.optimizer is not None and not isinstance(self.optimizer, FusedOptimizer):
            raise ConfigError(
                f"optimizers=({type(self.optimizer).__name__}, ...): a fused trainer needs a FusedOptimizer; name "
                "the class in fused=FusedConfig(rule=...) instead"
            )
        if self.optimizer is not None:
            _check_ready(self.optimizer, self.args)

    # -- the update ------------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        _check_activations(self.args)
        self._sharding = sharding.of(self.args)
        super().create_accelerator_and_postprocess()
        self.accelerator.backward = self._fused_backward
        # ranks average in the optimizer's hooks, so the model gets device and autocast, and no wrapper
        self.accelerator.prepare_model = functools.partial(self.accelerator.prepare_model, evaluation_mode=True)
        if self._sharding is not None:
            self.accelerator.prepare = functools.partial(self._prepare_cut, self.accelerator.prepare)
            self.accelerator.no_sync = lambda model: nullcontext()  # pieces of gradients are summed, not gradients

    def _prepare_cut(self, prepare: Callable[..., Any], *objects: Any, **options: Any) -> Any:
        """Accelerate prepares data; a model is cut instead, and the optimizer left alone."""
        if not any(isinstance(one, nn.Module | torch.optim.Optimizer) for one in objects):
            return prepare(*objects, **options)
        for one in objects:
            if isinstance(one, nn.Module):
                self._cut()
                self.accelerator._models.append(one)
        return objects if len(objects) > 1 else objects[0]

    def _wrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if self._sharding is None:
            return super()._wrap_model(model, *args, **kwargs)
        self._cut()
        return model

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if self._sharding is None:
            super()._move_model_to_device(model, device)  # else each piece goes there when the model is cut

    def _cut(self) -> None:
        """Cuts the model over the ranks, where that is asked for, and has nothing gathered."""
        if self._sharding is not None:
            self._sharding.shard(self.model, self.accelerator)
            self._sharding.release(self.model)

    def _fused_backward(self, loss: Tensor, **_: Any) -> None:
        with nullcontext() if self.accelerator.sync_gradients else self.optimizer.accumulate():
            self.optimizer.backward(loss)
        # with a loss scale an overflow is part of the game, and the schedule waits for it, as with GradScaler
        scaled = self.accelerator.sync_gradients and self.optimizer.loss_scale is not None
        self.optimizer.step_was_skipped = scaled and self.optimizer.last_step.skipped

    def create_optimizer(self, model: nn.Module | None = None) -> FusedOptimizer:
        self._cut()
        if self.optimizer is None:
            model = self.model if model is None else model
            named = [(_own_name(n), p) for n, p in model.named_parameters() if p.requires_grad]
            groups: list[dict[str, Any]] = [{"params": named}]
            rule = resolve(self.fused.rule)
            if rule.decay in rule.defaults:
                decayed = set(map(_own_name, self.get_decay_parameter_names(model)))
                none = rule.without_decay()
                amount = {rule.decay: self.args.weight_decay or none[rule.decay]}
                groups = [
                    {"params": [pair for pair in named if pair[0] in decayed], **amount},
                    {"params": [pair for pair in named if pair[0] not in decayed], **none},
                ]
            self.optimizer = self.fused.build([g for g in groups if g["params"]], lr=self.args.learning_rate)
            self.optimizer.sum_norms_in_order(model.parameters())
        if self.args.gradient_accumulation_steps > 1:
            with self.optimizer.accumulate():  # the policy is settled now, not after the first micro-batch
                pass
        opt = self.optimizer
        if opt.replay == "forward":
            raise UnsupportedError(
                "policy='two_pass': DeepSpeed ZeRO-3 would need the forward once more, and a trainer has computed the "
                "loss when the optimizer gets it; use policy='deferred' (or 'auto')"
            )
        if opt.policy == "two_pass":
            _check_replay(self.args)
        logger.info("fused optimizer: %s, policy %s (%s)", opt.rule.name, opt.policy, opt.policy_reason)
        # Accelerate must not wrap the engine; it leaves alone what looks like its own.
        self.optimizer._is_accelerate_prepared = True
        self.optimizer.step_was_skipped = False
        return self.optimizer

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """As in Hugging Face's trainer, with what the policy and the rule have to say of the step."""
        told = isinstance(self.optimizer, FusedOptimizer) and self.optimizer.last_step is not None and "loss" in logs
        super().log({**logs, **(self._telemetry() if told else {})}, *args, **kwargs)

    def _telemetry(self) -> dict[str, Any]:
        """Of the last step: clip coefficient, loss scale, non-finite steps so far, the rule's statistics, norms."""
        last = self.optimizer.last_step
        scale, nonfinite_steps = last.loss_scale, self.optimizer.nonfinite_steps  # each is read back from the device
        told: dict[str, Any] = {}
        if last.clip_coef is not None:
            told["clip_coef"] = float(last.clip_coef)
        if scale is not None:
            told["loss_scale"] = scale
        if scale is not None or nonfinite_steps:
            told["nonfinite_steps"] = nonfinite_steps
        if self.fused.log_norms:
            told |= {f"{PARAM_NORM}{name}": norm for name, norm in zip(last.names, last.norms.tolist(), strict=True)}
        return {**told, **last.statistics}

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self._get_grad_norm(model)  # the fused optimizer has clipped by it already

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor:
        return self.optimizer.last_step.grad_norm

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As in Hugging Face's trainer; `True` resumes from the newest checkpoint that is whole.

        Raises:
            CheckpointError: the checkpoint is missing or damaged, or there is none.
        """
        if resume_from_checkpoint is True:
            folder, damaged = checkpoint.find_last(Path(self.args.output_dir))
            for reason in damaged:
                logger.warning("passed over a damaged checkpoint: %s", reason)
            resume_from_checkpoint = str(folder)
        elif resume_from_checkpoint:
            checkpoint.check_resumable(Path(resume_from_checkpoint))
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staging) if self._staging is not None else super()._get_output_dir(trial)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Writes aside, then renames: a checkpoint appears whole or not at all. Old ones go by number.

        Rank 0 writes, and every rank its random state.
        """
        run_dir = Path(super()._get_output_dir(trial))
        self._staging = run_dir / _STAGING
        first = self.is_world_process_zero()
        try:
            if first:
                shutil.rmtree(self._staging, ignore_errors=True)
            self.accelerator.wait_for_everyone()
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            (written,) = self._staging.iterdir()
            final = run_dir / written.name
            if self.state.best_model_checkpoint == str(written):
                self.state.best_model_checkpoint = str(final)
                if first:
                    self.state.save_to_json(str(written / checkpoint.TRAINER_STATE_FILE))
            self.accelerator.wait_for_everyone()
            if first:
                if final.exists():  # resumed from an earlier step, and here again
                    shutil.rmtree(final)
                written.rename(final)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch.save raises RuntimeError
            raise CheckpointError(
                f"{run_dir}/checkpoint-{self.state.global_step} could not be written: {error}. Free some space or take "
                "another run_dir (output_dir), and resume from the checkpoint before it."
            ) from error
        finally:
            if first:
                shutil.rmtree(self._staging, ignore_errors=True)
            self._staging = None
        if first:
            rotate_checkpoints(
                output_dir=str(run_dir),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=False,
            )
        self.accelerator.wait_for_everyone()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in Hugging Face's trainer; where ranks share the model, every rank calls it."""
        if self._sharding is None:
            super().save_model(output_dir, _internal_call)
            return
        folder = Path(output_dir or self.args.output_dir)
        self._cut()
        if self.args.should_save:
            self._save(str(folder), state_dict={})  # everything but weights
        save_weights(self.model, folder, write=self.args.should_save)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        write = self.args.should_save
        if write or self._sharding is not None:
            checkpoint.save_optimizer(self.optimizer, Path(output_dir) / checkpoint.OPTIMIZER_FILE, write=write)
        if write:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / checkpoint.SCHEDULER_FILE)

    def _load_optimizer_and_scheduler(self, checkpoint_dir: str | None) -> None:
        if checkpoint_dir is None:
            return
        folder = Path(checkpoint_dir)
        checkpoint.load_optimizer(self.optimizer, folder / checkpoint.OPTIMIZER_FILE)
        self.lr_scheduler.load_state_dict(torch.load(folder / checkpoint.SCHEDULER_FILE, weights_only=True))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self._cut()
        load_weights(self.model if model is None else model, Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        self._cut()
        load_weights(self.model, Path(self.state.best_model_checkpoint))


def _own_name(name: str) -> str:
    """A parameter's name without what FSDP's activation checkpointing puts into it: a checkpoint fits either way."""
    return name.replace("_checkpoint_wrapped_module.", "")


class _RefuseFinished(TrainerCallback):
    """A run resumed at its last step would take one step too many."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step >= state.max_steps:
            raise CheckpointError(
                f"nothing is left to train: the checkpoint is at step {state.global_step} of {state.max_steps}. "
                "Raise max_steps or num_train_epochs to go on."
            )


class FusedTrainer(FusedTrainerMixin, Trainer):
    """`transformers.Trainer` with fused updates."""


def _check_arguments(args: TrainingArguments, fused: FusedConfig) -> None:
    """Raises for every argument of the trainer that would be ignored or could not be kept exact."""
    defaults = {f.name: f.default for f in fields(type(args))}
    for name in _REPLACED:
        value = getattr(args, name)
        if value is not None and value != defaults[name]:
            raise ConfigError(
                f"{name}={value!r} is of the optimizer that a fused trainer replaces; "
                "give the rule and its hyperparameters in fused=FusedConfig(rule=..., hyper={...})"
            )
    rule = resolve(fused.rule)
    for setting, argument in (("lr", "learning_rate"), (rule.decay, "weight_decay")):
        if setting in fused.hyper:
            raise ConfigError(f"FusedConfig.hyper has {setting!r}; in a trainer set its argument {argument}")
    if rule.decay not in rule.defaults and args.weight_decay:
        raise ConfigError(f"weight_decay={args.weight_decay}: rule {fused.rule!r} has none; leave it out")
    if fused.clip_norm is not None and fused.clip_norm != args.max_grad_norm:
        raise ConfigError(
            f"FusedConfig.clip_norm={fused.clip_norm} and max_grad_norm={args.max_grad_norm} say different things; in "
            "a trainer set max_grad_norm (Hugging Face's default is 1.0; 0 is no clipping)"
        )
    if fused.replay == "forward":
        raise UnsupportedError(
            "replay='forward' computes the loss twice, and a trainer has computed it when the optimizer gets it; leave "
            "replay out (the graph is replayed), or use policy='deferred'"
        )
    if args.fp16 and args.device.type == "cpu":
        raise ConfigError(
            "fp16=True: Accelerate has no fp16 autocast on a CPU and would leave it out without a word; use bf16=True, "
            "or weights in bfloat16"
        )
    if args.use_liger_kernel and not is_liger_kernel_available():
        raise ConfigError("use_liger_kernel=True wants a package: pip install liger-kernel, or leave it out")
    if args.auto_find_batch_size:
        raise UnsupportedError(
            "auto_find_batch_size=True retries after a backward ran out of memory, and a fused backward has moved some "
            "weights by then; find the batch size with a short run of its own"
        )
    started = int(os.environ.get("WORLD_SIZE", 1))
    if started > 1 and args.world_size == 1:
        raise ConfigError(
            f"{started} processes were started, but Accelerate sees this one alone, and each would train a model of "
            "its own: on a CPU set use_cpu=True"
        )
    if args.n_gpu > 1:
        raise UnsupportedError(
            f"one process sees {args.n_gpu} GPUs, and DataParallel would split each batch over them: start a process "
            f"for each (torchrun --nproc_per_node {args.n_gpu} ...), or let it see one (CUDA_VISIBLE_DEVICES=0)"
        )


def _check_activations(args: TrainingArguments) -> None:
    """Raises for every setting of activations that would be ignored, or that does not fit this device."""
    kwargs = args.activation_checkpointing_kwargs or {}
    if kwargs and not args.activation_checkpointing:
        raise ConfigError(
            f"activation_checkpointing_kwargs={kwargs} has no effect without activation_checkpointing; set that to "
            "true, or leave them out"
        )
    if args.activation_checkpointing and args.fsdp and args.fsdp_config.get("activation_checkpointing"):
        raise ConfigError(
            "activation_checkpointing and fsdp_config.activation_checkpointing would recompute every layer twice; set "
            "one of them to false"
        )
    offload = "activation_checkpointing_kwargs={'offload': True}" if kwargs.get("offload") else None
    if getattr(args, "activation_offloading", False):
        offload = "activation_offloading=True"
    if offload and args.device.type == "cpu":
        raise ConfigError(f"{offload}: this run computes on the host, where its activations are already; leave it out")


def _check_replay(args: TrainingArguments) -> None:
    """Raises for settings of activations with which a graph cannot be replayed."""
    if (args.activation_checkpointing_kwargs or {}).get("use_reentrant"):
        raise UnsupportedError(
            "activation_checkpointing_kwargs={'use_reentrant': True}: policy 'two_pass' does not see the parameters "
            "inside; set use_reentrant to false, or use policy='deferred'"
        )
    if getattr(args, "activation_offloading", False):
        raise UnsupportedError(
            "activation_offloading=True brings every activation back once, and policy 'two_pass' needs it twice; use "
            "policy='deferred', or offload with activation_checkpointing_kwargs={'offload': True}"
        )


def _completed(fused: FusedConfig, args: TrainingArguments, cut: sharding.Sharding | None) -> FusedConfig:
    """The settings with what the trainer's arguments say of them.

    Raises:
        UnsupportedError: the policy that was asked for cannot do what they ask for.
    """
    scale = fused.loss_scale
    if scale is None and args.fp16:
        scale = "dynamic" if cut is None else cut.loss_scale()
    try:
        completed = replace(fused, clip_norm=args.max_grad_norm or None, loss_scale=scale)
        wanted = policies.PolicySettings(policy=completed.policy)
        policies.choose(wanted, policies.Wish(accumulates=args.gradient_accumulation_steps > 1), on_cpu=True)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"{error} (max_grad_norm={args.max_grad_norm}, "
            f"gradient_accumulation_steps={args.gradient_accumulation_steps})"
        ) from None
    return completed


def _check_ready(optimizer: FusedOptimizer, args: TrainingArguments) -> None:
    """Raises for arguments that a fused optimizer which was made beforehand does not follow."""
    if (args.max_grad_norm or None) != optimizer.clip_norm:
        raise ConfigError(
            f"max_grad_norm={args.max_grad_norm}, but the optimizer was made with clip_norm={optimizer.clip_norm}; set "
            "both to the same (0 and None are no clipping)"
        )
    if args.fp16 and optimizer.loss_scale is None:
        raise ConfigError(
            'fp16=True, but the optimizer was made without a loss scale; make it with loss_scale="dynamic"'
        )


def _check_smoothing(args: "SFTConfig") -> None:
    """Raises where TRL's SFT trainer would ignore smoothed labels, or compute them and fail."""
    asked = f"label_smoothing_factor={args.label_smoothing_factor}"
    if args.label_smoothing_factor and args.loss_type != "nll":
        raise ConfigError(f"{asked} has no effect with loss_type={args.loss_type!r}; leave one of them out")
    if args.label_smoothing_factor and args.deepspeed:
        raise UnsupportedError(
            f"{asked}: TRL then computes the logits of each batch twice, in two ways, and DeepSpeed ZeRO-3 gathers the "
            "head for one of them; use fsdp, or leave it out"
        )


@functools.cache
def _sft_trainer() -> "type[SFTTrainer]":
    from trl import SFTTrainer

    class FusedSFTTrainer(FusedTrainerMixin, SFTTrainer):
        """`trl.SFTTrainer` with fused updates. Logits exist in tiles, unless labels are smoothed."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            head.check(self.model)
            _check_smoothing(self.args)

        def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            with head.tiles(inputs["input_ids"].device):
                return super().compute_loss(model, inputs, *args, **kwargs)

    FusedSFTTrainer.__module__ = __name__
    FusedSFTTrainer.__qualname__ = "FusedSFTTrainer"
    return FusedSFTTrainer


def __getattr__(name: str) -> Any:
    if name == "FusedSFTTrainer":  # made when asked for: TRL takes seconds to import and may not be installed
        return _sft_trainer()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
