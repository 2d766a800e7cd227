"""Trainers whose gradients stop being finite, or come from more losses than one."""

import math

import pytest
import torch
from transformers import Trainer

from lowmem.errors import StepError, UnsupportedError
from lowmem.options import FusedConfig


def spoiling(trainer, spoilt):
    """The trainer, whose loss is NaN in the steps for which `spoilt` is true."""
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
    fused = FusedConfig(rule="adamw", max_nonfinite_steps=3)
    trainer = spoiling(make(fused=fused, **SAVING), lambda step: step >= 4)
    with pytest.raises(StepError, match=r"the last 3 steps had non-finite gradients.*the loss is not finite"):
        trainer.train()
    assert trainer.state.global_step == 6
    assert steps_saved(tmp_path / "run") == [2, 3, 4, 5, 6]  # 2 and 3 are from before
    assert not (tmp_path / "run" / ".saving").exists()
    assert "older checkpoints were not removed when step 4 was saved, because the last 1 step(s)" in caplog.text
    good = make(fused=fused, run="run", **SAVING)
    good.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert good.state.global_step == 8
    assert all(param.isfinite().all() for param in good.model.parameters())


def test_one_nan_skips_a_step_and_old_checkpoints_are_removed(make, tmp_path):
    trainer = spoiling(make(fused=FusedConfig(rule="adamw", max_nonfinite_steps=3), **SAVING), lambda step: step == 4)
    trainer.train()
    assert trainer.optimizer.nonfinite_steps == 1
    assert steps_saved(tmp_path / "run") == [7, 8]


def test_checkpoints_of_weights_only_are_kept_too(make, tmp_path):
    """Without the optimizer's state nothing else asks how the last step ended."""
    options = {**SAVING, "save_only_model": True, "max_steps": 5}
    spoiling(make(**options), lambda step: step >= 4).train()
    assert steps_saved(tmp_path / "run") == [2, 3, 4, 5]


def with_a_loss_beside(trainer):
    """The trainer, whose `compute_loss` also runs the backward of a loss of its own, on the same graph."""
    compute = trainer.compute_loss

    def compute_loss(model, inputs, return_outputs=False, **kwargs):
        loss, outputs = compute(model, inputs, return_outputs=True, **kwargs)
        if model.training:
            beside = 1e-3 * outputs["logits"].float().square().mean() / trainer.args.gradient_accumulation_steps
            beside.backward(retain_graph=True)
        return (loss, outputs) if return_outputs else loss

    trainer.compute_loss = compute_loss
    return trainer


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.05])
def test_a_backward_inside_compute_loss_belongs_to_the_same_step(make, max_grad_norm, accumulation):
    options = {"max_grad_norm": max_grad_norm, "gradient_accumulation_steps": accumulation, "max_steps": 3}
    plain = with_a_loss_beside(make(cls=Trainer, run="plain", **options))
    plain.train()
    fused = with_a_loss_beside(make(fused=FusedConfig(rule="adamw"), run="fused", **options))
    fused.train()
    assert fused.optimizer.policy == "deferred"
    for expected, found in zip(plain.model.parameters(), fused.model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("policy", "max_grad_norm"),
    [
        ("immediate", 0.0),
        pytest.param("two_pass", 1.0, marks=pytest.mark.troubleshooting("policy 'two_pass' cannot accumulate")),
    ],
)
def test_policies_without_accumulation_raise(make, policy, max_grad_norm):
    trainer = with_a_loss_beside(make(fused=FusedConfig(rule="adamw", policy=policy), max_grad_norm=max_grad_norm))
    before = [param.detach().clone() for param in trainer.model.parameters()]
    with pytest.raises(UnsupportedError, match=r"cannot accumulate gradients.*policy='deferred'"):
        trainer.train()
    assert all(map(torch.equal, before, trainer.model.parameters()))
