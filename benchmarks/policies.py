"""Measures the time and memory of a training step under each policy, and with an ordinary optimizer.

    python -m benchmarks.policies [--size 100M --batch 8 --tokens 64]

All methods process the same tokens per step. Methods named `8 micro-batches` split a step into eight micro-batches. All
methods except `floor` and `immediate` clip by the global norm. Times are relative to `immediate`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks import step
from benchmarks.methods import FLOOR, Method, drop_gradients, fused, ordinary
from benchmarks.reports import command

BASE = "immediate"
EIGHT = ", 8 micro-batches"


def lowmem_method(micro_batches: int = 1, **options: Any) -> Method:
    return Method(partial(fused, **{"rule": "adalomo", **options}), "lowmem", micro_batches=micro_batches)


def deferred(micro_batches: int = 1, **options: Any) -> Method:
    return lowmem_method(micro_batches, policy="deferred", clip_norm=1.0, **options)


ADAMW = partial(ordinary, cls=torch.optim.AdamW, clip_norm=1.0, fused=True)
METHODS = {
    FLOOR: Method(drop_gradients, "floor"),
    BASE: lowmem_method(policy="immediate"),
    "two_pass": lowmem_method(policy="two_pass", clip_norm=1.0),
    "deferred": deferred(),
    "deferred, rule adamw": deferred(rule="adamw", state_storage="float32"),
    "ordinary AdamW(fused=True)": Method(ADAMW),
    f"{FLOOR}{EIGHT}": Method(drop_gradients, "floor", micro_batches=8),
    f"deferred, float32 accumulation{EIGHT}": deferred(8),
    f"deferred, gradient's dtype{EIGHT}": deferred(8, accumulation_dtype="gradient"),
    f"ordinary AdamW(fused=True){EIGHT}": Method(ADAMW, micro_batches=8),
}

tables = partial(step.ratios, base=BASE)


@command
def main(argv: Sequence[str] | None = None) -> None:
    options = step.make_parser(__doc__, batch=8, tokens=64, rounds=2).parse_args(argv)
    step.run(METHODS, options, "policies", tables)


if __name__ == "__main__":
    main()
