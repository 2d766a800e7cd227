"""A whole training step under each policy, beside ordinary training that clips and accumulates.

    python benchmarks/policies.py [--size 100M --tokens 64 --batch 8] [--steps 5 --rounds 2] [--out benchmarks/results]

Every contender sees the same tokens a step; those named `8 micro-batches` a row at a time. All but `floor` and
`immediate` clip by the norm over all gradients. The figures are ratios to `immediate`.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from benchmarks import comparison
from benchmarks.baselines import Contender, drop_gradients, fused, ordinary

BASE = "immediate"
EIGHT = ", 8 micro-batches"


def ours(micro_batches: int = 1, **settings: object) -> Contender:
    return Contender(partial(fused, **{"rule": "adalomo", **settings}), "ours", micro_batches=micro_batches)


def deferred(micro_batches: int = 1, **settings: object) -> Contender:
    return ours(micro_batches, policy="deferred", clip_norm=1.0, **settings)


ADAMW = partial(ordinary, cls=torch.optim.AdamW, clip_norm=1.0, fused=True)
CONTENDERS = {
    "floor": Contender(drop_gradients, "floor"),
    BASE: ours(policy="immediate"),
    "two_pass": ours(policy="two_pass", clip_norm=1.0),
    "two_pass, forward replay": ours(policy="two_pass", replay="forward", clip_norm=1.0),
    "deferred": deferred(),
    "deferred, on disk": deferred(store="disk"),
    "deferred, rule adamw": deferred(rule="adamw"),
    "ordinary AdamW(fused=True)": Contender(ADAMW),
    f"floor{EIGHT}": Contender(drop_gradients, "floor", micro_batches=8),
    f"deferred, float32 sums{EIGHT}": deferred(8),
    f"deferred, bfloat16 sums{EIGHT}": deferred(8, accumulation_dtype="gradient"),
    f"deferred, on disk{EIGHT}": deferred(8, store="disk"),
    f"ordinary AdamW(fused=True){EIGHT}": Contender(ADAMW, micro_batches=8),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    comparison.add_arguments(parser, batch=8, tokens=64, rounds=2, out=Path(__file__).parent / "results")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found = comparison.compare(CONTENDERS, comparison.workload_of(options), options.rounds, Console(stderr=True))
    comparison.tell(found, BASE, Console())
    comparison.save_all(found, BASE, options.out, "policies")


if __name__ == "__main__":
    main()
