"""Runs that are killed and resumed end in the bits of one that was not. `benchmarks.crashes` kills more of them."""

import json
import sys
from pathlib import Path

from processes import Launched

sys.path.insert(0, str(Path(__file__).parent.parent))


def test_killed_runs_end_like_one_that_was_not(tmp_path):
    few = ["--kills", "2", "--only", "local", "--seed", "5"]
    done = Launched.ranks(0, "benchmarks.crashes", *few, "--out", str(tmp_path)).finish()
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "crashes.json").read_text())["runs"]["local"]
    assert sum(found["kills"].values()) >= 2
    assert found["identical"] == found["runs"]
