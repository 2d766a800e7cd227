"""Updates during backward in Hugging Face and TRL trainers: a mixin, and two trainers that use it.

    class FusedDPOTrainer(FusedTrainerMixin, trl.DPOTrainer): ...

The trainer keeps its loop, its arguments and its callbacks. The mixin changes where updates happen (in the
accelerator's `backward`) and how checkpoints are written.
"""

import lowmem.hf  # noqa: F401, first, because it says which packages are not installed

# isort: split
import logging
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from accelerate.utils import is_peft_model, purge_accelerate_environment
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_utils import rotate_checkpoints

from lowmem.errors import require_packages
from lowmem.hf import adapters, arguments, checkpoint, optim, packing, processes, resuming
from lowmem.hf import layers as model_layers
from lowmem.hf.accelerator import FusedAccelerator, step_metrics
from lowmem.hf.sharding import StreamedSharding
from lowmem.hf.weights import load_weights, save_weights
from lowmem.optimizer import FusedOptimizer
from lowmem.options import FusedConfig, LayersConfig
from lowmem.placements import find
from lowmem.step.record import weights_in_words
from lowmem.tiles.quantized import has_quantized_weights

logger = logging.getLogger(__name__)

# Model → the optimizer of its most recent trainer.
_OPTIMIZERS: "WeakKeyDictionary[nn.Module, ReferenceType[FusedOptimizer]]" = WeakKeyDictionary()


class FusedTrainerMixin(Trainer):
    """Mixin for subclasses of `Trainer`, listed before them: the rule of `fused` updates parameters during backward.

    The trainer's arguments for learning rate, weight decay, schedule, evaluation, logging, callbacks, saving and
    resuming have their usual meaning. For rules other than AdamW, the learning rate must be set. Norms and biases do
    not decay, unless a group of `FusedConfig.groups` sets weight decay. A group with a different rule uses the default
    learning rate and weight decay of that rule, unless it sets them. If the class overrides `create_optimizer` or
    `get_optimizer_cls_and_kwargs`, the groups are taken from the optimizer that it creates.

    Args:
        fused: options of the fused optimizer. Without a rule, the trainer uses the optimizer that its class creates or
            that its arguments name, by default AdamW. You can also pass a `FusedOptimizer` in `optimizers`.
        layers: memory options of the head and MLPs. If None, uses `LayersConfig()`.

    Raises:
        ConfigError: an argument contradicts `fused` or does not exist in the rule; the rule is not AdamW, but the
            learning rate is AdamW's default; or the class creates an optimizer whose options cannot be read.
        TypeError: a class lists the mixin after a trainer.
        UnsupportedError: an argument cannot give the same result as ordinary training.
    """

    args: Any
    optimizer: Any

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        mixin = cls.__mro__.index(FusedTrainerMixin)
        for place, base in enumerate(cls.__mro__):
            if place < mixin and issubclass(base, Trainer) and not issubclass(base, FusedTrainerMixin):
                raise TypeError(f"list the mixin first: class {cls.__name__}(FusedTrainerMixin, {base.__name__})")

    # Accelerate 1.15 (accelerator.py) sets ACCELERATE_USE_FSDP permanently, but a later trainer may not use FSDP
    @purge_accelerate_environment  # type: ignore[untyped-decorator]
    def __init__(
        self, *args: Any, fused: FusedConfig | None = None, layers: LayersConfig | None = None, **kwargs: Any
    ) -> None:
        classes = type(self).__mro__
        bases = classes[classes.index(FusedTrainerMixin) + 1 :]
        self._inputs = arguments.Inputs.from_call(bases, args, kwargs, fused)
        if self._inputs.args is not None:  # otherwise the class creates them
            self._inputs.prepare()
        self.layers = layers or LayersConfig()
        self._resumed: Path | None = None  # the checkpoint that the run resumes from
        self._position: resuming.DataPosition | None = None  # None in a custom training loop
        self._staged: Path | None = None  # the directory of the checkpoint that is being saved
        super().__init__(*args, **kwargs)
        self._inputs.check(self)
        self._hide_sharding()
        model_layers.quantize(self.model, self._inputs.fused)  # unless the trainer has done so when it moved the model
        options = self._inputs.options(self.args)
        if self.optimizer is None:
            self.args = optim.with_learning_rate(self.args, options, self.model)
        model_layers.apply(self.model, self.layers)
        self._lazy_heads = model_layers.compute_losses(self, self.layers)

    def _hide_sharding(self) -> None:
        # transformers 5.23 (trainer.py) would prepare, save and load sharded models differently
        self.is_deepspeed_enabled = self.is_fsdp_enabled = False

    def _hp_search_setup(self, trial: Any) -> None:
        """Prepares a trial of a hyperparameter search like the trainer, which creates a new accelerator."""
        if trial is not None:
            self.is_deepspeed_enabled = bool(self.args.deepspeed)  # resets the state of Accelerate
            self._inputs = replace(self._inputs)  # determines the sharding for the changed arguments
        super()._hp_search_setup(trial)
        self._hide_sharding()

    @property
    def fused(self) -> FusedConfig:
        """The options of the optimizer: the constructor's `fused`, completed by the trainer's arguments."""
        created = isinstance(self.optimizer, FusedOptimizer)
        return self.optimizer.config if created else self._inputs.options(self.args)

    # -- the update ------------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        if self._inputs.args is None:
            self._inputs = replace(self._inputs, model=self.model, args=self.args)
            self._inputs.prepare()
        super().create_accelerator_and_postprocess()
        processes.set_timeout(self.args)
        FusedAccelerator.adopt(self)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        sharding = self._inputs.sharding  # moves the model, if there is one
        model_layers.quantize(model, self._inputs.fused, device if sharding is None else None)
        if sharding is None:
            super()._move_model_to_device(model, device)
        elif isinstance(sharding, StreamedSharding):  # already here, because TRL may run the model before training
            sharding.shard(model)

    def _shard(self) -> None:
        """Shards the model if the arguments request it, and frees gathered parameters."""
        if self._inputs.sharding is not None:
            self._inputs.sharding.shard(self.model, self.accelerator)
            self._inputs.sharding.release(self.model)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, *args: Any, **kwargs: Any) -> Any:
        with model_layers.lazily([] if return_outputs else self._lazy_heads):  # returned outputs have ordinary logits
            return super().compute_loss(model, inputs, return_outputs, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Runs the trainer's step. A backward inside `compute_loss` counts as an earlier micro-batch."""
        # the optimizer does not exist before train()
        with nullcontext() if self.optimizer is None else self.optimizer.accumulating():
            return super().training_step(*args, **kwargs)

    def set_initial_training_values(self, args: TrainingArguments, dataloader: Any, *rest: Any) -> Any:
        """Checks that the ranks agree, and that the rows match the checkpoint, before the first step."""
        epochs, steps_per_epoch, *others, max_steps = super().set_initial_training_values(args, dataloader, *rest)
        self.remove_callback(resuming.DataPosition)
        self._position = resuming.DataPosition(self, dataloader, steps_per_epoch, max_steps, self._resumed)
        self.add_callback(self._position)
        if self._position.complete:  # transformers 5.23 (trainer.py) would train a step of an unfinished epoch
            epochs = min(epochs, self._position.start[0])
        return epochs, steps_per_epoch, *others, max_steps

    def _init_training_state(self, *args: Any) -> tuple[int, int]:
        """Starts a resumed run with the row after the last trained row."""
        super()._init_training_state(*args)
        assert self._position is not None
        return self._position.start

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        samples, items = super().get_batch_samples(*args, **kwargs)
        if self._position is not None:
            self._position.fetched += len(samples)
            self._position.ended = not samples
        return samples, items

    def create_optimizer(self, model: nn.Module | None = None) -> FusedOptimizer:
        """Prepares the model for its first step and creates its optimizer, unless a `FusedOptimizer` was passed."""
        self._prepare_model()
        model = self.model if model is None else model
        if not isinstance(self.optimizer, FusedOptimizer):
            self.optimizer = self._new_optimizer(model)
        opt: Any = self.optimizer
        arguments.check_optimizer(opt, self.args)
        _OPTIMIZERS[model] = ref(opt)
        if self.args.gradient_accumulation_steps > 1:
            with opt.accumulate():  # selects the policy now instead of after the first micro-batch
                pass
        if opt.policy == "two_pass":
            arguments.check_replay(self.args)
        names = ", ".join(dict.fromkeys(group["rule"] for group in opt.param_groups))
        formats = weights_in_words(opt._records.values())
        logger.info("fused optimizer: %s, weights in %s, policy %s (%s)", names, formats, opt.policy, opt.policy_reason)
        # Accelerate 1.15 (accelerator.py, prepare_optimizer and optimizer_step_was_skipped) wraps an optimizer without
        # the first of these attributes, and reads the second attribute
        opt._is_accelerate_prepared = True
        opt.step_was_skipped = False
        self.accelerator.updates = True
        return opt

    def _prepare_model(self) -> None:
        model_layers.apply(self.model, self.layers)  # model_init created a new model, or checkpointing was enabled
        self._shard()
        if not getattr(self.accelerator, "updates", False):  # train() creates the optimizer again
            packing.check(self)
            self._shard()  # frees the weights that were gathered by the check

    def _new_optimizer(self, model: nn.Module) -> FusedOptimizer:
        """Creates the optimizer from `fused`, or from the class, options and groups of one that the trainer creates."""
        rate = self.args.learning_rate
        created = self._created_by_class()
        if isinstance(created, FusedOptimizer):
            return created
        if created is None:
            fused, parts = self._inputs.options(self.args), optim.parts_by_decay(self, model)
        else:
            fused, parts = optim.read_optimizer(created, self._inputs.fused or FusedConfig())
            fused = arguments.complete(fused, self.args, self._inputs.sharding)
            rate = rate if fused.lr is None else fused.lr
        if model in _OPTIMIZERS and (earlier := _OPTIMIZERS[model]()) is not None:
            earlier.remove()
        groups = optim.param_groups(fused, model, parts)
        config = replace(fused, groups=(), lr=rate)
        if find(config.placement, (pair for group in groups for pair in group["params"])).name == "replicated":
            config = replace(config, placement="replicated")  # broadcasts weights, like DistributedDataParallel
        return FusedOptimizer.from_config(groups, config, model=model)

    def _created_by_class(self) -> Any:
        """Returns the optimizer that a custom method of the trainer's class creates or has created, or None."""
        usual = type(self).get_optimizer_cls_and_kwargs is Trainer.get_optimizer_cls_and_kwargs
        if self.optimizer is None and usual and self._inherits("create_optimizer"):
            return None
        return super().create_optimizer() or self.optimizer

    def _inherits(self, method: str) -> bool:
        """Returns whether the classes after the mixin inherit a method from `transformers.Trainer`."""
        return getattr(getattr(super(), method), "__func__", None) is getattr(Trainer, method)

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Logs like the trainer, and adds the metrics of the policy and the rule, which are also sent to trackers."""
        if isinstance(self.optimizer, FusedOptimizer) and self.optimizer.last_step is not None and "loss" in logs:
            logs |= step_metrics(self.optimizer)
        super().log(logs, *args, **kwargs)  # adds to `logs`, which evaluate() and train() return

    # -- checkpoints -----------------------------------------------------------------------------------------------

    @processes.explained()
    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Trains as the trainer does. `resume_from_checkpoint=True` resumes from the last complete checkpoint. Raises
        `CheckpointError` if there is none, and `UnsupportedError` for adapters that could not be saved or resumed.
        """
        saves = self.args.save_strategy != "no" or bool(resume_from_checkpoint)
        if self.model is not None:  # otherwise the next trial of a hyperparameter search creates a model
            adapters.check(self.model, self.args, sharded=self._inputs.sharded, saves=saves)
        folder = checkpoint.to_resume(resume_from_checkpoint, Path(self.args.output_dir))
        self._resumed, self._position = folder, None
        arguments.check_callbacks(self.callback_handler.callbacks, resumed=folder is not None)
        if resume_from_checkpoint or args:  # the `train` of a class may not have arguments
            args = (None if folder is None else str(folder), *args)
        return super().train(*args, **kwargs)

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._staged is None else str(self._staged.parent)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Saves to a staging directory. Rank 0 writes everything except the random states of the other ranks."""
        run_dir = Path(super()._get_output_dir(trial))
        name = f"checkpoint-{self.state.global_step}"
        try:
            with checkpoint.saving(run_dir, name) as self._staged:
                super()._save_checkpoint(model, trial)
                if self.state.best_model_checkpoint == str(self._staged):
                    self.state.best_model_checkpoint = str(run_dir / name)
                    if self.is_world_process_zero():
                        self.state.save_to_json(str(self._staged / checkpoint.TRAINER_STATE_FILE))
        finally:
            self._staged = None
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(run_dir / name))
        self._rotate(run_dir)

    def _rotate(self, run_dir: Path) -> None:
        """Removes old checkpoints, unless the last steps had non-finite gradients."""
        step, streak = self.state.global_step, self.optimizer.nonfinite_streak
        if self.is_world_process_zero() and streak:
            logger.warning(
                "older checkpoints were not removed when step %d was saved, because the last %d step(s) had non-finite "
                "gradients, and you may need to continue from an older checkpoint", step, streak
            )  # fmt: skip
        elif self.is_world_process_zero():
            best = self.state.best_model_checkpoint and str(run_dir / Path(self.state.best_model_checkpoint).name)
            rotate_checkpoints(str(run_dir), self.args.save_total_limit, best)
        self.accelerator.wait_for_everyone()

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Pushes a checkpoint after it was renamed, because the upload continues during training."""
        if self._staged is None:
            super()._push_from_checkpoint(checkpoint_folder)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves like the trainer, but one weight at a time. If the model is sharded, every rank must call it."""
        model = self.model
        ordinary = not (getattr(model, "hf_quantizer", None) or getattr(model, "peft_config", None))
        by_weight = is_peft_model(model) or (isinstance(model, PreTrainedModel) and ordinary)
        if not (by_weight or self._inputs.sharding is not None or has_quantized_weights(model)):
            super().save_model(output_dir, _internal_call)
            return
        self._shard()
        save_weights(model, output_dir or self.args.output_dir, write=self.args.should_save, save=self._save)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        write = self.args.should_save
        if write or self._inputs.sharding is not None:
            checkpoint.save_optimizer(self.optimizer, Path(output_dir) / checkpoint.OPTIMIZER_FILE, write=write)
        if self._position is not None:
            self._position.save(Path(output_dir), self.state.epoch, write=write)
        if write:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / checkpoint.SCHEDULER_FILE)

    def _load_optimizer_and_scheduler(self, checkpoint_dir: str | None) -> None:
        if checkpoint_dir is not None:
            folder = Path(checkpoint_dir)
            checkpoint.load_optimizer(self.optimizer, folder / checkpoint.OPTIMIZER_FILE)
            checkpoint.load_scheduler(self.lr_scheduler, folder / checkpoint.SCHEDULER_FILE)

    def _load_scaler(self, checkpoint_dir: str | None) -> None:
        """Does nothing, because the optimizer has the loss scale and `scaler.pt` is never unpickled."""

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if not isinstance(self.optimizer, FusedOptimizer):  # a subclass did not call the mixin's create_optimizer
            self.optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # removes Accelerate's wrapper
            self.optimizer = self.accelerator.prepare(FusedTrainerMixin.create_optimizer(self))
            optimizer = self.optimizer
        return super().create_scheduler(num_training_steps, optimizer)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        checkpoint.check_configuration(self.model, Path(resume_from_checkpoint))
        self._shard()
        target = self.model if model is None else model
        custom = not self._inherits("_load_from_checkpoint")
        if custom or (self._inputs.sharding is None and type(target).load_state_dict is not nn.Module.load_state_dict):
            super()._load_from_checkpoint(resume_from_checkpoint, *(() if model is None else (model,)))
        else:
            load_weights(target, Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint)
        if not best.is_dir():  # like transformers, which would otherwise lose the last weights
            logger.warning("the best checkpoint %s no longer exists, so the model keeps the last step's weights", best)
        elif self._inherits("_load_best_model"):
            self._load_from_checkpoint(str(best))
        else:
            super()._load_best_model()


class FusedTrainer(FusedTrainerMixin, Trainer):
    """`transformers.Trainer` with updates during backward."""


def __getattr__(name: str) -> Any:
    if name != "FusedSFTTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_packages(name, "trl")
    from trl import SFTTrainer  # takes seconds

    class FusedSFTTrainer(FusedTrainerMixin, SFTTrainer):
        """`trl.SFTTrainer` with updates during backward. Logits are computed in tiles, also with label smoothing,
        unless `LayersConfig.computed_gradients` is False.
        """

        __qualname__ = "FusedSFTTrainer"

    globals()[name] = FusedSFTTrainer  # cached for the next access
    return FusedSFTTrainer
