"""The check of what is compiled for a GPU, on a machine without one."""

import importlib.util
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu.kernels import Launch
from benchmarks.triton_check import FORMATS, INTERPRETED, cases_of, updated
from lowmem.tiles.storage import WEIGHT_FORMATS, Integer

# As Inductor writes it. It reads a matrix in two loops, a vector for each row and a number, and has two outputs.
KERNEL = """
def kernel(in_ptr0, in_ptr1, in_ptr2, out_ptr0, out_ptr1, xnumel, r0_numel, XBLOCK : tl.constexpr):
    x0 = xindex
    tmp0 = tl.load(in_ptr2 + (1))
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        tmp1 = tl.load(in_ptr0 + (r0_1 + ks0*x0), r0_mask & xmask, eviction_policy='evict_last', other=0.0)
        tmp2 = tl.load(in_ptr1 + (r0_1), r0_mask, eviction_policy='evict_last', other=0.0)
        tmp3 = tl.load(in_ptr1 + (r0_1), r0_mask, eviction_policy='evict_last', other=0.0)
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        tmp4 = tl.load(in_ptr0 + (r0_1 + ks0*x0), r0_mask & xmask, eviction_policy='evict_first', other=0.0)
        tl.store(out_ptr0 + (r0_1 + ks0*x0), tmp4, r0_mask & xmask)
    tl.store(out_ptr1 + (x0), tmp5, xmask)
"""


def test_the_bytes_that_a_kernel_moves():
    names = ["in_ptr0", "in_ptr1", "in_ptr2", "out_ptr0", "out_ptr1", "xnumel", "r0_numel"]
    matrix, vector, number = torch.empty(8, 16, dtype=torch.bfloat16), torch.empty(16), torch.empty(3)
    kernel = SimpleNamespace(fn=SimpleNamespace(arg_names=names, src=KERNEL))
    launch = Launch(kernel, (matrix, vector, number, matrix, torch.empty(8), 8, 16))
    assert launch.moved == 2 * matrix.nbytes + vector.nbytes + 4 + matrix.nbytes + 8 * 4


def test_rules_without_8_bit_states_are_checked_in_the_other_formats():
    assert {name for _, name, _ in cases_of(["adamw"])} == set(FORMATS)
    in_codes = {"int8", "int10", "int12"}
    assert {name for _, name, _ in cases_of(["lomo"])} == {
        "nearest",
        "stochastic",
        "compensated",
        "compensated8",
    } | in_codes
    assert cases_of(["lion"], ["8bit + stochastic"]) == [
        ("lion", "8bit + stochastic", "parameter"), ("lion", "8bit + stochastic", "shard")
    ]  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_compared_are_the_values_that_stored_tensors_stand_for(name):
    param, kept, full, weight, states = updated("lion", name, INTERPRETED, 1, compile=False)
    assert set(kept) == set(full)
    codes = kept["exp_avg"]
    assert codes.dtype == (torch.int8 if name.startswith("8bit") else torch.float32)
    assert weight.dtype == states["exp_avg"].dtype == torch.float32
    if name.startswith("int"):
        assert param.dtype == torch.int8 and ("low" in kept) == (name != "int8")
        others = (kept[key] for key in ("low", "unit") if key in kept)
        assert torch.equal(weight, Integer(WEIGHT_FORMATS[name], 32).decode((param, *others)))
    else:
        assert param.dtype == torch.bfloat16
        assert torch.equal(weight.bfloat16(), param)
        assert torch.equal(weight, param.float()) != ("residual" in kept)
    # the first running mean: (1 - 0.99) * gradient, of the seed of `initial`
    torch.manual_seed(0)
    torch.randn(INTERPRETED)
    expected = 0.01 * torch.randn(INTERPRETED).bfloat16().float()
    # codes are furthest apart, by 2/127 of the scale, at the largest value of a group
    apart = 2 / 127 * 1.01 * float(expected.abs().max()) if name.startswith("8bit") else 0.0
    torch.testing.assert_close(states["exp_avg"], expected, rtol=1e-5, atol=apart)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_a_rule_is_checked_without_a_gpu(tmp_path):
    out = tmp_path / "triton_check.json"
    command = [sys.executable, "-m", "benchmarks.triton_check", "--rules", "lomo", "lion", "--out", tmp_path]
    command += ["--formats", "compensated", "8bit + stochastic"]
    other = {"lomo, nearest, shard": {"calls": 3}}
    out.write_text(json.dumps({"updates": other}))
    subprocess.run(command, check=True)
    rows = json.loads(out.read_text())["updates"]
    assert other.items() <= rows.items()
    cases = [", ".join(case) for case in cases_of(["lomo", "lion"], ["compensated", "8bit + stochastic"])]
    assert list(rows) == [*other, *cases]
    for name in cases:
        row = rows[name]
        assert row["calls"] == (3 if "shard" in name else 1)
        assert row["floor_bytes"] <= row["passes_bytes"] <= row["bytes"]
        assert row["interpreted"]["weights"] < 1e-3
        assert row["interpreted"]["states"] < 1e-5
