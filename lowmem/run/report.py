"""Writes the log lines, the progress bar, metrics.jsonl and loss.png of a run."""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback

from lowmem.errors import LowmemError
from lowmem.files import write_file, writing
from lowmem.placements import nbytes
from lowmem.run.pictures import Record, draw, main_metric
from lowmem.run.terminal import size

METRICS = "metrics.jsonl"  # the log history, one JSON object per line

# The only metric that is text: the parameter that contributes most to the model's norm (`scaled_adam`).
DOMINANT = "dominant_parameter"

# Metrics of an evaluation that log lines omit.
_TIMING = ("runtime", "samples_per_second", "steps_per_second", "num_tokens")


class _Bar(ProgressCallback):  # type: ignore[misc]
    """The progress bar of transformers, without its log lines, because `RunReport` prints them."""

    def on_log(self, *_: Any, **__: Any) -> None:
        pass


class RunReport(TrainerCallback):  # type: ignore[misc]
    """Writes log lines, metrics.jsonl and, on a terminal, a progress bar. Draws loss.png with every checkpoint and at
    the end, even after an error.

        with RunReport(run_dir).attached(trainer):
            trainer.train()

    The Trainer counts tokens without padding (`include_num_input_tokens_seen`). Checkpoints contain the count, so a
    resumed run continues it. Tokens per second exclude evaluation, saving and, in the first step, compilation. Memory
    is measured on rank 0, on its GPU or, without a GPU, in its process. The peak is the highest value since training
    began and excludes loading the model, except on macOS and Windows, which cannot reset the peak of a process.
    """

    def __init__(self, run_dir: str | Path, console: Console | None = None) -> None:
        self.run_dir = Path(run_dir)
        self.console = console or Console()
        self.bar = _Bar()
        self.records: list[Record] = []  # empty before the first log line, and on ranks other than 0
        self.weight_bytes = 0
        self.seconds = 0.0  # of training since the last log line
        self.last_time = 0.0
        self.compile_seconds = 0.0  # of this process so far
        self.logged_tokens = 0
        self.first_step = 0
        self.first_time = 0.0

    @contextmanager
    def attached(self, trainer: Trainer) -> Iterator[None]:
        """A context that reports on a trainer, and replaces the trainer's progress bar and printer."""
        if trainer.args.include_num_input_tokens_seen == "no":
            trainer.args.include_num_input_tokens_seen = "non_padding"
        trainer.remove_callback(ProgressCallback)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(self)
        if self.console.is_terminal and not trainer.args.disable_tqdm:
            trainer.add_callback(self.bar)
        trainer.log = partial(self._log, trainer, trainer.log)
        try:
            yield
        finally:
            if self.bar.training_bar is not None:
                self.bar.training_bar.close()
            del trainer.log  # the method of the class again
            trainer.remove_callback(self)
            self._draw()

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: torch.nn.Module, optimizer: Any = None, **_: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        _reset_peak(args.device)
        self.weight_bytes = sum(map(nbytes, model.parameters()))
        self.records = state.log_history
        # a resumed run repeats the steps after its checkpoint and logs them again
        write_file(self.run_dir / METRICS, "".join(map(_json_line, self.records)).encode())
        self.logged_tokens, self.first_step = state.num_input_tokens_seen, state.global_step
        self.compile_seconds = getattr(optimizer, "compile_seconds", 0.0)
        self.first_time = self.last_time = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        now = time.perf_counter()
        compile_seconds = getattr(optimizer, "compile_seconds", 0.0)
        compiling = compile_seconds - self.compile_seconds
        if state.is_world_process_zero and compiling > 0:
            self._print(f"compiled the optimizer in {compiling:.1f} s", "dim")
        self.seconds += now - self.last_time - compiling
        self.first_time += compiling
        self.last_time, self.compile_seconds = now, compile_seconds
        if state.global_step == state.max_steps and args.logging_strategy != "no":
            # transformers 5.23 (trainer.py) adds the loss of steps after the last log line to the mean of rank 0 alone
            control.should_log = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.last_time = time.perf_counter()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._draw()
        self.last_time = time.perf_counter()

    def _draw(self) -> None:
        if self.records:
            try:
                draw(self.run_dir, self.records)
            except LowmemError as error:  # the weights are worth more than the picture
                self._print(str(error), "red")

    def _log(self, trainer: Any, log: Callable[..., None], logs: Record, *args: Any, **kwargs: Any) -> None:
        """Logs as the trainer does, but adds the metrics of this report for trackers, and writes metrics.jsonl."""
        state = trainer.state
        nothing_trained = "train_loss" in logs and state.global_step == self.first_step  # a finished run was resumed
        if not state.is_world_process_zero or nothing_trained:
            log(logs, *args, **kwargs)
            return
        tokens = state.num_input_tokens_seen
        memory = {**_memory(trainer.args.device), "weight_bytes": self.weight_bytes}
        logs |= {"time": round(time.time(), 3), "tokens": tokens, **memory}
        if "loss" in logs:
            logs["tokens_per_second"] = (tokens - self.logged_tokens) / self.seconds if self.seconds else math.nan
            self.logged_tokens, self.seconds = tokens, 0.0
        log(logs, *args, **kwargs)
        record = state.log_history[-1]  # saved in checkpoints, so that a resumed run has it
        trained = state.global_step - self.first_step
        path = self.run_dir / METRICS
        with writing(path), path.open("a", encoding="utf-8") as file:
            file.write(_json_line(record))
        seconds_left = None
        if trained > 0:
            seconds_left = (self.last_time - self.first_time) / trained * (state.max_steps - state.global_step)
        main = main_metric(self.records)
        if line := _log_line(record, state.max_steps, self.console.width, seconds_left, main):
            self._print(line, "cyan" if any(name.startswith("eval_") for name in record) else "")

    def _print(self, line: str, style: str) -> None:
        bar = self.bar.training_bar
        with nullcontext() if bar is None else bar.external_write_mode():
            self.console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


# The parts of a line after the main metric, in order of importance. Lines that are too long omit the last parts.
_PARTS = {
    "rewards/accuracies": "accuracy {rewards/accuracies:>6.3f}",
    "accuracy": "accuracy {accuracy:>6.3f}",
    "grad_norm": "grad norm {grad_norm:>8.2e}",
    "left": "{left:>7} left",
    "rewards/margins": "margin {rewards/margins:>6.3f}",
    "margin": "margin {margin:>6.3f}",
    "clip_coef": "clip {clip_coef:>7.2g}",
    "loss_scale": "scale {loss_scale:>10,.10g}",
    "learning_rate": "lr {learning_rate:.2e}",
    "tokens_per_second": "{tokens_per_second:>7,.0f} tokens/s",
    "peak": "peak {peak:>10}",
    DOMINANT: f"{{dominant_proportion:.0%}} of the norm is {{{DOMINANT}}}",
}


def _json_line(record: Record) -> str:
    """Returns a line of metrics.jsonl. NaN and infinity become null, because JSON does not support them."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(finite, default=str) + "\n"


def _log_line(
    record: Record, max_steps: int, width: int, seconds_left: float | None = None, main: str = "loss"
) -> str | None:
    """Returns an aligned line of at most `width` columns for a logging step, an evaluation or the end of training."""
    step = f"step {record['step']:>{len(str(max_steps))}}/{max_steps}"
    if "train_loss" in record:
        trained = f"trained in {timedelta(seconds=round(record['train_runtime']))}"
        peak = f"peak {size(record['peak_memory'])}"
        mean = f"  mean loss {record['train_loss']:.4f}" if main == "loss" else ""
        return f"{step}  {trained}{mean}  {record['tokens']:,} tokens  {peak}"
    if "loss" not in record:
        scores = {name.removeprefix("eval_"): value for name, value in record.items() if name.startswith("eval_")}
        shown = [f"{name.replace('_', ' ')} {v:.4f}" for name, v in scores.items() if not name.endswith(_TIMING)]
        return f"{step}  evaluation  {'  '.join(shown)}" if shown else None
    value = math.nan if record.get(main) is None else record[main]  # no reward function has returned a reward
    left = None if seconds_left is None else str(timedelta(seconds=round(seconds_left)))
    values = {**record, "left": left, "peak": size(record["peak_memory"])}
    parts = [step, f"{main} {value:>8.4f}"]
    parts += [text.format_map(values) for name, text in _PARTS.items() if values.get(name) is not None]
    kind = "skipped steps" if "loss_scale" in record else "non-finite steps"
    seldom = [f"{kind} {record['nonfinite_steps']:,}"] if record.get("nonfinite_steps") else []
    while len(line := "  ".join(parts + seldom)) > width and len(parts) > 1:
        parts.pop()
    return line


def _reset_peak(device: torch.device) -> None:
    """Resets the peak of `_memory`, if the system can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # on Linux, resets the peak that getrusage reads


def _memory(device: torch.device) -> dict[str, int]:
    """Returns the bytes in use, and the peak since training began."""
    if device.type == "cuda":
        return {"memory": torch.cuda.memory_allocated(device), "peak_memory": torch.cuda.max_memory_allocated(device)}
    used = psutil.Process().memory_info()
    if sys.platform == "win32":
        return {"memory": used.rss, "peak_memory": used.peak_wset}
    import resource  # not available on Windows

    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    return {"memory": used.rss, "peak_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
