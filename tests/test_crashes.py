"""Runs that are killed and resumed end in the bits of one that was not. `benchmarks.crashes` kills more of them."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_killed_runs_end_like_one_that_was_not(tmp_path):
    command = [sys.executable, "-m", "benchmarks.crashes", "--kills", "2", "--only", "local", "--seed", "5"]
    done = subprocess.run([*command, "--out", tmp_path], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "crashes.json").read_text())["runs"]["local"]
    assert sum(found["kills"].values()) >= 2
    assert found["identical"] == found["runs"]
