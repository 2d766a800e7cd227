"""The accelerator of a fused trainer, whose `backward` updates parameters, and the metrics of its steps."""

import math
from contextlib import nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lowmem.errors import ConfigError
from lowmem.hf.sharding import StreamedSharding
from lowmem.optimizer import FusedOptimizer


class FusedAccelerator(Accelerator):  # type: ignore[misc]
    """Updates parameters in `backward` once `updates` is true. It does not wrap models and optimizers."""

    trainer: Any
    updates: bool

    @classmethod
    def adopt(cls, trainer: Any) -> None:
        """Changes the class of the accelerator that a trainer has created. Keeps the methods of a subclass."""
        accelerator = trainer.accelerator
        accelerator.__class__ = type(cls.__name__, (cls, type(accelerator)), {})
        accelerator.trainer, accelerator.updates = trainer, False
        accelerator.scaler = None  # the optimizer scales the loss

    def prepare(self, *objects: Any, **options: Any) -> Any:
        """Prepares data loaders. If the model is to be sharded, shards it and returns the optimizer unchanged."""
        only_data = not any(isinstance(item, nn.Module | torch.optim.Optimizer) for item in objects)
        if not self.trainer._inputs.sharded or only_data:
            return super().prepare(*objects, **options)
        self.trainer._shard()
        prepare = super().prepare
        prepared = [prepare(item) if isinstance(item, DataLoader) else item for item in objects]
        return tuple(prepared) if len(prepared) > 1 else prepared[0]

    def prepare_model(self, model: nn.Module, *args: Any, **options: Any) -> Any:
        """Moves a model to its device and adds autocast, or shards it. In evaluation mode, Accelerate does not wrap it
        in DistributedDataParallel: the hooks of the optimizer average gradients.
        """
        inputs = self.trainer._inputs
        if model is self.trainer.model:
            self.trainer._shard()
            if inputs.sharded:
                return model
        elif isinstance(inputs.sharding, StreamedSharding) and model is getattr(self.trainer, "ref_model", None):
            inputs.sharding.shard(model, reference=True)
        return super().prepare_model(model, *args, **{**options, "evaluation_mode": True})

    def no_sync(self, model: nn.Module) -> Any:
        """Does nothing if the model is sharded, because gradients are reduced in every micro-batch."""
        return nullcontext() if self.trainer._inputs.sharded else super().no_sync(model)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, *args: Any, **options: Any) -> Any:
        """Does nothing in the trainer's loop: the optimizer has already clipped, and `log` adds the norm."""
        if getattr(self.trainer, "is_in_train", False) and max_norm in (self.trainer.args.max_grad_norm, math.inf):
            return None
        return super().clip_grad_norm_(parameters, max_norm, *args, **options)

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Runs backward and updates the parameters."""
        if not self.updates:
            super().backward(loss, **options)
            return
        trainer, optimizer = self.trainer, self.trainer.optimizer
        if not (getattr(trainer, "is_in_train", False) or trainer._inputs.clips or optimizer.config.clip_norm is None):
            raise ConfigError(
                f"max_grad_norm={trainer.args.max_grad_norm}: {type(trainer).__name__} has a custom training loop, and "
                "lowmem cannot tell whether it clips. If it does not (TRL's PPO), set max_grad_norm=0. If it does, "
                f"set FusedConfig(clip_norm={trainer.args.max_grad_norm}) too, and omit clipping in the loop"
            )
        if self.distributed_type != DistributedType.DEEPSPEED:  # as in Accelerate's backward
            loss = loss / self.gradient_accumulation_steps
        with optimizer.accumulating(not self.sync_gradients):
            optimizer.backward(loss)
        # with a loss scale, a skipped step does not advance the schedule, as with GradScaler
        scaled = self.sync_gradients and optimizer.loss_scale is not None
        optimizer.step_was_skipped = scaled and optimizer.last_step.skipped


def step_metrics(optimizer: FusedOptimizer) -> dict[str, Any]:
    """Returns the norms, changed weights, clip coefficient and loss scale of the last step, and the rule's metrics."""
    last: Any = optimizer.last_step
    scale, nonfinite_steps = last.loss_scale, optimizer.nonfinite_steps  # each is copied to the host
    metrics: dict[str, Any] = {"grad_norm": float(last.grad_norm)}
    if not math.isnan(changed_share := float(last.changed_share)):
        metrics["changed_share"] = changed_share
    if last.clip_coef is not None:
        metrics["clip_coef"] = float(last.clip_coef)
    if scale is not None:
        metrics["loss_scale"] = scale
    if scale is not None or nonfinite_steps:
        metrics["nonfinite_steps"] = nonfinite_steps
    if optimizer.config.log_norms:
        metrics |= {f"grad_norm/{name}": norm for name, norm in zip(last.names, last.norms.tolist(), strict=True)}
    return {**metrics, **last.statistics}
