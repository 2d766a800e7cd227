"""Checkpoints are on the disk before they are renamed, equal for equal runs, and resume without any difference."""

import errno
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from support.products import FULL
from support.trainers import build, losses
from torch.distributed import DistBackendError
from transformers import TrainerCallback

from lowmem import DynamicScale, FusedConfig
from lowmem.errors import CheckpointError, LowmemError
from lowmem.hf import checkpoint
from lowmem.tiles.quantized import tensors_of

SAVES = {"save_strategy": "steps", "save_steps": 1}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# -- written ----------------------------------------------------------------------------------------------------------


def test_everything_is_flushed_before_the_checkpoint_has_its_name(make, tmp_path, monkeypatch):
    events = []

    def fsync(descriptor, fsync=os.fsync):
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    def rename(path, target, rename=Path.rename):
        events.append("renamed")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    make(**SAVES, max_steps=1).train()
    staged, final = (tmp_path / "run" / name for name in (".saving/checkpoint-1", "checkpoint-1"))
    before, after = events[: events.index("renamed")], events[events.index("renamed") + 1 :]
    assert {*before} == {staged, *(staged / name for name in names(final))}
    assert after == [tmp_path / "run"]


def test_weights_are_saved_one_at_a_time(make, tmp_path, monkeypatch):
    """safetensors would first copy all of them from a GPU."""
    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full_disk)
    trainer = make(**SAVES, max_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    monkeypatch.undo()
    trainer.model.save_pretrained(tmp_path / "theirs")
    for folder in ("run/checkpoint-1", "saved"):
        for name in names(tmp_path / "theirs"):
            assert (tmp_path / folder / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()


def test_a_resumed_run_warns_of_models_that_checkpoints_do_not_contain(tmp_path, caplog):
    def trained(steps, **keywords):
        caplog.clear()
        trainer = build("DPO, synchronized", tmp_path, True, max_steps=steps, **SAVES)
        trainer.train(**keywords)
        return trainer

    whole = trained(3)
    assert "checkpoints do not contain" not in caplog.text
    resumed = trained(3, resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert caplog.text.count("SyncRefModelCallback: checkpoints do not contain its reference model") == 1
    assert not all(map(torch.equal, whole.ref_model.parameters(), resumed.ref_model.parameters()))


def full_disk(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def read_only(*_, **__):
    raise OSError(errno.EROFS, "Read-only file system")


@pytest.mark.parametrize("place", ["flush_tree", "write_safetensors", "shutil.rmtree", "Path.rename"])
def test_a_save_that_fails_keeps_the_checkpoint_before(make, place, tmp_path, monkeypatch):
    """The save may fail anywhere, and also in a run that was resumed from an earlier checkpoint."""
    make(**SAVES, max_steps=3).train()
    trainer = make(**SAVES, max_steps=3)
    original = (tmp_path / "run" / "checkpoint-3" / "optimizer.safetensors").read_bytes()

    class FailLater(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 3:
                if place == "Path.rename":
                    rename = Path.rename
                    fail = lambda path, target: full_disk() if ".saving" in str(path) else rename(path, target)  # noqa: E731
                    monkeypatch.setattr(Path, "rename", fail)
                elif place != "shutil.rmtree":
                    monkeypatch.setattr(checkpoint, place, full_disk)
                else:
                    monkeypatch.setattr(Path, "mkdir", read_only)
                    monkeypatch.setattr(os, "makedirs", read_only)

    trainer.add_callback(FailLater())
    with pytest.raises(CheckpointError, match=r"checkpoint-3 could not be written: .*(No space left|Read-only)"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    monkeypatch.undo()
    superseded = "superseded-checkpoint-3"  # as of the save after step 2
    assert names(tmp_path / "run") == ["checkpoint-1", "checkpoint-2", superseded]
    assert (tmp_path / "run" / superseded / "optimizer.safetensors").read_bytes() == original
    assert checkpoint.find_last(tmp_path / "run") == (tmp_path / "run" / "checkpoint-2", [])  # from the resumed run


@pytest.mark.parametrize("when", ["between two saves", "while saving"])
def test_a_run_folder_deleted_during_training(make, when, tmp_path, monkeypatch):
    """If a save is under way, one error names the checkpoint. Otherwise the next checkpoint is complete."""
    trainer = make(**SAVES, max_steps=2)

    class Delete(TrainerCallback):
        def on_save(self, args, state, control, **_):
            if state.global_step == 1:
                shutil.rmtree(tmp_path / "run")

    if when == "between two saves":
        trainer.add_callback(Delete())
        trainer.train()
        assert checkpoint.find_last(tmp_path / "run") == (tmp_path / "run" / "checkpoint-2", [])
    else:
        monkeypatch.setattr(trainer, "_save_rng_state", lambda folder: shutil.rmtree(tmp_path / "run"))
        with pytest.raises(LowmemError, match="checkpoint-1 could not be written"):
            trainer.train()


def test_errors_unrelated_to_files_are_not_changed(make, tmp_path, monkeypatch):
    """For an error of another rank, for example, free space on the disk would not help."""

    def fail(*_, **__):
        raise DistBackendError("NCCL error")

    monkeypatch.setattr(checkpoint, "write_safetensors", fail)
    with pytest.raises(DistBackendError, match=r"^NCCL error$"):
        make(**SAVES).train()
    assert names(tmp_path / "run") == []


def test_a_file_that_torch_cannot_write(make, monkeypatch):
    """`torch.save` raises RuntimeError if it cannot write, for example because the disk is full."""
    monkeypatch.setattr(checkpoint, "SCHEDULER_FILE", "/missing/scheduler.pt")
    with pytest.raises(CheckpointError, match=r"checkpoint-1 could not be written: .* Free some space"):
        make(**SAVES).train()


class Killed(BaseException):
    pass


@pytest.mark.parametrize("at", range(1, 5))
def test_a_run_killed_while_replacing_a_checkpoint_loses_none(make, at, tmp_path, monkeypatch):
    """The process is killed before each call that renames or removes directories."""
    make(**SAVES, max_steps=2).train()
    run = tmp_path / "run"
    shutil.copytree(run / "checkpoint-2", run / ".saving" / "checkpoint-2")
    calls = []

    def counted(function):
        def call(*args, **options):
            calls.append(function)
            if len(calls) >= at:  # cleanup code does not run either
                raise Killed
            return function(*args, **options)

        return call

    monkeypatch.setattr(Path, "rename", counted(Path.rename))
    monkeypatch.setattr(shutil, "rmtree", counted(shutil.rmtree))
    with pytest.raises(Killed):
        checkpoint.publish(run / ".saving" / "checkpoint-2", run / "checkpoint-2")
    monkeypatch.undo()
    folder, damaged = checkpoint.find_last(run)
    assert (folder.name, damaged) == ("checkpoint-2", [])
    make(**SAVES, max_steps=3).train(resume_from_checkpoint=True)
    assert names(run) == ["checkpoint-1", *(["checkpoint-2"] if folder.parent == run else []), "checkpoint-3"]


@pytest.mark.parametrize("absolute", ["the run directory", "the checkpoint"])
def test_the_best_checkpoint_is_kept_for_any_spelling_of_its_path(make, absolute, tmp_path, monkeypatch):
    """Either `output_dir` or the checkpoint that is resumed from is a relative path."""
    settings = {**SAVES, "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "max_steps": 3}
    settings |= {"metric_for_best_model": "loss", "greater_is_better": True}  # the first checkpoint is the best
    monkeypatch.chdir(tmp_path)
    make(**settings).train()
    run, checkpoint_1 = tmp_path / "run", tmp_path / "run" / "checkpoint-1"
    path, resumed_from = ("run", checkpoint_1) if absolute == "the checkpoint" else (run, "run/checkpoint-1")
    trainer = make(**settings, output_dir=str(path), save_total_limit=2)
    trainer.train(resume_from_checkpoint=str(resumed_from))
    assert Path(trainer.state.best_model_checkpoint).resolve() == checkpoint_1
    assert names(run) == ["checkpoint-1", "checkpoint-3", "superseded-checkpoint-3"]


def test_equal_runs_have_equal_files(make, tmp_path):
    """The arguments differ because they contain the run's path, and the log differs because it contains times."""
    fused = FusedConfig(rounding="compensated", rule="adamw")
    for run in ("one", "two"):
        make(**SAVES, max_steps=2, run=run, fused=fused).train()
    one, two = (tmp_path / run / "checkpoint-2" for run in ("one", "two"))
    differ = {path.name for path in one.iterdir() if path.read_bytes() != (two / path.name).read_bytes()}
    assert differ == {"training_args.bin", "checksums.txt"}


# -- continued --------------------------------------------------------------------------------------------------------


LOGGED = ("step", "loss", "grad_norm", "clip_coef", "loss_scale")
ACCUMULATED = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
RESUMED = {  # Optimizer options, trainer arguments, and the steps after which the run is resumed.
    "each step": ({}, {}, range(1, 8) if FULL else (1, 5)),
    "scaled": (
        {"loss_scale": DynamicScale(init_scale=64.0, growth_interval=2)}, {"max_grad_norm": 0.7, **ACCUMULATED}, [3],
    ),
    "weights of 10 bits, clipped": ({"rule": "adalomo", "weight_format": "int10"}, {"max_grad_norm": 0.5}, [3]),
}  # fmt: skip


def logged(trainer):
    return [tuple(map(entry.get, LOGGED)) for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(("options", "arguments", "steps"), RESUMED.values(), ids=RESUMED)
def test_a_resumed_run_equals_the_uninterrupted_one(make, tiny_llama, options, arguments, steps, tmp_path):
    """The run rounds weights stochastically, uses dropout, and continues past an epoch of five steps."""
    settings = {**SAVES, "max_steps": 7, "per_device_train_batch_size": 8, "lr_scheduler_type": "cosine", **arguments}

    def trainer_of(**changes):
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4, "attention_dropout": 0.1}
        return make(model=tiny_llama(torch.bfloat16, **sizes), fused=FusedConfig(**options), **settings | changes)

    whole = trainer_of()
    whole.train()
    assert len(logged(whole)) == 7
    for step in steps:
        resumed = trainer_of(save_strategy="no")
        output = resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{step}"))
        assert logged(resumed) == logged(whole)
        for one, other in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
            assert all(map(torch.equal, tensors_of(one), tensors_of(other)))
        if hasattr(resumed, "_initial_global_step"):  # transformers 5.6 divides it by the total number of steps
            mean = sum(losses(whole)[step:]) / max(7 - step, 0.001)
            assert output.training_loss == pytest.approx(mean)  # of the steps after resuming


def test_a_model_with_an_infinity_in_its_configuration_is_resumed(make, tiny_llama, tmp_path):
    """transformers writes infinity to config.json as `{"__float__": "Infinity"}`."""
    for resume in (None, str(tmp_path / "run" / "checkpoint-1")):
        make(model=tiny_llama(limit=math.inf), max_steps=2, **SAVES).train(resume_from_checkpoint=resume)
    assert "Infinity" in (tmp_path / "run" / "checkpoint-1" / "config.json").read_text()


@pytest.mark.parametrize("original", ["there", "gone"])
def test_a_moved_or_copied_run_folder_keeps_its_best_model(make, original, tmp_path):
    settings = {
        **SAVES, "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "learning_rate": 0.3,
        "optim": "adalomo",
    }  # fmt: skip
    first = make(**settings, save_total_limit=3, max_steps=6)
    first.train()
    best = Path(first.state.best_model_checkpoint).name
    assert best == "checkpoint-4"
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    if original == "gone":
        shutil.rmtree(tmp_path / "run")
    resumed = make(**settings, save_total_limit=1, max_steps=6, run="copy")
    resumed.train(resume_from_checkpoint=str(tmp_path / "copy" / "checkpoint-5"))
    assert resumed.state.best_model_checkpoint == str(tmp_path / "copy" / best)
    assert names(tmp_path / "copy") == [best]
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), resumed.model.parameters(), strict=True))
