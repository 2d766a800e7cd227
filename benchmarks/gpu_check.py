"""Measures memory and time on a GPU within `--budget` seconds. Only torch and transformers need to be installed.

    python -m benchmarks.gpu_check [--out gpu_check.json] [--budget 500] [--small]

The most important parts run first. Every measurement is written to the report immediately, with its goal (if any) and
whether the goal is met. If a part fails, its error is reported and the other parts still run. A part that needs more
seconds than remain in the budget is reported as skipped. `--small` reduces all sizes, to try the script without a GPU.
The correctness of results is tested by `scripts/test.sh --gpu`.
"""

import argparse
import itertools
import json
import os
import platform
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lowmem
from benchmarks import measurement
from benchmarks.engine import has_compiler
from benchmarks.gpu.device import (
    DEVICE,
    GPU,
    Updates,
    clear,
    device_seconds,
    host_seconds,
    kernels,
    median,
    normal,
    peak,
    pinned_bytes,
    squares,
)  # fmt: skip
from benchmarks.gpu.report import Report
from benchmarks.methods import Step, drop_gradients, fused, ordinary
from benchmarks.pages import markdown
from lowmem.layers.head import linear_cross_entropy
from lowmem.layers.head_tiles import MEMORY
from lowmem.tiles.quantized import plain

COMPILES = has_compiler(DEVICE.type)
CLIPPED = {"clip_norm": 1.0}
POLICIES: dict[str, dict[str, Any]] = {
    "two_pass": {"policy": "two_pass", **CLIPPED},
    "deferred, host": {"policy": "deferred", "store": "host", **CLIPPED},
    "deferred, auto": {"policy": "deferred", **CLIPPED},
}


def environment(report: Report, small: bool) -> None:
    import transformers

    report.row("lowmem", lowmem.__version__, small=small, python=platform.python_version(), cpus=os.cpu_count())
    report.row("torch", torch.__version__, cuda=torch.version.cuda, transformers=transformers.__version__)
    if GPU:
        device = torch.cuda.get_device_properties(0)
        report.row("device", device.name, bytes=device.total_memory, free=torch.cuda.mem_get_info()[0])
    report.row("torch.compile has a compiler", COMPILES)


# -- memory and time ---------------------------------------------------------------------------------------------------


UPDATES: dict[str, dict[str, Any]] = {
    "AdamW(fused=True) in hooks": {"rule": torch.optim.AdamW, "fused": True, "lr": 1e-3, "rounding": "nearest"},
    "adamw, bfloat16 states": {"rule": "adamw", "rounding": "nearest", "state_storage": "bfloat16"},
    "adamw, 8-bit states": {"rule": "adamw", "rounding": "stochastic", "state_storage": "8bit_64"},
    "adamw, int12 weights": {"rule": "adamw", "weights": "int12", "state_storage": "8bit_64"},
    "adalomo": {"rule": "adalomo", "rounding": "nearest"},
    "adalomo, stochastic": {"rule": "adalomo", "rounding": "stochastic"},
    "adalomo, compensated": {"rule": "adalomo", "rounding": "compensated"},
    "adalomo, eager": {"rule": "adalomo", "rounding": "nearest", "compile": False},
}
BITS = ("adamw, bfloat16 states", "adamw, 8-bit states", "adamw, int12 weights", "adalomo, stochastic")
UPDATE_GOALS = {"adalomo": 0.9, "adamw, bfloat16 states": 1.5, "adamw, 8-bit states": 2.0}


def bits(report: Report, small: bool) -> None:
    """Measures the share of weights that differ after three updates by kernels and three by tiles, which sum in a
    different order. The constructor of `Updates` runs the first update.
    """
    for name in BITS:
        with report.trial(name):
            side = 64 if small else 1000
            results = []
            for compiled in (COMPILES and not small, False):
                tested = Updates((side, side), 1, **{**UPDATES[name], "compile": compiled})
                tested.run()
                tested.run()
                results.append(plain(tested.params[0].detach()).float())
            differing = results[0].ne(results[1]).float().mean().item()
            report.row(f"bits, {name}: share of weights that differ", differing, 0.01 if "adalomo" in name else 0.0)


def updates(report: Report, small: bool) -> None:
    """Measures the temporary memory of an update, and its time relative to a copy of the same number of bytes and to a
    step of torch's fused AdamW with bfloat16 weights and states. The matrices together are far larger than a cache.
    """
    side, count = (64, 2) if small else (4096, 16)
    compiled = COMPILES and not small
    numel = side * side
    pairs = torch.zeros(count, 2, 3 * numel, dtype=torch.bfloat16, device=DEVICE)
    # AdaLomo reads the gradient three times and the weight twice, and writes the weight once
    floor = device_seconds(lambda pairs=pairs: [target.copy_(source) for target, source in pairs]) / count
    report.row("copy: bytes per second", 12 * numel / floor)
    del pairs
    params = [nn.Parameter(normal(side, side)) for _ in range(count)]
    for param in params:
        param.grad = torch.zeros_like(param)
    adamw = torch.optim.AdamW(params, lr=1e-3, fused=True)
    adamw.step()
    adamw_seconds = device_seconds(adamw.step) / count
    report.row("AdamW(fused=True).step()", adamw_seconds)
    del params, param, adamw
    seconds: dict[str, float] = {}
    for name, options in UPDATES.items():
        with report.trial(name):
            tested = Updates((side, side), count, **{"compile": compiled and "fused" not in options, **options})
            above = peak(tested.run)
            seconds[name] = device_seconds(tested.run) / count
            report.row(
                f"update, {name}: temporary memory, relative to the parameter",
                None if above is None else above / (2 * numel),
                0.01 if "fused" not in options and "eager" not in name else None,
                seconds=seconds[name],
                host_seconds=host_seconds(tested.run) / count,
                kernels=kernels(tested.run),
                first_seconds=tested.first_seconds,
            )
        tested = None
        clear()
    for name, taken in seconds.items():
        report.row(f"update, {name}: times AdamW(fused=True).step()", taken / adamw_seconds, UPDATE_GOALS.get(name))
    report.row("update, adalomo: times the copy", seconds["adalomo"] / floor, 1.3)
    ratio = seconds["adalomo, stochastic"] / seconds["adalomo"]
    report.row("update, adalomo, stochastic: times nearest", ratio, 1.3)


def offload(report: Report, small: bool) -> None:
    """Measures the pinned memory of offloaded gradients, since torch's allocator rounds blocks up to powers of two."""
    sizes = ((48, 40), (33,)) if small else ((5000, 4000), (3000, 4000), (4000,))
    params = [nn.Parameter(normal(*size)) for size in sizes]
    before = pinned_bytes()
    opt = lowmem.FusedOptimizer(params, rule="adamw", lr=1e-3, **POLICIES["deferred, host"])
    for _ in range(2):
        opt.backward(squares(params))
    needed = sum(param.nbytes for param in params)
    pinned = pinned_bytes() - before if GPU else None
    report.row("pinned memory, relative to the gradients", pinned and pinned / needed, 1.1, bytes=pinned)


def loading(report: Report, small: bool) -> None:
    """Measures the peak of moving a 10-bit model to the device, which must not create a full bfloat16 copy."""
    side = 128 if small else 4096
    model = nn.Sequential(*(nn.Linear(side, side, bias=False, dtype=torch.bfloat16) for _ in range(8)))
    lowmem.quantize_(model, "int10")
    before = torch.cuda.memory_allocated() if GPU else 0
    above = peak(lambda: model.to(DEVICE))
    stored = torch.cuda.memory_allocated() - before if GPU else 0
    report.row("peak of loading 10-bit weights, relative to their bytes", above and above / stored, 1.1, bytes=stored)


# -- steps -------------------------------------------------------------------------------------------------------------

# Name → layers, hidden size, intermediate size, vocabulary size, attention heads
MODELS = {
    "8B": (32, 4096, 14336, 128256, 32),
    "1B": (16, 2048, 8192, 128256, 32),
    "100M": (8, 768, 2048, 32000, 12),
    "tiny": (2, 64, 128, 512, 4),
    "narrow": (4, 160, 320, 512, 4),
}

adalomo = partial(fused, rule="adalomo", rounding="stochastic")


def llama(name: str) -> Any:
    """Returns a Llama with random bfloat16 weights and activation checkpointing."""
    *size, heads = MODELS[name]
    options = {"num_attention_heads": heads, "num_key_value_heads": heads // 4, "attn_implementation": "sdpa"}
    return measurement.llama(*size, "bfloat16", DEVICE, **options)


def cross_entropy(model: Any, ids: Tensor, memory: int) -> Tensor:
    """Computes the loss of a batch without a full matrix of logits."""
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1)
    return linear_cross_entropy(hidden, model.lm_head.weight, ids[:, 1:].flatten(), memory=memory)


def steps(
    report: Report, name: str, rows: int, tokens: int, *, memory: int, goal: float | None = None, policies: bool = False
) -> None:
    """Measures the time and peak memory of training steps with dropped gradients, lowmem and AdamW.

    Args:
        memory: bytes for temporary tensors of the loss and of the head's gradient.
        goal: goal for AdaLomo's time relative to dropped gradients.
        policies: whether policies that clip by the global norm are also measured.
    """
    methods: dict[str, Callable[[Any], Step]] = {"gradients dropped": drop_gradients, "adalomo": adalomo}
    if policies:
        methods |= {policy: partial(adalomo, **options) for policy, options in POLICIES.items()}
        methods["AdamW(fused=True), clipped"] = partial(ordinary, cls=torch.optim.AdamW, fused=True, **CLIPPED)
    methods["AdamW(fused=True)"] = partial(ordinary, cls=torch.optim.AdamW, fused=True)
    floor = 0.0
    for method, make in methods.items():
        label = f"{name}, {rows} x {tokens} tokens, head_memory {memory >> 20} MiB, {method}"
        with report.trial(label):
            others = torch.cuda.memory_allocated() if GPU else 0
            model = llama(name)
            weights = sum(param.nbytes for param in model.parameters())
            ids = torch.randint(0, model.config.vocab_size, (rows, tokens), device=DEVICE)
            take = make(model)
            run = partial(take, [partial(cross_entropy, model, ids, memory)])
            first = measurement.seconds(run)
            run()
            before = torch.cuda.memory_allocated() if GPU else 0
            above = peak(run)
            taken = median(run, 4)
            floor = floor or taken
            is_adalomo = method == "adalomo"
            figures = {"seconds": taken, "tokens_per_second": rows * tokens / taken, "first_seconds": first}
            report.row(f"{label}: times gradients dropped", taken / floor, goal if is_adalomo else None, **figures)
            total = None if above is None else (before + above - others) / weights
            report.row(f"{label}: peak over the weights", total, 1.15 if is_adalomo else None)
        model = take = run = None  # type: ignore[assignment]
        clear()


def small_steps(report: Report, small: bool) -> None:
    steps(report, "tiny" if small else "100M", 1, 16 if small else 128, memory=MEMORY, goal=1.12)


def one_billion(report: Report, small: bool) -> None:
    name, tokens = ("tiny", 64) if small else ("1B", 2048)
    for rows, memory in itertools.product((1, 8), (MEMORY, 4 * MEMORY)):
        steps(report, name, rows, tokens, memory=memory, policies=(rows, memory) == (1, MEMORY))


def eight_billion(report: Report, small: bool) -> None:
    """Measures a model with 16 GB of weights. Out-of-memory errors are reported, such as AdamW's on a small GPU."""
    steps(report, "tiny" if small else "8B", 1, 64 if small else 2048, memory=4 * MEMORY, policies=True)


def streamed(report: Report, small: bool) -> None:
    """Measures steps with 4 GiB of the weights on the device relative to steps with all weights on it, the rate of
    copies relative to one copy of a layer, and the share of a step in which the device waits for copies.
    """
    name, tokens, budget = ("narrow", 64, None) if small else ("8B", 4096, 4 << 30)
    resident = 0.0
    for streams in (False, True):
        label = f"{name}, {tokens} tokens, adalomo, {'streamed' if streams else 'resident'}"
        with report.trial(label):
            model = llama(name)
            others = torch.cuda.memory_allocated() if GPU else 0
            streaming = lowmem.stream(model, DEVICE, device_memory=budget) if streams else None
            take = adalomo(model)
            ids = torch.randint(0, model.config.vocab_size, (1, tokens), device=DEVICE)
            run = partial(take, [partial(cross_entropy, model, ids, MEMORY)])
            run()
            run()
            above = peak(run)
            before = streaming and (streaming.fetched + streaming.written, streaming.waited)
            taken = median(run, 3)
            resident = resident or taken
            report.row(f"{label}: times resident", taken / resident, seconds=taken, tokens_per_second=tokens / taken)
            report.row(f"{label}: peak above the bytes allocated before the step", above, weights_and_others=others)
            if streaming is not None and before is not None:
                unit = next(iter(streaming.units))
                source = torch.empty(unit.nbytes, dtype=torch.uint8, device="cpu", pin_memory=GPU)
                target = torch.empty_like(source, device=DEVICE)
                bare = unit.nbytes / median(partial(target.copy_, source, non_blocking=True), 5)
                rate = (streaming.fetched + streaming.written - before[0]) / 3 / taken
                waits = (streaming.waited - before[1]) / 3 / taken
                figures = {"layers": len(streaming.units), "rate": rate, "bare_rate": bare, "waiting": waits}
                report.row(f"{label}: rate of copies, relative to a single copy", rate / bare, **figures)
        model = take = run = streaming = None  # type: ignore[assignment]
        clear()


def tables(report: dict[str, Any]) -> dict[str, str]:
    """Returns a table of steps, with the seconds and the peak of each method, by model, tokens and head memory."""
    rows = [row for part in report.values() if isinstance(part, dict) for row in part["rows"]]
    measured = {row["what"]: row for row in rows if "measured" in row}
    steps: dict[tuple[str, ...], dict[str, str]] = {}
    for what, row in measured.items():
        if match := re.fullmatch(r"(\w+), (.+) tokens, head_memory (.+) MiB, (.+): times gradients dropped", what):
            *step, method = match.groups()
            peak = measured[what.replace("times gradients dropped", "peak over the weights")]["measured"]
            steps.setdefault(tuple(step), {})[method] = f"{row['seconds']:.3f} s, {peak:.2f} ×"
    methods = dict.fromkeys(method for cells in steps.values() for method in cells)
    return {
        "": markdown(
            [
                {
                    **dict(zip(("model", "tokens", "head memory, MiB"), step, strict=True)),
                    **{method: cells.get(method, "–") for method in methods},
                }
                for step, cells in steps.items()
            ]
        )
    }


# The parts in order of importance, with the maximum number of seconds of each, including compilation.
PARTS: tuple[tuple[Callable[[Report, bool], None], float], ...] = (
    (environment, 5), (bits, 30), (updates, 80), (one_billion, 90), (eight_billion, 100), (small_steps, 40),
    (offload, 10), (loading, 5), (streamed, 60),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--budget", type=float, default=500, help="seconds from the start")
    parser.add_argument("--only", nargs="+", default=[measure.__name__ for measure, _ in PARTS], help="parts to run")
    parser.add_argument("--small", action="store_true", help="reduce all sizes, to try the script on any machine")
    options = parser.parse_args()
    report = Report(options.out, options.budget)
    for measure, needs in PARTS:
        if measure.__name__ in options.only:
            report.part(measure, needs, options.small)
    print(options.out.read_text())
    for row in report.goals():
        met = {True: "met", False: "NOT MET", None: "not measured"}[row["met"]]
        print(f"{row['what']}: {json.dumps(row['measured'])} (goal {row['goal']}): {met}", file=sys.stderr)
    sys.exit(report.failed)


if __name__ == "__main__":
    main()
