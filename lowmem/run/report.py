"""The run folder: metrics as JSON lines, pictures, environment, README; and the log lines of a run."""

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
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from numbers import Real
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback

from lowmem.errors import ConfigError, LowmemError
from lowmem.files import cpu, version, write_file, writing
from lowmem.hf.checkpoint import by_number
from lowmem.placements import in_group, shape_of
from lowmem.run.config import RunConfig
from lowmem.run.pictures import Record, draw, loss_keys, series, size

METRICS = "metrics.jsonl"

# The only logged text: the parameter that contributes most to the model's norm (`scaled_adam`).
DOMINANT = "dominant_parameter"

# Metrics of an evaluation that describe its duration and are not shown.
_TIMING = ("runtime", "samples_per_second", "steps_per_second", "num_tokens")


@contextmanager
def run_folder(run_dir: str | Path, resume: bool, rank: int = 0) -> Iterator[Path]:
    """The folder of a run. Rank 0 creates it, and removes it if the run fails before anything is written there."""
    folder = Path(run_dir)
    if rank == 0:
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"run_dir {folder} is a file. Set run_dir to another path.")
        used = folder.is_dir() and any(folder.iterdir())
        if resume and not used:
            raise ConfigError(f"run_dir {folder} does not contain a run to resume. Omit --resume to start one.")
        if used and not resume:
            raise ConfigError(
                f"run_dir {folder} already contains a run. Continue it with --resume, set run_dir to another folder, "
                "or delete this one."
            )
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    except BaseException:
        if rank == 0 and not any(folder.iterdir()):
            folder.rmdir()
        raise


def write_environment(run_dir: str | Path) -> None:
    """Writes environment.json: when, where and with which versions the run was started."""
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
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "processes": int(os.environ.get("WORLD_SIZE", 1)),
        "versions": {name: version(name) for name in packages},
    }
    write_file(Path(run_dir) / "environment.json", (json.dumps(record, indent=2) + "\n").encode())


def describe(config: RunConfig, trainer: Any) -> dict[str, str]:
    """What a run trains and how, by topic, for its first lines and for a plan."""
    model, args, optimizer = trainer.model, trainer.args, trainer.optimizer
    sizes: dict[str, int] = {}  # rule and learning rate → parameters
    for group in optimizer.param_groups:
        rule = group["rule"] + ("" if group.get("lr") is None else f", lr {group['lr']:g}")
        sizes[rule] = sizes.get(rule, 0) + sum(math.prod(shape_of(p)) for p in group["params"])
    rules = "; ".join(f"{rule}: {_count(size)}" for rule, size in sizes.items()) if len(sizes) > 1 else "".join(sizes)
    states = "" if config.optimizer.state_storage == "float32" else f", states in {config.optimizer.state_storage}"
    compiled = ", compiled in the first step (up to a minute)" if optimizer.compiled else ""
    parameters = _count(sum(math.prod(shape_of(p)) for p in model.parameters()))
    topics = {
        "model": f"{type(model).__name__}, {parameters}, {config.model.dtype}",
        "optimizer": f"{rules}; rounding {config.optimizer.rounding}{states}, fused into backward{compiled}",
    }
    if in_group():
        share = "a shard of the parameters" if optimizer.placement in ("zero3", "fsdp2") else "all parameters"
        topics["placement"] = f"{optimizer.placement}: each of {args.world_size} processes holds {share}"
    logits = "logits in tiles"
    if args.label_smoothing_factor:
        logits = f"labels smoothed by {args.label_smoothing_factor:g}, which takes all logits at once"
    recomputed = args.activation_checkpointing or (args.fsdp and args.fsdp_config.get("activation_checkpointing"))
    activations = "recomputed in backward" if recomputed else "kept for backward"
    kwargs = args.activation_checkpointing_kwargs or {}
    offloaded = ", offloaded to the host" if args.activation_offloading or kwargs.get("offload") else ""
    return {
        **topics,
        "policy": f"{optimizer.policy}: {optimizer.policy_reason}",
        "loss": f"{args.loss_type}, {logits}; activations {activations}{offloaded}",
    }


def _count(parameters: int) -> str:
    return f"{parameters / 1e6:,.1f}M parameters" if parameters >= 1e5 else f"{parameters:,} parameters"


def command() -> str:
    """The command that starts lowmem with as many processes as now."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    return "lowmem" if processes == 1 else f"torchrun --nproc_per_node {processes} -m lowmem"


def _git() -> Record | None:
    """The commit of the repository in the current directory, and whether there are uncommitted changes."""
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        status = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return {"commit": commit.stdout.strip(), "dirty": bool(status.stdout.strip())}


class RunReport(TrainerCallback):  # type: ignore[misc]
    """Writes log lines, metrics.jsonl and, on a terminal, a progress bar; at the end, even after an error, pictures
    and README.

        with RunReport(run_dir).attached(trainer):
            trainer.train()

    Tokens are counted by the Trainer without padding (`include_num_input_tokens_seen`); checkpoints contain the count,
    so a resumed run continues it. Tokens per second leave out evaluation, saving and, in the first step, compilation.
    Memory is that of rank 0: of its GPU, or of its process where there is none.
    """

    def __init__(self, run_dir: str | Path, console: Console | None = None) -> None:
        self.run_dir = Path(run_dir)
        self.console = console or Console()
        self.progress: Progress | None = None
        self.logged = False
        self.weight_bytes = 0
        self.seconds = 0.0  # of training since the last log line
        self.last_time = 0.0
        self.compile_seconds = 0.0  # of this process so far
        self.logged_tokens = 0
        self.first_step = 0

    @contextmanager
    def attached(self, trainer: Trainer) -> Iterator[None]:
        """Reports on a trainer, in place of the trainer's own progress bar and printer."""
        if trainer.args.include_num_input_tokens_seen == "no":
            trainer.args.include_num_input_tokens_seen = "non_padding"
        trainer.remove_callback(ProgressCallback)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(self)
        try:
            yield
        except BaseException:
            try:
                self._finish()
            except LowmemError as error:
                self._print(str(error), "red")  # the error that ended the run is raised
            raise
        self._finish()

    def _finish(self) -> None:
        if self.progress:
            self.progress.stop()
        if self.logged:  # neither on other ranks than 0 nor before the first log line
            plot_run(self.run_dir)
            write_readme(self.run_dir)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: torch.nn.Module, optimizer: Any = None, **_: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        self.weight_bytes = sum(math.prod(shape_of(p)) * p.element_size() for p in model.parameters())
        _cut_metrics(self.run_dir / METRICS, state.global_step)
        self.logged_tokens, self.first_step = state.num_input_tokens_seen, state.global_step
        self.compile_seconds = getattr(optimizer, "compile_seconds", 0.0)
        self.last_time = time.perf_counter()
        if self.console.is_terminal and not args.disable_tqdm:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self.progress = Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=self.console)
            activity = "compiling" if getattr(optimizer, "compiled", False) else "training"
            self.progress.add_task(activity, total=state.max_steps, completed=state.global_step)
            self.progress.start()

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        now = time.perf_counter()
        compile_seconds = getattr(optimizer, "compile_seconds", 0.0)
        compiling = compile_seconds - self.compile_seconds
        if state.is_world_process_zero and compiling > 0:
            self._print(f"compiled the optimizer in {compiling:.1f} s", "dim")
        self.seconds += now - self.last_time - compiling
        self.last_time, self.compile_seconds = now, compile_seconds
        self._advance("training", state.global_step)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._advance("evaluating", state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.last_time = time.perf_counter()
        self._advance("training", state.global_step)

    on_save = on_evaluate

    def on_log(self, args: Any, state: Any, control: Any, logs: Record, **kwargs: Any) -> None:
        nothing_trained = "train_loss" in logs and state.global_step == self.first_step  # a finished run was resumed
        if not state.is_world_process_zero or nothing_trained:
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
        path = self.run_dir / METRICS
        with writing(path), path.open("a", encoding="utf-8") as file:
            file.write(_json_line(record))
        self.logged = True
        if line := _log_line(record, state.max_steps):
            self._print(line, "cyan" if any(name.startswith("eval_") for name in record) else "")

    def _advance(self, activity: str, step: int) -> None:
        if self.progress:
            self.progress.update(self.progress.task_ids[0], description=activity, completed=step)

    def _print(self, line: str, style: str) -> None:
        self.console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def _log_line(record: Record, max_steps: int) -> str | None:
    """One aligned line for a logging step, an evaluation or the end of training."""
    step = f"step {record['step']:>{len(str(max_steps))}}/{max_steps}"
    if "train_loss" in record:
        trained = f"trained in {timedelta(seconds=round(record['train_runtime']))}"
        peak = f"peak {size(record['peak_memory'])}"
        return f"{step}  {trained}  mean loss {record['train_loss']:.4f}  {record['tokens']:,} tokens  {peak}"
    if "loss" in record:
        norm, name = record.get("grad_norm", math.nan), record.get(DOMINANT)
        clip = f"  clip {_coef(record['clip_coef']):>5}" if "clip_coef" in record else ""
        scale = f"  scale {record['loss_scale']:>10,.10g}" if "loss_scale" in record else ""
        # not in every line, so at the end
        nonfinite = f"  {_nonfinite(record)} {record['nonfinite_steps']:,}" if record.get("nonfinite_steps") else ""
        dominant = f"  {record['dominant_proportion']:.0%} of the norm is {name}" if name else ""
        return (
            f"{step}  loss {record['loss']:>8.4f}  grad norm {norm:>9.3e}{clip}{scale}  "
            f"lr {record.get('learning_rate', 0.0):.2e}  {record['tokens_per_second']:>9,.0f} tokens/s  "
            f"peak {size(record['peak_memory']):>10}{nonfinite}{dominant}"
        )
    scores = {name.removeprefix("eval_"): value for name, value in record.items() if name.startswith("eval_")}
    shown = [f"{name.replace('_', ' ')} {v:.4f}" for name, v in scores.items() if not name.endswith(_TIMING)]
    return f"{step}  evaluation  {'  '.join(shown)}" if shown else None


def _coef(value: float) -> str:
    """A number up to 1 in at most five characters."""
    return f"{value:.0e}" if 0 < value < 0.005 else f"{value:.2f}"


def _nonfinite(record: Record) -> str:
    """What a step with a non-finite gradient is called: with a loss scale it is skipped as a matter of course."""
    return "skipped steps" if "loss_scale" in record else "non-finite steps"


def _memory(device: torch.device) -> dict[str, int]:
    """Bytes in use now, and the most so far."""
    if device.type == "cuda":
        return {"memory": torch.cuda.memory_allocated(device), "peak_memory": torch.cuda.max_memory_allocated(device)}
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"memory": psutil.Process().memory_info().rss, "peak_memory": peak}


def _json_line(record: Record) -> str:
    """One line of metrics.jsonl. JSON has no NaN and no infinity: they become null."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(finite) + "\n"


def _cut_metrics(path: Path, step: int) -> None:
    """Removes what was logged after `step`, which a resumed run logs again."""
    if path.exists():
        records = [record for record in read_metrics(path.parent) if record["step"] <= step]
        write_file(path, "".join(map(_json_line, records)).encode())


def read_metrics(run_dir: str | Path) -> list[Record]:
    """The records in a run's metrics.jsonl; a last line that was not written completely is left out."""
    path, records = Path(run_dir) / METRICS, []
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                if line.endswith("\n"):
                    records.append(json.loads(line, object_pairs_hook=_record))
    except OSError as error:
        raise LowmemError(f"{path}: can't be read: {error.strerror}. It is written while a run trains.") from error
    except json.JSONDecodeError as error:
        raise LowmemError(f"{path}, line {len(records) + 1}: not JSON: {error.msg}. Delete the line.") from error
    return records


def _record(pairs: list[tuple[str, Any]]) -> Record:
    """A record whose names, hundreds where norms of parameters are logged, are shared by all records."""
    return {sys.intern(name): value for name, value in pairs}


def plot_run(run_dir: str | Path) -> list[Path]:
    """Draws a run's pictures into its folder; needs only its metrics.jsonl."""
    folder = Path(run_dir)
    records = read_metrics(folder)
    if not records:
        raise LowmemError(f"{folder / METRICS}: nothing is logged yet, so there is nothing to draw.")
    pictures = draw(records, folder.resolve().name)
    for name, png in pictures.items():
        write_file(folder / name, png)
    return [folder / name for name in pictures]


_FILES = {
    "config.yaml": "the full configuration, including overrides; `lowmem train` accepts it",
    "environment.json": "machine, versions, git commit and command of the latest start",
    "metrics.jsonl": "every logged number, one JSON object per line",
    "loss.png": "training and evaluation loss, gradient norm, learning rate, clip coefficient, loss scale",
    "memory.png": "memory in use, its peak, and the size of the weights",
    "norms.png": "the gradient norm of each parameter at each step",
    "runs": "TensorBoard files; view them with `tensorboard --logdir` and this folder",
}


def write_readme(run_dir: str | Path) -> None:
    """Writes README.md into the run folder: results, files, and how to continue."""
    folder = Path(run_dir)
    checkpoints = by_number(folder)
    files = [f"| [{name}]({name}) | {content} |" for name, content in _FILES.items() if (folder / name).exists()]
    files += [f"| {path.name}/ | a Hugging Face model folder with optimizer states |" for path in checkpoints]
    pictures = [f"![{name}]({name})" for name in _FILES if name.endswith(".png") and (folder / name).exists()]
    lines = [
        f"# {folder.resolve().name}", "",
        "| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in _results(read_metrics(folder))), "",
        *pictures, "",
        "## Files", "", "| file | content |", "| --- | --- |", *files, "",
        "## Continue", "", *_continue(folder, checkpoints),
    ]  # fmt: skip
    write_file(folder / "README.md", ("\n".join(lines) + "\n").encode())


def _results(records: list[Record]) -> list[tuple[str, str]]:
    """Names and values for the table of results."""
    results = [("steps", f"{records[-1]['step']:,}"), ("tokens", f"{records[-1]['tokens']:,}")]
    for key in ("loss", *loss_keys(records)):
        losses = [(loss, step) for step, loss in zip(*series(records, key), strict=True)]
        lowest, at_step = min((pair for pair in losses if math.isfinite(pair[0])), default=(math.nan, 0))
        name = "training loss" if key == "loss" else key.replace("_", " ").replace("eval", "evaluation")
        if losses:
            results.append((name, f"{losses[-1][0]:.4f} (lowest {lowest:.4f}, at step {at_step:,})"))
    if rates := [value for value in series(records, "tokens_per_second")[1] if math.isfinite(value)]:
        results.append(("tokens/s, median", f"{statistics.median(rates):,.0f}"))
    if coefs := [value for value in series(records, "clip_coef")[1] if value > 0]:  # 0 is that of an infinite norm
        results.append(("clipped", f"{sum(value < 1 for value in coefs) / len(coefs):.0%} of the logged steps"))
    if nonfinite := [record for record in records if record.get("nonfinite_steps")]:
        count = f"{nonfinite[-1]['nonfinite_steps']:,}, with a gradient that was not finite"
        results.append((_nonfinite(nonfinite[-1]), count))
    peak = max(record["peak_memory"] for record in records)
    return [*results, ("peak memory", f"{size(peak)} (weights {size(records[-1]['weight_bytes'])})")]


def _continue(folder: Path, checkpoints: list[Path]) -> list[str]:
    if not checkpoints:
        return ["No checkpoint was saved, so this run cannot be continued. Set a smaller `trainer.save_steps`."]
    load = f'model = AutoModelForCausalLM.from_pretrained("{checkpoints[-1]}", dtype="auto")'
    return [
        "```sh", f"{command()} train {folder}/config.yaml --resume     # from the newest checkpoint",
        f'lowmem generate {folder} "a prompt"', "```", "",
        "```python", "from transformers import AutoModelForCausalLM, AutoTokenizer", "", load,
        f'tokenizer = AutoTokenizer.from_pretrained("{checkpoints[-1]}")', "```",
    ]  # fmt: skip
