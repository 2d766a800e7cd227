"""The cost of hooks and dispatch: a backward into many small tensors, and the same with a bare hook per tensor.

    python -m benchmarks.dispatch [--count 720 --repeats 15]

A bare hook only drops the gradient. With 64 elements per tensor the update computes next to nothing, and hooks take
the time; with 64 × 64 the update counts too. Small tensors are always updated eagerly. Times are medians of the
backward alone.
"""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

import lowmem
from benchmarks import reports
from benchmarks.pages import markdown
from benchmarks.reports import command

RULES = ("lomo", "adalomo", "adamw")
BARE = "bare hook"


def milliseconds(params: Sequence[Tensor], backward: Callable[[Tensor], object], repeats: int) -> float:
    """Times a backward into all tensors, after three to warm up."""
    times = []
    for _ in range(repeats + 3):
        loss = torch.stack([param.sum() for param in params]).sum()
        start = time.perf_counter()
        backward(loss)
        times.append(time.perf_counter() - start)
    return median(times[3:]) * 1e3


def bare(params: Sequence[Tensor], repeats: int) -> float:
    hooks = [param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)) for param in params]
    result = milliseconds(params, torch.Tensor.backward, repeats)
    for hook in hooks:
        hook.remove()
    return result


def fused(params: Sequence[Tensor], rule: str, repeats: int) -> float:
    opt = lowmem.FusedOptimizer(params, rule=rule, lr=1e-5)
    result = milliseconds(params, opt.backward, repeats)
    opt.remove()
    return result


def tables(report: Any) -> dict[str, str]:
    rows = []
    for size, times in report["milliseconds"].items():
        ratios = {name: f"{taken:.1f} ({taken / times[BARE]:.1f} ×)" for name, taken in times.items() if name != BARE}
        rows.append({f"{report['settings']['count']} tensors of": size, BARE: f"{times[BARE]:.1f}", **ratios})
    return {"": markdown(rows)}


@command
def main(argv: Sequence[str] | None = None) -> None:
    counts = {"count": (720, "number of tensors"), "repeats": (15, "timed backwards")}
    options = reports.make_parser(__doc__, counts).parse_args(argv)
    results: dict[str, dict[str, float]] = {}
    with reports.output(options.out):
        for shape in ((64,), (64, 64)):
            values = (torch.randn(shape).to(getattr(torch, options.dtype)) for _ in range(options.count))
            params = [torch.nn.Parameter(value) for value in values]
            times = {f"lowmem {rule}": fused(params, rule, options.repeats) for rule in RULES}
            results[" x ".join(map(str, shape))] = {BARE: bare(params, options.repeats), **times}
        settings = {"count": options.count, "repeats": options.repeats, "dtype": options.dtype}
        reports.publish(options.out, "dispatch", settings, tables, milliseconds=results)


if __name__ == "__main__":
    main()
