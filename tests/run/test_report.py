"""The run folder, written by real trainers of a tiny model. Its pictures: test_pictures.py."""

import errno
import io
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainingArguments

from lowmem import FusedConfig
from lowmem.errors import ConfigError, LowmemError
from lowmem.files import write_file, writing
from lowmem.run import environment, report
from lowmem.run.folder import run_folder
from lowmem.run.metrics import cut_metrics, read_metrics
from lowmem.run.report import RunReport
from lowmem.run.summary import plot_run, write_readme
from lowmem.trainer import FusedTrainer

PNG = b"\x89PNG\r\n\x1a\n"
SHOW_CURSOR = "\x1b[?25h"
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


@pytest.fixture
def run_dir(tmp_path):
    with run_folder(tmp_path / "one", resume=False) as folder:
        return folder


@pytest.fixture
def trainer(run_dir, tiny_llama):
    """A factory of trainers that log every step; six steps are one epoch."""

    def make(**arguments):
        arguments = {"max_steps": 4, "save_strategy": "no", "disable_tqdm": False, **arguments}
        args = TrainingArguments(
            run_dir, use_cpu=True, per_device_train_batch_size=2, logging_steps=1, report_to="none", **arguments
        )
        return InOrder(tiny_llama(), args=args, train_dataset=Rows(), eval_dataset=Rows())

    return make


def train(trainer, run_dir, terminal=False, resume=None):
    """What is printed while a trainer runs under a report."""
    printed = io.StringIO()
    console = Console(file=printed, force_terminal=terminal, width=160)
    with RunReport(run_dir, console).attached(trainer):
        trainer.train(resume_from_checkpoint=resume)
    return printed.getvalue()


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


# --- While it runs ------------------------------------------------------------------------------------------------


def test_one_aligned_line_each_logging_step(trainer, run_dir):
    lines = train(trainer(eval_strategy="steps", eval_steps=2), run_dir).splitlines()
    steps = [line for line in lines if "tokens/s" in line]
    assert [line.split()[1] for line in steps] == ["1/4", "2/4", "3/4", "4/4"]
    for word in ("loss", "grad norm", "lr", "tokens/s", "peak"):
        assert len({line.index(word) for line in steps}) == 1, word
    evaluations = [line for line in lines if "evaluation" in line]
    assert len(evaluations) == 2
    assert "loss" in evaluations[0] and "runtime" not in evaluations[0] and "per second" not in evaluations[0]
    assert "trained in 0:00:" in lines[-1] and "52 tokens" in lines[-1]


def test_lines_with_clip_coefficient_loss_scale_and_skipped_steps_stay_aligned():
    record = {"step": 7, "loss": 2.5, "grad_norm": 3.0, "tokens_per_second": 50.0, "peak_memory": 2**30}
    metrics = [
        {"clip_coef": 1.0, "loss_scale": 65536.0, "nonfinite_steps": 0},
        {"clip_coef": 0.4321, "loss_scale": 16777216.0, "nonfinite_steps": 0},
        {"clip_coef": 0.0012, "loss_scale": 0.5, "nonfinite_steps": 1234},
        {"clip_coef": math.nan, "loss_scale": 1.0, "nonfinite_steps": 1234},
    ]
    lines = [report._log_line({**record, **more}, 10, 200) for more in metrics]
    for word in ("clip", "scale", "lr", "tokens/s", "peak"):
        assert len({line.index(word) for line in lines}) == 1, word
    for line, shown in zip(lines, ("clip  1.00", "clip  0.43", "clip 1e-03", "clip   nan"), strict=True):
        assert shown in line
    assert "scale     65,536  lr" in lines[0] and "scale 16,777,216  lr" in lines[1] and "scale        0.5" in lines[2]
    assert "skipped steps" not in lines[0] and lines[2].endswith("  skipped steps 1,234")
    plain = report._log_line(record, 10, 200)
    assert not any(word in plain for word in ("clip", "scale", "steps"))
    assert report._log_line({**record, "nonfinite_steps": 2}, 10, 200).endswith("  non-finite steps 2")


def test_metrics_of_a_fused_trainer_are_reported(run_dir, tiny_llama):
    options = {"max_steps": 2, "logging_steps": 1, "max_grad_norm": 0.01, "save_strategy": "no", "report_to": "none"}
    args = TrainingArguments(run_dir, use_cpu=True, per_device_train_batch_size=2, **options)
    fused = FusedConfig(rule="lomo", lr=1e-2, loss_scale="dynamic", log_norms=True)
    trainer = FusedTrainer(tiny_llama(), args=args, fused=fused, train_dataset=Rows())
    lines = [line for line in train(trainer, run_dir).splitlines() if "tokens/s" in line]
    assert len(lines) == 2
    assert all("  clip " in line and "  scale     65,536  " in line for line in lines)
    norms = [key for key in read_metrics(run_dir)[0] if key.startswith("grad_norm/")]
    assert norms == [f"grad_norm/{name}" for name, _ in trainer.model.named_parameters()]
    text = (run_dir / "README.md").read_text()
    assert "| clipped | 100% of the logged steps |" in text


def test_the_trainer_s_own_printer_is_replaced(trainer, run_dir, capsys):
    quiet = trainer(disable_tqdm=True)
    assert any(isinstance(callback, PrinterCallback) for callback in quiet.callback_handler.callbacks)
    train(quiet, run_dir)
    assert capsys.readouterr().out == ""
    with RunReport(run_dir).attached(trained := trainer()):
        kinds = (PrinterCallback, ProgressCallback)
        assert not any(isinstance(callback, kinds) for callback in trained.callback_handler.callbacks)


def test_a_bar_on_a_terminal_and_none_elsewhere(trainer, run_dir):
    assert "━" in train(trainer(), run_dir, terminal=True)
    assert "━" not in train(trainer(), run_dir)
    assert "━" not in train(trainer(disable_tqdm=True), run_dir, terminal=True)


def test_metrics_hold_every_number_and_the_tokens_without_padding(trainer, run_dir):
    trained = trainer()
    train(trained, run_dir)
    steps = [line for line in read_metrics(run_dir) if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert [line["tokens"] for line in steps] == [13, 26, 39, 52]
    for line in steps:
        assert {"epoch", "grad_norm", "learning_rate", "time"} <= set(line)
        assert line["tokens_per_second"] > 0
        assert 0 < line["memory"] <= line["peak_memory"] * 1.1
        assert line["weight_bytes"] == sum(p.numel() for p in trained.model.parameters()) * 4


def test_a_logged_value_that_is_not_a_number_is_left_out(trainer, run_dir):
    class Note(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            trained.log({"note": "text", "rows": 3})

    trained = trainer(max_steps=1)
    trained.add_callback(Note())
    train(trained, run_dir)
    line = read_metrics(run_dir)[0]
    assert line["rows"] == 3 and "note" not in line


def test_the_rate_leaves_out_the_time_of_evaluation(trainer, run_dir, clock):
    class Slow(TrainerCallback):
        def on_evaluate(self, args, state, control, **kwargs):
            clock[0] += 1000.0

    trained = trainer(eval_strategy="steps", eval_steps=1)
    trained.add_callback(Slow())
    train(trained, run_dir)
    rates = [line["tokens_per_second"] for line in read_metrics(run_dir) if "loss" in line]
    assert rates == [13.0] * 4


def test_a_line_is_there_as_soon_as_it_is_logged(trainer, run_dir):
    class Look(TrainerCallback):
        seen = ()

        def on_step_begin(self, args, state, control, **kwargs):
            path = run_dir / "metrics.jsonl"
            self.seen += (len(path.read_text().splitlines()) if path.exists() else 0,)

    look = Look()
    trained = trainer()
    trained.add_callback(look)
    train(trained, run_dir)
    assert look.seen == (0, 1, 2, 3)


def test_what_is_not_finite_is_still_json(trainer, run_dir):
    trained = trainer(logging_nan_inf_filter=False)
    with torch.no_grad():
        trained.model.lm_head.weight.fill_(math.nan)
    assert "loss      nan" in train(trained, run_dir)

    def no_constant(name):
        raise AssertionError(f"{name} is not JSON")

    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0], parse_constant=no_constant)["loss"] is None
    assert (run_dir / "loss.png").exists()


def test_a_resumed_run_repeats_no_step_and_counts_on(trainer, run_dir, clock):
    trained = trainer(max_steps=5, save_strategy="steps", save_steps=2)
    trained.add_callback(Fail(3, RuntimeError("gone")))
    with pytest.raises(RuntimeError, match="gone"):
        train(trained, run_dir)
    assert [line["step"] for line in read_metrics(run_dir)] == [1, 2, 3]
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # the process died while it wrote

    train(trainer(max_steps=5, save_strategy="steps", save_steps=2), run_dir, resume=str(run_dir / "checkpoint-2"))
    steps = [line for line in read_metrics(run_dir) if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5]
    assert [line["tokens"] for line in steps] == [13, 26, 39, 52, 65]
    assert [line["tokens_per_second"] for line in steps] == [13.0] * 5


@pytest.mark.parametrize("error", [RuntimeError("gone"), KeyboardInterrupt()])
def test_a_run_that_fails_still_leaves_its_pictures(error, trainer, run_dir, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    trained = trainer()
    trained.add_callback(Fail(2, error))
    printed = io.StringIO()
    console = Console(file=printed, force_terminal=True)
    with pytest.raises(type(error)), RunReport(run_dir, console).attached(trained):
        trained.train()
    assert printed.getvalue().rstrip().endswith(SHOW_CURSOR)  # the progress bar restored the terminal
    assert (run_dir / "loss.png").read_bytes().startswith(PNG)
    assert "| steps | 2 |" in (run_dir / "README.md").read_text()


def test_a_run_that_fails_before_its_first_line_leaves_nothing(trainer, run_dir):
    trained = trainer()
    trained.add_callback(Fail(0, RuntimeError("gone")))
    with pytest.raises(RuntimeError, match="gone"):
        train(trained, run_dir)
    assert not (run_dir / "README.md").exists()


def test_a_picture_that_fails_does_not_hide_what_ended_the_run(trainer, run_dir):
    trained = trainer()
    trained.add_callback(Fail(2, RuntimeError("gone")))
    (run_dir / "loss.png").mkdir()
    (run_dir / "loss.png" / "inside").touch()
    printed = io.StringIO()
    with pytest.raises(RuntimeError, match="gone"), RunReport(run_dir, Console(file=printed)).attached(trained):
        trained.train()
    assert "loss.png: can't be written" in printed.getvalue()


def test_a_full_disk_names_the_file_and_the_way_out(trainer, run_dir, monkeypatch):
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    (run_dir / "metrics.jsonl").symlink_to(full)
    monkeypatch.setattr(report, "cut_metrics", lambda path, step: None)
    with pytest.raises(LowmemError) as caught:
        train(trainer(), run_dir)
    message = str(caught.value)
    assert f"{run_dir}/metrics.jsonl: can't be written: no space left on device" in message
    assert "set run_dir" in message


# --- Files --------------------------------------------------------------------------------------------------------


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "kept.txt"
    write_file(path, b"old")

    def half(self, content):
        with self.open("wb") as file:
            file.write(content[:1])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(LowmemError, match=r"kept\.txt: can't be written: no space left on device\. Free some space"):
        write_file(path, b"new")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("kept.txt", b"old")]


def test_only_a_full_disk_is_told_to_free_space(tmp_path):
    with pytest.raises(LowmemError, match=r"can't be written: permission denied\.$"), writing(tmp_path):
        raise PermissionError(errno.EACCES, "Permission denied")


def test_a_new_run_gets_its_folder(tmp_path):
    for _ in range(2):  # the second time it is still empty
        with run_folder(tmp_path / "runs" / "new", resume=False) as folder:
            assert folder.is_dir()


def test_an_empty_folder_of_a_failed_run_is_removed(tmp_path):
    for rank, removed in ((1, False), (0, True)):
        (tmp_path / "new").mkdir(exist_ok=True)
        with pytest.raises(RuntimeError), run_folder(tmp_path / "new", resume=False, rank=rank):
            raise RuntimeError
        assert (tmp_path / "new").exists() != removed


def test_a_folder_with_a_run_is_refused_unless_resumed(tmp_path):
    (tmp_path / "config.yaml").touch()
    with (
        pytest.raises(ConfigError, match=r"already contains a run\. Continue it with --resume, set run_dir .* delete"),
        run_folder(tmp_path, resume=False),
    ):
        pass
    with run_folder(tmp_path, resume=True) as folder:
        assert folder == tmp_path


def test_nothing_to_resume_is_refused_and_makes_no_folder(tmp_path):
    with (
        pytest.raises(ConfigError, match="does not contain a run to resume"),
        run_folder(tmp_path / "absent", resume=True),
    ):
        pass
    assert not (tmp_path / "absent").exists()


def test_a_run_dir_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file"), run_folder(tmp_path / "file", resume=False):
        pass
    with (
        pytest.raises(LowmemError, match="can't be written: not a directory"),
        run_folder(tmp_path / "file" / "run", resume=False),
    ):
        pass


def test_the_environment_says_where_and_with_what(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lowmem", "train", "my run.yaml"])
    monkeypatch.chdir(tmp_path)  # no repository
    environment.write_environment(tmp_path)
    written = json.loads((tmp_path / "environment.json").read_text())
    assert written["command"] == "lowmem train 'my run.yaml'"
    assert written["git"] is None
    assert written["versions"]["torch"] == torch.__version__
    assert written["cpu"]["count"] >= 1 and written["cpu"]["model"]
    assert written["memory_bytes"] > 2**28
    assert written["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")


def test_the_commit_and_its_changes_are_noted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "a")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "a@b.c")
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        environment.subprocess.run(["git", *words], check=True)
    clean = environment._git()
    assert len(clean["commit"]) == 40 and clean["dirty"] is False
    (tmp_path / "new.txt").touch()
    assert environment._git() == {"commit": clean["commit"], "dirty": True}


# --- The run folder ----------------------------------------------------------------------------------------------


@pytest.fixture
def logged(tmp_path):
    """A run folder with forty logged steps, two evaluations and a loss that was not finite."""
    memory = {"memory": 3 * 2**30, "peak_memory": 4 * 2**30, "weight_bytes": 2**30}
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, 41):
            line = {"step": step, "loss": None if step == 9 else 5 / step, "grad_norm": 1.0, "learning_rate": 1e-3}
            file.write(json.dumps({**line, "tokens": 100 * step, "tokens_per_second": 50.0, **memory}) + "\n")
            if step % 20 == 0:
                file.write(json.dumps({"step": step, "eval_loss": 6 / step, "tokens": 100 * step, **memory}) + "\n")
    return tmp_path


def test_pictures_need_the_metrics_alone_and_can_be_drawn_again(logged):
    before = (logged / "metrics.jsonl").read_bytes()
    drawn = plot_run(logged)
    assert drawn == plot_run(logged) == [logged / "loss.png", logged / "memory.png"]
    assert all(path.read_bytes().startswith(PNG) for path in drawn)
    assert (logged / "metrics.jsonl").read_bytes() == before


def test_lines_with_a_norm_for_each_of_many_parameters_share_their_names(tmp_path):
    always = dict.fromkeys(("step", "tokens", "memory", "peak_memory", "weight_bytes"), 1)
    line = json.dumps(always | {f"grad_norm/layers.{i}.weight": 0.5 for i in range(2000)})
    (tmp_path / "metrics.jsonl").write_text(f"{line}\n{line}\n{line[:-9]}")
    first, second = read_metrics(tmp_path)
    assert len(first) == 2005
    assert all(one is other for one, other in zip(first, second, strict=True))


def test_pictures_of_nothing_are_refused(tmp_path):
    with pytest.raises(LowmemError, match=r"metrics\.jsonl: can't be read: No such file"):
        plot_run(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(LowmemError, match="nothing is logged yet"):
        plot_run(tmp_path)


DAMAGED_LINES = ("{", "[1]", "3", '{"step": "2"}', '{"step": 2, "loss": 1.0}', "[" * 10_000, "\ufffe")


def test_damaged_lines_are_left_out(logged):
    path = logged / "metrics.jsonl"
    first, second, *_ = path.read_text().splitlines()
    path.write_bytes("\n".join([first, *DAMAGED_LINES, second, ""]).encode() + b"\xff\n" + second[:20].encode())
    assert read_metrics(logged) == [json.loads(first), json.loads(second)]
    plot_run(logged)
    write_readme(logged)
    assert cut_metrics(path, 1) == len(DAMAGED_LINES) + 1
    assert path.read_text() == f"{first}\n"


def test_the_readme_says_how_it_went_and_how_to_continue(logged):
    for name in ("checkpoint-20", "checkpoint-100", "checkpoint-9.tmp"):
        (logged / name).mkdir()
    (logged / "config.yaml").touch()
    plot_run(logged)
    write_readme(logged)
    text = (logged / "README.md").read_text()
    assert "| training loss | 0.1250 (lowest 0.1250, at step 40) |" in text
    assert "| evaluation loss | 0.1500 (lowest 0.1500, at step 40) |" in text
    assert "| peak memory | 4.00 GiB (weights 1.00 GiB) |" in text
    assert "![loss.png](loss.png)" in text and "![memory.png](memory.png)" in text
    assert f"lowmem train {logged}/config.yaml --resume" in text
    assert f"lowmem generate {logged} 'a prompt'" in text
    assert f'AutoModelForCausalLM.from_pretrained("{logged}/checkpoint-100"' in text
    assert "checkpoint-9.tmp" not in text and "environment.json" not in text


def test_the_readme_counts_clipped_and_nonfinite_steps_where_there_were_any(logged):
    write_readme(logged)
    text = (logged / "README.md").read_text()
    assert "| clipped |" not in text and "| non-finite steps |" not in text
    metrics = [(0.5, 0), (1.0, 0), (0.0, 1), (None, 2), (0.25, 2), (0.1, 2), (1.0, 3)]
    last = read_metrics(logged)[-1]
    with (logged / "metrics.jsonl").open("a") as file:
        for coef, nonfinite_steps in metrics:
            file.write(json.dumps({**last, "clip_coef": coef, "nonfinite_steps": nonfinite_steps}) + "\n")
    write_readme(logged)
    text = (logged / "README.md").read_text()
    assert "| clipped | 60% of the logged steps |" in text
    assert "| non-finite steps | 3, with a gradient that was not finite |" in text


def test_the_readme_of_a_run_without_checkpoint_says_so(logged):
    write_readme(logged)
    assert "No checkpoint was saved" in (logged / "README.md").read_text()
