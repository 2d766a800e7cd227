"""Compilation at any size, in the tests and in all processes that they start: `scripts/test.sh --compiled`."""

import os

FORCED = bool(os.environ.get("LOWMEM_COMPILED"))


def force() -> None:
    """Makes `compile="auto"` compile every update, none of them in a stack, if that was asked for."""
    if not FORCED:
        return
    from lowmem.step import compiled, shards, updates

    compiled.COMPILE_FROM = 0
    updates.SMALL = shards.SMALL = 0
