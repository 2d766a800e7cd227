"""One update of one 4096 x 4096 bfloat16 parameter, every rule beside its peers in one run: seconds and bytes.

    python benchmarks/update.py [--size 4096 --rounds 3] [--only "adalomo"] [--out benchmarks/results]

Each contender runs in a process of its own, in turn, several rounds; figures are medians, to be read as ratios to
torch's fused AdamW. Temporary bytes are the most that the allocator gave out during an update. Peers that are not
installed are left out.
"""

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import lowmem
from lowmem.layout import Layout
from lowmem.placements.local import Local
from lowmem.sweep import Sweep

BASE = "AdamW(fused=True)"
Made = tuple[Callable[[], object], Callable[[], list[Tensor]]]  # what updates, and what it keeps


def ours(
    name: str, rounding: str = "nearest", compiled: bool = True, **options: object
) -> Callable[[Tensor, Tensor], Made]:
    def make(param: Tensor, grad: Tensor) -> Made:
        rule = lowmem.rules.resolve(name)
        hyper = {**rule.defaults, "lr": 1e-3, **options}
        shape = tuple(param.shape)
        plan = rule.plan("weight", shape, hyper)
        state = {key: Local().new_state(spec, param, plan.view) for key, spec in plan.states.items()}
        residual = torch.zeros_like(param, dtype=torch.int16) if rounding == "compensated" else None
        layout, step = Layout.whole(shape, plan.view), 0

        def update() -> None:
            nonlocal step
            step += 1
            stochastic = rounding == "stochastic"
            sweep = Sweep(layout, param, grad, residual=residual, stochastic=stochastic, compiled=compiled)
            rule.update(sweep, plan, state, hyper, step)

        return update, lambda: [*state.values(), *([residual] if residual is not None else [])]

    return make


def torchs(cls: type[torch.optim.Optimizer], **settings: object) -> Callable[[Tensor, Tensor], Made]:
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


RULES = [row.name for row in lowmem.rules.table()]
CONTENDERS = {
    **{rule: ours(rule) for rule in RULES},
    "adamw, bfloat16 moments": ours("adamw", dtype_moments="bfloat16"),
    "adalomo, stochastic": ours("adalomo", "stochastic"),
    "adalomo, compensated": ours("adalomo", "compensated"),
    **{f"{rule}, eager": ours(rule, compiled=False) for rule in RULES},
    BASE: torchs(torch.optim.AdamW, fused=True),
    "AdamW": torchs(torch.optim.AdamW),
    "torch Adafactor": torchs(torch.optim.Adafactor),
    "lomo_optim AdaLomo": lomo_optim,
}
NEEDS = {"lomo_optim AdaLomo": "lomo_optim"}


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
    param = torch.nn.Parameter(torch.randn(size, size).bfloat16())
    update, kept = CONTENDERS[name](param, torch.randn(size, size).bfloat16())
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
    names = [n for n in options.only or CONTENDERS if n not in NEEDS or importlib.util.find_spec(NEEDS[n])]
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
    base = results.get(BASE)
    print("| contender | ms | x fused AdamW | temporary, MiB | state, bytes a weight |")
    print("| --- | --- | --- | --- | --- |")
    for name, row in results.items():
        ratio = f"{row['seconds'] / base['seconds']:.2f}" if base else "-"
        cells = f"{row['seconds'] * 1e3:.1f} | {ratio} | {row['temporary'] / 2**20:.2f} | {row['state']:.3g}"
        print(f"| {name} | {cells} |")
    settings = {key: getattr(options, key) for key in ("size", "repeats", "rounds")}
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
    options.out.mkdir(parents=True, exist_ok=True)
    report = {"settings": settings, "machine": machine, "results": results}
    (options.out / "update.json").write_text(json.dumps(report, indent=2) + "\n")
    if base:
        draw(results, base, options.size, options.out / "update.png")


def draw(results: dict[str, dict[str, float]], base: dict[str, float], size: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = [name for name in reversed(results) if not name.endswith("eager")]
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
