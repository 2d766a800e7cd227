"""Measures the host time per large parameter, from its hook to the end of its update.

    python -m benchmarks.host [--count 32 --repeats 20 --rounds 5]

Compiled code and kernel launches are replaced by functions that compute nothing, so only host time is measured. A GPU
waits for the host if its kernels take less time. With "waiting", several parameters are updated together once their
gradients have as many elements as the largest one. torch's `AdamW(fused=True)` has one optimizer per parameter, which
steps in a hook; its time includes an update of 160 × 160 elements. The result is thread time: the minimum over all
steps for each parameter except the first (which starts the step), averaged over parameters.
"""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

import lowmem
from benchmarks import reports
from benchmarks.engine import without_computing
from benchmarks.pages import markdown
from benchmarks.reports import command

RULES = ("adalomo", "adamw", "lion")
BASE = "AdamW, fused, in hooks"
SHAPE = 160, 160  # updates of at least 2¹⁴ elements are compiled

# Registers hooks that update parameters, and returns an object that must stay alive with them.
Register = Callable[[Sequence[Tensor]], object]


def microseconds(
    register: Register, count: int, repeats: int, dtype: torch.dtype, *, waiting: bool = False
) -> list[float]:
    """Returns the time per hook after three warm-up steps. waiting: all parameters but one are updated together."""
    shapes = [SHAPE] * count
    if waiting:
        shapes[-1] = (count - 1) * SHAPE[0], SHAPE[1]  # its gradient comes first
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    begins, ends = list[int](), list[int]()
    for param in params:
        param.register_post_accumulate_grad_hook(lambda _: begins.append(time.thread_time_ns()))
    alive = register(params)
    for param in params:
        param.register_post_accumulate_grad_hook(lambda _: ends.append(time.thread_time_ns()))
    least = [math.inf] * count
    for number in range(repeats + 3):
        begins.clear()
        ends.clear()
        torch.stack([param.sum() for param in params]).sum().backward()
        if number >= 3:
            least = [min(old, (end - begin) / 1e3) for old, begin, end in zip(least, begins, ends, strict=True)]
    del alive
    return least[1:]


def fused(params: Sequence[Tensor], rule: str) -> object:
    return lowmem.FusedOptimizer(params, rule=rule, lr=1e-5, compile=True)


def timed_in_turn(timed: Callable[..., list[float]]) -> dict[str, list[float]]:
    """Measures each method once."""
    times = {BASE: timed(hooked)}
    for kernels, code in ((False, "compiled for a CPU"), (True, "kernels of a GPU")):
        with without_computing(kernels=kernels):
            times |= {f"{rule}, {code}": timed(partial(fused, rule=rule)) for rule in RULES}
    with without_computing(kernels=True, waiting=True):
        times |= {
            f"{rule}, kernels of a GPU, waiting": timed(partial(fused, rule=rule), waiting=True) for rule in RULES
        }
    return times


def hooked(params: Sequence[Tensor]) -> object:
    """Creates an `AdamW(fused=True)` per parameter, which steps in the parameter's hook."""

    def step(param: Tensor, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        param.grad = None

    for param in params:
        optimizer = torch.optim.AdamW([param], lr=1e-5, fused=True)
        param.register_post_accumulate_grad_hook(partial(step, optimizer=optimizer))
    return None


def tables(report: Any) -> dict[str, str]:
    times = report["microseconds"]
    rows = [
        {"update": name, "µs per parameter": f"{taken:.0f}", f"× {BASE}": f"{taken / times[BASE]:.1f}"}
        for name, taken in times.items()
    ]
    return {"": markdown(rows)}


@command
def main(argv: Sequence[str] | None = None) -> None:
    counts = {
        "count": (32, "number of parameters"),
        "repeats": (20, "timed steps per round"),
        "rounds": (5, "number of measurements of each method"),
    }
    options = reports.make_parser(__doc__, counts).parse_args(argv)
    settings = {**{name: getattr(options, name) for name in counts}, "dtype": options.dtype}
    timed = partial(microseconds, count=options.count, repeats=options.repeats, dtype=getattr(torch, options.dtype))
    with reports.output(options.out):
        rounds = [timed_in_turn(timed) for _ in range(options.rounds)]
        times = {name: mean(map(min, zip(*(times[name] for times in rounds), strict=True))) for name in rounds[0]}
        reports.publish(options.out, "host", settings, tables, microseconds=times)


if __name__ == "__main__":
    main()
