"""What a run leaves behind: log lines, metrics as JSON lines, pictures, the environment and a README."""

import json
import math
import os
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import time
from datetime import datetime
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback

from lowmem.errors import ConfigError, LowmemError
from lowmem.files import cpu, version, write_file, writing
from lowmem.hf.checkpoint import by_number
from lowmem.placements import shape_of
from lowmem.run.pictures import Record, draw, loss_keys, new_nonfinite_steps, series, size

METRICS = "metrics.jsonl"

# The one text among the numbers that are logged: the parameter that a norm is mostly of.
DOMINANT = "dominant_parameter"

# Of an evaluation's metrics these say how long it took, not how good the model is.
_TIMING = ("runtime", "samples_per_second", "steps_per_second", "num_tokens")


def start_run_folder(run_dir: str | Path, resume: bool) -> Path:
    """Make the folder of a new run, or find that of a run to resume; one process of a run calls it."""
    folder = Path(run_dir)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"run_dir {folder} is a file. Set run_dir to another path.")
    used = folder.is_dir() and any(folder.iterdir())
    if resume and not used:
        raise ConfigError(f"run_dir {folder} holds no run to resume. Leave --resume out to start one.")
    if used and not resume:
        raise ConfigError(
            f"run_dir {folder} holds a run already. Go on with it by --resume, set run_dir to another folder, "
            "or delete this one."
        )
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_environment(run_dir: str | Path) -> None:
    """Write environment.json: where, when and with which versions a run was started."""
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    packages = ("lowmem", "torch", "transformers", "trl", "accelerate", "datasets", "deepspeed", "safetensors")
    record = {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "directory": str(Path.cwd()),
        "git": _git(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": {"model": cpu(), "count": os.cpu_count()},
        "memory_bytes": psutil.virtual_memory().total,
        "devices": devices,
        "processes": int(os.environ.get("WORLD_SIZE", 1)),
        "versions": {name: version(name) for name in packages},
    }
    write_file(Path(run_dir) / "environment.json", (json.dumps(record, indent=2) + "\n").encode())


def command() -> str:
    """What starts lowmem as it was started here."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    return "lowmem" if processes == 1 else f"torchrun --nproc_per_node {processes} -m lowmem"


def _git() -> Record | None:
    """The commit of the repository around the current directory, and whether it has changes beside it."""
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        status = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return {"commit": commit.stdout.strip(), "dirty": bool(status.stdout.strip())}


# --- While it runs ------------------------------------------------------------------------------------------------


class RunReport(TrainerCallback):  # type: ignore[misc]
    """Log lines, a progress bar on a terminal, metrics.jsonl; when it ends, however it ends, pictures and README.

        with RunReport(run_dir) as report:
            report.attach(trainer)
            trainer.train()

    Tokens are those of the batches that were trained on, padding left out, as the Trainer itself counts them
    (`include_num_input_tokens_seen`): the count is saved in checkpoints, so it goes on when a run is resumed. The rate
    is over training time alone: evaluating and saving are not in it. Memory is that of the GPU where there is one, and
    of the process otherwise, in both cases on the first rank. Compiling, in the first step, is said and not counted.
    """

    def __init__(self, run_dir: str | Path, console: Console | None = None) -> None:
        self.run_dir = Path(run_dir)
        self.console = console or Console()
        self.progress: Progress | None = None
        self.logged = False
        self.weight_bytes = 0
        self.seconds = 0.0  # of training since the last log line
        self.mark = 0.0
        self.compiling = 0.0  # seconds, of this process so far
        self.logged_tokens = 0

    def attach(self, trainer: Trainer) -> None:
        """Take the place of the trainer's own progress bar and printer."""
        if trainer.args.include_num_input_tokens_seen == "no":
            trainer.args.include_num_input_tokens_seen = "non_padding"
        trainer.remove_callback(ProgressCallback)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(self)

    def __enter__(self) -> "RunReport":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.progress:
            self.progress.stop()
        if not self.logged:
            return  # it never began, or this is another rank
        try:
            plot_run(self.run_dir)
            write_readme(self.run_dir)
        except LowmemError as failure:
            if error is None:
                raise
            self._print(str(failure), "red")  # what ended the run is the error to raise

    def on_train_begin(self, args: Any, state: Any, control: Any, model: torch.nn.Module, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self.weight_bytes = _weight_bytes(model)
        _cut_metrics(self.run_dir / METRICS, state.global_step)
        self.logged_tokens = state.num_input_tokens_seen
        self.compiling = getattr(kwargs.get("optimizer"), "compile_seconds", 0.0)
        self.mark = time.perf_counter()
        if self.console.is_terminal and not args.disable_tqdm:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self.progress = Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=self.console)
            first = "compiling" if getattr(kwargs.get("optimizer"), "compiled", False) else "training"
            self.progress.add_task(first, total=state.max_steps, completed=state.global_step)
            self.progress.start()

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        now = time.perf_counter()
        compiling = getattr(optimizer, "compile_seconds", 0.0)
        if state.is_world_process_zero and compiling > self.compiling:
            self._print(f"compiled the optimizer in {compiling - self.compiling:.1f} s", "dim")
        self.seconds += now - self.mark - (compiling - self.compiling)
        self.mark, self.compiling = now, compiling
        self._advance("training", state.global_step)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._advance("evaluating", state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.mark = time.perf_counter()
        self._advance("training", state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.mark = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: Record, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        record = {
            "step": state.global_step,
            **{name: value for name, value in logs.items() if isinstance(value, Real) or name == DOMINANT},
            "time": round(time.time(), 3),
            "tokens": state.num_input_tokens_seen,
            **_memory(args.device),
            "weight_bytes": self.weight_bytes,
        }
        if "loss" in logs:
            rate = (state.num_input_tokens_seen - self.logged_tokens) / self.seconds if self.seconds else math.nan
            record["tokens_per_second"] = rate
            self.logged_tokens, self.seconds = state.num_input_tokens_seen, 0.0
        _append(self.run_dir / METRICS, record)
        self.logged = True
        if line := _log_line(record, state.max_steps):
            self._print(line, "cyan" if any(name.startswith("eval_") for name in record) else "")

    def _advance(self, what: str, step: int) -> None:
        if self.progress:
            self.progress.update(self.progress.task_ids[0], description=what, completed=step)

    def _print(self, line: str, style: str) -> None:
        self.console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def _log_line(record: Record, max_steps: int) -> str | None:
    """One aligned line for a logging step, an evaluation or the end of training."""
    width = len(str(max_steps))
    step = f"step {record['step']:>{width}}/{max_steps}"
    if "train_loss" in record:
        return (
            f"{step}  trained in {_duration(record['train_runtime'])}  mean loss {record['train_loss']:.4f}  "
            f"{record['tokens']:,} tokens  peak {size(record['peak_memory'])}"
        )
    if "loss" in record:
        norm, name = record.get("grad_norm", math.nan), record.get(DOMINANT)
        clip = f"  clip {_factor(record['clip_coef']):>5}" if "clip_coef" in record else ""
        scale = f"  scale {record['loss_scale']:>10,.10g}" if "loss_scale" in record else ""
        # what may come and go stands last
        nonfinite_steps = f"  nonfinite_steps {record['nonfinite_steps']:,}" if record.get("nonfinite_steps") else ""
        dominant = f"  {record['dominant_proportion']:.0%} of the norm is {name}" if name else ""
        return (
            f"{step}  loss {record['loss']:>8.4f}  grad norm {norm:>9.3e}{clip}{scale}  "
            f"lr {record.get('learning_rate', 0.0):.2e}  {record['tokens_per_second']:>9,.0f} tokens/s  "
            f"peak {size(record['peak_memory']):>10}{nonfinite_steps}{dominant}"
        )
    scores = {name.removeprefix("eval_"): value for name, value in record.items() if name.startswith("eval_")}
    shown = [f"{name.replace('_', ' ')} {v:.4f}" for name, v in scores.items() if not name.endswith(_TIMING)]
    return f"{step}  evaluation  {'  '.join(shown)}" if shown else None


def _factor(value: float) -> str:
    """A number up to 1 in few characters."""
    return f"{value:.0e}" if 0 < value < 0.005 else f"{value:.2f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _weight_bytes(model: torch.nn.Module) -> int:
    return sum(math.prod(shape_of(p)) * p.element_size() for p in model.parameters())


def _memory(device: torch.device) -> dict[str, int]:
    """Bytes in use now and at most so far."""
    if device.type == "cuda":
        return {"memory": torch.cuda.memory_allocated(device), "peak_memory": torch.cuda.max_memory_allocated(device)}
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"memory": psutil.Process().memory_info().rss, "peak_memory": peak}


# --- metrics.jsonl ------------------------------------------------------------------------------------------------


def _json_line(record: Record) -> str:
    """JSON knows no NaN and no infinity: they become null."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(finite) + "\n"


def _append(path: Path, record: Record) -> None:
    with writing(path), path.open("a", encoding="utf-8") as file:
        file.write(_json_line(record))


def _cut_metrics(path: Path, step: int) -> None:
    """Drop what was logged after `step`: a resumed run logs it again."""
    if path.exists():
        kept = [record for record in read_metrics(path.parent) if record["step"] <= step]
        write_file(path, "".join(map(_json_line, kept)).encode())


def read_metrics(run_dir: str | Path) -> list[Record]:
    """The lines of a run's metrics.jsonl. A last line that was cut off while it was written is left out."""
    path = Path(run_dir) / METRICS
    try:
        file = path.open(encoding="utf-8")
    except OSError as error:
        raise LowmemError(f"{path}: can't be read: {error.strerror}. It is written while a run trains.") from error
    records = []
    with file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                break
            try:
                records.append(json.loads(line, object_pairs_hook=_record))
            except json.JSONDecodeError as error:
                raise LowmemError(f"{path}, line {number}: not JSON: {error.msg}. Delete the line to go on.") from error
    return records


def _record(pairs: list[tuple[str, Any]]) -> Record:
    """Every line has the same names, hundreds where norms of parameters are logged: each is kept once."""
    return {sys.intern(name): value for name, value in pairs}


def plot_run(run_dir: str | Path) -> list[Path]:
    """Draw a run's pictures into its folder, from its metrics.jsonl alone."""
    folder = Path(run_dir)
    records = read_metrics(folder)
    if not records:
        raise LowmemError(f"{folder / METRICS}: nothing was logged yet, so there is nothing to draw.")
    pictures = draw(records, folder.resolve().name)
    for name, png in pictures.items():
        write_file(folder / name, png)
    return [folder / name for name in pictures]


# --- README -------------------------------------------------------------------------------------------------------

_FILES = {
    "config.yaml": "the whole configuration, overrides included; `lowmem train` takes it",
    "environment.json": "machine, versions, git commit and command of the latest start",
    "metrics.jsonl": "every logged number, one JSON object a line",
    "loss.png": "training and evaluation loss, gradient norm, learning rate, clip factor, loss scale",
    "memory.png": "memory in use and at its peak, beside the weights",
    "norms.png": "the gradient norm of each parameter, step by step",
    "runs": "TensorBoard files: `tensorboard --logdir` of this folder",
}


def write_readme(run_dir: str | Path) -> None:
    """Write README.md into the run folder: how it went, what each file is, how to go on."""
    folder = Path(run_dir)
    checkpoints = by_number(folder)
    files = [f"| [{name}]({name}) | {what} |" for name, what in _FILES.items() if (folder / name).exists()]
    files += [f"| {path.name}/ | a Hugging Face model folder, with the optimizer's states |" for path in checkpoints]
    pictures = [f"![{name}]({name})" for name in _FILES if name.endswith(".png") and (folder / name).exists()]
    lines = [
        f"# {folder.resolve().name}", "",
        "| | |", "| --- | --- |", *(f"| {what} | {value} |" for what, value in _results(read_metrics(folder))), "",
        *pictures, "",
        "## Files", "", "| file | what it is |", "| --- | --- |", *files, "",
        "## Going on", "", *_going_on(folder, checkpoints),
    ]  # fmt: skip
    write_file(folder / "README.md", ("\n".join(lines) + "\n").encode())


def _results(records: list[Record]) -> list[tuple[str, str]]:
    """What a run came to, for a table of two columns."""
    results = [("steps", f"{records[-1]['step']:,}"), ("tokens", f"{records[-1]['tokens']:,}")]
    for key in ("loss", *loss_keys(records)):
        losses = [(loss, step) for step, loss in zip(*series(records, key), strict=True)]
        lowest, at_step = min((pair for pair in losses if math.isfinite(pair[0])), default=(math.nan, 0))
        name = "training loss" if key == "loss" else key.replace("_", " ").replace("eval", "evaluation")
        if losses:
            results.append((name, f"{losses[-1][0]:.4f} (lowest {lowest:.4f}, at step {at_step:,})"))
    rates = [value for value in series(records, "tokens_per_second")[1] if math.isfinite(value)]
    if rates:
        results.append(("tokens/s, median", f"{statistics.median(rates):,.0f}"))
    factors = [value for value in series(records, "clip_coef")[1] if value > 0]  # 0 is the factor of an overflow
    if factors:
        clipped = sum(value < 1 for value in factors) / len(factors)
        results.append(("clipped", f"{clipped:.0%} of the logged steps"))
    if nonfinite_steps := sum(new_nonfinite_steps(records)):
        results.append(("nonfinite_steps", f"{nonfinite_steps:,} steps with a gradient that was not finite"))
    peak = max(record["peak_memory"] for record in records)
    return [*results, ("peak memory", f"{size(peak)} (weights {size(records[-1]['weight_bytes'])})")]


def _going_on(folder: Path, checkpoints: list[Path]) -> list[str]:
    if not checkpoints:
        return ["No checkpoint was saved: set `trainer.save_steps` lower to have something to go on from."]
    load = f'model = AutoModelForCausalLM.from_pretrained("{checkpoints[-1]}", dtype="auto")'
    return [
        "```sh", f"{command()} train {folder}/config.yaml --resume     # from the newest checkpoint",
        f'lowmem generate {folder} "a prompt"', "```", "",
        "```python", "from transformers import AutoModelForCausalLM, AutoTokenizer", "", load,
        f'tokenizer = AutoTokenizer.from_pretrained("{checkpoints[-1]}")', "```",
    ]  # fmt: skip
