"""One run from its first line to its last: data, model and trainer in a run folder, signals, and the end."""

import shlex
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import distributed
from transformers import TrainerCallback
from transformers.trainer_utils import has_length

from lowmem.errors import CheckpointError, ConfigError, LowmemError
from lowmem.files import write_file
from lowmem.hf import checkpoint
from lowmem.placements import in_group
from lowmem.run import build, data, environment, folder, report
from lowmem.run.memory import is_out_of_memory
from lowmem.run.recipe import LAST, Recipe, reason, refused
from lowmem.run.secrets import redacted
from lowmem.run.terminal import out, print_topics, rank, stage, train_command, warn

# Packages that see the arguments of a run.
_PACKAGES = ("lowmem", "trl", "transformers", "accelerate", "datasets", "peft")

# Ranks tell each other of a signal once in so many steps.
_STEPS_BETWEEN = 10


def train(recipe: Recipe) -> int | None:
    """Trains in `output_dir`, from the beginning or from a checkpoint, and saves the model there.

    Returns:
        The signal on which the run has stopped, with a checkpoint, or None if it is complete.

    Raises:
        LowmemError: what is wrong with the arguments, the data, the run folder or a checkpoint.
    """
    with folder.run_folder(recipe, rank()) as run_dir:
        resume = _resumed(recipe, run_dir)
        with stage("loading the data"):
            train, evaluation = data.load(recipe)
        with stage("loading the model and tokenizing"), _explained(recipe, run_dir):
            trainer = build.trainer(recipe, train, evaluation)
        counts = data.check(trainer, train, evaluation)
        trainer.create_optimizer()  # raises what it does not support before anything is written
        print_topics({**report.describe(recipe, trainer), "data": counts})
        with _explained(recipe, run_dir):
            _require_metric(trainer)
        beginning = _Beginning(recipe, run_dir)
        trainer.add_callback(beginning)
        with _explained(recipe, run_dir, begun=True), report.RunReport(run_dir, out).attached(trainer):
            with _stop_on_signal(trainer) as stopped, beginning.checked():
                trainer.train(resume_from_checkpoint=resume)
            beginning.on_step_end()  # also if nothing was left to train
            if not stopped:
                _save_model(trainer, run_dir)
        if recipe.training.push_to_hub and not stopped:
            trainer.push_to_hub(dataset_name=recipe.script.dataset_name)
        if in_group():  # a process that ends without leaving it aborts
            distributed.barrier()
            distributed.destroy_process_group()
        _print_end(recipe, trainer, run_dir, stopped=bool(stopped))
    return stopped[0] if stopped else None


def _require_metric(trainer: Any) -> None:
    """Raises `ConfigError` unless an evaluation has the metric of the best model: after one of a batch."""
    name, data = trainer.args.metric_for_best_model, trainer.eval_dataset
    if data is None or name in (None, "loss", "eval_loss"):
        return
    handler = trainer.callback_handler
    callbacks, handler.callbacks = handler.callbacks, []  # which would report it
    with torch.random.fork_rng():
        count = trainer.args.per_device_eval_batch_size * trainer.args.world_size
        metrics = trainer.evaluate(data.take(min(count, len(data)) if has_length(data) else count))
    handler.callbacks = callbacks
    names = [metric.removeprefix("eval_") for metric in metrics]
    if name.removeprefix("eval_") not in names:
        raise ConfigError(f"metric_for_best_model {name!r} is unknown. An evaluation has {', '.join(names)}")


class _Beginning(TrainerCallback):  # type: ignore[misc]
    """Makes a folder that of a run once a step is complete. Until then a mistake in the arguments leaves nothing."""

    def __init__(self, recipe: Recipe, run_dir: Path) -> None:
        self.recipe, self.run_dir, self.written = recipe, run_dir, False

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if rank() == 0 and not self.written:
            folder.write_config(self.recipe, self.run_dir)
        self.written = True

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Converts what libraries raise until the first step is complete into errors for users."""
        try:
            yield
        except Exception as error:
            if self.written or _raised_by(error) == "lowmem":
                raise
            with refused(f"{self.recipe.file or 'the command line'}: {type(self.recipe.training).__name__}"):
                raise


def _raised_by(error: BaseException) -> str | None:
    """The last package that called what raised an error, of those that see arguments."""
    frames = traceback.walk_tb(error.__traceback__)
    packages = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in frames]
    return next((name for name in reversed(packages) if name in _PACKAGES), None)


def _save_model(trainer: Any, run_dir: Path) -> None:
    """Saves the final model next to the checkpoints. Every rank calls it. If the run is killed meanwhile, its last
    checkpoint remains.
    """
    staging = run_dir / checkpoint.STAGING
    try:
        trainer.save_model(str(staging / "model"), _internal_call=True)
        if rank() == 0:
            checkpoint.publish_model(staging / "model", run_dir)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{run_dir}: the final model could not be written: {error}. The last checkpoint contains it. Free some "
            "space, and resume from there"
        ) from error
    finally:
        if rank() == 0:
            checkpoint.remove(staging)


def _resumed(recipe: Recipe, run_dir: Path) -> str | bool | None:
    """Returns `resume_from_checkpoint` for the trainer: True for the newest intact checkpoint in `output_dir`."""
    path = recipe.training.resume_from_checkpoint
    if path is not None and path != LAST and not Path(path).is_dir():
        raise ConfigError(
            f"resume_from_checkpoint: there is no directory {path}. Use {LAST!r} for the newest checkpoint in "
            "output_dir"
        )
    if path != LAST:
        return path
    if checkpoint.candidates(run_dir):
        return True
    warn(f"{run_dir} has no checkpoint yet, so the run starts from the beginning")
    return None


def _print_end(recipe: Recipe, trainer: Any, run_dir: Path, *, stopped: bool) -> None:
    """Says how the run ended, and what can be done with its results."""
    if rank() > 0:
        return
    if stopped:
        again = train_command(recipe.command, run_dir)
        out.print(f"stopped at step {trainer.state.global_step}; continue with: {again}", style="bold", soft_wrap=True)
        return
    out.print("done", style="bold")
    topics = {"results": f"{run_dir}: model, config.yaml, metrics.jsonl, loss.png"}
    if recipe.command != "reward":
        topics["try it"] = f"lowmem generate {shlex.quote(str(run_dir))} 'a prompt'"
    print_topics(topics)


@contextmanager
def _explained(recipe: Recipe, run_dir: Path, *, begun: bool = False) -> Iterator[None]:
    """Adds advice to an error of memory. The traceback of any other that is not for users goes into the folder."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            if begun and rank() == 0 and not (run_dir / environment.CONFIG).exists():
                folder.write_config(recipe, run_dir)  # with which it continues
            config = shlex.quote(str(run_dir / environment.CONFIG))
            device = "gpu" if torch.cuda.is_available() else "cpu"
            plan = f"lowmem plan {recipe.command} --config {config} --device {device} --memory SIZE"
            raise LowmemError(
                f"out of memory: {reason(error)}. `{plan}` shows the memory of a step, and the arguments that reduce "
                f"it. Then continue with: {train_command(recipe.command, run_dir)}"
            ) from error
        if not isinstance(error, LowmemError):
            path = run_dir / f"{folder.TRACEBACK}{f'-{rank()}' if rank() else ''}.txt"
            write_file(path, redacted("".join(traceback.format_exception(error))).encode())
        raise


@contextmanager
def _stop_on_signal(trainer: Any) -> Iterator[list[int]]:
    """On the first Ctrl-C or SIGTERM, ends training with a checkpoint: after the current step, or within
    `_STEPS_BETWEEN` steps where there are several ranks. A second Ctrl-C ends it at once. A second SIGTERM does not: a
    cluster and a launcher may both send one.

    Yields a list to which the signal is added when training ends because of it.
    """
    signals: list[int] = []
    stopped: list[int] = []

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if number := _on_any_rank(max(signals, default=0), state.global_step, args.device):
                control.should_save = control.should_training_stop = True
                stopped.append(number)

    def restore() -> None:
        for name, handler in handlers.items():
            signal.signal(name, handler)

    def handle(number: int, _: object) -> None:
        signals.append(number)
        restore()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        when = f"within {_STEPS_BETWEEN} steps" if in_group() else "after this step"
        warn(f"stopping {when}, with a checkpoint; press Ctrl-C again to stop at once")

    handlers = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}
    trainer.add_callback(Stop())
    for name in handlers:
        signal.signal(name, handle)
    try:
        yield stopped
    finally:
        restore()


def _on_any_rank(number: int, step: int, device: Any) -> int:
    """The signal that has arrived on any rank, or 0. It may arrive on them in different steps; all stop in the same."""
    if not in_group() or step % _STEPS_BETWEEN:
        return 0 if in_group() else number
    largest = torch.tensor(number, device=device)
    distributed.all_reduce(largest, op=distributed.ReduceOp.MAX)
    return int(largest)
