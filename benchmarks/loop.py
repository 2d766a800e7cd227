"""The loop around a training step: how much of a step is neither the model nor the update.

    python -m benchmarks.loop [--load 1x128] [--only "lowmem sft"] [--rounds 3]

Every loop trains the same Llama on rows of random tokens, with activation checkpointing, without clipping, and logs
every step. A step lasts from the end of one to the end of the next, so it contains fetching and collating its batch,
callbacks, the log line and the progress bar. "Other" is the part of a step that is not forward, backward or update.
"""

import io
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from transformers import TrainerCallback

import lowmem
from benchmarks import reports
from benchmarks.engine import stacks_between
from benchmarks.measurement import SIZES, Workload
from benchmarks.methods import LR, Method, exit_if_ours_failed, select
from benchmarks.pages import markdown
from benchmarks.processes import Figures, alone, in_rounds
from benchmarks.reports import command, formatted
from benchmarks.runs import configuration, trainer_of
from lowmem.run.report import RunReport

OURS, BASE = "lowmem sft", "PyTorch loop, AdamW(fused=True)"
LOADS = {"1x128": (1, 128, 10), "8x512": (8, 512, 2)}  # rows and tokens of a step, and how many are timed per round
WARMUP = 2  # the first step compiles


class Clock(TrainerCallback):  # type: ignore[misc]
    """Times steps, and what of them is inside forward, backward or update, which do not overlap."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []  # seconds in all, and outside
        self._inside, self._began, self._ended = 0.0, 0.0, time.perf_counter()

    def start(self, *_: Any) -> None:
        self._began = time.perf_counter()

    def stop(self, *_: Any) -> None:
        self._inside += time.perf_counter() - self._began

    def on_step_end(self, *_: Any, **__: Any) -> None:
        taken = (now := time.perf_counter()) - self._ended
        self.steps.append((taken, taken - self._inside))
        self._inside, self._ended = 0.0, now

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Times the model's forward, backward, and what is updated after it: by `step()`, and small parameters."""
        backward = torch.autograd.backward

        def timed(*args: Any, **kwargs: Any) -> None:
            self.start()
            backward(*args, **kwargs)
            self.stop()

        hooks = [model.register_forward_pre_hook(self.start), model.register_forward_hook(self.stop)]
        hooks += [register_optimizer_step_pre_hook(self.start), register_optimizer_step_post_hook(self.stop)]
        with mock.patch.object(torch.autograd, "backward", timed), stacks_between(self.start, self.stop):
            yield
        for hook in hooks:
            hook.remove()


def rows_of(workload: Workload) -> list[list[int]]:
    """Random tokens, a row for each sample of the run."""
    shape = (workload.batch * (WARMUP + workload.steps), workload.tokens)
    return torch.randint(SIZES[workload.size][-1], shape).tolist()


def run_lowmem(workload: Workload, clock: Clock, folder: str, **options: Any) -> None:
    """`lowmem sft` with its report, its files and its progress bar."""
    depth, hidden, vocabulary = SIZES[workload.size]
    model = {"model_type": "llama", "vocab_size": vocabulary, "hidden_size": hidden, "num_hidden_layers": depth,
             "intermediate_size": workload.intermediate, "num_attention_heads": hidden // 64}  # fmt: skip
    steps = {"max_steps": WARMUP + workload.steps, "per_device_train_batch_size": workload.batch}
    others = {"output_dir": folder, "learning_rate": LR, "logging_steps": 1, "save_strategy": "no", **steps, **options}
    config = configuration(model, workload.tokens, dtype=workload.dtype, **others)
    trainer = trainer_of(config, rows_of(workload))
    trainer.add_callback(clock)
    report = RunReport(folder, Console(file=io.StringIO(), force_terminal=True))
    with clock.attached(trainer.model), report.attached(trainer):
        trainer.train()


def run_pytorch(workload: Workload, clock: Clock, folder: str, rule: str | None = None) -> None:
    """A loop of five lines."""
    model = workload.model("cpu")
    loader = DataLoader(torch.tensor(rows_of(workload)), batch_size=workload.batch, shuffle=True)  # type: ignore[arg-type]
    if rule is None:
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    else:
        optimizer = lowmem.FusedOptimizer(model.named_parameters(), rule=rule, lr=LR)
    with clock.attached(model):
        for ids in loader:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(loss.item())
            clock.on_step_end()


LOOPS = {
    OURS: Method(run_lowmem, "ours"),
    f"{OURS}, computed_gradients: false": Method(partial(run_lowmem, layers={"computed_gradients": False}), "ours"),
    "PyTorch loop, lowmem adalomo": Method(partial(run_pytorch, rule="adalomo"), "ours"),
    BASE: Method(run_pytorch),
}


def measure(loop: str, workload: Workload) -> Figures:
    """Medians over the steps of one run: `seconds` of a step, and `other` of them."""
    torch.set_num_threads(workload.threads)
    torch.manual_seed(0)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        LOOPS[loop].make(workload, clock, folder)
    seconds, other = map(statistics.median, zip(*clock.steps[WARMUP:], strict=True))
    return {"seconds": seconds, "other": other}


def tables(report: Any) -> dict[str, str]:
    rows = []
    for load, results in report["results"].items():
        base = results.get(BASE, {}).get("seconds")
        for name, row in results.items():
            shown = {"tokens": load.replace("x", " × "), "loop": name, "s/step": f"{row['seconds']:.3f}"}
            shown["× PyTorch loop"] = formatted(base and row["seconds"] / base, ".2f")
            share = f"{row['other'] / row['seconds']:.1%}"
            rows.append({**shown, "other, ms": f"{row['other'] * 1e3:.1f}", "of a step": share})
    return {"": markdown(rows)}


@command
def main(argv: Sequence[str] | None = None) -> None:
    parser = reports.make_parser(__doc__, {"rounds": (3, "how often all loops are measured in turn")}, only="loop")
    parser.add_argument("--load", choices=LOADS, action="append", help="only this load; repeatable")
    parser.add_argument("--size", choices=SIZES, default="100M", help="approximate parameters of the Llama (100M)")
    options = parser.parse_args(argv)
    chosen, results, failed = select(LOOPS, options.only), {}, {}
    with reports.output(options.out):
        for load in options.load or LOADS:
            batch, tokens, steps = LOADS[load]
            workload = Workload(options.size, batch, tokens, options.dtype, steps)

            def one(name: str, folder: Path, workload: Workload = workload) -> Figures:
                return alone(measure, name, workload, folder=folder)

            results[load], missing = in_rounds(chosen, options.rounds, one)
            failed |= missing
        settings = {"size": options.size, "dtype": options.dtype, "rounds": options.rounds}
        reports.publish(options.out, "loop", settings, tables, results=results, failed=failed)
    exit_if_ours_failed(LOOPS, failed)


if __name__ == "__main__":
    main()
