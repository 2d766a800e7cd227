"""`train` and `evaluate` return the same results as without the mixin, even for a completed run."""

import pytest
from support.nets import same, weights
from support.trainers import build
from transformers import TrainerCallback
from transformers.trainer_utils import TrainOutput

import lowmem
from lowmem.errors import CheckpointError


def test_metrics_of_trl_are_returned(tmp_path):
    returned = []
    for mixin in (False, True):
        trainer = build("SFT", tmp_path / str(mixin), mixin, max_steps=2)
        returned.append((trainer.train().metrics, trainer.evaluate(trainer.train_dataset)))
    for actual, expected in zip(*reversed(returned), strict=True):
        assert actual.keys() == expected.keys()
        timed = [name for name in expected if name.endswith(("runtime", "per_second"))]
        assert {k: v for k, v in actual.items() if k not in timed} == pytest.approx(
            {k: v for k, v in expected.items() if k not in timed}, rel=1e-5, abs=1e-6
        )


def test_metrics_of_the_step_are_logged(make):
    """A subclass that logs in `compute_loss` or in a callback must see the metrics that are added to its dict."""
    trainer = make(fused=lowmem.FusedConfig(loss_scale=8.0))
    trainer.train()
    logs = {"loss": 1.0}
    trainer.log(logs)
    assert logs["loss_scale"] == 8.0 and logs["epoch"] == trainer.state.epoch


@pytest.mark.parametrize(("steps", "again"), [(3, 3), (10, 10), (3, 2)], ids=["in an epoch", "its end", "fewer"])
def test_resuming_a_finished_run_trains_no_step(make, steps, again, caplog):
    """Ten steps form an epoch. The weights are loaded from the checkpoint."""
    run = make(save_strategy="steps", save_steps=steps, max_steps=steps)
    run.train()
    trained = weights(run.model)
    resumed = make(max_steps=again)
    seen = []

    names = ("on_train_begin", "on_step_end", "on_train_end")
    events = {name: lambda self, *args, name=name, **_: seen.append(name) for name in names}
    resumed.add_callback(type("Look", (TrainerCallback,), events)())
    output = resumed.train(resume_from_checkpoint=f"{run.args.output_dir}/checkpoint-{steps}")
    assert isinstance(output, TrainOutput) and output.global_step == steps
    assert seen == ["on_train_begin", "on_train_end"]
    assert same(trained, resumed.model.parameters())
    assert f"checkpoint-{steps} is at step {steps} of {again}" in caplog.text
    assert resumed.evaluate()["eval_loss"] == run.evaluate()["eval_loss"]


def test_resuming_a_finished_run_loads_the_best_weights(make):
    settings = {
        "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "learning_rate": 0.3,
        "load_best_model_at_end": True, "optim": "adalomo",
    }  # fmt: skip
    run = make(**settings)
    run.train()
    assert run.state.best_global_step < 8
    resumed = make(**settings)
    resumed.train(resume_from_checkpoint=True)
    assert same(run.model.parameters(), resumed.model.parameters())


def test_a_missing_checkpoint_still_raises(make, tmp_path):
    with pytest.raises(CheckpointError, match="no such directory"):
        make().train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
