"""A Llama's training step by several contenders, side by side in one run: seconds, and memory over the weights'.

Each contender runs in a process of its own, in turn, several rounds; the figures are medians, to be read as ratios to
one of them. On a GPU memory is what the allocator has given out at most, on a CPU every tensor is counted.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import LlamaConfig, LlamaForCausalLM

Loss = Callable[[], torch.Tensor]

# Takes a step, given the losses of its micro-batches, each computed when it is called.
Step = Callable[[Sequence[Loss]], None]
Contenders = Mapping[str, Callable[[torch.nn.Module], Step]]

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")


def drop_gradients(model: torch.nn.Module) -> Step:
    """The floor: every gradient is dropped the moment it exists, and nothing is updated."""

    def drop(param: torch.Tensor) -> None:
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(drop)

    def step(losses: Sequence[Loss]) -> None:
        for loss in losses:
            loss().backward()

    return step


def ordinary(
    cls: type[torch.optim.Optimizer], clip_norm: float | None = None, **settings: object
) -> Callable[[torch.nn.Module], Step]:
    """Gradients accumulate in `.grad`, are clipped, and then applied."""

    def make(model: torch.nn.Module) -> Step:
        optimizer = cls(model.parameters(), **settings)

        def step(losses: Sequence[Loss]) -> None:
            for loss in losses:
                (loss() / len(losses)).backward()
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            optimizer.zero_grad()

        return step

    return make


def options_of(doc: str, **defaults: int) -> argparse.Namespace:
    """The command line: what is measured, how often, and where the results go."""
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    for option, default in {"layers": 8, "hidden": 768, "steps": 5, **defaults}.items():
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


def model_of(options: argparse.Namespace) -> LlamaForCausalLM:
    """Random weights in bfloat16, with activation checkpointing."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 8 // 3,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
    )
    model = LlamaForCausalLM(config).to(DEVICE, torch.bfloat16)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def measure(
    make: Callable[[torch.nn.Module], Step], options: argparse.Namespace, micro_batches: int
) -> dict[str, float]:
    """One contender, in this process: seconds a step, peak resident and peak tensor bytes beside the weights."""
    model = model_of(options)
    step = make(model)
    rows = torch.randint(0, 32000, (options.batch, options.tokens), device=DEVICE).tensor_split(micro_batches)
    tracker = MemTracker()

    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        tracker.reset_mod_stats()  # it cannot track a module's second forward otherwise
        return model(input_ids=ids, labels=ids).loss

    losses = [lambda ids=ids: loss_of(ids) for ids in rows]
    for _ in range(2):
        step(losses)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    seconds = []
    for _ in range(options.steps):
        _finish()
        start = time.perf_counter()
        step(losses)
        _finish()
        seconds.append(time.perf_counter() - start)
    if GPU:
        torch.cuda.reset_peak_memory_stats()
        step(losses)
        peak = torch.cuda.max_memory_allocated()
    else:
        tracker.track_external(model)
        with tracker:
            step(losses)
            step(losses)  # by now everything has been seen that lives between steps
        peak = sum(device["Total"] for device in tracker.get_tracker_snapshot("peak").values())
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return {"seconds": statistics.median(seconds), "resident": resident, "tensor_peak": peak, "weights": weights}


def _finish() -> None:
    if GPU:
        torch.cuda.synchronize()


def rounds(names: Sequence[str], count: int) -> dict[str, dict[str, float]]:
    """Runs this script's contenders by name, each in a process of its own; the medians of `count` rounds."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for turn in range(count):
        for name in names:
            print(f"round {turn + 1}/{count}: {name}", file=sys.stderr)
            command = [sys.executable, *sys.argv, "--one", name]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
    return {name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in found.items()}


def tell(results: dict[str, dict[str, float]], options: argparse.Namespace, base: str) -> None:
    """Prints the table."""
    print(f"\n{'':44}{'s/step':>9}{'ratio':>8}{'tensor peak over weights':>27}{f'resident over {base}':>26}")
    for name, row in results.items():
        over = (row["tensor_peak"] - row["weights"]) / 2**20
        more = (row["resident"] - results[base]["resident"]) / 2**20
        ratio = row["seconds"] / results[base]["seconds"]
        print(f"{name:44}{row['seconds']:9.3f}{ratio:8.2f}{over:22.0f} MiB{more:22.0f} MiB")


def save(results: dict[str, dict[str, float]], options: argparse.Namespace, name: str) -> None:
    """Writes the figures beside what they are of."""
    settings = {k: v for k, v in vars(options).items() if k not in ("out", "one")}
    device = torch.cuda.get_device_name() if GPU else platform.processor() or platform.machine()
    machine = {"device": device, "cores": os.cpu_count(), "torch": torch.__version__}
    options.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"settings": settings, "machine": machine, "results": results}, indent=2)
    (options.out / f"{name}.json").write_text(text + "\n")


def draw(
    results: dict[str, dict[str, float]], colors: Sequence[str], options: argparse.Namespace, base: str, name: str
) -> None:
    """Draws time and memory of each contender as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = list(results)[::-1]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 0.9 + 0.31 * len(names)), sharey=True, layout="constrained")
    times = [results[n]["seconds"] / results[base]["seconds"] for n in names]
    memory = [(results[n]["tensor_peak"] - results[n]["weights"]) / results[n]["weights"] for n in names]
    panels = ((left, times, f"time of a step, × {base}"), (right, memory, "tensor memory over the weights, × weights"))
    for axes, values, label in panels:
        bars = axes.barh(names, values, color=list(colors)[::-1])
        axes.bar_label(bars, [f"{value:.2f}" for value in values], padding=3, fontsize=9)
        axes.set_xlabel(label)
        axes.margins(x=0.14)
        axes.spines[["top", "right"]].set_visible(False)
    millions = results[base]["weights"] / 2 / 1e6
    where = torch.cuda.get_device_name() if GPU else f"{os.cpu_count()} CPU cores"
    shape = f"{options.batch} × {options.tokens} tokens"
    figure.suptitle(f"Llama of {millions:.0f}M parameters, bfloat16, {shape}, checkpointing, {where}")
    figure.savefig(options.out / f"{name}.png", dpi=150)
