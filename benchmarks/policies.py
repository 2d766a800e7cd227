"""A whole training step under each policy, beside ordinary training that clips and accumulates.

    python benchmarks/policies.py [--layers 8 --hidden 768 --tokens 64 --batch 8] [--out benchmarks/results]

Every contender sees the same tokens a step; those named `8 micro-batches` a row at a time. All but `floor` and
`immediate` clip by the norm over all gradients. The figures are ratios to `immediate`.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from side_by_side import DEVICE, Loss, Step, draw, drop_gradients, measure, options_of, ordinary, rounds, save, tell

import lowmem

EIGHT = ", 8 micro-batches"


def fused(**settings: object) -> Callable[[torch.nn.Module], Step]:
    def make(model: torch.nn.Module) -> Step:
        opt = lowmem.FusedOptimizer(model.named_parameters(), **{"rule": "adalomo", "lr": 1e-3, **settings})

        def step(losses: Sequence[Loss]) -> None:
            for n, loss in enumerate(losses, start=1):
                with opt.accumulate() if n < len(losses) else nullcontext():
                    opt.backward(lambda loss=loss: loss() / len(losses))

        return step

    return make


CLIPPED = {"clip_norm": 1.0}
ADAMW = ordinary(torch.optim.AdamW, clip_norm=1.0, lr=1e-4, fused=True)
CONTENDERS = {
    "floor": drop_gradients,
    "immediate": fused(policy="immediate"),
    "two_pass": fused(policy="two_pass", **CLIPPED),
    "two_pass, forward replay": fused(policy="two_pass", replay="forward", **CLIPPED),
    "deferred": fused(policy="deferred", **CLIPPED),
    "deferred, on disk": fused(policy="deferred", store="disk", **CLIPPED),
    "deferred, rule adamw": fused(policy="deferred", rule="adamw", **CLIPPED),
    "ordinary AdamW(fused=True)": ADAMW,
    f"floor{EIGHT}": drop_gradients,
    f"deferred, float32 sums{EIGHT}": fused(policy="deferred", **CLIPPED),
    f"deferred, bfloat16 sums{EIGHT}": fused(policy="deferred", sums="gradient", **CLIPPED),
    f"deferred, on disk{EIGHT}": fused(policy="deferred", store="disk", **CLIPPED),
    f"ordinary AdamW(fused=True){EIGHT}": ADAMW,
}


def main() -> None:
    options = options_of(__doc__, tokens=64, batch=8, rounds=2)
    if options.one:
        print(json.dumps(measure(CONTENDERS[options.one], options, 8 if options.one.endswith(EIGHT) else 1)))
        return
    results = rounds(list(CONTENDERS), options.rounds)
    for name, row in results.items():
        # where every tensor is counted the mapped file is one: 4 bytes for each 2 of the weights
        if "on disk" in name and DEVICE.type == "cpu":
            row["tensor_peak"] -= 2 * row["weights"]
    tell(results, options, "immediate")
    save(results, options, "policies")
    colors = ["#e6e6e6" if "floor" in name else "#c9ced6" if "ordinary" in name else "#2a8f7c" for name in results]
    draw(results, colors, options, "immediate", "policies")


if __name__ == "__main__":
    main()
