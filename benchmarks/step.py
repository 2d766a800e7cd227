"""A whole training step, peers side by side in one run: seconds, and memory over that of the weights.

    python benchmarks/step.py [--layers 8 --hidden 768 --tokens 128 --batch 1] [--out benchmarks/results]

Each contender runs in a process of its own, in turn, several rounds; the figures are medians, to be read as ratios to
`floor`, which drops every gradient the moment it exists and updates nothing. Peers that are not installed are left out.
"""

import argparse
import importlib.util
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import LlamaConfig, LlamaForCausalLM

import lowmem

Step = Callable[[torch.Tensor], None]


def floor(model: torch.nn.Module) -> Step:
    def drop(param: torch.Tensor) -> None:
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(drop)
    return lambda loss: loss.backward()


def ordinary(cls: type[torch.optim.Optimizer], **settings: object) -> Callable[[torch.nn.Module], Step]:
    def make(model: torch.nn.Module) -> Step:
        optimizer = cls(model.parameters(), **settings)

        def step(loss: torch.Tensor) -> None:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return make


def fused(rule: object, **settings: object) -> Callable[[torch.nn.Module], Step]:
    def make(model: torch.nn.Module) -> Step:
        return lowmem.FusedOptimizer(model.named_parameters(), rule=rule, **settings).backward

    return make


def lomo_optim(model: torch.nn.Module) -> Step:
    from lomo_optim import AdaLomo

    torch.Tensor.cuda = lambda self: self  # it names the device in its code
    optimizer = AdaLomo(model, lr=1e-3)
    return lambda loss: optimizer.fused_backward(loss, 1e-3)


CONTENDERS = {
    "floor": floor,
    "lowmem adalomo": fused("adalomo", lr=1e-3),
    "lowmem adalomo, stochastic rounding": fused("adalomo", lr=1e-3, rounding="stochastic"),
    "lowmem AdamW": fused(torch.optim.AdamW, lr=1e-4, foreach=False),
    "AdamW": ordinary(torch.optim.AdamW, lr=1e-4),
    "AdamW(fused=True)": ordinary(torch.optim.AdamW, lr=1e-4, fused=True),
    "torch Adafactor": ordinary(torch.optim.Adafactor),
    "lomo_optim AdaLomo": lomo_optim,
}
NEEDS = {"lomo_optim AdaLomo": "lomo_optim"}


def model_of(options: argparse.Namespace) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 8 // 3,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def one(name: str, options: argparse.Namespace) -> dict[str, float]:
    """One contender, in this process: seconds a step, peak resident and peak tensor bytes beside the weights."""
    model = model_of(options)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    step = CONTENDERS[name](model)
    ids = torch.randint(0, 32000, (options.batch, options.tokens))

    def run() -> None:
        step(model(input_ids=ids, labels=ids).loss)

    for _ in range(2):
        run()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    seconds = []
    for _ in range(options.steps):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        run()
    peak = sum(device["Total"] for device in tracker.get_tracker_snapshot("peak").values())
    return {"seconds": statistics.median(seconds), "resident": resident, "tensor_peak": peak, "weights": weights}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for option, default in (("layers", 8), ("hidden", 768), ("tokens", 128), ("batch", 1), ("steps", 5), ("rounds", 3)):
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--one", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one, options)))
        return
    names = [n for n in CONTENDERS if n not in NEEDS or importlib.util.find_spec(NEEDS[n])]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for turn in range(options.rounds):
        for name in names:
            print(f"round {turn + 1}/{options.rounds}: {name}", file=sys.stderr)
            done = subprocess.run(
                [sys.executable, *sys.argv, "--one", name], capture_output=True, text=True, check=True
            )
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
    results = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in found.items()
    }
    base = results["floor"]
    print(f"\n{'':38}{'s/step':>9}{'ratio':>8}{'tensor peak over weights':>27}{'resident over floor':>22}")
    for name, row in results.items():
        over, more = (row["tensor_peak"] - row["weights"]) / 2**20, (row["resident"] - base["resident"]) / 2**20
        ratio = row["seconds"] / base["seconds"]
        print(f"{name:38}{row['seconds']:9.3f}{ratio:8.2f}{over:22.0f} MiB{more:17.0f} MiB")
    settings = {k: v for k, v in vars(options).items() if k not in ("out", "one")}
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "step.json").write_text(
        json.dumps({"settings": settings, "machine": machine, "results": results}, indent=2) + "\n"
    )
    draw(results, settings, options.out / "step.png")


def draw(results: dict[str, dict[str, float]], settings: dict[str, int], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = list(results)[::-1]
    base = results["floor"]
    ours = ["#2a8f7c" if name.startswith("lowmem") else "#c9ced6" if name != "floor" else "#e6e6e6" for name in names]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), sharey=True, layout="constrained")
    panels = (
        (left, [results[n]["seconds"] / base["seconds"] for n in names], "time of a step, × floor", "{:.2f}"),
        (
            right,
            [(results[n]["tensor_peak"] - results[n]["weights"]) / results[n]["weights"] for n in names],
            "tensor memory over the weights, × weights",
            "{:.2f}",
        ),
    )
    for axes, values, label, form in panels:
        bars = axes.barh(names, values, color=ours)
        axes.bar_label(bars, [form.format(v) for v in values], padding=3, fontsize=9)
        axes.set_xlabel(label)
        axes.margins(x=0.14)
        axes.spines[["top", "right"]].set_visible(False)
    millions = results["floor"]["weights"] / 2 / 1e6
    shape = f"{settings['batch']} × {settings['tokens']} tokens"
    figure.suptitle(
        f"Llama of {millions:.0f}M parameters, bfloat16, {shape}, checkpointing, {os.cpu_count()} CPU cores"
    )
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
