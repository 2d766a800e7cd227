"""Writes the log lines, the progress bar, metrics.jsonl and loss.png of a run."""

import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import psutil
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from transformers import ProgressCallback, Trainer, TrainerCallback

from lowmem.errors import LowmemError
from lowmem.files import write_file, writing
from lowmem.run.terminal import METRICS, out, size, warn

# A line of metrics.jsonl.
Record = dict[str, Any]

# Metrics with a panel, from top to bottom. The metrics of evaluations are in the same panel.
_PANELS = (
    "reward", "loss", "kl", "rewards/accuracies", "rewards/margins", "accuracy", "margin", "grad_norm", "learning_rate",
    "changed_share", "clip_coef", "loss_scale",
)  # fmt: skip

# Metrics that log lines omit. The last ones are the norms of parameters (`fused.log_norms`).
_HIDDEN = re.compile(r"step|epoch|total_flos|.*runtime|.*(samples|steps)_per_second|.*num_.*tokens.*|grad_norm/.*")


class _Progress(ProgressCallback):  # type: ignore[misc]
    """The progress bar of transformers, with readable log lines. The remaining time excludes compilation."""

    compile_seconds = 0.0  # of this process so far

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **options: Any) -> None:
        super().on_train_begin(args, state, control, **options)
        self.compile_seconds = getattr(optimizer, "compile_seconds", 0.0)

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **options: Any) -> None:
        before, self.compile_seconds = self.compile_seconds, getattr(optimizer, "compile_seconds", 0.0)
        if self.training_bar is not None:
            self.training_bar.start_t += self.compile_seconds - before
            self.training_bar.last_print_t += self.compile_seconds - before
        super().on_step_end(args, state, control, **options)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "peak_memory" in logs and self.training_bar is not None:
            with self.training_bar.external_write_mode() if out.is_terminal else nullcontext():  # hides the bar
                out.print(_log_line({**logs, "step": state.global_step}, state.max_steps), soft_wrap=True)


class RunReport(TrainerCallback):  # type: ignore[misc]
    """Writes log lines and metrics.jsonl. Draws loss.png with every checkpoint and at the end, even after an error.

        with RunReport(run_dir).attached(trainer):
            trainer.train()

    The Trainer counts tokens without padding (`include_num_input_tokens_seen`). Peak memory is measured on rank 0, on
    its GPU or, without a GPU, in its process. It is the highest value since training began, and excludes loading the
    model, except on macOS and Windows, which cannot reset the peak of a process.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.run_dir = Path(run_dir)
        self.records: list[Record] = []  # empty before the first log line, and on ranks other than 0
        self.first_step = 0

    @contextmanager
    def attached(self, trainer: Trainer) -> Iterator[None]:
        """A context that reports on a trainer."""
        if trainer.args.include_num_input_tokens_seen == "no":
            trainer.args.include_num_input_tokens_seen = "non_padding"
        bar = trainer.pop_callback(ProgressCallback) and _Progress()  # none with `disable_tqdm`
        for callback in filter(None, (bar, self)):
            trainer.add_callback(callback)
        trainer.log = partial(self._log, trainer, trainer.log)
        try:
            yield
        finally:
            if bar is not None and bar.training_bar is not None:
                bar.training_bar.close()
            del trainer.log  # the method of the class again
            trainer.remove_callback(self)
            self._draw()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        _reset_peak(args.device)
        self.records, self.first_step = state.log_history, state.global_step
        # a resumed run repeats the steps after its checkpoint and logs them again
        write_file(self.run_dir / METRICS, "".join(map(_json_line, self.records)).encode())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == state.max_steps and args.logging_strategy != "no":
            # transformers 5.23 (trainer.py) adds the loss of steps after the last log line to the mean of rank 0 alone
            control.should_log = True

    def on_save(self, *_: Any, **__: Any) -> None:
        self._draw()

    def _draw(self) -> None:
        if self.records:
            png = BytesIO()
            loss_picture(self.records, self.run_dir.resolve().name).savefig(png, format="png", dpi=150)
            try:
                write_file(self.run_dir / "loss.png", png.getvalue())
            except LowmemError as error:  # the weights are worth more than the picture
                warn(str(error))

    def _log(self, trainer: Any, log: Callable[..., None], logs: Record, *args: Any, **kwargs: Any) -> None:
        """Logs as the trainer does, but adds the peak of memory for trackers, and writes metrics.jsonl."""
        state = trainer.state
        nothing_trained = "train_loss" in logs and state.global_step == self.first_step  # a finished run was resumed
        if not state.is_world_process_zero or nothing_trained:
            log(logs, *args, **kwargs)
            return
        logs["peak_memory"] = _peak(trainer.args.device)
        log(logs, *args, **kwargs)
        path = self.run_dir / METRICS
        with writing(path), path.open("a", encoding="utf-8") as file:
            file.write(_json_line(state.log_history[-1]))


def loss_picture(records: list[Record], name: str) -> Figure:
    """Draws the logged metrics of `_PANELS`, each with its values in evaluations."""
    logged = dict.fromkeys(key for record in records for key in record)
    panels = [key for key in _PANELS if key in logged] or ["loss"]
    figure = Figure(figsize=(9, 3 + 1.4 * len(panels)), layout="constrained")
    ratios = [3, *[1] * (len(panels) - 1)]
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    for metric, panel in zip(panels, axes, strict=True):
        for key in (key for key in logged if key == metric or re.fullmatch(rf"eval_(.+_)?(?<!aux_){metric}", key)):
            rows = [(row["step"], math.nan if row[key] is None else row[key]) for row in records if key in row]
            panel.plot(*zip(*rows, strict=True), label=key, lw=1.3, marker="o" if len(rows) < 20 else "")
        panel.set_ylabel(metric.replace("_", " "))
        if metric == "changed_share":
            panel.set_ylim(0, 1.05)
        panel.grid(alpha=0.3)
    axes[0].set_title(name)
    if axes[0].lines:
        axes[0].legend()
    axes[-1].set_xlabel("step")
    axes[-1].xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    return figure


def _json_line(record: Record) -> str:
    """Returns a line of metrics.jsonl. NaN and infinity become null, because JSON does not support them."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(finite, default=str) + "\n"


def _log_line(record: Record, max_steps: int) -> str:
    """Returns a line with the metrics of a logging step, of an evaluation, or of the run at its end."""
    parts = [f"step {record['step']:>{len(str(max_steps))}}/{max_steps}"]
    for name, value in record.items():
        if not _HIDDEN.fullmatch(name):
            value = size(value) if name == "peak_memory" else value
            text = f"{value:.4g}" if isinstance(value, float) else value
            parts.append(f"{name.replace('_', ' ')} {text}")
    return "  ".join(parts)


def _reset_peak(device: torch.device) -> None:
    """Resets the peak of memory, if the system can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # on Linux, resets the peak that getrusage reads


def _peak(device: torch.device) -> int:
    """Returns the bytes in use at the peak since training began."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource  # not available on Windows

    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
