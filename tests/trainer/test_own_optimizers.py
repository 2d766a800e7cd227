"""Trainers that choose the optimizer, override the training loop or load checkpoints train alike with the mixin."""

import logging

import pytest
import torch
from support.nets import weights
from support.products import in_turn
from support.trainers import fused
from transformers import Trainer, TrainerCallback

import lowmem
from lowmem.errors import ConfigError, StepError, UnsupportedError
from lowmem.trainer import FusedTrainer


def ends_alike(make, cls, other=None, **options):
    """Compares training with `cls` and with `other`, by default `cls` with the mixin."""
    plain = make(cls, **options)
    plain.train()
    ours = make(other or fused(cls), **options)
    start = weights(ours.model)
    ours.train()
    assert isinstance(ours.optimizer, lowmem.FusedOptimizer)
    assert all(map(torch.equal, weights(plain.model), weights(ours.model)))
    assert not all(map(torch.equal, start, weights(ours.model)))
    return ours


def head_and_body(trainer):
    params = dict(trainer.model.named_parameters())
    head = [param for name, param in params.items() if "lm_head" in name]
    body = [param for name, param in params.items() if "lm_head" not in name]
    return [{"params": head, "lr": 3e-2, "weight_decay": 0.0}, {"params": body}]


def makes(create):
    """Returns a trainer class whose `create_optimizer` calls `create(trainer)` once."""

    class Makes(Trainer):
        def create_optimizer(self):
            if self.optimizer is None:
                self.optimizer = create(self)
            return self.optimizer

    return Makes


def sgd(self):
    return torch.optim.SGD(head_and_body(self), lr=0.1, momentum=0.9, weight_decay=0.1)


class NamesAdagrad(Trainer):
    @staticmethod
    def get_optimizer_cls_and_kwargs(args, model=None):
        return torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1}


class ChangesTheRate(Trainer):
    def create_optimizer(self, model=None):
        optimizer = super().create_optimizer(model)
        optimizer.param_groups[0]["lr"] = 1e-4
        return optimizer


class MakesItInInit(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.optimizer = torch.optim.SGD(head_and_body(self), lr=0.1)


MakesSGD = makes(sgd)
CLASSES = {
    "SGD": MakesSGD,
    "AdamW": makes(lambda self: torch.optim.AdamW(head_and_body(self), lr=1e-2, betas=(0.8, 0.9), weight_decay=0.2)),
    "AMSGrad": makes(lambda self: torch.optim.AdamW(self.model.parameters(), lr=1e-2, amsgrad=True, foreach=False)),
    "a class and options": NamesAdagrad,
    "another rate": ChangesTheRate,
    "in __init__": MakesItInInit,
}


@pytest.mark.parametrize(("kind", "norm"), in_turn(CLASSES, [0.0, 0.5]))
def test_an_optimizer_created_by_a_trainer_class_runs_fused(make, kind, norm):
    options = {"optim": "adamw_torch", "weight_decay": 0.1, "lr_scheduler_type": "linear", "max_grad_norm": norm}
    ends_alike(make, CLASSES[kind], max_steps=4, **options)


def test_a_rule_in_fused_replaces_the_optimizer_class_and_keeps_its_groups(make):
    rule = lowmem.FusedConfig(rule="adalomo", groups=({"match": "norm", "lr": 5e-4},))
    opt = make(fused(MakesSGD), fused=rule, optim="adamw_torch_fused", weight_decay=0.1).create_optimizer()
    rates = {name: (group["rule"], group["lr"]) for group in opt.param_groups for name in group["param_names"]}
    assert rates["lm_head.weight"] == ("adalomo", 3e-2)
    assert rates["model.norm.weight"] == ("adalomo", 5e-4)
    assert rates["model.layers.0.mlp.up_proj.weight"] == ("adalomo", 1e-2)
    decays = {name: group["weight_decay"] for group in opt.param_groups for name in group["param_names"]}
    assert (decays["lm_head.weight"], decays["model.layers.0.mlp.up_proj.weight"]) == (0.0, 0.1)


class Scheduled(MakesItInInit):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.lr_scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer)


class Hidden(torch.optim.SGD):
    def __init__(self, params, lr=0.1, secret=1.0):
        super().__init__(params, lr)
        self.secret = secret


def hooked(self):
    optimizer = sgd(self)
    optimizer.register_step_pre_hook(lambda *args: None)
    return optimizer


Hides = makes(lambda self: Hidden(self.model.parameters(), secret=2.0))
Partial = makes(lambda self: torch.optim.SGD(self.model.lm_head.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (makes(hooked), "hooks around its step, a schedule"),
        (Scheduled, "hooks around its step, a schedule"),
        (Hides, "options that are not in its `defaults`"),
        (Partial, "only in the model, or only in the optimizer that the class creates"),
    ],
    ids=["hooks", "a schedule", "hidden options", "a part of the model"],
)
def test_custom_behavior_that_would_be_lost_raises_before_the_first_step(make, cls, message):
    trainer = make(fused(cls), optim="adamw_torch", max_grad_norm=0.5)
    start = weights(trainer.model)
    with pytest.raises((ConfigError, UnsupportedError), match=message):
        trainer.train()
    assert all(map(torch.equal, start, weights(trainer.model)))


def test_suggestions_of_error_messages_work(make):
    ends_alike(make, Partial, optim="adamw_torch", max_grad_norm=0.0)
    rule = lowmem.FusedConfig(rule="torch.optim.SGD", momentum=0.5)
    trainer = make(fused(Hides), fused=rule, optim="adamw_torch_fused")
    trainer.train()
    assert trainer.optimizer.param_groups[0]["momentum"] == 0.5


# -- loops and methods -------------------------------------------------------------------------------------------------


class OwnLoop(Trainer):
    """Like TRL's PPO, creates its optimizer in `__init__`, overrides `train` without arguments, and never clips."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.accelerator.gradient_state.plugin_kwargs["num_steps"] = self.args.gradient_accumulation_steps
        self.create_optimizer_and_scheduler(num_training_steps=4)
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)

    def train(self):
        loader = self.get_train_dataloader()
        self.model.train()
        for batch in [*loader][:4]:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.compute_loss(self.model, self._prepare_inputs(batch)))
                self.optimizer.step()
                self.optimizer.zero_grad()
        self.lr_scheduler.step()
        if self.args.save_strategy != "no":
            self._save_checkpoint(self.model, trial=None)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_custom_loop_trains_as_without_the_mixin(make, accumulation):
    options = {"optim": "adamw_torch", "max_grad_norm": 0.0, "gradient_accumulation_steps": accumulation}
    options |= {"save_strategy": "steps"}
    ends_alike(make, OwnLoop, per_device_train_batch_size=2, **options)


def test_a_custom_loop_is_clipped_only_on_request(make):
    trainer = make(fused(OwnLoop), optim="adamw_torch", max_grad_norm=1.0)
    start = weights(trainer.model)
    with pytest.raises(ConfigError, match=r"FusedOwnLoop has a custom training loop.* set max_grad_norm=0"):
        trainer.train()
    assert all(map(torch.equal, start, weights(trainer.model)))
    clipped = make(fused(OwnLoop), optim="adamw_torch", max_grad_norm=0.1, fused=lowmem.FusedConfig(clip_norm=0.1))
    clipped.train()
    assert clipped.optimizer.last_step.clip_coef < 1


def test_a_class_with_custom_checkpoint_loading(make):
    loaded = []

    class Loads(Trainer):
        def _load_from_checkpoint(self, checkpoint_path):
            loaded.append(checkpoint_path)
            super()._load_from_checkpoint(checkpoint_path)

    options = {"optim": "adamw_torch", "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    straight = make(fused(Loads), **options)
    straight.train()
    resumed = make(fused(Loads), **options)
    resumed.train(resume_from_checkpoint=True)  # resuming from the last checkpoint leaves nothing to train
    assert loaded == [f"{resumed.args.output_dir}/checkpoint-4"]
    assert all(map(torch.equal, weights(straight.model), weights(resumed.model)))


class CachesGradients(FusedTrainer):
    """Like the `Cached...Loss` classes of sentence-transformers, runs the backward of the graph in a hook."""

    def compute_loss(self, model, inputs, **kwargs):
        inner = super().compute_loss(model, inputs, **kwargs)
        loss = inner.detach().requires_grad_()
        loss.register_hook(inner.backward)
        return loss


def test_cached_gradients_name_the_policy_that_is_exact(make):
    options = {"optim": "adamw_torch", "max_grad_norm": 0.5, "max_steps": 3}
    with pytest.raises(StepError, match=r"loss that caches gradients.*policy='deferred'"):
        make(CachesGradients, **options).train()
    plain = make(Trainer, **options)
    plain.train()
    ours = make(CachesGradients, fused=lowmem.FusedConfig(policy="deferred"), **options)
    ours.train()
    assert all(map(torch.equal, weights(plain.model), weights(ours.model)))


def test_a_callback_that_may_read_gradients_warns_once(make, caplog):
    class Reads(TrainerCallback):
        def on_pre_optimizer_step(self, *args, **kwargs):
            pass

    class Waits(TrainerCallback):
        pass

    trainer = make(max_steps=2)
    trainer.add_callback(Reads())
    trainer.add_callback(Waits())
    with caplog.at_level(logging.WARNING, "lowmem"):
        trainer.train()
    (message,) = [record.getMessage() for record in caplog.records if ".grad is None" in record.getMessage()]
    assert "Reads.on_pre_optimizer_step" in message
