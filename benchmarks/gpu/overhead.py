"""What updates add to the step of a small model, relative to a step that drops gradients and to AdamW; first steps.

python -m benchmarks.gpu.overhead    # prints the times of first steps as JSON: a process of its own for `first_step`
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from benchmarks import models
from benchmarks.gpu.measure import DEVICE, clear, seconds
from benchmarks.gpu.report import Report
from benchmarks.gpu.steps import Optimizer, adamw_in_hooks, dropped, fused, model_loss

# layers, hidden, inner, vocabulary: 100M parameters
MODEL = 8, 768, 2048, 32000
SMALL_MODEL = 1, 64, 128, 256

adalomo = partial(fused, rule="adalomo", rounding="nearest")
adamw = partial(fused, rule="adamw", rounding="nearest")


def build(dtype: str, small: bool) -> Any:
    return models.llama(*(SMALL_MODEL if small else MODEL), dtype, DEVICE)


def in_turn(dtype: str, rows: int, tokens: int, methods: Mapping[str, Optimizer], small: bool) -> dict[str, float]:
    """The median time of a step by each method. They take turns with one model."""
    model = build(dtype, small)
    ids = torch.randint(0, model.config.vocab_size, (rows, tokens), device=DEVICE)
    times: dict[str, list[float]] = {name: [] for name in methods}
    rounds, repeats = (1, 1) if small else (3, 7)
    for _ in range(rounds):
        for name, optimizer in methods.items():
            with optimizer(model) as step:

                def run(step: Any = step) -> None:
                    step(model_loss(model, ids))

                for _ in range(2):  # compiles, and creates states
                    run()
                times[name] += [seconds(run) for _ in range(repeats)]
            clear()
    return {name: statistics.median(taken) for name, taken in times.items()}


def small_steps(report: Report, small: bool) -> None:
    """Steps of 1 x 128 and 4 x 512 tokens, with activation checkpointing."""
    methods = {"floor": dropped, "adalomo": adalomo, "AdamW in hooks": adamw_in_hooks}
    for rows, tokens, over_floor, over_adamw in ((1, 128, 1.12, 1.05), (4, 512, 1.03, None)):
        size = f"step, {rows} x {tokens} tokens, adalomo"
        if report.affords(size, 20):
            taken = in_turn("bfloat16", rows, 8 if small else tokens, methods, small)
            report.row(f"{size}: times the floor", taken["adalomo"] / taken["floor"], ("<=", over_floor), seconds=taken)
            goal = None if over_adamw is None else ("<=", over_adamw)
            report.row(f"{size}: times AdamW(fused=True) in hooks", taken["adalomo"] / taken["AdamW in hooks"], goal)
    for dtype in ("bfloat16", "float32"):
        what = f"step, 1 x 128 tokens, adamw, {dtype} weights and states: times AdamW(fused=True) in hooks"
        if report.affords(what, 15):
            alike = {"adamw": partial(adamw, state_storage=dtype), "AdamW in hooks": adamw_in_hooks}
            taken = in_turn(dtype, 1, 8 if small else 128, alike, small)
            report.row(what, taken["adamw"] / taken["AdamW in hooks"], ("<=", 1.05), seconds=taken)


# -- first steps -------------------------------------------------------------------------------------------------------


def first_step(report: Report, small: bool) -> None:
    """What the first step takes longer than a later one: with an empty compilation cache, and with a full one."""
    if small:
        report.row("first step: seconds over a later one", first_steps(small)["over"])
        return
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
        for name, goal in (("cold", 6.0), ("warm cache", 1.0)):
            done = subprocess.run([sys.executable, "-m", __name__], env=environment, stdout=subprocess.PIPE, check=True)
            times = json.loads(done.stdout)
            report.row(f"first step, {name}: seconds over a later one", times["over"], ("<=", goal), **times)


def first_steps(small: bool) -> dict[str, Any]:
    model = build("bfloat16", small)
    ids = torch.randint(0, model.config.vocab_size, (1, 8 if small else 128), device=DEVICE)
    seconds(lambda: model_loss(model, ids).backward())  # loads the libraries of a GPU
    model.zero_grad()
    with adalomo(model) as step:
        times = [seconds(lambda: step(model_loss(model, ids))) for _ in range(4)]
    return {"over": times[0] - statistics.median(times[1:]), "steps": times}


if __name__ == "__main__":
    print(json.dumps(first_steps(small=False)))
