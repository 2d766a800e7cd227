"""One update of one small or medium parameter, from its hook to its end: what a call costs.

    python -m benchmarks.one_update

Times are medians of AdaLomo, compiled, and of AdamW(fused=True), which take turns.
"""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch.utils.benchmark import Timer

from benchmarks import reports
from benchmarks.pages import markdown
from benchmarks.reports import command
from benchmarks.update import lowmem_update, torch_update

SHAPES = ((64, 64), (256, 128), (768, 768), (768, 2048))
OURS, PEER = "lowmem adalomo", "AdamW(fused=True)"


def updates(shape: tuple[int, int], dtype: str) -> dict[str, Callable[[], object]]:
    def tensor() -> torch.Tensor:
        return torch.randn(shape).to(getattr(torch, dtype))

    ours, _ = lowmem_update(torch.nn.Parameter(tensor()), tensor(), "adalomo")
    peer, _ = torch_update(torch.nn.Parameter(tensor()), tensor(), torch.optim.AdamW, fused=True)
    return {OURS: ours, PEER: peer}


@torch.no_grad()
def microseconds(runs: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """The median time of each, in turns, after one to warm up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(turns + 1):
        for name, run in runs.items():
            timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
            times[name].append(timer.blocked_autorange(min_run_time=0.1).median * 1e6)
    return {name: median(taken[1:]) for name, taken in times.items()}


def tables(report: Any) -> dict[str, str]:
    rows = []
    for shape, times in report["microseconds"].items():
        taken = {f"{name}, µs": f"{time:.0f}" for name, time in times.items()}
        rows.append({"shape": shape, **taken, "ratio": f"{times[OURS] / times[PEER]:.2f}"})
    return {"": markdown(rows)}


@command
def main(argv: Sequence[str] | None = None) -> None:
    options = reports.make_parser(__doc__, {"turns": (10, "of both")}).parse_args(argv)
    with reports.output(options.out):
        times = {
            " x ".join(map(str, shape)): microseconds(updates(shape, options.dtype), options.turns) for shape in SHAPES
        }
        settings = {"turns": options.turns, "dtype": options.dtype}
        reports.publish(options.out, "one_update", settings, tables, microseconds=times)


if __name__ == "__main__":
    main()
