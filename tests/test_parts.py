"""Runs parts of the suite on a simulated GPU and in Triton's interpreter. `scripts/test.sh` runs the other parts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import simgpu
from support.products import FULL

TESTS = Path(__file__).parent
STREAMED = [
    f"placements/test_streamed.py::test_{name}"
    for name in (
        "same_bits_as_local_training[adamw-deferred-torch.bfloat16-False]", "traffic_of_a_step",
        "weights_are_filled_and_read", "a_parameter_is_used_outside_of_its_layer",
    )
]  # fmt: skip
PARTS = {
    "LOWMEM_SIMGPU": [
        "simgpu", "step/test_hot_path.py", "step/test_on_a_gpu.py", "step/test_offload.py",
        "placements/test_where_shards_are.py", *STREAMED,
    ],
    "TRITON_INTERPRET": ["kernels/test_kernels.py"],
}  # fmt: skip
# Tests that resemble others; only with LOWMEM_FULL.
MORE = "sums_equal_grad or narrow_gradients"


@pytest.mark.skipif(simgpu.compiler() is None, reason="needs a C++ compiler")
@pytest.mark.skipif(any(switch in os.environ for switch in PARTS), reason="runs there already")
@pytest.mark.parametrize("switch", PARTS)
def test_a_part_of_the_suite(switch):
    if switch == "TRITON_INTERPRET":
        pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *(str(TESTS / path) for path in PARTS[switch])]
    if not FULL:
        command += ["-k", f"not ({MORE})"]
    done = subprocess.run(
        command, cwd=TESTS.parent, env=os.environ | {switch: "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-10_000:]
    assert " passed" in done.stdout
