"""A run's result depends on its configuration and its seed, and on nothing around it."""

import os
import subprocess
import sys
from pathlib import Path

from support import small_runs
from support.processes import Launched


def test_neither_process_nor_folder_nor_workers_matter(tmp_path):
    """Files and losses of a run equal those of one with another hash seed, in another folder, with other workers."""
    words = small_runs.inputs(tmp_path)
    done = Launched.ranks(0, *words, f"--output_dir={tmp_path / 'run'}").finish()
    assert done.returncode == 0, done.stderr
    others = ["--dataloader_num_workers=2", "--dataset_num_proc=2", "--fused.log_norms=true"]
    command = [sys.executable, "-m", *words, f"--output_dir={tmp_path / 'elsewhere' / 'run'}", *others]
    environment = os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert small_runs.results(tmp_path / "run") == small_runs.results(tmp_path / "elsewhere" / "run")
