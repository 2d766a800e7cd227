"""Tests the log that trainers of a tiny model write. test_pictures.py tests the plots."""

import errno
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from lowmem.errors import LowmemError
from lowmem.files import write_file, writing
from lowmem.run import report
from lowmem.run.report import RunReport

LENGTHS = (5, 8)  # samples take turns; a batch of two has 13 tokens and 3 padding tokens


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        length = LENGTHS[index % 2]
        real = torch.arange(8) < length
        ids = torch.where(real, torch.arange(8) + 3, 0)
        return {"input_ids": ids, "attention_mask": real.long(), "labels": torch.where(real, ids, -100)}


class InOrder(Trainer):
    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


pytestmark = pytest.mark.usefixtures("sketched_pictures")


@pytest.fixture
def trainer(run_dir, tiny_llama):
    """Returns a factory of trainers that log every step. Six steps form an epoch."""

    def make(**arguments):
        run_dir.mkdir(exist_ok=True)
        usual = {"max_steps": 4, "save_strategy": "no", "disable_tqdm": False, "logging_steps": 1}
        args = TrainingArguments(
            run_dir, use_cpu=True, per_device_train_batch_size=2, report_to="none", **{**usual, **arguments}
        )
        return InOrder(tiny_llama(), args=args, train_dataset=Rows(), eval_dataset=Rows())

    return make


def train(trainer, run_dir, resume=None):
    with RunReport(run_dir).attached(trainer):
        trainer.train(resume_from_checkpoint=resume)


def metrics(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


class Fail(TrainerCallback):
    def __init__(self, step, error):
        self.step, self.error = step, error

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise self.error


def test_each_logging_step_prints_one_line(trainer, run_dir, capsys):
    trained = trainer(eval_strategy="steps", eval_steps=2)
    train(trained, run_dir)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["1/4", "2/4", "2/4", "3/4", "4/4", "4/4", "4/4"]
    assert all(f"  {word} " in lines[0] for word in ("loss", "grad norm", "learning rate", "peak memory"))
    assert "  eval loss " in lines[2] and "runtime" not in lines[2] and "per second" not in lines[2]
    assert "  train loss " in lines[-1]
    logged = metrics(run_dir)
    trained.evaluate()
    assert metrics(run_dir) == logged  # the report has been closed


def test_a_line_has_every_metric_but_those_of_parameters():
    record = {"step": 7, "loss": 0.0, "reward": None, "loss_scale": 65536.0, "nonfinite_steps": 2, "epoch": 0.5}
    record |= {"dominant_parameter": "head", "grad_norm/head": 1.0, "peak_memory": 2**30, "num_tokens": 9.0}
    shown = "step  7/10  loss 0  reward None  loss scale 6.554e+04  nonfinite steps 2  dominant parameter head"
    assert report._log_line(record, 10) == f"{shown}  peak memory 1.00 GiB"


def test_trackers_receive_the_metrics_of_metrics_jsonl(trainer, run_dir):
    """This includes metrics that are logged alone. The tracker callbacks of transformers read `logs`."""
    seen = []

    class Tracker(TrainerCallback):
        def on_log(self, args, state, control, logs, **kwargs):
            seen.append({**logs, "step": state.global_step})

    tracked = trainer(max_steps=2, eval_strategy="steps", eval_steps=1)
    tracked.add_callback(Tracker())
    train(tracked, run_dir)
    assert seen == metrics(run_dir) and len(seen) == 5
    assert all({"peak_memory", "num_input_tokens_seen"} <= logs.keys() for logs in seen)


@pytest.mark.parametrize(("strategy", "steps"), [("steps", [3, 5]), ("no", [])])
def test_the_last_step_is_logged_for_the_mean_of_the_run(trainer, run_dir, strategy, steps):
    """transformers adds steps left over at the end from rank 0 alone. They must be averaged over the ranks."""
    train(trainer(max_steps=5, logging_strategy=strategy, logging_steps=3), run_dir)
    *logged, end = metrics(run_dir)
    assert [line["step"] for line in logged] == steps
    if steps:
        assert end["train_loss"] == pytest.approx((3 * logged[0]["loss"] + 2 * logged[1]["loss"]) / 5)


def test_metrics_count_tokens_without_padding(trainer, run_dir):
    class Look(TrainerCallback):
        seen = ()

        def on_step_begin(self, args, state, control, **kwargs):
            self.seen += (len(metrics(run_dir)),)

    look, trained = Look(), trainer()
    trained.add_callback(look)
    train(trained, run_dir)
    assert look.seen == (0, 1, 2, 3)
    steps = [line for line in metrics(run_dir) if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert [line["num_input_tokens_seen"] for line in steps] == [13, 26, 39, 52]
    for line in steps:
        assert {"epoch", "grad_norm", "learning_rate"} <= set(line)
        assert line["train_tokens_per_second"] > 0 and line["peak_memory"] > 0


@pytest.mark.skipif(sys.platform != "linux" and not torch.cuda.is_available(), reason="the peak cannot be reset")
def test_the_peak_excludes_memory_allocated_before(run_dir, tiny_llama):
    run_dir.mkdir()
    size = 1 << 30
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.full((size // 4,), 1.0, device=device)  # freed immediately
    arguments = {"max_steps": 1, "logging_steps": 1, "save_strategy": "no", "report_to": "none"}
    before = report._peak(torch.device(device))
    assert before >= size
    train(InOrder(tiny_llama(), args=TrainingArguments(run_dir, **arguments), train_dataset=Rows()), run_dir)
    for line in metrics(run_dir):
        assert line["peak_memory"] < before - size / 2


def test_non_finite_metrics_are_valid_json(trainer, run_dir):
    trained = trainer(logging_nan_inf_filter=False)
    with torch.no_grad():
        trained.model.lm_head.weight.fill_(math.nan)
    train(trained, run_dir)

    def no_constant(name):
        raise AssertionError(f"{name} is not JSON")

    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0], parse_constant=no_constant)["loss"] is None
    assert (run_dir / "loss.png").exists()


def test_a_resumed_run_continues_counting_and_repeats_no_step(trainer, run_dir):
    trained = trainer(max_steps=5, save_strategy="steps", save_steps=2)
    trained.add_callback(Fail(3, RuntimeError("gone")))
    with pytest.raises(RuntimeError, match="gone"):
        train(trained, run_dir)
    assert [line["step"] for line in metrics(run_dir)] == [1, 2, 3]
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # the process died while writing

    train(trainer(max_steps=5, save_strategy="steps", save_steps=2), run_dir, resume=str(run_dir / "checkpoint-2"))
    steps = [line for line in metrics(run_dir) if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5]
    assert [line["num_input_tokens_seen"] for line in steps] == [13, 26, 39, 52, 65]


@pytest.mark.parametrize("error", [RuntimeError("gone"), KeyboardInterrupt()])
def test_a_run_that_fails_still_leaves_its_pictures(error, trainer, run_dir, capsys):
    trained = trainer()
    trained.add_callback(Fail(2, error))
    with pytest.raises(type(error)):
        train(trained, run_dir)
    assert capsys.readouterr().err.endswith("\n")  # later output is not printed next to the bar
    assert (run_dir / "loss.png").exists() and len(metrics(run_dir)) == 2


def test_a_failed_picture_does_not_hide_the_error_of_the_run(trainer, run_dir, capsys):
    trained = trainer()
    trained.add_callback(Fail(2, RuntimeError("gone")))
    (run_dir / "loss.png" / "inside").mkdir(parents=True)
    with pytest.raises(RuntimeError, match="gone"):
        train(trained, run_dir)
    assert "loss.png: cannot be written" in capsys.readouterr().err.replace("\n", " ")


def test_a_failed_write_keeps_only_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "kept.txt"
    write_file(path, b"old")

    def half(self, content):
        with self.open("wb") as file:
            file.write(content[:1])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(LowmemError, match=r"kept\.txt: cannot be written: no space left on device\. Free some space"):
        write_file(path, b"new")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("kept.txt", b"old")]
    with pytest.raises(LowmemError, match=r"cannot be written: permission denied\.$"), writing(tmp_path):
        raise PermissionError(errno.EACCES, "Permission denied")  # only for a full disk, suggest freeing space


def test_the_time_left_does_not_count_compilation():
    progress, state = report._Progress(), SimpleNamespace(is_world_process_zero=True, max_steps=4, global_step=1)
    progress.on_train_begin(None, state, None, optimizer=SimpleNamespace(compile_seconds=5.0))
    bar = progress.training_bar
    begun = bar.start_t
    progress.on_step_end(None, state, None, optimizer=SimpleNamespace(compile_seconds=65.0))
    bar.close()
    assert bar.start_t == begun + 60
