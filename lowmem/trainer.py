"""Fused updates in the trainers of Hugging Face and TRL: a mixin, and two trainers that use it.

    class FusedDPOTrainer(FusedTrainerMixin, trl.DPOTrainer): ...

The trainer keeps its loop, its arguments and its callbacks. The mixin changes where updates happen (`backward` of the
accelerator becomes that of the fused optimizer) and how checkpoints are written.
"""

import lowmem.hf  # noqa: F401, first, because it says which packages are not installed

# isort: split
import copy
import functools
import logging
import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from accelerate.utils import DistributedType, is_peft_model, purge_accelerate_environment
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from lowmem.errors import CheckpointError, ConfigError, StepError, UnsupportedError, require_packages
from lowmem.hf import adapters, agreement, arguments, checkpoint, dry_runs, failures, head, optim, resuming, sharding
from lowmem.hf import layers as model_layers
from lowmem.hf.weights import load_weights, save_weights
from lowmem.layers.config import LayersConfig
from lowmem.layers.quantize import quantize_
from lowmem.optimizer import FusedOptimizer
from lowmem.options import FusedConfig
from lowmem.placements import find
from lowmem.rules import resolve
from lowmem.step.record import weights_in_words
from lowmem.tiles.quantized import in_codes

if TYPE_CHECKING:

    class _Base(Trainer):
        args: Any
        optimizer: Any
else:
    _Base = object

logger = logging.getLogger(__name__)

# The optimizer of the trainer that trains a model.
_OPTIMIZERS: "WeakKeyDictionary[nn.Module, ReferenceType[FusedOptimizer]]" = WeakKeyDictionary()


class FusedTrainerMixin(_Base):
    """Mixin for subclasses of `Trainer`, listed before them: parameters are updated in backward by the rule of `fused`.

    Learning rate, weight decay, schedule, evaluation, logging, callbacks, saving and resuming are arguments of the
    trainer and mean what they mean there. With another rule than AdamW, the learning rate has to be set. Norms and
    biases do not decay, unless a group of `FusedConfig.groups` gives the weight decay. A group that names another rule
    uses that rule's defaults for the learning rate and weight decay that it does not give. Where the class has its own
    `create_optimizer` or `get_optimizer_cls_and_kwargs`, groups are those of the optimizer that it makes.

    Args:
        fused: options of the fused optimizer. Without a rule in it, the optimizer is the one that the class makes or
            the arguments name, which is AdamW by default. Alternatively pass a `FusedOptimizer` in the trainer's
            `optimizers`.
        layers: memory options of the head, the embedding, MLPs and activations. If None, uses `LayersConfig()`.

    Raises:
        ConfigError: an argument contradicts `fused`, names what the rule does not have, or is the default learning
            rate, which is chosen for AdamW. The class makes an optimizer that has more than can be taken over.
        TypeError: a class lists the mixin after a trainer.
        UnsupportedError: an argument cannot give the same result as ordinary training.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        mixin = cls.__mro__.index(FusedTrainerMixin)
        for place, base in enumerate(cls.__mro__):
            if place < mixin and issubclass(base, Trainer) and not issubclass(base, FusedTrainerMixin):
                raise TypeError(f"list the mixin first: class {cls.__name__}(FusedTrainerMixin, {base.__name__})")

    # Accelerate 1.15 (accelerator.py) sets ACCELERATE_USE_FSDP for good, and a later trainer may not ask for FSDP
    @purge_accelerate_environment  # type: ignore[untyped-decorator]
    def __init__(
        self, *args: Any, fused: FusedConfig | None = None, layers: LayersConfig | None = None, **kwargs: Any
    ) -> None:
        self._requested, self.layers = fused, layers or LayersConfig()
        self._asked_to_clip = fused is not None and fused.clip_norm is not None
        self._staging: Path | None = None
        self._rows: resuming.Rows | None = None  # of the training loop of transformers
        self._resumed: str | None = None  # the checkpoint that it resumes from
        self._sharding: sharding.Sharding | None = None
        self._checked: Any = None  # the model of the last dry run
        given = [*args, *kwargs.values()]
        options = next((value for value in given if isinstance(value, TrainingArguments)), None)
        model = kwargs.get("model", args[0] if args else None)
        arguments.check_devices(model, options)
        sharding.prepare(model, options)
        super().__init__(*args, **kwargs)
        arguments.check_devices(self.model, self.args)  # a trainer of TRL may have loaded it
        self._quantize(self.model)  # not yet, if the trainer has not moved it
        # transformers 5.23 (trainer.py) would prepare, save and load sharded models in its own ways
        self.is_deepspeed_enabled = self.is_fsdp_enabled = False
        if self.optimizer_cls_and_kwargs is not None:
            raise ConfigError("optimizer_cls_and_kwargs: name the class in fused.rule instead")
        if self.optimizer is not None and any(isinstance(value, tuple) and self.optimizer in value for value in given):
            arguments.check_optimizer(self.optimizer, self.args)
            arguments.check_alone(self.args, fused)
            self._asked_to_clip = True
        arguments.check_windows(self.args, self.train_dataset)
        self._configure()
        model_layers.change(self.model, self.layers)
        self._lazy = head.compute(self, self.layers)

    def _configure(self, fused: FusedConfig | None = None) -> None:
        """Completes `fused` by the arguments, as they are now, and the arguments by the learning rate of `fused`."""
        first, fused = "fused" not in vars(self), fused or optim.choose(self.args, self._requested)
        arguments.check_arguments(self.args, fused)
        self.fused = arguments.complete(fused, self.args, self._sharding)
        if first and self.optimizer is None:
            rate = optim.learning_rate(self.args, self.fused, self.model)
            if rate != self.args.learning_rate:
                self.args = copy.copy(self.args)  # the user's stay as they are
                self.args.learning_rate = rate

    # -- the update ------------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        arguments.check_activations(self.args)
        self._sharding = sharding.of(self.args)
        super().create_accelerator_and_postprocess()
        agreement.set_timeout(self.args)
        self.accelerator.prepare_model = functools.partial(self._prepare_model, self.accelerator.prepare_model)
        self.accelerator.clip_grad_norm_ = functools.partial(self._clip_grad_norm_, self.accelerator.clip_grad_norm_)
        self.accelerator.scaler = None  # nothing to save: the optimizer has the loss scale
        if self._sharding is not None:
            self.accelerator.prepare = functools.partial(self._prepare, self.accelerator.prepare)
            self.accelerator.no_sync = lambda model: nullcontext()  # gradients are reduced in every micro-batch

    def _prepare(self, prepare: Callable[..., Any], *objects: Any, **options: Any) -> Any:
        """Accelerate prepares data loaders. The model is sharded instead, and the optimizer is left as it is."""
        if not any(isinstance(item, nn.Module | torch.optim.Optimizer) for item in objects):
            return prepare(*objects, **options)
        if any(isinstance(item, nn.Module) for item in objects):
            self._shard()
        return objects if len(objects) > 1 else objects[0]

    def _prepare_model(self, prepare: Callable[..., Any], model: nn.Module, *args: Any, **options: Any) -> nn.Module:
        """Gives a model its device and autocast, or shards it. Accelerate would wrap it in DistributedDataParallel
        unless it is in evaluation mode, and the hooks of the optimizer average gradients.
        """
        if self._sharding is None or model is not self.model:
            return prepare(model, *args, **{**options, "evaluation_mode": True})
        self._shard()
        return model

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        self._quantize(model)
        if self._sharding is None:
            super()._move_model_to_device(model, device)  # sharding moves the shards

    def _quantize(self, model: nn.Module) -> None:
        """Holds weights in fewer bits if `fused` asks for it, before the model gets to its device."""
        if self._requested is None or self._requested.weight_format is None:
            return
        if is_peft_model(model):
            raise ConfigError("fused.weight_format is for training all weights, but this model has adapters; omit it")
        quantize_(model, self._requested.weight_format)

    def _clip_grad_norm_(
        self, clip: Callable[..., Any], params: Any, max_norm: float, *args: Any, **kwargs: Any
    ) -> Any:
        """Clips nothing in the trainer's loop, because the optimizer has clipped already, and `log` has the norm."""
        in_loop = getattr(self, "is_in_train", False) and max_norm in (self.args.max_grad_norm, math.inf)
        return None if in_loop else clip(params, max_norm, *args, **kwargs)

    def _shard(self) -> None:
        """Shards the model if the arguments ask for it, and frees what is gathered."""
        if self._sharding is not None:
            self._sharding.shard(self.model, self.accelerator)
            self._sharding.release(self.model)

    def compute_loss(self, *args: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        with head.lazily([] if return_outputs else self._lazy):  # a trainer that returns outputs has ordinary logits
            return super().compute_loss(*args, return_outputs=return_outputs, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Trains as the trainer does. A backward that `compute_loss` runs is a micro-batch before that of the loss."""
        # without train() there is no optimizer
        with nullcontext() if self.optimizer is None else self.optimizer._hooks.during(in_accumulate=True):
            return super().training_step(*args, **kwargs)

    def _fused_backward(self, loss: Tensor, **_: Any) -> None:
        if not (getattr(self, "is_in_train", False) or self._asked_to_clip or self.optimizer.config.clip_norm is None):
            raise ConfigError(
                f"max_grad_norm={self.args.max_grad_norm}: {type(self).__name__} has a custom training loop, and "
                "lowmem cannot tell whether it clips. If it does not (TRL's PPO), set max_grad_norm=0. If it does, "
                f"set FusedConfig(clip_norm={self.args.max_grad_norm}) too, and omit clipping in the loop"
            )
        if self.accelerator.distributed_type != DistributedType.DEEPSPEED:  # as Accelerate's backward
            loss = loss / self.accelerator.gradient_accumulation_steps
        with self.optimizer._hooks.during(in_accumulate=not self.accelerator.sync_gradients):
            self.optimizer.backward(loss)
        # with a loss scale the schedule waits for a skipped step, as with GradScaler
        scaled = self.accelerator.sync_gradients and self.optimizer._clipping.scaler.value is not None
        self.optimizer.step_was_skipped = scaled and self.optimizer.last_step.skipped

    def get_train_dataloader(self) -> Any:
        self._train_batch_size = self.args.train_batch_size  # transformers 4 would take the one of the checkpoint
        return super().get_train_dataloader()

    def set_initial_training_values(self, args: TrainingArguments, dataloader: Any, *rest: Any) -> Any:
        """Returns what the trainer returns, and no epoch to train for a run that has finished: transformers 5.23
        (trainer.py) would train one step more if the last epoch is not complete. Raises where the ranks of a group were
        not started alike, or the rows that are left would be others.
        """
        epochs, steps_per_epoch, *others, max_steps = super().set_initial_training_values(args, dataloader, *rest)
        fused = self.optimizer.config if isinstance(self.optimizer, FusedOptimizer) else self.fused
        agreement.check(self.args, fused, self.layers, self.train_dataset, self._resumed)
        if self.args.save_strategy != "no":
            agreement.check_shared(Path(self.args.output_dir))
        if self._resumed is not None:
            checkpoint.check_configuration(self.model, Path(self._resumed))
        self.remove_callback(resuming.Rows)
        self._rows = resuming.Rows(self, dataloader, steps_per_epoch, max_steps, self._resumed)
        self.add_callback(self._rows)
        if not self._rows.left:
            epochs = min(epochs, self._rows.step // steps_per_epoch)
            if self.is_world_process_zero():
                logger.warning(
                    "training is already complete: %s is at step %d of %d, and its weights are loaded. Raise max_steps "
                    "or num_train_epochs to continue.", self._resumed, self._rows.step, max_steps
                )  # fmt: skip
        return epochs, steps_per_epoch, *others, max_steps

    def _init_training_state(self, *args: Any) -> tuple[int, int]:
        """Begins a resumed run with the row after the last one that was trained."""
        super()._init_training_state(*args)
        assert self._rows is not None
        return self._rows.start

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        samples, items = super().get_batch_samples(*args, **kwargs)
        if self._rows is not None:
            self._rows.fetched += len(samples)
            self._rows.ended = not samples
        return samples, items

    def create_optimizer(self, model: nn.Module | None = None) -> FusedOptimizer:
        model_layers.change(self.model, self.layers)  # model_init made a new one, or its layers are checkpointed now
        self._shard()
        if self._checked is not self.model:  # train() calls this once more
            self._checked = self.model
            dry_runs.check(self)
            self._shard()  # frees what that has gathered
        model = self.model if model is None else model
        if not isinstance(self.optimizer, FusedOptimizer):
            self._configure()  # a hyperparameter search has set other arguments
            made, rate, parts = self._made_by_class(), self.args.learning_rate, None
            self.optimizer = made if isinstance(made, FusedOptimizer) else None
            if made is not self.optimizer:
                fused, parts = optim.read(made, self._requested or FusedConfig())
                self._configure(fused)
                rate = rate if fused.lr is None else fused.lr
                del made
        if self.optimizer is None:
            if model in _OPTIMIZERS and (other := _OPTIMIZERS[model]()) is not None:
                other.remove()  # that of an earlier trainer
            groups = self._param_groups(model, parts)
            config = replace(self.fused, groups=(), lr=rate)
            if find(config.placement, (pair for group in groups for pair in group["params"])).name == "replicated":
                config = replace(config, placement="replicated")  # rank 0's weights, as DistributedDataParallel does
            self.optimizer = FusedOptimizer.from_config(groups, config, model=model)
        arguments.check_optimizer(self.optimizer, self.args)
        opt: Any = self.optimizer
        if opt._hooks.removed:
            raise StepError(
                "another trainer has since trained this model and removed the hooks of this trainer's optimizer. "
                "Create a new trainer"
            )
        _OPTIMIZERS[model] = ref(opt)
        if self.args.gradient_accumulation_steps > 1:
            with opt.accumulate():  # chooses the policy now instead of after the first micro-batch
                pass
        if opt.policy == "two_pass":
            arguments.check_replay(self.args)
        names = ", ".join(dict.fromkeys(group["rule"] for group in opt.param_groups))
        held = weights_in_words(opt._records.values())
        logger.info("fused optimizer: %s, weights in %s, policy %s (%s)", names, held, opt.policy, opt.policy_reason)
        # Accelerate 1.15 (accelerator.py, prepare_optimizer and optimizer_step_was_skipped) wraps an optimizer without
        # the first of these attributes, and reads the second
        opt._is_accelerate_prepared = True
        opt.step_was_skipped = False
        opt._hooks.prepared = True
        self.accelerator.backward = self._fused_backward  # not before: training_step() may be called without train()
        return opt

    def _made_by_class(self) -> Any:
        """The optimizer that the trainer's class makes in a method of its own, if it has one, or has made before."""
        usual = type(self).get_optimizer_cls_and_kwargs is Trainer.get_optimizer_cls_and_kwargs
        if self.optimizer is None and usual and self._inherits("create_optimizer"):
            return None
        return super().create_optimizer() or self.optimizer

    def _inherits(self, method: str) -> bool:
        """Returns whether no class after the mixin has a method of its own instead of transformers'."""
        return getattr(getattr(super(), method), "__func__", None) is getattr(Trainer, method)

    def _param_groups(self, model: nn.Module, parts: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
        """The groups of `fused`, each split into parameters that decay, and norms and biases, which do not; or into
        `parts`, the groups of the optimizer that the class makes.
        """
        named = dict(model.named_parameters())
        # without the prefix that FSDP's activation checkpointing adds: checkpoints are the same with it and without
        names = {param: name.replace("_checkpoint_wrapped_module.", "") for name, param in named.items()}
        by_class, default = parts is not None, resolve(self.fused.rule)
        if parts is None:
            decayed = {named.get(name) for name in self.get_decay_parameter_names(model)}
            trained = [param for param in names if param.requires_grad]
            parts = [
                {"params": [param for param in trained if (param in decayed) is decays], "weight_decay": amount}
                for decays, amount in ((True, self.args.weight_decay), (False, None))
            ]
        part_of = {param: n for n, part in enumerate(parts) for param in part["params"]}
        others = {param: f"outside.{n}" for n, param in enumerate(param for param in part_of if param not in names)}
        names |= others
        odd = [name for param, name in names.items() if param.requires_grad and (param in part_of) is (param in others)]
        if odd and self.fused.clip_norm is not None:
            raise UnsupportedError(
                f"max_grad_norm={self.fused.clip_norm}: the trainer clips the gradients of its model, but {odd[0]!r} "
                "is only in the model, or only in the optimizer that the class creates. Set max_grad_norm=0, or "
                "freeze it"
            )
        groups: list[dict[str, Any]] = []
        for group in self.fused.param_groups((name, param) for param, name in names.items() if param in part_of):
            rule = resolve(group["rule"]) if "rule" in group else default
            own, decays = rule.name == default.name, rule.decay in rule.defaults and rule.decay not in group
            if not decays and not by_class:
                groups.append(group)
                continue
            for n, part in enumerate(parts):
                options = {key: value for key, value in part.items() if own and key != "weight_decay"} | group
                amount, without = part["weight_decay"], rule.without_decay()
                if decays and amount is None:
                    options |= without
                elif decays:
                    options[rule.decay] = (amount if own else rule.defaults[rule.decay]) or without[rule.decay]
                elif amount and own and rule.decay not in group:
                    options["weight_decay"] = amount  # which the rule does not have, and raises
                groups.append({**options, "params": [pair for pair in group["params"] if part_of[pair[1]] == n]})
        return [group for group in groups if group["params"]]

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Logs as the trainer does, with the metrics of the policy and the rule."""
        if isinstance(self.optimizer, FusedOptimizer) and self.optimizer.last_step is not None and "loss" in logs:
            logs.update(self._step_metrics())
        super().log(logs, *args, **kwargs)  # adds to `logs`, which evaluate() and train() return

    def _step_metrics(self) -> dict[str, Any]:
        """Share of changed weights, clip coefficient, loss scale, non-finite steps, statistics of the rule, norms."""
        last = self.optimizer.last_step
        scale, nonfinite_steps = last.loss_scale, self.optimizer.nonfinite_steps  # copies each to the host
        metrics: dict[str, Any] = {"grad_norm": float(last.grad_norm)}
        if not math.isnan(changed_share := float(last.changed_share)):
            metrics["changed_share"] = changed_share
        if last.clip_coef is not None:
            metrics["clip_coef"] = float(last.clip_coef)
        if scale is not None:
            metrics["loss_scale"] = scale
        if scale is not None or nonfinite_steps:
            metrics["nonfinite_steps"] = nonfinite_steps
        if self.optimizer.config.log_norms:
            metrics |= {f"grad_norm/{name}": norm for name, norm in zip(last.names, last.norms.tolist(), strict=True)}
        return {**metrics, **last.statistics}

    # -- checkpoints -----------------------------------------------------------------------------------------------

    @failures.explained()
    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Trains as the trainer does. `resume_from_checkpoint=True` resumes from the last complete checkpoint.

        Raises:
            CheckpointError: the checkpoint is missing or damaged, or there is none.
            UnsupportedError: the model has adapters that could not be saved or resumed.
        """
        saves = self.args.save_strategy != "no" or bool(resume_from_checkpoint)
        if self.model is not None:  # else the next trial of a hyperparameter search makes one
            adapters.check(self.model, self.args, sharded=self._sharding is not None, saves=saves)
        self._resumed = path = checkpoint.to_resume(resume_from_checkpoint, Path(self.args.output_dir))
        arguments.check_callbacks(self.callback_handler.callbacks)
        if resume_from_checkpoint or args:  # a class may have a `train` without arguments
            args = path if resume_from_checkpoint else None, *args
        return super().train(*args, **kwargs)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staging) if self._staging is not None else super()._get_output_dir(trial)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Saves into a staging directory and renames it, so that a checkpoint is complete or does not exist.

        Rank 0 writes; the other ranks write only their random state.
        """
        run_dir = Path(super()._get_output_dir(trial))
        self._staging = run_dir / checkpoint.STAGING
        name = f"checkpoint-{self.state.global_step}"
        staged, final = self._staging / name, run_dir / name
        is_first = self.is_world_process_zero()
        try:
            if is_first:
                checkpoint.remove(self._staging)
            self.accelerator.wait_for_everyone()
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.state.best_model_checkpoint == str(staged):
                self.state.best_model_checkpoint = str(final)
                if is_first:
                    self.state.save_to_json(str(staged / checkpoint.TRAINER_STATE_FILE))
            if is_first:
                checkpoint.publish(staged, final)
        except (OSError, RuntimeError, SafetensorError) as error:
            # torch.save raises RuntimeError if it cannot write a file, as devices and other ranks do when they fail
            if isinstance(error, RuntimeError) and not re.search("inline_container|iostream|Parent|opened", str(error)):
                raise
            raise CheckpointError(
                f"{final} could not be written: {error}. Free some space or set another output_dir, and resume from "
                "the previous checkpoint."
            ) from error
        finally:
            if is_first:
                checkpoint.remove(self._staging)
            self._staging = None
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))
        opt = self.optimizer
        opt._report.settle()
        if is_first and (streak := opt._report.streak):
            logger.warning(
                "older checkpoints were not removed when step %d was saved, because the last %d step(s) had non-finite "
                "gradients, and you may need to continue from an older checkpoint", self.state.global_step, streak
            )  # fmt: skip
        elif is_first:
            best, limit = self.state.best_model_checkpoint, self.args.save_total_limit
            checkpoint.rotate(run_dir, self.state.global_step, limit, best)
        self.accelerator.wait_for_everyone()

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Pushes a checkpoint once it has its name: an upload goes on while training does."""
        if self._staging is None:
            super()._push_from_checkpoint(checkpoint_folder)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves as the trainer does. If the model is sharded, every rank calls it."""
        adapted, sharded = is_peft_model(self.model), self._sharding is not None
        if not adapted and not sharded and not in_codes(self.model):
            super().save_model(output_dir, _internal_call)
            return
        folder, write = Path(output_dir or self.args.output_dir), self.args.should_save
        self._shard()
        if adapted:
            state = adapters.full_state(self.model) if sharded else None
            if write:
                self._save(str(folder), state_dict=state)
            adapters.save_others(self.model, folder, write=write)
        else:
            if write:
                self._save(str(folder), state_dict={})  # everything except weights
            save_weights(self.model, folder, write=write)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        super().create_model_card(*args, **kwargs)
        card, base = Path(self.args.output_dir, "README.md"), getattr(self.model.config, "_name_or_path", "")
        if self.is_world_process_zero() and card.exists() and Path(base).is_dir():
            # TRL 1.16 (base_trainer.py) writes None for a model from a directory, and for one that is not on the Hub
            text = card.read_text("utf-8").replace('model="None"', f'model="{self.args.output_dir}"')
            card.write_text(re.sub(r"\[None\]\(\S*\)", f"`{Path(base).name}`", text), "utf-8")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        write = self.args.should_save
        if write or self._sharding is not None:
            checkpoint.save_optimizer(self.optimizer, Path(output_dir) / checkpoint.OPTIMIZER_FILE, write=write)
        if self._rows is not None:
            self._rows.save(Path(output_dir), self.state.epoch, write=write)
        if write:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / checkpoint.SCHEDULER_FILE)

    def _load_optimizer_and_scheduler(self, checkpoint_dir: str | None) -> None:
        if checkpoint_dir is not None:
            folder = Path(checkpoint_dir)
            checkpoint.load_optimizer(self.optimizer, folder / checkpoint.OPTIMIZER_FILE)
            checkpoint.load_scheduler(self.lr_scheduler, folder / checkpoint.SCHEDULER_FILE)

    def _load_scaler(self, checkpoint_dir: str | None) -> None:
        """Loads nothing, also where there is a `scaler.pt`: the optimizer has the loss scale."""

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if not isinstance(self.optimizer, FusedOptimizer):  # a subclass has not called the mixin's create_optimizer
            self.optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # Accelerate has wrapped it
            self.optimizer = self.accelerator.prepare(FusedTrainerMixin.create_optimizer(self))
            optimizer = self.optimizer
        return super().create_scheduler(num_training_steps, optimizer)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self._shard()
        target, own = self.model if model is None else model, not self._inherits("_load_from_checkpoint")
        if own and self._sharding is not None:
            raise UnsupportedError(
                f"{type(self).__name__} loads checkpoints with custom code, which does not support sharding. Omit "
                "resume_from_checkpoint and load_best_model_at_end, or fsdp and deepspeed"
            )
        if own or (self._sharding is None and type(target).load_state_dict is not nn.Module.load_state_dict):
            super()._load_from_checkpoint(resume_from_checkpoint, *(() if model is None else (model,)))
        else:
            load_weights(target, Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        if self._inherits("_load_best_model"):
            self._load_from_checkpoint(self.state.best_model_checkpoint)
        else:
            super()._load_best_model()


class FusedTrainer(FusedTrainerMixin, Trainer):
    """`transformers.Trainer` with fused updates."""


def __getattr__(name: str) -> Any:
    if name != "FusedSFTTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_packages(name, "trl")
    from trl import SFTTrainer  # which takes seconds

    class FusedSFTTrainer(FusedTrainerMixin, SFTTrainer):
        """`trl.SFTTrainer` with fused updates. Logits are computed in tiles, also where labels are smoothed, unless
        `LayersConfig.computed_gradients` is False.
        """

        __qualname__ = "FusedSFTTrainer"

    globals()[name] = FusedSFTTrainer  # the next access finds it
    return FusedSFTTrainer
