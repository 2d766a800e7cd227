"""Tests interrupted runs: the step at which they stop, the files that they save, and the step where they resume."""

import os
import shlex
import shutil
import signal
from functools import cache

import pytest
from support.products import FULL
from support.runs import logged, lowmem, write
from transformers import TrainerCallback

from lowmem.hf import checkpoint
from lowmem.run import build
from lowmem.run.folder import RunFolder
from lowmem.trainer import FusedTrainerMixin

pytestmark = pytest.mark.usefixtures("sketched_pictures")

EPOCHS = {"max_steps": 6, "per_device_train_batch_size": 3, "test_split_size": 0.25, "logging_steps": 1}  # 4 steps each
STRATEGIES = {
    "steps": {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 1},
    "epoch": {"save_strategy": "epoch", "eval_strategy": "epoch"},
    "best": {
        "save_strategy": "best", "metric_for_best_model": "loss", "eval_strategy": "steps", "eval_steps": 1,
        "load_best_model_at_end": True,
    },
}  # fmt: skip
CASES = [("steps", "on_evaluate", 1), ("epoch", "on_prediction_step", 4), ("best", "on_step_end", 6)]
if FULL:
    CASES += [("steps", "on_step_end", 2), ("steps", "on_step_end", 6), ("steps", "on_save", 2)]
    CASES += [("epoch", "on_step_end", 4)]
    CASES += [("best", "on_step_end", 2)]


def run(folder, *words, **changes):
    return lowmem("sft", "--config", write(folder, **{**EPOCHS, **changes}), *words)


def stopping(monkeypatch, moment, step, number=signal.SIGTERM):
    """Sends a signal to the next run at a point in a step. Returns a list of the evaluations that end after it."""
    original, evaluations = build.trainer, []

    class Stop(TrainerCallback):
        sent = False

        def on_evaluate(self, *_, **__):
            if self.sent:
                evaluations.append(None)

    def send(self, args, state, control, **_):
        if state.global_step == step and not self.sent:
            self.sent = True
            os.kill(os.getpid(), number)

    setattr(Stop, moment, send)

    def with_stop(*args, **options):
        trainer = original(*args, **options)
        trainer.add_callback(Stop())
        monkeypatch.setattr(build, "trainer", original)
        return trainer

    monkeypatch.setattr(build, "trainer", with_stop)
    return evaluations


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """Returns a function that returns the weights and the evaluation losses of an uninterrupted run with a strategy."""

    @cache
    def run_strategy(strategy):
        folder = tmp_path_factory.mktemp(strategy)
        assert run(folder, **STRATEGIES[strategy]).status == 0
        return (folder / "run" / "model.safetensors").read_bytes(), logged(folder / "run", "eval_loss")

    return run_strategy


@pytest.mark.parametrize(("strategy", "moment", "step"), CASES)
def test_a_stop_saves_at_once_and_evaluates_no_more(strategy, moment, step, complete, tmp_path, run_dir, monkeypatch):
    settings, (complete_weights, losses) = STRATEGIES[strategy], complete(strategy)  # before a signal is sent
    evaluations = stopping(monkeypatch, moment, step)
    stopped = run(tmp_path, "--resume_from_checkpoint", "auto", **settings)  # the signal starts it
    assert stopped.status == 128 + signal.SIGTERM, stopped.out
    at = step + (moment == "on_evaluate")  # an evaluation had ended, so the run stops after the next step
    assert f"stopped at step {at}; continue with: " in stopped.out
    assert not evaluations
    assert checkpoint.find_last(run_dir) == (run_dir / f"checkpoint-{at}", [])
    continued = run(tmp_path, "--resume_from_checkpoint", "auto", **settings)
    assert continued.status == 0, continued.err
    assert (run_dir / "model.safetensors").read_bytes() == complete_weights
    assert logged(run_dir, "eval_loss") == losses  # the evaluation that the stop skipped comes first


def test_ctrl_c_stops_a_run_that_saves_models_only(tmp_path, run_dir, monkeypatch):
    """The printed command starts another run with the model."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    stopping(monkeypatch, "on_step_end", 2, signal.SIGINT)
    stopped = run(tmp_path, save_strategy="steps", save_only_model=True)
    assert stopped.status == 128 + signal.SIGINT and "stopping after this step is saved" in stopped.err
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    command = stopped.out.partition("continue with: lowmem ")[2].splitlines()[0]
    words = command.replace("checkpoint-N", "checkpoint-2").replace("ANOTHER", str(tmp_path / "another"))
    assert lowmem(*shlex.split(words), "--max_steps", 1).status == 0


def test_ctrl_c_while_the_final_model_is_saved_does_not_lose_it(tmp_path, run_dir, monkeypatch):
    save = RunFolder.save_model
    monkeypatch.setattr(RunFolder, "save_model", lambda *args: (os.kill(os.getpid(), signal.SIGINT), save(*args)))
    assert run(tmp_path).status == 0
    assert (run_dir / "model.safetensors").exists()


def test_a_stop_trains_the_steps_that_share_completions(tmp_path, run_dir, monkeypatch):
    stopping(monkeypatch, "on_step_end", 1)
    path = write(tmp_path, "grpo", max_steps=6, num_iterations=2, save_strategy="steps", save_steps=100)
    assert lowmem("grpo", "--config", path).status == 128 + signal.SIGTERM
    assert [folder.name for folder in checkpoint.candidates(run_dir)] == ["checkpoint-2"]
    continued = lowmem("grpo", "--config", run_dir / "config.yaml", "--resume_from_checkpoint", "last")
    assert continued.status == 0, continued.err


def test_the_last_checkpoint_belongs_to_the_run_that_was_resumed(tmp_path, run_dir, monkeypatch):
    """After resuming from an earlier checkpoint and stopping again, later checkpoints of the first run are ignored."""
    save = {"save_strategy": "steps", "save_steps": 1, "max_steps": 5}
    assert run(tmp_path, **save).status == 0
    stopping(monkeypatch, "on_step_end", 3)
    words = "--resume_from_checkpoint", run_dir / "checkpoint-2", "--learning_rate", 1e-4
    assert run(tmp_path, *words, **save).status == 128 + signal.SIGTERM
    assert checkpoint.find_last(run_dir) == (run_dir / "checkpoint-3", [])
    limited = run(tmp_path, "--resume_from_checkpoint", "last", "--save_total_limit", 2, **save | {"max_steps": 4})
    assert limited.status == 0 and "train loss" in limited.out
    assert [folder.name for folder in checkpoint.candidates(run_dir)] == ["checkpoint-4", "checkpoint-3"]
    assert (run_dir / "superseded-checkpoint-5").is_dir()


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_it_in_its_run(tmp_path, run_dir):
    save = {"save_strategy": "steps", "save_steps": 1}
    assert run(tmp_path, **save, max_steps=4).status == 0
    back = "--resume_from_checkpoint", run_dir / "checkpoint-1", "--output_dir", run_dir
    assert run(tmp_path, *back, **save, max_steps=2).status == 0
    (run_dir / "checkpoint-2" / "model.safetensors").write_bytes(b"{")
    folder, (reason,) = checkpoint.find_last(run_dir)
    assert "checkpoint-2" in reason and folder == run_dir / "checkpoint-1"


def test_a_best_checkpoint_that_is_gone_does_not_end_a_run(tmp_path, run_dir, monkeypatch, caplog):
    load = FusedTrainerMixin._load_best_model
    monkeypatch.setattr(
        FusedTrainerMixin, "_load_best_model",
        lambda self: (shutil.rmtree(self.state.best_model_checkpoint), load(self)),
    )  # fmt: skip
    ended = run(tmp_path, **STRATEGIES["best"])
    assert ended.status == 0 and (run_dir / "model.safetensors").exists()
    assert "no longer exists, so the model keeps the last step's weights" in caplog.text
