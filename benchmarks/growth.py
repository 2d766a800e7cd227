"""How cost grows with the model: seconds that AdaLomo adds to a step, and the step's memory, from 10M to 1B parameters.

    python benchmarks/growth.py [--tokens 128 --steps 5] [--timed 300M] [--out benchmarks/results]

Memory is that of a planned step, of tensors without data, and of a real one up to the largest model that is timed. The
seconds are those of a step less those of the same step with every gradient dropped in its hook, medians. Lines are
fitted by least squares, relative to what they fit.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch._subclasses import FakeTensorMode
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import lowmem
from benchmarks.comparison import machine
from lowmem.run.memory import step_memory

# Layers, hidden size and that inside a layer; the vocabulary is 8192.
SIZES = {
    "10M": (7, 256, 768),
    "30M": (7, 512, 1536),
    "100M": (12, 768, 2048),
    "300M": (24, 1024, 2816),
    "1B": (20, 2048, 5632),
}


def llama(size: str) -> PreTrainedModel:
    layers, hidden, inner = SIZES[size]
    config = LlamaConfig(
        vocab_size=8192, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def loss_of(model: PreTrainedModel, tokens: int) -> Callable[[], torch.Tensor]:
    ids = torch.ones(1, tokens, dtype=torch.int64)
    return lambda: model(input_ids=ids, labels=ids).loss


def memory(size: str, tokens: int) -> dict[str, int]:
    """Bytes of weights, and at the peak of a step."""
    model = llama(size)

    def optimizer() -> lowmem.FusedOptimizer:
        return lowmem.FusedOptimizer(model.named_parameters(), lr=1e-4, compile=False)

    step = step_memory(model, optimizer, [loss_of(model, tokens)], [])
    return {"weights": step.items["weights"], "peak": step.peak}


def seconds(size: str, tokens: int, steps: int) -> dict[str, float]:
    """Of a step that drops its gradients, and of one that updates, compiled."""
    model = llama(size)
    loss = loss_of(model, tokens)

    def median(step: Callable[[], object]) -> float:
        taken = []
        for _ in range(steps + 2):
            start = time.perf_counter()
            step()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken[2:])

    hooks = [p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)) for p in model.parameters()]
    floor = median(lambda: loss().backward())
    for hook in hooks:
        hook.remove()
    opt = lowmem.FusedOptimizer(model.named_parameters(), lr=1e-4, compile=True)
    return {"floor": floor, "step": median(lambda: opt.backward(loss()))}


def line(x: list[float], y: list[float]) -> dict[str, float]:
    """y = intercept + slope·x, and the largest deviation relative to y."""
    design = np.stack([np.ones(len(x)), np.array(x)], axis=1) / np.array(y)[:, None]
    (intercept, slope), *_ = np.linalg.lstsq(design, np.ones(len(x)), rcond=None)
    fitted = intercept + slope * np.array(x)
    return {"intercept": intercept, "slope": slope, "deviation": float(np.abs(fitted / np.array(y) - 1).max())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--timed", choices=SIZES, default="300M", help="the largest model that is timed (300M)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    names = list(SIZES)
    results: dict[str, dict[str, float]] = {}
    for name in names:
        with FakeTensorMode():
            results[name] = dict(memory(name, options.tokens))
        if names.index(name) <= names.index(options.timed):
            results[name]["real peak"] = memory(name, options.tokens)["peak"]
            results[name] |= seconds(name, options.tokens, options.steps)
        print(name, {key: round(value, 4) for key, value in results[name].items()}, flush=True)
    timed = [row for row in results.values() if "step" in row]
    lines = {
        "peak, bytes over bytes of weights": line(
            [row["weights"] for row in results.values()], [row["peak"] for row in results.values()]
        ),
        "update, seconds over parameters": line(
            [row["weights"] / 2 for row in timed], [row["step"] - row["floor"] for row in timed]
        ),
    }
    for what, found in lines.items():
        print(what, {key: float(f"{value:.4g}") for key, value in found.items()})
    settings = {"tokens": options.tokens, "steps": options.steps, "threads": torch.get_num_threads()}
    options.out.mkdir(parents=True, exist_ok=True)
    report = {"settings": settings, "machine": machine(), "results": results, "lines": lines}
    (options.out / "growth.json").write_text(json.dumps(report, indent=2) + "\n")
    draw(results, *lines.values(), options.out / "growth.png")


def draw(
    results: dict[str, dict[str, float]], peak: dict[str, float], update: dict[str, float], path: Path
) -> None:  # fmt: skip
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    sizes = np.array([row["weights"] / 2 for row in results.values()])
    timed = [row for row in results.values() if "step" in row]
    left.plot(sizes, [row["peak"] / 2**20 for row in results.values()], "o", color="#1f5fa8", label="planned")
    real = [row["real peak"] / 2**20 for row in timed]
    left.plot(sizes[: len(timed)], real, "x", color="#d1495b", ms=9, label="real")
    fitted = (peak["intercept"] + peak["slope"] * 2 * sizes) / 2**20
    told = f"{peak['intercept'] / 2**20:.0f} MiB + {peak['slope']:.3f} × weights"
    left.plot(sizes, fitted, color="#888888", lw=1, label=told)
    left.set(xlabel="parameters", ylabel="most in tensors (MiB)", title="memory of a step")
    taken = [(row["step"] - row["floor"]) * 1e3 for row in timed]
    right.plot(sizes[: len(timed)], taken, "o", color="#2a8f7c", label="measured")
    fitted = (update["intercept"] + update["slope"] * sizes[: len(timed)]) * 1e3
    told = f"{update['intercept'] * 1e3:.1f} ms + {update['slope'] * 1e12:.0f} ms for each 10⁹ parameters"
    right.plot(sizes[: len(timed)], fitted, color="#888888", lw=1, label=told)
    right.set(xlabel="parameters", ylabel="added to a step (ms)", title="time of the update")
    for axes in (left, right):
        axes.set(xscale="log", yscale="log")
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("AdaLomo on Llamas of 10M to 1B parameters, bfloat16, checkpointing")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
