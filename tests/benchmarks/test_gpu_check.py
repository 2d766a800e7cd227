"""The GPU check with small sizes, as on a machine with nothing installed but torch and transformers."""

import json
import subprocess
import sys

import pytest
import torch

from benchmarks.gpu_check import PARTS, Report

# Hides the packages that only trainers and the command line need. Functions are traced, but no code is generated.
BARE = """
import runpy, sys
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


def test_every_part_runs_on_a_bare_machine(tmp_path):
    out = tmp_path / "report.json"
    command = [sys.executable, "-c", BARE, "--small", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert json.loads(done.stdout) == report
    assert list(report) == ["seconds", *(measure.__name__ for measure, _ in PARTS)]
    for part in list(report)[1:]:
        rows = report[part]["rows"]
        assert rows and all({"what", "measured", "goal", "met"} <= set(row) for row in rows), rows  # none skipped
        if part in ("compiled_update", "policies_agree", "computed_gradients"):
            assert all(row["met"] for row in rows), part


def test_all_parts_fit_into_the_budget():
    assert sum(needs for _, needs in PARTS) <= 500


# -- the report --------------------------------------------------------------------------------------------------------


@pytest.fixture
def rows_of(tmp_path):
    """A function: the rows that functions of a report have written, with 100 seconds, and the report."""

    def of(*parts, needs=0):
        report = Report(tmp_path / "report.json", budget=100)
        for part in parts:
            report.part(part, needs, True)
        written = json.loads((tmp_path / "report.json").read_text())
        return [row for part in report.parts for row in written[part]["rows"]], report

    return of


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
def test_goals_are_compared_with_results(measured, goal, met, rows_of):
    [row], report = rows_of(lambda report, small: report.row("it", measured, goal))
    assert row["met"] == met and len(list(report.goals())) == (goal is not None)


@pytest.mark.parametrize(("error", "failed"), [(ValueError("broken"), True), (torch.OutOfMemoryError("big"), False)])
def test_other_parts_run_after_one_has_failed(error, failed, rows_of):
    def one(report, small):
        report.row("before", 1)
        raise error

    def two(report, small):
        report.row("after", 2)

    (before, broken, after), report = rows_of(one, two)
    assert (before["measured"], broken["error"][-3:], after["measured"]) == (1, str(error)[-3:], 2)
    assert report.failed == failed


def test_a_part_that_the_budget_does_not_allow_is_skipped(rows_of):
    [row], _ = rows_of(lambda report, small: pytest.fail("it ran"), needs=101)
    assert "left of the budget" in row["skipped"]
