"""Hugging Face and TRL trainers train as without the mixin, respect or reject arguments, and resume bitwise."""

import itertools
import math

import pytest
import torch
from support.nets import weights
from support.trainers import both
from transformers import Trainer, TrainerCallback, TrainingArguments

import lowmem
from lowmem import rules
from lowmem.errors import ConfigError, StepError, UnsupportedError
from lowmem.trainer import FusedTrainer


def groups_by_name(trainer):
    return {name: group for group in trainer.create_optimizer().param_groups for name in group["param_names"]}


def test_metrics_are_logged(make):
    fused = lowmem.FusedConfig(loss_scale=lowmem.DynamicScale(init_scale=1024.0, growth_interval=3), log_norms=True)
    trainer = make(fused=fused, max_grad_norm=0.5)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["loss_scale"] for entry in logs] == [1024.0] * 3 + [2048.0] * 3 + [4096.0] * 2
    assert {entry["nonfinite_steps"] for entry in logs} == {0}
    for entry in logs:
        norms = [value for key, value in entry.items() if key.startswith("grad_norm/")]
        assert len(norms) == len(trainer.optimizer.last_step.names)
        assert entry["grad_norm"] == pytest.approx(math.hypot(*norms), rel=1e-5)
        assert entry["clip_coef"] == pytest.approx(min(1.0, 0.5 / entry["grad_norm"]), rel=1e-4)


def test_a_non_finite_gradient_skips_the_step_and_the_schedule(make):
    """As with GradScaler, the trainer counts the step, but the optimizer and the schedule do not."""
    trainer = make(
        fused=lowmem.FusedConfig(rule="adamw", loss_scale="dynamic"),
        lr_scheduler_type="linear",
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
    )
    snapshots = []

    class Poison(TrainerCallback):
        def on_step_begin(self, args, state, control, model, **_):
            weight = model.model.layers[0].mlp.up_proj.weight
            snapshots.append(weights(trainer.model))
            self.handle = weight.register_hook(lambda grad: grad * (torch.inf if state.global_step in (2, 5) else 1))

        def on_step_end(self, *args, **_):
            self.handle.remove()

    trainer.add_callback(Poison())
    trainer.train()
    snapshots.append(weights(trainer.model))
    unmoved = [all(map(torch.equal, a, b)) for a, b in itertools.pairwise(snapshots)]
    assert unmoved == [step in (2, 5) for step in range(8)]
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["loss_scale"] for entry in logs] == [2.0**16] * 3 + [2.0**15] * 3 + [2.0**14] * 2
    assert [entry["nonfinite_steps"] for entry in logs] == [0, 0, 1, 1, 1, 2, 2, 2]
    rates = [entry["learning_rate"] for entry in logs]
    assert [after == before for before, after in itertools.pairwise(rates)] == [step in (2, 5) for step in range(7)]
    assert trainer.optimizer.named_state_dict()["step"] == 6


@pytest.mark.troubleshooting("The gradient norm is 0.0")
def test_gradients_are_freed_and_the_optimizer_is_not_wrapped(make):
    trainer = make()
    steps = []

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, optimizer, **_):
            steps.append((type(optimizer), any(p.grad is not None for p in model.parameters())))

    trainer.add_callback(Look())
    trainer.train()
    assert steps == [(lowmem.FusedOptimizer, False)] * 8


@pytest.mark.parametrize(
    ("fused", "weight_decay", "decayed", "others"),
    [
        ({"rule": "adalomo"}, 0.3, {"weight_decay": 0.3}, {"weight_decay": 0.0}),
        ({"rule": "lans"}, 0.3, {"wd": 0.3}, {"wd": 0.0}),
        ({"rule": "adafactor"}, 0.3, {"weight_decay_rate": 0.3}, {"weight_decay_rate": None}),
        (  # the exponent alone also decays weights, by a power of the learning rate
            {"rule": "adafactor", "hyper": {"weight_decay_rate_lr_exponent": 2.0}},
            0.0,
            {"weight_decay_rate": None, "weight_decay_rate_lr_exponent": 2.0},
            {"weight_decay_rate": None, "weight_decay_rate_lr_exponent": None},
        ),
    ],
)
def test_norms_and_biases_are_not_decayed(make, fused, weight_decay, decayed, others):
    group_of = groups_by_name(make(fused=lowmem.FusedConfig(**fused), weight_decay=weight_decay))
    for name, expected in (("model.layers.0.mlp.up_proj.weight", decayed), ("model.norm.weight", others)):
        assert {key: group_of[name][key] for key in expected} == expected


GROUPS = (
    {"match": "embed_tokens|lm_head", "rule": "lans", "beta1": 0.8},
    {"match": r"mlp\.", "lr": 0.5},
    {"match": "self_attn|input_layernorm", "rule": "adamw", "lr": 0.25, "weight_decay": 0.125},
)
EXPECTED = {  # rule, lr and weight decay of some parameters
    "lm_head.weight": ("lans", rules.resolve("lans").defaults["lr"], {"wd": rules.resolve("lans").defaults["wd"]}),
    "model.layers.0.mlp.up_proj.weight": ("adalomo", 0.5, {"weight_decay": 0.3}),
    "model.layers.1.self_attn.q_proj.weight": ("adamw", 0.25, {"weight_decay": 0.125}),
    "model.layers.1.input_layernorm.weight": ("adamw", 0.25, {"weight_decay": 0.125}),  # set by its group
    "model.norm.weight": ("adalomo", 1e-2, {"weight_decay": 0.0}),
}


def test_groups_of_rules_are_split_by_decay(make):
    """A group that names another rule takes that rule's defaults; the other groups take the trainer's arguments."""
    fused = lowmem.FusedConfig(rule="adalomo", groups=GROUPS)
    trainer = make(fused=fused, weight_decay=0.3, lr_scheduler_type="linear", max_steps=2)
    group_of = groups_by_name(trainer)
    for name, (rule, lr, decay) in EXPECTED.items():
        group = group_of[name]
        assert (rules.resolve(group.get("rule", "adalomo")).name, group["lr"]) == (rule, lr), name
        assert {key: group[key] for key in decay} == decay, name
    before = {name: param.detach().clone() for name, param in trainer.model.named_parameters()}
    trainer.train()
    assert not any(torch.equal(param, before[name]) for name, param in trainer.model.named_parameters())
    assert {group["lr"] / group["initial_lr"] for group in trainer.optimizer.param_groups} == {0.0}


IN_THE_HOOK = lowmem.FusedConfig(policy="immediate")
REFUSED = {
    "norm clipping": ({"max_grad_norm": 1.0, "fused": IN_THE_HOOK}, "max_grad_norm=0"),
    "accumulation": ({"gradient_accumulation_steps": 2, "fused": IN_THE_HOOK}, "gradient_accumulation_steps=2"),
    "fp16 on a CPU": ({"fp16": True, "use_cpu": True}, "fp16"),
    "another weight decay": (
        {"fused": lowmem.FusedConfig(weight_decay=0.1)},
        r"fused\.weight_decay=0\.1 contradicts weight_decay=0\.0",
    ),
    "another clip norm": (
        {"fused": lowmem.FusedConfig(clip_norm=2.0)},
        r"fused\.clip_norm=2\.0 contradicts max_grad_norm=0\.0",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_unsupported_arguments_raise_when_the_trainer_is_created(make, arguments, message):
    with pytest.raises((ConfigError, UnsupportedError), match=message):
        make(**arguments)


PASSED = {  # an optimizer that is passed to the trainer, arguments, the message
    "without clipping": ({"rule": "lomo"}, {"max_grad_norm": 1.0}, r"max_grad_norm=1\.0.*clip_norm=None"),
    "with clipping": ({"rule": "lomo", "clip_norm": 2.0}, {}, r"max_grad_norm=0\.0.*clip_norm=2\.0"),
    "beside fused": ({"rule": "lomo"}, {"fused": lowmem.FusedConfig()}, "fused=... has no effect on the optimizer in"),
    "beside optim": ({"rule": "lomo"}, {"optim": "sgd"}, "optim='sgd' has no effect on the optimizer in `optimizers`"),
    "beside betas": ({"rule": "lomo"}, {"adam_beta1": 0.8}, "adam_beta1=0.8 has no effect on the optimizer in"),
    "of torch": (None, {}, "needs a FusedOptimizer"),
}


@pytest.mark.parametrize(("options", "arguments", "message"), PASSED.values(), ids=PASSED)
def test_an_optimizer_that_contradicts_the_arguments_raises(make, tiny_llama, options, arguments, message):
    model = tiny_llama()
    if options is None:
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        opt = lowmem.FusedOptimizer(model.named_parameters(), **options)
    with pytest.raises(ConfigError, match=message):
        make(model=model, optimizers=(opt, None), **arguments)


def test_options_may_repeat_arguments(make):
    options = lowmem.FusedConfig(lr=1e-2, clip_norm=0.5, weight_decay=0.1)
    optimizer = make(fused=options, max_grad_norm=0.5, weight_decay=0.1).create_optimizer()
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(1e-2, 0.1), (1e-2, 0.0)]


def test_an_optimizer_class_raises(tiny_llama, samples, tmp_path):
    with pytest.raises(ConfigError, match="optimizer_cls_and_kwargs"):
        FusedTrainer(
            model=tiny_llama(),
            args=TrainingArguments(output_dir=str(tmp_path), max_grad_norm=0, report_to="none"),
            train_dataset=samples,
            optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1}),
        )


def test_training_twice_continues_with_the_same_optimizer(make):
    trainer = make()
    trainer.train()
    trainer.train()
    assert trainer.optimizer.last_step.step == 16


# -- gradients that are not finite, and more losses than one -----------------------------------------------------------


def spoiling(trainer, spoilt):
    """Makes the trainer's loss NaN in steps for which `spoilt` returns true."""
    compute = trainer.compute_loss

    def compute_loss(*args, **kwargs):
        loss = compute(*args, **kwargs)
        return loss * math.nan if spoilt(trainer.state.global_step + 1) else loss

    trainer.compute_loss = compute_loss
    return trainer


def steps_saved(folder):
    return sorted(int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoint-*"))


SAVING = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "save_only_model": False}


@pytest.mark.troubleshooting("the last ... steps")
def test_nan_stops_the_run_and_keeps_good_checkpoints(make, tmp_path, caplog):
    fused = lowmem.FusedConfig(rule="adamw", max_nonfinite_steps=3)
    trainer = spoiling(make(fused=fused, **SAVING), lambda step: step >= 4)
    with pytest.raises(StepError, match=r"the last 3 steps had non-finite gradients.*the loss is not finite"):
        trainer.train()
    assert trainer.state.global_step == 6
    assert steps_saved(tmp_path / "run") == [2, 3, 4, 5, 6]  # 2 and 3 are older than the first failure
    assert not (tmp_path / "run" / ".saving").exists()
    assert "older checkpoints were not removed when step 4 was saved, because the last 1 step(s)" in caplog.text
    good = make(fused=fused, run="run", **SAVING)
    good.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert good.state.global_step == 8
    assert all(param.isfinite().all() for param in good.model.parameters())


def test_one_nan_skips_a_step_and_old_checkpoints_are_removed(make, tmp_path):
    trainer = spoiling(make(**SAVING), lambda step: step == 4)
    trainer.train()
    assert trainer.optimizer.nonfinite_steps == 1
    assert steps_saved(tmp_path / "run") == [7, 8]


def test_checkpoints_of_weights_only_are_kept_too(make, tmp_path):
    """Without the optimizer's state, only this check looks at the result of the last step."""
    options = {**SAVING, "save_only_model": True, "max_steps": 5}
    spoiling(make(**options), lambda step: step >= 4).train()
    assert steps_saved(tmp_path / "run") == [2, 3, 4, 5]


def with_a_loss_beside(trainer):
    """Makes the trainer's `compute_loss` also run the backward of a second loss on the same graph."""
    compute = trainer.compute_loss

    def compute_loss(model, inputs, return_outputs=False, **kwargs):
        loss, outputs = compute(model, inputs, True, **kwargs)
        if model.training:
            beside = 1e-3 * outputs["logits"].float().square().mean() / trainer.args.gradient_accumulation_steps
            beside.backward(retain_graph=True)
        return (loss, outputs) if return_outputs else loss

    trainer.compute_loss = compute_loss
    return trainer


def test_a_backward_inside_compute_loss_belongs_to_the_same_step(make):
    options = {"max_grad_norm": 0.05, "gradient_accumulation_steps": 2, "max_steps": 3}
    plain, fused = both(lambda mixin: with_a_loss_beside(make(None if mixin else Trainer, **options)))
    assert fused.optimizer.policy == "deferred"
    torch.testing.assert_close(weights(fused.model), weights(plain.model), rtol=1e-5, atol=1e-6)


def test_a_policy_without_accumulation_raises(make):
    trainer = with_a_loss_beside(make(fused=IN_THE_HOOK))
    before = weights(trainer.model)
    with pytest.raises(UnsupportedError, match=r"cannot accumulate gradients.*policy='deferred'"):
        trainer.train()
    assert all(map(torch.equal, before, trainer.model.parameters()))
