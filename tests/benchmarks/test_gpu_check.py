"""The GPU check runs at small sizes on a machine with only torch and transformers."""

import json
import subprocess
import sys

import pytest
from support.products import FULL

from benchmarks.gpu_check import PARTS

# Hides packages that only trainers and the command line need. Functions are traced, but no code is generated.
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
    if not FULL:
        pytest.skip("with LOWMEM_FULL=1")
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


def test_all_parts_fit_into_the_budget():
    assert sum(needs for _, needs in PARTS) <= 500
