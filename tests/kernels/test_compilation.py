"""Kernels are compiled for three GPUs without one: their arithmetic is exact, and they use registers alone."""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from support.interpreted import INTERPRETED
from support.updated import Parameter

from lowmem.kernels.tables import FOLD
from lowmem.tiles.sweep import Reading

pytestmark = pytest.mark.skipif(
    INTERPRETED or importlib.util.find_spec("triton") is None, reason="needs Triton's compiler"
)

F32, BF16 = torch.float32, torch.bfloat16
MATRIX, LINE = (4096, 4096), (4096,)
FULL = os.environ.get("LOWMEM_FULL") == "1"
POINTERS = {
    "programs": "*i32", "table": "*i64", "grads": "*i64", "numbers": "*fp64", "keys": "*i32", "scalars": "*fp64",
    "work": "*fp32", "results": "*fp64", "jobs": "*i64", "pieces": "*i64", "reading_finite": "*i1",
    "reading_square_sums": "*fp64",
}  # fmt: skip
CASES = {
    "adalomo": ("adalomo", MATRIX, BF16, "stochastic", "bfloat16"),
    "adalomo of a vector": ("adalomo", LINE, BF16, "stochastic", "bfloat16"),
    "adalomo float32": ("adalomo", MATRIX, F32, "nearest", "float32"),
    "adamw": ("adamw", LINE, BF16, "stochastic", "bfloat16"),
    "adamw float32": ("adamw", LINE, F32, "nearest", "float32"),
    "adamw 8bit": ("adamw", LINE, BF16, "stochastic", "8bit"),
    "lion": ("lion", LINE, BF16, "stochastic", "bfloat16"),
    "lion int12": ("lion", MATRIX, BF16, "int12", "bfloat16"),
    "lion compensated": ("lion", LINE, BF16, "compensated", "bfloat16"),
    "lans": ("lans", LINE, BF16, "stochastic", "bfloat16"),
    "scaled_adam": ("scaled_adam", LINE, BF16, "stochastic", "bfloat16"),
    "adafactor": ("adafactor", MATRIX, BF16, "stochastic", "bfloat16"),
    "adafactor_t2t": ("adafactor_t2t", MATRIX, BF16, "nearest", "bfloat16"),
}
SAMPLE = {"adalomo": 90, "adamw": 80}


def compiled(function, constants, warps, arch):
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lowmem.kernels.kernels import OPTIONS

    names = function.arg_names
    signature = {name: "constexpr" if name in constants else POINTERS.get(name, "*fp32") for name in names}
    source = ASTSource(function, signature, {(names.index(name),): value for name, value in constants.items()})
    return compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps, **OPTIONS})


def resources(kernel, arch):
    """Registers, and bytes of spills, by ptxas."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder, "kernel.ptx")
        ptx.write_text(kernel.asm["ptx"])
        command = [tool, "-v", f"--gpu-name=sm_{arch}{'a' if arch == 90 else ''}", "--fmad=false", ptx]
        said = subprocess.run([*command, "-o", Path(folder, "o")], capture_output=True, text=True, check=True).stderr
    registers, spilled = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill stores", said)
    return int(registers[1]), int(spilled[1])


def kernels_of(name):
    from lowmem.kernels import Kernels, is_line

    parameter = Parameter(*CASES[name])
    traced = parameter.traced(Reading())
    kernels = Kernels(traced, line=is_line(traced, parameter.layout.shape), aligned=True)
    for step, _ in kernels.source.steps:
        yield step, kernels.functions[step], {}, kernels.source.tile.warps if step.startswith("pass") else 8
    yield "fold", kernels.functions["fold"], {"LARGEST": False, "LINES": FOLD[0], "BLOCK": FOLD[1]}, 4


@pytest.mark.parametrize("arch", [80, 89, 90])
@pytest.mark.parametrize("name", CASES)
def test_compiled_kernels(name, arch):
    if not FULL and SAMPLE.get(name) != arch:
        pytest.skip("with LOWMEM_FULL=1")
    for step, function, constants, warps in kernels_of(name):
        kernel = compiled(function, constants, warps, arch)
        ptx = kernel.asm["ptx"]
        registers, spilled = resources(kernel, arch)
        arithmetic = set(re.findall(r"\b((?:add|sub|mul|div|sqrt|rcp|fma)\.(?:\w+\.)*f(?:32|64))", ptx))
        print(
            name,
            arch,
            step,
            registers,
            spilled,
            sorted(arithmetic),
            sorted(set(re.findall(r"(?:ld|st)\.global\S*?(?:\.v\d)?\.b\d+", ptx))),
        )


assert sys
