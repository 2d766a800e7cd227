"""How cost grows with the model: the time that AdaLomo adds to a step, and the step's memory, up to 1B parameters.

    python -m benchmarks.growth [--tokens 128 --steps 5] [--timed 300M]

Memory is that of a planned step, whose tensors have no data, and that of a real step up to the largest model that is
timed. The time is that of a step less that of a step whose gradients are dropped in their hooks; both are medians.
Lines are fitted by least squares of relative deviations.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses import FakeTensorMode

import lowmem
from benchmarks import reports
from benchmarks.baselines import Step, drop_gradients, fused
from benchmarks.measurement import median_seconds
from benchmarks.models import llama, loss_of
from benchmarks.reports import command, headline, picture, print_table
from lowmem.run.memory import step_memory

# Layers, hidden size and that inside a layer; the vocabulary is 8192.
SIZES = {
    "10M": (7, 256, 768),
    "30M": (7, 512, 1536),
    "100M": (12, 768, 2048),
    "300M": (24, 1024, 2816),
    "1B": (20, 2048, 5632),
}


def workload(size: str, tokens: int, dtype: str) -> tuple[Any, Any]:
    """A model and a function that computes its loss."""
    model = llama(*SIZES[size], 8192, dtype, attn_implementation="eager")
    return model, loss_of(model, torch.ones(1, tokens, dtype=torch.int64))


def memory(size: str, tokens: int, dtype: str) -> dict[str, int]:
    """Bytes of the weights, and of all tensors at the peak of a step."""
    model, loss = workload(size, tokens, dtype)

    def optimizer() -> lowmem.FusedOptimizer:
        return lowmem.FusedOptimizer(model.named_parameters(), lr=1e-4, compile=False)

    step = step_memory(model, optimizer, [loss], [])
    return {"weights": step.items["weights"], "peak": step.peak}


def seconds(size: str, tokens: int, dtype: str, steps: int) -> dict[str, float]:
    """Of a step that drops its gradients, and of one that updates, compiled."""
    times = {}
    makers: dict[str, Callable[..., Step]] = {"floor": drop_gradients, "step": partial(fused, compile=True)}
    for name, make in makers.items():
        model, loss = workload(size, tokens, dtype)
        times[name] = median_seconds(partial(make(model), [loss]), steps, warmup=2)
        del model, loss
    return times


def line(x: Sequence[float], y: Sequence[float]) -> dict[str, float]:
    """Fits y = intercept + slope · x, and returns also the largest deviation relative to y."""
    design = np.stack([np.ones(len(x)), np.array(x)], axis=1) / np.array(y)[:, None]
    (intercept, slope), *_ = np.linalg.lstsq(design, np.ones(len(x)), rcond=None)
    fitted = intercept + slope * np.array(x)
    return {"intercept": intercept, "slope": slope, "deviation": float(np.abs(fitted / np.array(y) - 1).max())}


@command
def main(argv: Sequence[str] | None = None) -> None:
    counts = {"tokens": (128, "tokens per step"), "steps": (5, "timed steps")}
    parser = reports.make_parser(__doc__, counts)
    parser.add_argument("--timed", choices=SIZES, default="300M", help="the largest model that is timed (300M)")
    options = parser.parse_args(argv)
    names = list(SIZES)
    results: dict[str, dict[str, float]] = {}
    with reports.output(options.out, "growth"):
        print(f"{headline(options.dtype)}\n", flush=True)
        for name in names:
            with FakeTensorMode():
                results[name] = dict(memory(name, options.tokens, options.dtype))
            if names.index(name) <= names.index(options.timed):
                results[name]["real peak"] = memory(name, options.tokens, options.dtype)["peak"]
                results[name] |= seconds(name, options.tokens, options.dtype, options.steps)
        report(results, options)


def report(results: dict[str, dict[str, float]], options: Any) -> None:
    """Prints and writes the figures of each size, and the fitted lines."""

    def column(key: str, form: str, unit: float = 1) -> list[str]:
        return [f"{row[key] / unit:{form}}" if key in row else "–" for row in results.values()]

    columns = (column("weights", ",.0f", 2**20), column("peak", ",.1f", 2**20), column("real peak", ",.1f", 2**20))
    rows = zip(results, *columns, column("floor", ".3f"), column("step", ".3f"), strict=True)
    planned = ("parameters", "weights, MiB", "peak of tensors, MiB: planned", "real")
    print_table((*planned, "step without update, s", "with update, s"), list(rows))
    itemsize = getattr(torch, options.dtype).itemsize
    timed = [row for row in results.values() if "step" in row]
    weights = [row["weights"] for row in results.values()]
    lines = {
        "peak, bytes over bytes of weights": line(weights, [row["peak"] for row in results.values()]),
        "update, seconds over parameters": line(
            [row["weights"] / itemsize for row in timed], [row["step"] - row["floor"] for row in timed]
        ),
    }
    print()
    for what, fit in lines.items():
        print(what, {key: float(f"{value:.4g}") for key, value in fit.items()})
    settings = {key: getattr(options, key) for key in ("tokens", "steps", "dtype")}
    reports.save(options.out / "growth.json", settings, results=results, lines=lines)
    draw(results, itemsize, *lines.values(), path=options.out / "growth.png", dtype=options.dtype)


def draw(
    results: dict[str, dict[str, float]],
    itemsize: int,
    peak: dict[str, float],
    update: dict[str, float],
    *,
    path: Path,
    dtype: str,
) -> None:
    """Draws memory and time against the number of parameters, with the fitted lines."""
    sizes = np.array([row["weights"] / itemsize for row in results.values()])
    timed = [row for row in results.values() if "step" in row]
    title = f"AdaLomo on Llamas of 10M to 1B parameters, activation checkpointing\n{headline(dtype)}"
    with picture(path, title, (10, 4), 2) as (left, right):
        left.plot(sizes, [row["peak"] / 2**20 for row in results.values()], "o", color="#1f5fa8", label="planned")
        real = [row["real peak"] / 2**20 for row in timed]
        left.plot(sizes[: len(timed)], real, "x", color="#d1495b", ms=9, label="real")
        fitted = (peak["intercept"] + peak["slope"] * itemsize * sizes) / 2**20
        label = f"{peak['intercept'] / 2**20:.0f} MiB + {peak['slope']:.3f} × weights"
        left.plot(sizes, fitted, color="#888888", lw=1, label=label)
        left.set(xlabel="parameters", ylabel="peak of tensors (MiB)", title="memory of a step")
        times = [(row["step"] - row["floor"]) * 1e3 for row in timed]
        right.plot(sizes[: len(timed)], times, "o", color="#2a8f7c", label="measured")
        fitted = (update["intercept"] + update["slope"] * sizes[: len(timed)]) * 1e3
        label = f"{update['intercept'] * 1e3:.1f} ms + {update['slope'] * 1e12:.0f} ms per 10⁹ parameters"
        right.plot(sizes[: len(timed)], fitted, color="#888888", lw=1, label=label)
        right.set(xlabel="parameters", ylabel="added to a step (ms)", title="time of the update")
        for axes in (left, right):
            axes.set(xscale="log", yscale="log")
            axes.legend(frameon=False)


if __name__ == "__main__":
    main()
