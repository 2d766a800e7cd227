"""Kernels compile for three GPU types on a CPU: arithmetic is exact, loads are wide, and registers suffice."""

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from support.interpreted import INTERPRETED
from support.updated import Parameter

from lowmem.tiles.sweep import Reading

pytestmark = pytest.mark.skipif(
    INTERPRETED or importlib.util.find_spec("triton") is None, reason="needs Triton's compiler"
)

FULL = os.environ.get("LOWMEM_FULL") == "1"
F32, BF16 = torch.float32, torch.bfloat16
MATRIX, LINE = (4096, 4096), (1 << 20,)
CASES = {
    "adalomo": ("adalomo", MATRIX, BF16, "stochastic"),
    "adamw": ("adamw", LINE, BF16, "stochastic", "bfloat16"),
    "adalomo of a vector": ("adalomo", LINE, BF16, "stochastic", "bfloat16"),
    "adalomo float32": ("adalomo", MATRIX, F32),
    "adamw float32": ("adamw", LINE, F32),
    "adamw 8bit": ("adamw", LINE, BF16, "stochastic", "8bit"),
    "lion": ("lion", LINE, BF16, "stochastic", "bfloat16"),
    "lion int8": ("lion", MATRIX, BF16, "int8", "bfloat16"),
    "lion int12": ("lion", MATRIX, BF16, "int12", "bfloat16"),
    "lion compensated": ("lion", LINE, BF16, "compensated", "bfloat16"),
    "lans": ("lans", LINE, BF16, "stochastic", "bfloat16"),
    "scaled_adam": ("scaled_adam", LINE, BF16, "stochastic", "bfloat16"),
    "adafactor": ("adafactor", MATRIX, BF16, "stochastic", "bfloat16"),
    "adafactor_t2t": ("adafactor_t2t", MATRIX, BF16),
}
POINTERS = {torch.int32: "*i32", torch.int64: "*i64", torch.float64: "*fp64"}
READING = Reading(inverse_scale=torch.ones(()), clip_coef=torch.ones(()))


def compiled(function, constants, warps, arch):
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lowmem.kernels.kernels import ARG_TYPES, COMPILER_OPTIONS

    names = function.arg_names
    fixed = dict(zip(names[len(names) - len(constants) :], constants, strict=True))
    signature = {name: POINTERS.get(ARG_TYPES.get(name), "*fp32") for name in names} | dict.fromkeys(fixed, "constexpr")
    source = ASTSource(function, signature, {(names.index(name),): value for name, value in fixed.items()})
    return compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps, **COMPILER_OPTIONS})


def spilled(ptx, arch, folder):
    """Returns the bytes of registers that ptxas spills to memory."""
    import triton

    tool, file = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas", folder / "kernel.ptx"
    file.write_text(ptx)
    command = [tool, "-v", f"--gpu-name=sm_{arch}{'a' if arch == 90 else ''}", file, "-o", folder / "kernel"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return int(re.search(r"(\d+) bytes spill stores", said)[1])


def kernels_of(name):
    from lowmem.kernels import Kernels

    parameter = Parameter(*CASES[name])
    return Kernels(parameter.traced(READING), one_row=parameter.layout.shape[1] == 1, aligned=True)


@pytest.mark.parametrize("arch", [80, 89, 90])
@pytest.mark.parametrize("name", CASES)
def test_compiled_kernels(name, arch, tmp_path):
    if not FULL and (name, arch) not in (("adalomo", 90), ("adamw", 80)):
        pytest.skip("with LOWMEM_FULL=1")
    kernels = kernels_of(name)
    for step, constants, warps in kernels.variants:
        function = kernels.functions[step]
        ptx = compiled(function, constants, warps, arch).asm["ptx"]
        arithmetic = set(re.findall(r"\b((?:add|sub|mul|div|sqrt|rsqrt|rcp|fma|ex2|lg2)\.(?:\w+\.)*f32)", ptx))
        exact = {f"{operation}.rn.f32" for operation in ("add", "sub", "mul", "div", "sqrt")}
        assert arithmetic <= exact | ({"fma.rn.f32"} if "tl.fma(" in function.src else set()), step
        assert spilled(ptx, arch, tmp_path) <= (8 if step == "fold" else 0), step
        if step.startswith("pass"):
            assert re.search(r"ld\.global\S*\.v4\.b32", ptx), step
            writes = re.search(r"tl\.store\(.*mask=inside", function.src)
            assert not writes or re.search(r"st\.global\S*\.v4\.b32", ptx), step
