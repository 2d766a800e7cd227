"""One update of one parameter, from its hook to its end: how long it takes, and what the time goes to.

    python -m benchmarks.one_update [--repeats 300] [--compare runs/before/one_update.json]

Times are medians of the updates of AdaLomo and AdamW(fused=True), which take turns; the smallest parameter shows what
a call costs. The picture is the profile of an update of 768 x 768 by AdaLomo, next to that of another version of lowmem
in the file that `--compare` names. An update takes longer when it is profiled.
"""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import lowmem
from benchmarks import reports
from benchmarks.engine import update_one
from benchmarks.reports import command, headline, print_table

SHAPES = ((64, 64), (256, 128), (768, 768), (768, 2048))
PROFILED = (768, 768)

# What the events of a profile are part of, by how their names begin; the later ones are inside of the earlier ones.
PARTS = {
    "operations": ("aten::",),
    "guards and wrappers": ("TorchDynamo", "Torch-Compiled", "Pregraph", "AOTDispatcher"),
    "compiled code": ("## Call CompiledFxGraph",),
}
COLORS = {"Python": "#e6e6e6", "operations": "#e3b04b", "guards and wrappers": "#c0504d", "compiled code": "#2a8f7c"}

Segment = tuple[str, float, float]  # part, start and length in microseconds


def tensors(shape: tuple[int, int], dtype: str) -> tuple[torch.nn.Parameter, Tensor]:
    kind = getattr(torch, dtype)
    return torch.nn.Parameter(torch.randn(shape).to(kind)), torch.randn(shape).to(kind)


def ours(shape: tuple[int, int], dtype: str) -> Callable[[], None]:
    param, grad = tensors(shape, dtype)
    options = {"rounding": "nearest", "compile": True, "batching": False}
    opt = lowmem.FusedOptimizer([("weight", param)], rule="adalomo", lr=1e-3, **options)
    return lambda: update_one(opt, param, grad)


def fused_adamw(shape: tuple[int, int], dtype: str) -> Callable[[], object]:
    param, param_grad = tensors(shape, dtype)
    param.grad = param_grad
    return torch.optim.AdamW([param], lr=1e-3, fused=True).step


def microseconds(updates: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """The median time of each update, in turns, after five to warm up."""
    times: list[list[float]] = [[] for _ in updates]
    for _ in range(repeats + 5):
        for update, taken in zip(updates, times, strict=True):
            start = time.perf_counter()
            update()
            taken.append(time.perf_counter() - start)
    return [median(taken[5:]) * 1e6 for taken in times]


def segments(update: Callable[[], object]) -> list[Segment]:
    """The profile of an update: Python from its start to its end, and on top of that what it calls."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(3):  # the first ones start the profiler
            begin = time.time_ns()
            update()
            end = time.time_ns()
    assert profiled.profiler is not None
    found: list[Segment] = [("Python", 0.0, (end - begin) / 1e3)]
    events = [event for event in profiled.profiler.kineto_results.events() if begin <= event.start_ns() <= end]
    for part, names in PARTS.items():
        for event in events:
            if event.name().startswith(names):
                found.append((part, (event.start_ns() - begin) / 1e3, event.duration_ns() / 1e3))
    return found


@command
def main(argv: Sequence[str] | None = None) -> None:
    parser = reports.make_parser(__doc__, {"repeats": (300, "timed updates")})
    parser.add_argument("--compare", type=Path, metavar="FILE", help="one_update.json of another version")
    options = parser.parse_args(argv)
    others = {} if options.compare is None else json.loads(options.compare.read_text())["profiles"]
    with reports.output(options.out, "one_update"), torch.no_grad():
        rows, times = [], {}
        for shape in SHAPES:
            pair = ours(shape, options.dtype), fused_adamw(shape, options.dtype)
            adalomo, adamw = microseconds(pair, options.repeats)
            name = " x ".join(map(str, shape))
            times[name] = {"adalomo": adalomo, "AdamW(fused=True)": adamw}
            rows.append((name, f"{adalomo:.0f}", f"{adamw:.0f}", f"{adalomo / adamw:.2f}"))
        print(f"One update of one parameter; {headline(options.dtype)}\n")
        print_table(("shape", "lowmem adalomo, µs", "AdamW(fused=True), µs", "ratio"), rows)
        profiles = {f"before: {name}": each for name, each in others.items()}
        update = ours(PROFILED, options.dtype)
        for _ in range(5):
            update()
        profiles[f"lowmem {lowmem.__version__}"] = segments(update)
        settings = {"repeats": options.repeats, "dtype": options.dtype}
        reports.save(options.out / "one_update.json", settings, microseconds=times, profiles=profiles)
        draw(profiles, headline(options.dtype), options.out / "one_update.png")


def draw(profiles: dict[str, Any], about: str, path: Path) -> None:
    """Draws each profile as a line in time."""
    with reports.picture(
        path, f"An update of {PROFILED[0]} × {PROFILED[1]} by AdaLomo\n{about}", (10.0, 2.6), 1, squeeze=False
    ) as ((axes,),):
        for row, parts in enumerate(profiles.values()):
            for part in COLORS:
                spans = [(start, length) for each, start, length in parts if each == part]
                axes.broken_barh(spans, (row - 0.35, 0.7), color=COLORS[part], label=part if not row else None)
        axes.set_yticks(range(len(profiles)), list(profiles))
        axes.invert_yaxis()
        axes.set_xlabel("µs, profiled")
        axes.legend(fontsize=8, frameon=False, loc="lower right")


if __name__ == "__main__":
    main()
