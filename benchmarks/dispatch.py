"""What hooks and dispatch cost: a backward into 720 small tensors, beside one bare hook each that drops the gradient.

    python benchmarks/dispatch.py [--count 720 --repeats 15] [--out benchmarks/results]

With 64 elements a tensor next to nothing is computed, and what is left is the cost of hooks; with 64 x 64 the update is
in it too. Ours are run eagerly, as small tensors always are. Milliseconds of the backward alone, medians.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

import lowmem
from benchmarks.comparison import machine

RULES = ("lomo", "adalomo", "adamw")


def milliseconds(params: Sequence[Tensor], backward: Callable[[Tensor], object], repeats: int) -> float:
    """Of a backward into all of them, after three that warm up."""
    taken = []
    for _ in range(repeats + 3):
        loss = torch.stack([param.sum() for param in params]).sum()
        start = time.perf_counter()
        backward(loss)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[3:]) * 1e3


def drop(param: Tensor) -> None:
    param.grad = None


def bare(params: Sequence[Tensor], repeats: int) -> float:
    """One hook a parameter that drops the gradient."""
    hooks = [param.register_post_accumulate_grad_hook(drop) for param in params]
    found = milliseconds(params, torch.Tensor.backward, repeats)
    for hook in hooks:
        hook.remove()
    return found


def fused(params: Sequence[Tensor], rule: str, repeats: int) -> float:
    opt = lowmem.FusedOptimizer(params, rule=rule, lr=1e-5)
    found = milliseconds(params, opt.backward, repeats)
    opt.remove()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for option, default in (("count", 720), ("repeats", 15)):
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    results = {}
    print(f"| {options.count} tensors of | contender | ms | x a bare hook |\n| --- | --- | --- | --- |")
    for shape in ((64,), (64, 64)):
        params = [torch.nn.Parameter(torch.randn(shape).bfloat16()) for _ in range(options.count)]
        found = {"bare hook": bare(params, options.repeats)}
        found |= {f"lowmem {rule}": fused(params, rule, options.repeats) for rule in RULES}
        size = " x ".join(map(str, shape))
        results[size] = found
        for name, taken in found.items():
            print(f"| {size} | {name} | {taken:.1f} | {taken / found['bare hook']:.2f} |")
    settings = {"count": options.count, "repeats": options.repeats, "threads": torch.get_num_threads()}
    options.out.mkdir(parents=True, exist_ok=True)
    report = {"settings": settings, "machine": machine(), "milliseconds": results}
    (options.out / "dispatch.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
