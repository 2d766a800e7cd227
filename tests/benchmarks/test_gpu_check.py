"""The GPU check with small sizes, as on a machine with nothing installed but torch and transformers."""

import json
import subprocess
import sys

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu import measure, steps
from benchmarks.gpu.report import Report

# Hides the packages that only trainers and the command line need. Functions are traced, but no code is generated.
BARE = """
import functools, runpy, sys
from importlib.machinery import PathFinder

import torch

MISSING = {"accelerate", "datasets", "deepspeed", "matplotlib", "psutil", "pydantic", "rich", "ruamel", "trl"}

class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in MISSING else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Bare
torch.compile = functools.partial(torch.compile, backend="aot_eager")
runpy.run_module("benchmarks.gpu_check", run_name="__main__", alter_sys=True)
"""
PARTS = ["environment", "attention", "no_host_sync", "compiled_against_eager", "update_against_floor"]
PARTS += ["update_against_adamw", "dispatch", "small_steps", "first_step"]
PARTS += ["vocabulary_gradients", "eight_billion", "update_memory", "one_billion", "policies_agree"]


def parts(out, printed):
    """The rows of the report by part."""
    report = json.loads(out.read_text())
    assert json.loads(printed) == report
    assert list(report) == ["seconds", *PARTS]
    return {part: report[part]["rows"] for part in PARTS}


def test_every_part_runs_on_a_bare_machine(tmp_path):
    out = tmp_path / "report.json"
    command = [sys.executable, "-c", BARE, "--small", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = parts(out, done.stdout)
    for part, rows in report.items():
        assert rows, part
        for row in rows:
            assert {"what", "measured", "goal", "met"} <= set(row), row  # not skipped, no error
            assert (row["met"] is None) == (row["goal"] is None or row["measured"] is None)
    goals = {row["goal"] for rows in report.values() for row in rows}
    assert goals >= {"<= 1.3", "<= 1.1", ">= 1", "<= 0.01", "<= 0", "<= 1.12", "<= 1.05", "<= 1.03", "<= 0.9", "<= 1.6"}


def test_parts_that_the_budget_does_not_allow_are_skipped(tmp_path, monkeypatch, capsys):
    out = tmp_path / "report.json"
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--small", "--out", str(out), "--budget", "0"])
    with pytest.raises(SystemExit) as done:
        gpu_check.main()
    assert not done.value.code
    for part, rows in parts(out, capsys.readouterr().out).items():
        assert [row["what"] for row in rows] == [part]
        assert "left of the budget" in rows[0]["skipped"]


# -- the report --------------------------------------------------------------------------------------------------------


@pytest.fixture
def report(tmp_path):
    return Report(tmp_path / "report.json", budget=100)


def rows_of(report, tmp_path):
    """The rows in the file."""
    written = json.loads((tmp_path / "report.json").read_text())
    return [row for part in report.parts for row in written[part]["rows"]]


@pytest.mark.parametrize(
    ("measured", "goal", "met"),
    [
        (1.0, ("<=", 1.0), True),
        (1.1, ("<=", 1.0), False),
        (1.0, (">=", 1.0), True),
        (0.9, (">=", 1.0), False),
        (None, (">=", 1.0), None),
        (1.0, None, None),
    ],
)
def test_whether_a_goal_is_met(measured, goal, met, report, tmp_path):
    with report.part("one"):
        report.row("it", measured, goal)
        assert [row["met"] for row in rows_of(report, tmp_path)] == [met]  # at once
    assert len(list(report.goals())) == (goal is not None)


def test_other_parts_run_after_one_has_failed(report, tmp_path, capsys):
    with report.part("one"):
        report.row("before", 1)
        raise ValueError("broken")
    with report.part("two"):
        report.row("after", 2)
    before, broken, after = rows_of(report, tmp_path)
    assert (before["measured"], broken["error"], after["measured"]) == (1, "ValueError: broken", 2)
    assert report.failed


def test_out_of_memory_is_not_a_failure(report, tmp_path, capsys):
    with report.part("one"), report.trial("large"):
        raise torch.OutOfMemoryError("too large")
    assert not report.failed
    assert rows_of(report, tmp_path)[0]["what"] == "large"


# -- whole steps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [True, False], ids=["by its size", "by an error"])
def test_a_smaller_model_is_measured_if_one_does_not_fit(known, report, monkeypatch, tmp_path, capsys):
    build, built = steps.llama, []

    def llama(*size):
        built.append(size)
        if not known and len(built) == 1:
            raise torch.OutOfMemoryError("too large")
        return build(*size)

    monkeypatch.setattr(steps, "llama", llama)
    monkeypatch.setattr(measure, "free_memory", lambda: 100_000 if known else 10**9)
    with report.part("one"):
        steps.eight_billion(report, small=True)
    rows = rows_of(report, tmp_path)
    assert (rows[0]["what"], rows[0]["measured"]) == ("tiny: fits", False)
    assert all(row["what"].startswith("tinier") for row in rows[1:])
    assert len(rows) > 5
    assert built[-1] == steps.SMALL_MODELS["tinier"]


def test_the_gradients_of_a_head_are_near_to_float64(report, tmp_path):
    with report.part("one"):
        steps.vocabulary_gradients(report, small=True)
    assert [row["met"] for row in rows_of(report, tmp_path)] == [True, True]


def test_the_tiled_loss_equals_the_loss_of_the_model():
    model = steps.llama(*steps.SMALL_MODELS["tiny"]).float()
    ids = torch.randint(0, 512, (1, 600), device=measure.DEVICE)
    results = []
    for loss in (steps.model_loss, steps.tiled_loss):
        value = loss(model, ids)
        value.backward()
        results.append((value.detach(), [param.grad for param in model.parameters()]))
        model.zero_grad()
    torch.testing.assert_close(results[1], results[0])
