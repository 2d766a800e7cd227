"""One update of one large parameter, by every rule and by its peers: time and memory.

    python -m benchmarks.update [--size 4096 --rounds 3] [--only adalomo]

Times are ratios to torch's fused AdamW, and to the nearest peer. Temporary memory is the maximum that the allocator has
handed out during an update.
"""

import gc
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from torch import Tensor

import lowmem
from benchmarks import reports
from benchmarks.baselines import Method, exit_if_ours_failed, import_lomo_optim, runnable, select
from benchmarks.engine import update_one
from benchmarks.measurement import median_seconds, peak_of_temporaries
from benchmarks.processes import Figures, alone, in_rounds, medians
from benchmarks.reports import Bars, command, draw_bars, formatted, headline, print_missing, print_table

BASE = "AdamW(fused=True)"
WIDE = ", float32 weights"
RULES = [row.name for row in lowmem.rules.table()]

# Updates a parameter, and returns the tensors of its optimizer state.
Update = tuple[Callable[[], object], Callable[[], list[Tensor]]]


@dataclass(frozen=True)
class UpdateMethod(Method):
    """A method of updating one parameter: `make(param, grad)` returns an `Update`.

    Attributes:
        nearest: the peer that computes the same, or else has a state of the same size.
        dtype: of the weights: that of `--dtype`, or one in which alone it is measured.
    """

    nearest: str | None = None
    dtype: Literal["bfloat16", "float32"] | None = None


def lowmem_update(param: Tensor, grad: Tensor, rule: str, compile: bool = True, **options: Any) -> Update:
    options = {"rounding": "nearest", **options}  # as the peers do
    opt = lowmem.FusedOptimizer([("weight", param)], rule=rule, lr=1e-3, compile=compile, batching=False, **options)
    return lambda: update_one(opt, param, grad), lambda: reports.state_tensors(opt)


def torch_update(param: Tensor, grad: Tensor, cls: Callable[..., torch.optim.Optimizer], **options: Any) -> Update:
    optimizer = cls([param], lr=1e-3, **options)
    param.grad = grad
    return optimizer.step, lambda: reports.state_tensors(optimizer)


def optimi_update(param: Tensor, grad: Tensor, name: str, **options: Any) -> Update:
    return torch_update(param, grad, getattr(importlib.import_module("optimi"), name), **options)


def lomo_optim_update(param: Tensor, grad: Tensor) -> Update:
    optimizer = import_lomo_optim().AdaLomo(torch.nn.ParameterDict({"weight": param}), lr=1e-3, loss_scale=0)
    optimizer.lr = 1e-3

    def update() -> None:
        optimizer.step_num += 1
        param.grad = grad  # changed in place, which takes as long as for a fresh one
        optimizer.grad_func(0)

    return update, lambda: [states["weight"] for states in (optimizer.exp_avg_sq_row, optimizer.exp_avg_sq_col)]


def ours(rule: str, nearest: str | None = None, dtype: Any = None, **options: Any) -> UpdateMethod:
    return UpdateMethod(partial(lowmem_update, rule=rule, **options), "ours", nearest=nearest, dtype=dtype)


def torchs(cls: Callable[..., torch.optim.Optimizer], dtype: Any = None, **options: Any) -> UpdateMethod:
    return UpdateMethod(partial(torch_update, cls=cls, **options), dtype=dtype)


NEAREST = {
    "lomo": "SGD(fused=True)",
    "adalomo": "lomo_optim AdaLomo",
    "adafactor": "torch Adafactor",
    "adafactor_t2t": "torch Adafactor",
    "lion": "optimi Lion",
}
METHODS = {
    **{rule: ours(rule, NEAREST.get(rule, "AdamW")) for rule in RULES},
    "adamw, bfloat16 moments": ours("adamw", BASE, "bfloat16", state_storage="bfloat16"),
    "adamw, bfloat16 moments, stochastic": ours(
        "adamw", BASE, "bfloat16", state_storage="bfloat16", rounding="stochastic"
    ),
    "adamw, 8-bit moments": ours("adamw", BASE, "bfloat16", state_storage="8bit"),
    "adamw, 8-bit moments, stochastic": ours("adamw", BASE, "bfloat16", state_storage="8bit", rounding="stochastic"),
    "adamw, 8-bit moments, compensated8": ours(
        "adamw", BASE, "bfloat16", state_storage="8bit", rounding="compensated8"
    ),
    "adamw, compensated": ours("adamw", "optimi AdamW, Kahan", "bfloat16", rounding="compensated"),
    "adalomo, stochastic": ours("adalomo", "lomo_optim AdaLomo", "bfloat16", rounding="stochastic"),
    "adalomo, compensated": ours("adalomo", "lomo_optim AdaLomo", "bfloat16", rounding="compensated"),
    "adalomo, compensated8": ours("adalomo", "lomo_optim AdaLomo", "bfloat16", rounding="compensated8"),
    f"adamw{WIDE}": ours("adamw", f"{BASE}{WIDE}", "float32"),
    f"adalomo{WIDE}": ours("adalomo", f"{BASE}{WIDE}", "float32"),
    **{f"{rule}, eager": ours(rule, compile=False) for rule in RULES},
    BASE: torchs(torch.optim.AdamW, fused=True),
    f"{BASE}{WIDE}": torchs(torch.optim.AdamW, "float32", fused=True),
    "AdamW": torchs(torch.optim.AdamW),
    "SGD(fused=True)": torchs(torch.optim.SGD, fused=True),
    "torch Adafactor": torchs(torch.optim.Adafactor),
    "lomo_optim AdaLomo": UpdateMethod(lomo_optim_update, package="lomo-optim"),
    "optimi Lion": UpdateMethod(partial(optimi_update, name="Lion"), package="torch-optimi"),
    "optimi AdamW, Kahan": UpdateMethod(
        partial(optimi_update, name="AdamW", kahan_sum=True), package="torch-optimi", dtype="bfloat16"
    ),
}


def methods(dtype: str) -> dict[str, UpdateMethod]:
    """The methods to measure where weights are of this dtype. With float32 those of `WIDE` would be measured twice."""
    allowed = (None, "float32", "bfloat16") if dtype == "bfloat16" else (None,)
    return {name: method for name, method in METHODS.items() if method.dtype in allowed}


def measure(name: str, size: int, repeats: int, dtype: str) -> Figures:
    """Measures one method in this process: `seconds`, and bytes of `temporary` memory and of `state` per weight."""
    torch.manual_seed(0)
    method = METHODS[name]
    kind = getattr(torch, method.dtype or dtype)
    param = torch.nn.Parameter(torch.randn(size, size).to(kind))
    update, state = method.make(param, torch.randn(size, size).to(kind))
    with torch.no_grad():
        seconds = median_seconds(update, repeats, warmup=3)
        gc.collect()
        temporary = peak_of_temporaries(update)
    return {
        "seconds": seconds,
        "temporary": temporary,
        "state": sum(tensor.nbytes for tensor in state()) / param.numel(),
    }


@command
def main(argv: Sequence[str] | None = None) -> None:
    counts = {
        "size": (4096, "rows and columns of the parameter"),
        "repeats": (9, "timed updates per round"),
        "rounds": (3, "how often all methods are measured in turn"),
    }
    options = reports.make_parser(__doc__, counts, only="method").parse_args(argv)
    names, left_out = runnable(select(methods(options.dtype), options.only))

    def one(name: str, folder: Path) -> Figures:
        return alone(measure, name, options.size, options.repeats, options.dtype)

    with reports.output(options.out, "update"):
        runs, failed = in_rounds(names, options.rounds, one, Console(stderr=True))
        results = {name: medians(rows) for name, rows in runs.items()}

        def ratio(name: str, base: str | None) -> str:
            value = results[name]["seconds"] / results[base]["seconds"] if base in results else None
            return formatted(value, ".2f")

        print(f"One update of a {options.size} × {options.size} parameter; {headline(options.dtype)}\n")
        rows = []
        for name, row in results.items():
            nearest = METHODS[name].nearest
            times = (f"{row['seconds'] * 1e3:.1f}", ratio(name, nearest), nearest or "", ratio(name, BASE))
            rows.append((name, *times, f"{row['temporary'] / 2**20:.2f}", f"{row['state']:.3g}"))
        over = ("× nearest peer", "nearest peer", "× fused AdamW", "temporary, MiB", "state, bytes per weight")
        print_table(("method", "ms", *over), rows)
        print_missing(failed, left_out)
        settings = {key: getattr(options, key) for key in ("size", "repeats", "rounds", "dtype")}
        reports.save(options.out / "update.json", settings, results=results, failed=failed, left_out=left_out)
        if BASE in results:
            draw(results, settings, options.out / "update.png")
    exit_if_ours_failed(METHODS, failed)


def draw(results: dict[str, Figures], settings: dict[str, Any], path: Path) -> None:
    """Draws the time and temporary memory of each method as bars."""
    names = [name for name in results if not name.endswith(("eager", WIDE))]
    colors = [reports.COLORS[METHODS[name].kind] for name in names]
    times = [results[name]["seconds"] / results[BASE]["seconds"] for name in names]
    memory = [results[name]["temporary"] / 2**20 for name in names]
    panels = (
        Bars("time of an update, × torch's fused AdamW", {"time": (times, colors)}),
        Bars("temporary memory, MiB", {"memory": (memory, colors)}, "{:.1f}"),
    )
    title = f"One update of a {settings['size']} × {settings['size']} parameter, lowmem compiled"
    draw_bars(path, f"{title}\n{headline(settings['dtype'])}", names, panels)


if __name__ == "__main__":
    main()
