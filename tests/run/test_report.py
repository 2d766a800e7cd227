"""The log of a run, written by real trainers of a tiny model. Its pictures: test_pictures.py."""

import errno
import io
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainingArguments

from lowmem.errors import LowmemError
from lowmem.files import write_file, writing
from lowmem.run import report
from lowmem.run.report import RunReport

LENGTHS = (5, 8)  # of the samples, in turn; a batch of two has 13 tokens and 3 of padding


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
    """A factory of trainers that log every step; six steps are one epoch."""

    def make(**arguments):
        run_dir.mkdir(exist_ok=True)
        usual = {"max_steps": 4, "save_strategy": "no", "disable_tqdm": False, "logging_steps": 1}
        args = TrainingArguments(
            run_dir, use_cpu=True, per_device_train_batch_size=2, report_to="none", **{**usual, **arguments}
        )
        return InOrder(tiny_llama(), args=args, train_dataset=Rows(), eval_dataset=Rows())

    return make


def train(trainer, run_dir, terminal=False, resume=None):
    """Returns the output of a trainer that runs under a report."""
    printed = io.StringIO()
    console = Console(file=printed, force_terminal=terminal, width=160)
    with RunReport(run_dir, console).attached(trainer):
        trainer.train(resume_from_checkpoint=resume)
    return printed.getvalue()


def metrics(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def clock(monkeypatch):
    """A clock, in a list of one, that a report reads: each reading is a second after the one before."""
    now = [0.0]

    def tick():
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr(report.time, "perf_counter", tick)
    return now


class Fail(TrainerCallback):
    def __init__(self, step, error):
        self.step, self.error = step, error

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise self.error


def test_each_logging_step_prints_one_aligned_line(trainer, run_dir):
    trained = trainer(eval_strategy="steps", eval_steps=2)
    lines = train(trained, run_dir).splitlines()
    steps = [line for line in lines if "tokens/s" in line]
    assert [line.split()[1] for line in steps] == ["1/4", "2/4", "3/4", "4/4"]
    for word in ("loss", "grad norm", "lr", "tokens/s", "peak"):
        assert len({line.index(word) for line in steps}) == 1, word
    evaluations = [line for line in lines if "evaluation" in line]
    assert len(evaluations) == 2
    logged = metrics(run_dir)
    trained.evaluate()
    assert metrics(run_dir) == logged  # the report has ended
    assert "loss" in evaluations[0] and "runtime" not in evaluations[0] and "per second" not in evaluations[0]
    assert "trained in 0:00:" in lines[-1] and "52 tokens" in lines[-1]


RECORD = {"step": 7, "grad_norm": 3.0, "tokens_per_second": 50.0, "peak_memory": 2**30, "learning_rate": 1e-3}

BOTH = "loss   0.5000  accuracy  1.000"


@pytest.mark.parametrize(
    ("logged", "main", "shown", "hidden"),  # the last in a line of 100 columns
    [
        ({"loss": -1e-9, "reward": 0.3125}, "reward", "reward   0.3125", "loss"),
        ({"loss": 0.5, "rewards/accuracies": 1, "rewards/margins": 2}, "loss", BOTH, "margin"),
        ({"loss": 0.5, "accuracy": 1.0, "margin": 2.0}, "loss", BOTH, "margin"),
    ],
)  # fmt: skip
def test_a_line_shows_the_metric_a_method_improves(logged, main, shown, hidden):
    more = {"clip_coef": 0.0012, "loss_scale": 0.5, "nonfinite_steps": 1234}
    line, wide = (report._log_line({**RECORD, **logged, **more}, 10, width, 3600, main) for width in (100, 200))
    assert f"step  7/10  {shown}  grad norm" in line and " 1:00:00 left" in line and hidden not in line
    assert "  clip  0.0012  scale        0.5  lr 1.00e-03  " in wide and wide.endswith("  skipped steps 1,234")
    assert "margin" not in logged or "  margin  2.000" in wide


def test_trackers_receive_the_metrics_of_metrics_jsonl(trainer, run_dir):
    """Also metrics that are logged alone. The tracker callbacks of transformers read `logs`."""
    seen = []

    class Tracker(TrainerCallback):
        def on_log(self, args, state, control, logs, **kwargs):
            seen.append({**logs, "step": state.global_step})

    tracked = trainer(max_steps=2, eval_strategy="steps", eval_steps=1)
    tracked.add_callback(Tracker())
    train(tracked, run_dir)
    assert seen == metrics(run_dir) and len(seen) == 5
    measured = {"memory", "peak_memory", "tokens", "weight_bytes"}
    assert all(measured <= logs.keys() and ("tokens_per_second" in logs) == ("loss" in logs) for logs in seen)


@pytest.mark.parametrize(("strategy", "steps"), [("steps", [3, 5]), ("no", [])])
def test_the_last_step_is_logged_for_the_mean_of_the_run(trainer, run_dir, strategy, steps):
    """The mean over the ranks: what is left at the end, transformers adds from rank 0 alone."""
    train(trainer(max_steps=5, logging_strategy=strategy, logging_steps=3), run_dir)
    *logged, end = metrics(run_dir)
    assert [line["step"] for line in logged] == steps
    if steps:
        assert end["train_loss"] == pytest.approx((3 * logged[0]["loss"] + 2 * logged[1]["loss"]) / 5)


def test_the_trainers_printer_is_replaced_and_progress_bars_need_a_terminal(trainer, run_dir, capsys):
    quiet = trainer(disable_tqdm=True, max_steps=1)
    assert any(isinstance(callback, PrinterCallback) for callback in quiet.callback_handler.callbacks)
    train(quiet, run_dir, terminal=True)
    kinds = (PrinterCallback, ProgressCallback)
    assert not any(isinstance(callback, kinds) for callback in quiet.callback_handler.callbacks)
    train(trainer(max_steps=1), run_dir)
    assert capsys.readouterr() == ("", "")
    train(trainer(max_steps=1), run_dir, terminal=True)
    assert "1/1 [" in capsys.readouterr().err


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
    assert [line["tokens"] for line in steps] == [13, 26, 39, 52]
    for line in steps:
        assert {"epoch", "grad_norm", "learning_rate", "time"} <= set(line)
        assert line["tokens_per_second"] > 0
        assert 0 < line["memory"] <= line["peak_memory"] * 1.1
        assert line["weight_bytes"] == sum(p.numel() for p in trained.model.parameters()) * 4


def test_throughput_excludes_the_time_of_evaluation(trainer, run_dir, clock):
    class Slow(TrainerCallback):
        def on_evaluate(self, args, state, control, **kwargs):
            clock[0] += 1000.0

    trained = trainer(eval_strategy="steps", eval_steps=1)
    trained.add_callback(Slow())
    train(trained, run_dir)
    assert [line["tokens_per_second"] for line in metrics(run_dir) if "loss" in line] == [13.0] * 4


def test_the_time_left_does_not_count_compilation(trainer, run_dir, clock):
    class Compile(TrainerCallback):
        def on_step_end(self, args, state, control, optimizer=None, **kwargs):
            if state.global_step == 1:
                clock[0] += 1000.0
                optimizer.compile_seconds = 1000.0

    trained = trainer()
    trained.add_callback(Compile())
    printed = train(trained, run_dir)
    assert "compiled the optimizer in 1000.0 s" in printed
    assert re.findall(r"(\S+) left", printed) == ["0:00:03", "0:00:02", "0:00:01", "0:00:00"]


@pytest.mark.skipif(sys.platform != "linux", reason="the peak cannot be reset")
def test_the_peak_excludes_memory_allocated_before(trainer, run_dir):
    trained = trainer(max_steps=1)
    torch.full((1 << 28,), 1.0)  # 1 GiB, freed at once
    before = report._memory(torch.device("cpu"))
    assert before["peak_memory"] >= 1 << 30
    train(trained, run_dir)
    for line in metrics(run_dir):
        assert line["peak_memory"] - before["memory"] < 1 << 29


def test_non_finite_metrics_are_valid_json(trainer, run_dir):
    trained = trainer(logging_nan_inf_filter=False)
    with torch.no_grad():
        trained.model.lm_head.weight.fill_(math.nan)
    assert "loss      nan" in train(trained, run_dir)

    def no_constant(name):
        raise AssertionError(f"{name} is not JSON")

    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0], parse_constant=no_constant)["loss"] is None
    assert (run_dir / "loss.png").exists()


def test_a_resumed_run_continues_counting_and_repeats_no_step(trainer, run_dir, clock):
    trained = trainer(max_steps=5, save_strategy="steps", save_steps=2)
    trained.add_callback(Fail(3, RuntimeError("gone")))
    with pytest.raises(RuntimeError, match="gone"):
        train(trained, run_dir)
    assert [line["step"] for line in metrics(run_dir)] == [1, 2, 3]
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # the process died while it wrote

    train(trainer(max_steps=5, save_strategy="steps", save_steps=2), run_dir, resume=str(run_dir / "checkpoint-2"))
    steps = [line for line in metrics(run_dir) if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5]
    assert [line["tokens"] for line in steps] == [13, 26, 39, 52, 65]
    assert [line["tokens_per_second"] for line in steps] == [13.0] * 5


@pytest.mark.parametrize("error", [RuntimeError("gone"), KeyboardInterrupt()])
def test_a_run_that_fails_still_leaves_its_pictures(error, trainer, run_dir, capsys):
    trained = trainer()
    trained.add_callback(Fail(2, error))
    with pytest.raises(type(error)):
        train(trained, run_dir, terminal=True)
    assert capsys.readouterr().err.endswith("\n")  # what is printed next is not beside the bar
    assert (run_dir / "loss.png").exists() and len(metrics(run_dir)) == 2


def test_a_failed_picture_does_not_hide_the_error_of_the_run(trainer, run_dir):
    trained = trainer()
    trained.add_callback(Fail(2, RuntimeError("gone")))
    (run_dir / "loss.png" / "inside").mkdir(parents=True)
    printed = io.StringIO()
    with pytest.raises(RuntimeError, match="gone"), RunReport(run_dir, Console(file=printed)).attached(trained):
        trained.train()
    assert "loss.png: cannot be written" in printed.getvalue()


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
        raise PermissionError(errno.EACCES, "Permission denied")  # only the message of a full disk says to free space
