"""Fused updates inside Hugging Face and TRL trainers: a mixin, and the ready-made trainers.

    class FusedDPOTrainer(FusedTrainerMixin, trl.DPOTrainer): ...

The trainer keeps its loop, its arguments and its callbacks. What changes is where the update happens (the accelerator's
`backward` becomes the fused optimizer's) and how checkpoints are written.
"""

import functools
import logging
import shutil
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import rotate_checkpoints

from lowmem import checkpoint, policies
from lowmem.errors import CheckpointError, ConfigError, UnsupportedError
from lowmem.optimizer import FusedConfig, FusedOptimizer
from lowmem.rules import resolve

if TYPE_CHECKING:
    from trl import SFTTrainer

    class _Base(Trainer):
        optimizer: Any
else:
    _Base = object

logger = logging.getLogger(__name__)

# Arguments of an optimizer that is not built: setting one would be ignored without a word.
_REPLACED = ("optim", "optim_args", "optim_target_modules", "adam_beta1", "adam_beta2", "adam_epsilon")

_STAGING = ".saving"


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
        super().__init__(*args, **kwargs)
        _check_arguments(self.args, self.fused)
        self.add_callback(_RefuseFinished())
        if self.optimizer_cls_and_kwargs is not None:
            raise ConfigError("optimizer_cls_and_kwargs: name the class in fused=FusedConfig(rule=...) instead")
        if self.optimizer is not None and not isinstance(self.optimizer, FusedOptimizer):
            raise ConfigError(
                f"optimizers=({type(self.optimizer).__name__}, ...): a fused trainer needs a FusedOptimizer; name "
                "the class in fused=FusedConfig(rule=...) instead"
            )

    # -- the update ------------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.backward = self._fused_backward

    def _fused_backward(self, loss: Tensor, **_: Any) -> None:
        self.optimizer.backward(loss)

    def create_optimizer(self, model: nn.Module | None = None) -> FusedOptimizer:
        if self.optimizer is None:
            model = self.model if model is None else model
            named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
            groups: list[dict[str, Any]] = [{"params": named}]
            rule = resolve(self.fused.rule)
            if rule.decay in rule.defaults:
                decayed, none = set(self.get_decay_parameter_names(model)), rule.without_decay()
                amount = {rule.decay: self.args.weight_decay or none[rule.decay]}
                groups = [
                    {"params": [pair for pair in named if pair[0] in decayed], **amount},
                    {"params": [pair for pair in named if pair[0] not in decayed], **none},
                ]
            self.optimizer = self.fused.build([g for g in groups if g["params"]], lr=self.args.learning_rate)
            logger.info("fused optimizer: %s, policy %s", self.optimizer.rule.name, self.optimizer.policy)
        # Accelerate must not wrap the engine; it leaves alone what looks like its own.
        self.optimizer._is_accelerate_prepared = True
        self.optimizer.step_was_skipped = False
        return self.optimizer

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """As in Hugging Face's trainer, with what the rule itself has to say of the step."""
        last = self.optimizer.last_step if isinstance(self.optimizer, FusedOptimizer) else None
        super().log({**logs, **(last.statistics if last is not None and "loss" in logs else {})}, *args, **kwargs)

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
        """Writes aside, then renames: a checkpoint appears whole or not at all. Old ones go by number."""
        run_dir = Path(super()._get_output_dir(trial))
        self._staging = run_dir / _STAGING
        shutil.rmtree(self._staging, ignore_errors=True)
        try:
            super()._save_checkpoint(model, trial)
            (written,) = self._staging.iterdir()
            final = run_dir / written.name
            if self.state.best_model_checkpoint == str(written):
                self.state.best_model_checkpoint = str(final)
                self.state.save_to_json(str(written / checkpoint.TRAINER_STATE_FILE))
            if final.exists():  # resumed from an earlier step, and here again
                shutil.rmtree(final)
            written.rename(final)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch.save raises RuntimeError
            raise CheckpointError(
                f"{run_dir}/checkpoint-{self.state.global_step} could not be written: {error}. Free some space or take "
                "another run_dir (output_dir), and resume from the checkpoint before it."
            ) from error
        finally:
            shutil.rmtree(self._staging, ignore_errors=True)
            self._staging = None
        rotate_checkpoints(
            output_dir=str(run_dir),
            save_total_limit=self.args.save_total_limit,
            best_model_checkpoint=self.state.best_model_checkpoint,
            use_mtime=False,
        )

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        checkpoint.save_optimizer(self.optimizer, Path(output_dir) / checkpoint.OPTIMIZER_FILE)
        torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / checkpoint.SCHEDULER_FILE)

    def _load_optimizer_and_scheduler(self, checkpoint_dir: str | None) -> None:
        if checkpoint_dir is None:
            return
        folder = Path(checkpoint_dir)
        checkpoint.load_optimizer(self.optimizer, folder / checkpoint.OPTIMIZER_FILE)
        self.lr_scheduler.load_state_dict(torch.load(folder / checkpoint.SCHEDULER_FILE, weights_only=True))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        checkpoint.load_weights(self.model if model is None else model, Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        checkpoint.load_weights(self.model, Path(self.state.best_model_checkpoint))


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
    policies.choose(fused.policy, clip_norm=args.max_grad_norm or None)
    if args.gradient_accumulation_steps > 1:
        raise UnsupportedError(
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}: policy 'immediate' updates the weights "
            "in every backward and cannot accumulate. Set it to 1 and raise per_device_train_batch_size."
        )
    if args.fp16:
        raise UnsupportedError(
            "fp16=True needs a dynamic loss scale, which is not available; use bf16=True, or bfloat16 weights"
        )
    if args.auto_find_batch_size:
        raise UnsupportedError(
            "auto_find_batch_size=True retries after a backward ran out of memory, and a fused backward has moved some "
            "weights by then; find the batch size with a short run of its own"
        )
    if args.deepspeed or args.fsdp or args.world_size > 1 or args.n_gpu > 1:
        raise UnsupportedError(
            "training over several devices is not available: run one process on one device (CUDA_VISIBLE_DEVICES=0), "
            "without deepspeed, fsdp or a distributed launcher"
        )


@functools.cache
def _sft_trainer() -> "type[SFTTrainer]":
    from trl import SFTTrainer

    class FusedSFTTrainer(FusedTrainerMixin, SFTTrainer):
        """`trl.SFTTrainer` with fused updates."""

    FusedSFTTrainer.__module__ = __name__
    FusedSFTTrainer.__qualname__ = "FusedSFTTrainer"
    return FusedSFTTrainer


def __getattr__(name: str) -> Any:
    if name == "FusedSFTTrainer":  # made when asked for: TRL takes seconds to import and may not be installed
        return _sft_trainer()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
