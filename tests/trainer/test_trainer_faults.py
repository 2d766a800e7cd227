"""Trainers whose gradients stop being finite."""

import math

import pytest

from lowmem.errors import StepError
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


def test_nan_ends_the_run_and_keeps_the_good_checkpoints(make, tmp_path, caplog):
    fused = FusedConfig(rule="adamw", max_nonfinite_steps=3)
    trainer = spoiling(make(fused=fused, **SAVING), lambda step: step >= 4)
    with pytest.raises(StepError, match=r"the last 3 steps had gradients that are not finite.*the loss is not finite"):
        trainer.train()
    assert trainer.state.global_step == 6
    assert steps_saved(tmp_path / "run") == [2, 3, 4, 5, 6]  # 2 and 3 are from before
    assert not (tmp_path / "run" / ".saving").exists()
    assert "no older checkpoint was removed when step 4 was saved: the last 1 step(s)" in caplog.text
    good = make(fused=fused, run="run", **SAVING)
    good.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert good.state.global_step == 8
    assert all(param.isfinite().all() for param in good.model.parameters())


def test_one_nan_is_a_skipped_step_and_old_checkpoints_go(make, tmp_path):
    trainer = spoiling(make(fused=FusedConfig(rule="adamw", max_nonfinite_steps=3), **SAVING), lambda step: step == 4)
    trainer.train()
    assert trainer.optimizer.nonfinite_steps == 1
    assert steps_saved(tmp_path / "run") == [7, 8]


def test_weights_alone_are_kept_too(make, tmp_path):
    """Without the optimizer's state nothing else asks how the last step ended."""
    options = {**SAVING, "save_only_model": True, "max_steps": 5}
    spoiling(make(**options), lambda step: step >= 4).train()
    assert steps_saved(tmp_path / "run") == [2, 3, 4, 5]
