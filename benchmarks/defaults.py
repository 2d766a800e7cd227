"""Measures the step time of `FusedSFTTrainer` with default options, relative to its time with TRL's loss.

    python -m benchmarks.defaults [--rounds 5]

For each shape of a Llama and number of tokens, the trainers run in this process and take turns after a few steps. On a
CPU, processor time is measured, because other processes affect it least. The tables show lower quartiles.
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from datasets import Dataset
from trl import SFTConfig

from benchmarks import reports
from benchmarks.measurement import llama, sync
from benchmarks.pages import markdown
from benchmarks.reports import command
from lowmem import FusedConfig
from lowmem.options import LayersConfig
from lowmem.trainer import FusedSFTTrainer
from scripts.make_model import train_tokenizer

# Layers, hidden size, vocabulary size, tokens per step
SHAPES = ((6, 384, 4096, 512), (4, 256, 16384, 512), (2, 768, 32000, 128), (2, 768, 32000, 1024), (2, 576, 49152, 400))
BASE = "all off (TRL's loss)"
SETTINGS = {BASE: False, "default": "auto"}
STEPS = 4  # per turn, of which the first is not measured


class Clock(transformers.TrainerCallback):  # type: ignore[misc]
    """Measures the time of each step of a trainer except the first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        sync()
        self._start = _now()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        sync()
        if state.global_step > 1:
            self.times.append(_now() - self._start)


def _now() -> float:
    return time.perf_counter() if torch.cuda.is_available() else time.process_time()


def trainer(shape: Sequence[int], layers: LayersConfig, folder: str, dtype: str, clock: Clock) -> FusedSFTTrainer:
    depth, hidden, vocabulary, tokens = shape
    model = llama(depth, hidden, 3 * hidden, vocabulary, dtype, checkpointing=False)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(vocabulary, (STEPS, tokens)).tolist()]
    args = SFTConfig(
        folder, max_steps=STEPS, per_device_train_batch_size=1, learning_rate=1e-3, max_grad_norm=0, max_length=tokens,
        gradient_checkpointing=False, bf16=False, save_strategy="no", report_to="none", disable_tqdm=True,
        logging_strategy="no",
    )  # fmt: skip
    tokenizer = train_tokenizer(["some words"], 270)
    result = FusedSFTTrainer(
        model,
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[clock],
        fused=FusedConfig(rule="adalomo", compile=True),
        layers=layers,
    )
    result.remove_callback(transformers.PrinterCallback)
    return result


def measured(shape: Sequence[int], rounds: int, dtype: str, folder: str) -> dict[str, float]:
    """Returns the seconds per step of each setting."""
    clocks = {name: Clock() for name in SETTINGS}
    trainers = {n: trainer(shape, LayersConfig(value), folder, dtype, clocks[n]) for n, value in SETTINGS.items()}
    for n in range(rounds + 1):
        for name in sorted(trainers, reverse=bool(n % 2)):
            trainers[name].train()
            if n == 0:
                clocks[name].times.clear()
    return {name: statistics.quantiles(clock.times, n=4)[0] for name, clock in clocks.items()}


def tables(report: Any) -> dict[str, str]:
    rows = []
    for row in report["results"]:
        _, hidden, vocabulary, tokens = row["shape"]
        base = row["seconds"][BASE]
        columns = {name: f"{row['seconds'][name] / base:.2f}" for name in SETTINGS if name != BASE}
        share = {"head and embedding": f"{row['share']:.0%} of the weights"}
        shape = {"words × hidden size": f"{vocabulary:,} × {hidden}", **share, "tokens": f"{tokens:,}"}
        rows.append({**shape, **columns})
    return {"": markdown(rows)}


@command
def main(argv: Sequence[str] | None = None) -> None:
    options = reports.make_parser(__doc__, {"rounds": (5, "turns per trainer")}).parse_args(argv)
    results = []
    with reports.output(options.out), tempfile.TemporaryDirectory() as folder:
        for shape in SHAPES:
            depth, hidden, vocabulary, _ = shape
            model = llama(depth, hidden, 3 * hidden, vocabulary, "bfloat16", "meta")
            share = 2 * hidden * vocabulary / sum(param.numel() for param in model.parameters())
            seconds = measured(shape, options.rounds, options.dtype, folder)
            results.append({"shape": shape, "share": share, "seconds": seconds})
        settings = {"rounds": options.rounds, "dtype": options.dtype}
        reports.publish(options.out, "defaults", settings, tables, results=results)


if __name__ == "__main__":
    main()
