"""One update of one 4096 x 4096 bfloat16 parameter, every rule beside its peers in one run: seconds and bytes.

    python benchmarks/update.py [--size 4096 --rounds 3] [--only "adalomo"] [--out benchmarks/results]

Each contender runs in a process of its own, in turn, several rounds; figures are medians, to be read as ratios to
torch's fused AdamW. Temporary bytes are the most that the allocator gave out during an update. Peers that are not
installed are left out.
"""

import argparse
import importlib
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import lowmem

BASE = "AdamW(fused=True)"
Made = tuple[Callable[[], object], Callable[[], list[Tensor]]]  # what updates, and what it keeps
Make = Callable[[Tensor, Tensor], Made]


def ours(rule: str, compile: bool = True, **settings: object) -> Make:
    def make(param: Tensor, grad: Tensor) -> Made:
        opt = lowmem.FusedOptimizer([("weight", param)], rule=rule, lr=1e-3, compile=compile, **settings)
        (record,) = opt._records.values()

        def update() -> None:  # what the hook does, without a backward to come from
            opt._cycle.step += 1
            opt._updates.put(record, grad)

        def kept() -> list[Tensor]:
            return [*opt.state[param].values(), *([] if record.residual is None else [record.residual])]

        return update, kept

    return make


def torchs(cls: type[torch.optim.Optimizer], **settings: object) -> Make:
    def make(param: Tensor, grad: Tensor) -> Made:
        optimizer = cls([param], lr=1e-3, **settings)
        param.grad = grad
        return optimizer.step, lambda: [t for t in optimizer.state[param].values() if isinstance(t, Tensor)]

    return make


def lomo_optim(param: Tensor, grad: Tensor) -> Made:
    from lomo_optim import AdaLomo

    torch.Tensor.cuda = lambda self: self  # it names the device in its code
    model = torch.nn.ParameterDict({"weight": param})
    optimizer = AdaLomo(model, lr=1e-3, loss_scale=0)
    optimizer.lr = 1e-3

    def update() -> None:
        optimizer.step_num += 1
        param.grad = grad  # it is changed in place, which costs as much as any other
        optimizer.grad_func(0)

    kept = (optimizer.exp_avg_sq_row, optimizer.exp_avg_sq_col)
    return update, lambda: [part["weight"] for part in kept]


def optimi(name: str) -> Make:
    def make(param: Tensor, grad: Tensor) -> Made:
        return torchs(getattr(importlib.import_module("optimi"), name))(param, grad)

    return make


def kahan(param: Tensor, grad: Tensor) -> Made:
    return torchs(importlib.import_module("optimi").AdamW, kahan_sum=True)(param, grad)


@dataclass(frozen=True)
class Contender:
    """make: of a parameter and its gradient.  peer: whose work is the nearest.  package: what has to be installed."""

    make: Make
    peer: str | None = None
    dtype: torch.dtype = torch.bfloat16
    package: str | None = None


WIDE = ", float32 weights"
RULES = [row.name for row in lowmem.rules.table()]
# Of rules that nobody else has here: what keeps as much, in one pass.
PEERS = {
    "lomo": "SGD(fused=True)",
    "adalomo": "lomo_optim AdaLomo",
    "adafactor": "torch Adafactor",
    "adafactor_t2t": "torch Adafactor",
    "lion": "optimi Lion",
}
CONTENDERS = {
    **{rule: Contender(ours(rule), PEERS.get(rule, "AdamW")) for rule in RULES},
    "adamw, bfloat16 moments": Contender(ours("adamw", dtype_moments="bfloat16"), BASE),
    "adamw, compensated": Contender(ours("adamw", rounding="compensated"), "optimi AdamW, Kahan"),
    "adalomo, stochastic": Contender(ours("adalomo", rounding="stochastic"), "lomo_optim AdaLomo"),
    "adalomo, compensated": Contender(ours("adalomo", rounding="compensated"), "lomo_optim AdaLomo"),
    f"adamw{WIDE}": Contender(ours("adamw"), f"{BASE}{WIDE}", torch.float32),
    f"adalomo{WIDE}": Contender(ours("adalomo"), f"{BASE}{WIDE}", torch.float32),
    **{f"{rule}, eager": Contender(ours(rule, compile=False)) for rule in RULES},
    BASE: Contender(torchs(torch.optim.AdamW, fused=True)),
    f"{BASE}{WIDE}": Contender(torchs(torch.optim.AdamW, fused=True), dtype=torch.float32),
    "AdamW": Contender(torchs(torch.optim.AdamW)),
    "SGD(fused=True)": Contender(torchs(torch.optim.SGD, fused=True)),
    "torch Adafactor": Contender(torchs(torch.optim.Adafactor)),
    "lomo_optim AdaLomo": Contender(lomo_optim, package="lomo_optim"),
    "optimi Lion": Contender(optimi("Lion"), package="optimi"),
    "optimi AdamW, Kahan": Contender(kahan, package="optimi"),
}


def temporary(update: Callable[[], object]) -> int:
    """The most bytes that the allocator gave out at a time during an update."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        update()
    now = peak = 0
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def one(name: str, size: int, repeats: int) -> dict[str, float]:
    """One contender, in this process."""
    torch.manual_seed(0)
    contender = CONTENDERS[name]
    param = torch.nn.Parameter(torch.randn(size, size).to(contender.dtype))
    update, kept = contender.make(param, torch.randn(size, size).to(contender.dtype))
    with torch.no_grad():
        for _ in range(3):
            update()
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            update()
            seconds.append(time.perf_counter() - start)
        peak = temporary(update)
    state = sum(tensor.nbytes for tensor in kept()) / param.numel()
    return {"seconds": statistics.median(seconds), "temporary": peak, "state": state}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for option, default in (("size", 4096), ("repeats", 9), ("rounds", 3)):
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--only", choices=CONTENDERS, action="append", help="this contender alone; may be repeated")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--one", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one, options.size, options.repeats)))
        return
    wanted = options.only or CONTENDERS
    needed = {name: CONTENDERS[name].package for name in wanted}
    names = [name for name in wanted if needed[name] is None or importlib.util.find_spec(needed[name])]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for turn in range(options.rounds):
        for name in names:
            print(f"round {turn + 1}/{options.rounds}: {name}", file=sys.stderr)
            command = [sys.executable, *sys.argv, "--one", name]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
    results = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in found.items()
    }
    print("| contender | ms | x its peer | nearest peer | x fused AdamW | temporary, MiB | state, bytes a weight |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, row in results.items():
        peer = CONTENDERS[name].peer or ""
        cells = f"{row['seconds'] * 1e3:.1f} | {ratio(results, name, peer)} | {peer} | {ratio(results, name, BASE)}"
        print(f"| {name} | {cells} | {row['temporary'] / 2**20:.2f} | {row['state']:.3g} |")
    settings = {key: getattr(options, key) for key in ("size", "repeats", "rounds")}
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
    options.out.mkdir(parents=True, exist_ok=True)
    report = {"settings": settings, "machine": machine, "results": results}
    (options.out / "update.json").write_text(json.dumps(report, indent=2) + "\n")
    if BASE in results:
        draw(results, results[BASE], options.size, options.out / "update.png")


def ratio(results: dict[str, dict[str, float]], name: str, base: str) -> str:
    """The time of an update in those of another; a dash where that was not measured."""
    return f"{results[name]['seconds'] / results[base]['seconds']:.2f}" if base in results else "-"


def draw(results: dict[str, dict[str, float]], base: dict[str, float], size: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = [name for name in reversed(results) if not name.endswith(("eager", WIDE))]
    mine = ["#2a8f7c" if name.split(",")[0] in RULES else "#c9ced6" for name in names]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 0.34 * len(names) + 1.2), sharey=True, layout="constrained")
    panels = (
        (
            left,
            [results[n]["seconds"] / base["seconds"] for n in names],
            "time of an update, × torch's fused AdamW",
            "{:.2f}",
        ),
        (right, [results[n]["temporary"] / 2**20 for n in names], "temporary memory, MiB", "{:.1f}"),
    )
    for axes, values, label, form in panels:
        bars = axes.barh(names, values, color=mine)
        axes.bar_label(bars, [form.format(v) for v in values], padding=3, fontsize=9)
        axes.set_xlabel(label)
        axes.margins(x=0.14)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"One update of a {size} × {size} bfloat16 parameter, {os.cpu_count()} CPU cores; ours compiled")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
