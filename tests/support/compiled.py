"""Compiles all updates in tests and in the processes that they start: `scripts/test.sh --compiled`."""

import os

import pytest
import torch
from support.interpreted import INTERPRETED, install

FORCED = bool(os.environ.get("LOWMEM_COMPILED"))


def force() -> None:
    """If the environment requests it, makes `compile="auto"` compile every update, and disables stacking."""
    if not (FORCED or INTERPRETED):
        return
    install()
    from lowmem.step import compiled, updates

    compiled.COMPILE_FROM = 0
    updates.SMALL = 0
    if INTERPRETED:
        compiled.KERNELS.add("cpu")


def compiles(test):
    """Marks tests that need a compiler."""
    from lowmem.step.compiled import has_compiler

    test = pytest.mark.skipif(not has_compiler("cpu"), reason="no C++ compiler")(test)
    return pytest.mark.cpu_only("the simulated GPU has no compiler")(test)


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether a tensor equals a result of torch's fused AdamW. Compiled updates may differ by rounding, because
    torch's kernel does not fuse multiply-adds in the last elements, which do not fill a vector.
    """
    return torch.allclose(one, other, rtol=1e-5, atol=1e-6) if FORCED else torch.equal(one, other)
