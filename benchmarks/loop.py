"""The loop around a training step: how much of a step is neither the model nor the update.

    python -m benchmarks.loop [--load 1x128] [--only "lowmem sft"] [--rounds 3]

Every loop trains the same Llama on rows of random tokens, with activation checkpointing, without clipping, and logs
every step. A step lasts from the end of one to the end of the next, so it contains fetching and collating its batch,
callbacks, the log line and the progress bar. "Other" is the part of a step that is not forward, backward or update.
What hooks update during backward is part of backward.
"""

import io
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from datasets import Dataset
from rich.console import Console
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

import lowmem
from benchmarks import reports
from benchmarks.baselines import LR, Method, exit_if_ours_failed, select
from benchmarks.engine import stacks_between
from benchmarks.measurement import SIZES, Workload
from benchmarks.processes import Figures, alone, in_rounds, medians
from benchmarks.reports import command, formatted, headline, print_missing, print_table
from benchmarks.runs import configuration, trainer_of
from lowmem.run.report import RunReport
from scripts.make_model import SMALLEST_VOCABULARY, train_tokenizer

OURS = "lowmem sft"
BASE = "PyTorch loop, AdamW(fused=True)"
PHASES = ("forward", "backward", "update")

# Rows and tokens of a step, and how many steps are timed per round.
LOADS = {"1x128": (1, 128, 10), "8x512": (8, 512, 2)}
WARMUP = 2  # the first step compiles


class Clock(TrainerCallback):  # type: ignore[misc]
    """Times steps and their phases. Phases do not overlap, nor does one contain another."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []  # seconds by phase, and of the whole step
        self._now = dict.fromkeys(PHASES, 0.0)
        self._started = self._ended = time.perf_counter()

    def start(self, *_: Any) -> None:
        self._started = time.perf_counter()

    def stop(self, phase: str, *_: Any) -> None:
        self._now[phase] += time.perf_counter() - self._started

    def end_step(self) -> None:
        now = time.perf_counter()
        self.steps.append({**self._now, "seconds": now - self._ended})
        self._now, self._ended = dict.fromkeys(PHASES, 0.0), now

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.end_step()

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Times the model's forward, backward, and what is updated after it: by `step()`, and small parameters."""
        backward = torch.autograd.backward

        def timed(*args: Any, **kwargs: Any) -> None:
            self.start()
            backward(*args, **kwargs)
            self.stop("backward")

        hooks = (
            model.register_forward_pre_hook(self.start),
            model.register_forward_hook(partial(self.stop, "forward")),
            register_optimizer_step_pre_hook(self.start),
            register_optimizer_step_post_hook(partial(self.stop, "update")),
        )
        try:
            with (
                mock.patch.object(torch.autograd, "backward", timed),
                stacks_between(self.start, partial(self.stop, "update")),
            ):
                yield
        finally:
            for hook in hooks:
                hook.remove()


# -- loops -------------------------------------------------------------------------------------------------------------


def rows_of(workload: Workload) -> list[list[int]]:
    """Random tokens, a row for each sample of the run."""
    shape = (workload.batch * (WARMUP + workload.steps), workload.tokens)
    return torch.randint(SIZES[workload.size][-1], shape).tolist()  # type: ignore[no-any-return]


def arguments(workload: Workload) -> dict[str, Any]:
    """Arguments that all trainers get."""
    return {
        "per_device_train_batch_size": workload.batch,
        "max_steps": WARMUP + workload.steps,
        "logging_steps": 1,
        "save_strategy": "no",
    }


def peer_arguments(workload: Workload) -> dict[str, Any]:
    """Those of Hugging Face's own trainers, which are the defaults of `lowmem sft`."""
    return {
        **arguments(workload),
        "learning_rate": LR,
        "optim": "adamw_torch_fused",
        "max_grad_norm": 0.0,
        "bf16": False,
        "report_to": "none",
        "dataloader_pin_memory": torch.cuda.is_available(),
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": False},
    }


def run_lowmem(workload: Workload, clock: Clock, folder: str, computed: bool = True, **optimizer: Any) -> None:
    """`lowmem sft` with its report, its files and its progress bar."""
    depth, hidden, vocabulary = SIZES[workload.size]
    model = {"model_type": "llama", "vocab_size": vocabulary, "hidden_size": hidden, "num_hidden_layers": depth,
             "intermediate_size": workload.intermediate, "num_attention_heads": hidden // 64}  # fmt: skip
    layers = {"computed_gradients": computed}
    others = {**arguments(workload), **{f"fused.{name}": value for name, value in optimizer.items()}}
    config = configuration(
        model, workload.tokens, dtype=workload.dtype, layers=layers, learning_rate=LR, output_dir=folder, **others
    )
    trainer = trainer_of(config, rows_of(workload))
    trainer.add_callback(clock)
    with (
        clock.attached(trainer.model),
        RunReport(folder, Console(file=io.StringIO(), force_terminal=True)).attached(trainer),
    ):
        trainer.train()


def run_trl(workload: Workload, clock: Clock, folder: str) -> None:
    """TRL's `SFTTrainer`."""
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(output_dir=folder, max_length=None, **peer_arguments(workload))
    tokenizer = train_tokenizer(["a"], SMALLEST_VOCABULARY)
    rows = Dataset.from_dict({"input_ids": (ids := rows_of(workload)), "labels": ids})
    model = workload.model("cpu")
    trainer = SFTTrainer(model, args=args, train_dataset=rows, processing_class=tokenizer, callbacks=[clock])
    with clock.attached(model):
        trainer.train()


def run_hugging_face(workload: Workload, clock: Clock, folder: str) -> None:
    """`transformers.Trainer`."""
    model = workload.model("cpu")
    rows = Dataset.from_dict({"input_ids": (ids := rows_of(workload)), "labels": ids})
    args = TrainingArguments(output_dir=folder, **peer_arguments(workload))
    trainer = Trainer(model, args, default_data_collator, train_dataset=rows, callbacks=[clock])
    with clock.attached(model):
        trainer.train()


def run_pytorch(workload: Workload, clock: Clock, folder: str, update: Literal["AdamW", "adalomo"] = "AdamW") -> None:
    """A loop of five lines."""
    model = workload.model("cpu")
    loader = DataLoader(torch.tensor(rows_of(workload)), batch_size=workload.batch, shuffle=True)  # type: ignore[arg-type]
    if update == "AdamW":
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
        backward: Callable[[torch.Tensor], object] = torch.Tensor.backward
    else:
        optimizer = lowmem.FusedOptimizer(model.named_parameters(), rule=update, lr=LR)
        backward = optimizer.backward
    with clock.attached(model):
        for ids in loader:
            loss = model(input_ids=ids, labels=ids).loss
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            print(loss.item())
            clock.end_step()


_ADAMW = {"rule": "torch.optim.AdamW", "rounding": "nearest", "fused": True}
LOOPS = {
    OURS: Method(run_lowmem, "ours"),
    f"{OURS}, computed_gradients=False": Method(partial(run_lowmem, computed=False), "ours"),
    f"{OURS}, AdamW(fused=True)": Method(partial(run_lowmem, computed=False, **_ADAMW), "ours"),
    "TRL's SFTTrainer, AdamW(fused=True)": Method(run_trl),
    "transformers.Trainer, AdamW(fused=True)": Method(run_hugging_face),
    "PyTorch loop, lowmem adalomo": Method(partial(run_pytorch, update="adalomo"), "ours"),
    BASE: Method(run_pytorch),
}


def measure(loop: str, workload: Workload) -> Figures:
    """Medians over the steps of one run: seconds of a step, of each phase and of the rest, and the share of that."""
    torch.set_num_threads(workload.threads)
    torch.manual_seed(0)
    clock = Clock()
    with (
        tempfile.TemporaryDirectory() as folder,
        redirect_stdout(io.StringIO()),
        redirect_stderr(io.StringIO()),
    ):
        LOOPS[loop].make(workload, clock, folder)
    steps = clock.steps[WARMUP:]
    figures = {name: statistics.median(step[name] for step in steps) for name in (*PHASES, "seconds")}
    other = [step["seconds"] - sum(step[name] for name in PHASES) for step in steps]
    share = statistics.median(rest / step["seconds"] for rest, step in zip(other, steps, strict=True))
    return {**figures, "other": statistics.median(other), "share": share}


# -- the command -------------------------------------------------------------------------------------------------------


def report(load: str, results: dict[str, Figures], failed: dict[str, str]) -> None:
    base = results.get(BASE, {}).get("seconds")
    print(f"\nA step of {load.replace('x', ' × ')} tokens\n")
    rows = [
        (name, f"{row['seconds']:.3f}", formatted(base and row["seconds"] / base, ".2f"),
         *(f"{row[phase]:.3f}" for phase in PHASES), f"{row['other'] * 1e3:.1f}", f"{row['share']:.1%}")
        for name, row in results.items()
    ]  # fmt: skip
    print_table(("loop", "s/step", "× the last", *(f"{phase}, s" for phase in PHASES), "other, ms", "share"), rows)
    print_missing(failed, {})


@command
def main(argv: Sequence[str] | None = None) -> None:
    counts = {"rounds": (3, "how often all loops are measured in turn")}
    parser = reports.make_parser(__doc__, counts, only="loop")
    parser.add_argument("--load", choices=LOADS, action="append", help="only this load; repeatable")
    parser.add_argument("--size", choices=SIZES, default="100M", help="approximate parameters of the Llama (100M)")
    options = parser.parse_args(argv)
    chosen = select(LOOPS, options.only)
    results: dict[str, dict[str, Figures]] = {}
    failed: dict[str, str] = {}
    with reports.output(options.out, "loop"):
        print(f"Llama of about {options.size} parameters; {headline(options.dtype)}; {options.rounds} rounds")
        for load in options.load or LOADS:
            batch, tokens, steps = LOADS[load]
            workload = Workload(options.size, batch, tokens, options.dtype, steps)

            def one(name: str, folder: Path, workload: Workload = workload) -> Figures:
                return alone(measure, name, workload, folder=folder)  # type: ignore[no-any-return]

            runs, missing = in_rounds(chosen, options.rounds, one, Console(stderr=True))
            results[load] = {name: medians(rows) for name, rows in runs.items()}
            failed |= missing
            report(load, results[load], missing)
        settings = {"size": options.size, "dtype": options.dtype, "rounds": options.rounds, "loads": LOADS}
        reports.save(options.out / "loop.json", settings, results=results, failed=failed)
    exit_if_ours_failed(LOOPS, failed)


if __name__ == "__main__":
    main()
