"""The GPU check with small sizes, as on a machine with nothing installed but torch and transformers."""

import json
import subprocess
import sys

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_check import PARTS, Report

# Hides the packages that only trainers and the command line need. Functions are traced, but no code is generated.
BARE = """
import functools, runpy, sys
from importlib.machinery import PathFinder

import torch

MISSING = {"accelerate", "datasets", "deepspeed", "matplotlib", "psutil", "pydantic", "rich", "ruamel", "trl", "xxhash"}

class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in MISSING else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Bare
runpy.run_module("benchmarks.gpu_check", run_name="__main__", alter_sys=True)
"""


def parts(out, printed):
    """The rows of the report by part."""
    report = json.loads(out.read_text())
    assert json.loads(printed) == report
    assert list(report) == ["seconds", *(measure.__name__ for measure, _ in PARTS)]
    return {part: report[part]["rows"] for part in list(report)[1:]}


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
    for part in ("compiled_update", "policies_agree", "computed_gradients"):
        assert all(row["met"] for row in report[part]), part


def test_parts_that_the_budget_does_not_allow_are_skipped(tmp_path, monkeypatch, capsys):
    out = tmp_path / "report.json"
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--small", "--out", str(out), "--budget", "0"])
    with pytest.raises(SystemExit) as done:
        gpu_check.main()
    assert not done.value.code
    for part, rows in parts(out, capsys.readouterr().out).items():
        assert [row["what"] for row in rows] == [part]
        assert "left of the budget" in rows[0]["skipped"]


def test_all_parts_fit_into_the_budget():
    assert sum(needs for _, needs in PARTS) <= 500


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
    def one(report, small):
        report.row("it", measured, goal)
        assert [row["met"] for row in rows_of(report, tmp_path)] == [met]  # at once

    report.part(one, 0, True)
    assert len(list(report.goals())) == (goal is not None)


def test_other_parts_run_after_one_has_failed(report, tmp_path, capsys):
    def one(report, small):
        report.row("before", 1)
        raise ValueError("broken")

    def two(report, small):
        report.row("after", 2)

    report.part(one, 0, True)
    report.part(two, 0, True)
    before, broken, after = rows_of(report, tmp_path)
    assert (before["measured"], broken["error"], after["measured"]) == (1, "ValueError: broken", 2)
    assert report.failed


def test_out_of_memory_is_not_a_failure(report, tmp_path, capsys):
    def one(report, small):
        raise torch.OutOfMemoryError("too large")

    report.part(one, 0, True)
    assert not report.failed
    assert rows_of(report, tmp_path)[0]["what"] == "one"
