"""Compilation at any size, in the tests and in all processes that they start: `scripts/test.sh --compiled`."""

import os

import pytest
import torch
from support.interpreted import INTERPRETED, install

FORCED = bool(os.environ.get("LOWMEM_COMPILED"))


def force() -> None:
    """Makes `compile="auto"` compile every update, none of them in a stack, if that was asked for."""
    if not (FORCED or INTERPRETED):
        return
    install()
    from lowmem.step import compiled, updates

    compiled.COMPILE_FROM = 0
    updates.SMALL = 0
    if INTERPRETED:
        compiled.KERNELS.add("cpu")


def compiles(test):
    """Mark of tests that compile."""
    from lowmem.step.compiled import has_compiler

    test = pytest.mark.skipif(not has_compiler("cpu"), reason="no C++ compiler")(test)
    return pytest.mark.cpu_only("the simulated GPU has no compiler")(test)


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a tensor has the bits of torch's AdamW, or its values where updates are compiled: they fuse multiply-adds
    as the fused kernel of torch does, which does not in the last elements of a tensor that fill no vector."""
    return torch.allclose(one, other, rtol=1e-5, atol=1e-6) if FORCED else torch.equal(one, other)
