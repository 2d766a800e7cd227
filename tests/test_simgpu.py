"""A part of the suite runs on a GPU made of host memory; `scripts/test.sh --simgpu` runs all that can."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import simgpu

TESTS = Path(__file__).parent
PART = ["simgpu", "step/test_hot_path.py", "step/test_on_a_gpu.py", "step/test_offload.py"]


@pytest.mark.skipif(simgpu.compiler() is None, reason="needs a C++ compiler")
@pytest.mark.skipif("LOWMEM_SIMGPU" in os.environ, reason="runs there already")
def test_a_part_of_the_suite():
    environment = os.environ | {"LOWMEM_SIMGPU": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *(str(TESTS / path) for path in PART)]
    done = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-10_000:]
    assert " passed" in done.stdout
