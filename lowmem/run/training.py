"""One run from its first line to its last: data, model and trainer in a run folder, signals, and the end."""

import shlex
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import distributed
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from lowmem.errors import DataError, LowmemError
from lowmem.files import read_json, write_file
from lowmem.hf import checkpoint
from lowmem.placements import in_group
from lowmem.run import build, environment, folder, report
from lowmem.run import plan as planning
from lowmem.run.config import RunConfig, save
from lowmem.run.data import TokenCounts, check_tokenized, fingerprint
from lowmem.run.memory import is_out_of_memory
from lowmem.run.metrics import read_metrics
from lowmem.run.pictures import size
from lowmem.run.secrets import redacted
from lowmem.run.source import reason
from lowmem.run.summary import last_losses
from lowmem.run.terminal import generate_command, out, print_topics, rank, stage, train_command, warn


def train(config: RunConfig, *, resume: bool = False) -> int | None:
    """Trains in `config.run_dir`, from the beginning or from its newest complete checkpoint.

    Returns:
        The signal on which the run has stopped, with a checkpoint, or None if it is complete.

    Raises:
        LowmemError: what is wrong with the configuration, the data, the run folder or a checkpoint.
    """
    with folder.run_folder(config.run_dir, resume, rank()) as run_dir:
        resume_from = _newest_checkpoint(run_dir) if resume else None
        with stage("reading the data"):
            samples = build.samples(config, resume_from)
        args = build.arguments(config, samples)
        with stage("creating the model" if config.model.path is None else "loading the model"):
            model = build.model(config, samples.tokenizer, args)
        with stage("tokenizing"):
            trainer = build.trainer(config, samples, model, args)
            counts = check_tokenized(trainer.train_dataset, samples.train, config.data)
            trained_on = DataFingerprint(fingerprint(trainer.train_dataset))
        if resume_from is not None:
            trained_on.check(resume_from, config.data.path)
        trainer.add_callback(trained_on)
        trainer.create_optimizer()  # raises what it does not support before anything is written
        _describe(config, trainer, counts)
        if rank() == 0:
            save(config, run_dir / folder.CONFIG)
            environment.write_environment(run_dir)
        try:
            with report.RunReport(run_dir, out).attached(trainer), _stop_on_signal(trainer) as signals:
                trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
        except Exception as error:
            raise _explained(error, config, run_dir) from error
        if in_group():  # a process that ends without leaving it aborts
            distributed.barrier()
            distributed.destroy_process_group()
        _print_end(config, trainer, samples, run_dir, stopped=bool(signals))
    return signals[0] if signals else None


class DataFingerprint(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Saves the fingerprint of the training data in each checkpoint, in trainer_state.json."""

    def __init__(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint

    def state(self) -> dict[str, Any]:
        return {"args": {"fingerprint": self.fingerprint}, "attributes": {}}

    def check(self, folder: Path, data: str) -> None:
        """Raises `DataError` if the checkpoint in `folder` was trained on other data."""
        saved = read_json(folder / checkpoint.TRAINER_STATE_FILE)["stateful_callbacks"].get(type(self).__name__)
        if saved is not None and saved["args"]["fingerprint"] != self.fingerprint:
            raise DataError(
                f"{data}, as it is tokenized now, is not what {folder} was trained on. Restore data and "
                "settings (data, the chat template) to continue this run, or start another from these weights: "
                f"model.path={shlex.quote(str(folder))} model.config=null model.train_tokenizer=null run_dir=..."
            )


def _newest_checkpoint(run_dir: Path) -> Path | None:
    """The checkpoint to continue from; None if the run has not saved any yet."""
    if not checkpoint.candidates(run_dir):
        warn(f"{run_dir} has no checkpoint yet, so the run starts from its beginning")
        return None
    newest, damaged = checkpoint.find_last(run_dir)
    for fault in damaged:
        warn(f"skipped a damaged checkpoint: {fault}")
    out.print(f"resuming from {newest}", soft_wrap=True)
    return newest


def _print_end(config: RunConfig, trainer: Any, samples: build.Samples, run_dir: Path, *, stopped: bool) -> None:
    """Says how the run ended, and what can be done with its results."""
    if rank() > 0:
        return
    if stopped:
        out.print(f"stopped at step {trainer.state.global_step}; continue with: {train_command(run_dir)}", style="bold",
                  soft_wrap=True)  # fmt: skip
        return
    losses = last_losses(read_metrics(run_dir))
    figures = "".join(f"{', ' if number else ': '}{name} {loss:.4f}" for number, (name, loss) in enumerate(losses))
    out.print(f"done{figures}", style="bold", soft_wrap=True)
    topics = {"results": f"{run_dir}/README.md"}
    if checkpoints := checkpoint.by_number(run_dir):
        topics |= {
            "checkpoint": str(checkpoints[-1]),
            "try it": generate_command(run_dir, _first_prompt(samples.train)),
        }
    print_topics(topics)


def _first_prompt(train: Dataset) -> str:
    """The beginning of what a model could be asked, from the first sample."""
    row = train[0]
    turns = row.get("messages") or row.get("prompt") or row.get("text") or "a prompt"
    texts = [turns] if isinstance(turns, str) else [turn["content"] for turn in turns if turn["role"] == "user"]
    return texts[0][:200] if texts else "a prompt"


def _explained(error: Exception, config: RunConfig, run_dir: Path) -> Exception:
    """The error that ended training, with advice where memory ran out. The traceback of any other that is not meant for
    users goes into the run folder.
    """
    if is_out_of_memory(error):
        return LowmemError(f"out of memory: {reason(error)}. {_memory_advice(config, run_dir)}")
    if not isinstance(error, LowmemError):
        path = run_dir / ("traceback.txt" if rank() == 0 else f"traceback-{rank()}.txt")
        write_file(path, redacted("".join(traceback.format_exception(error))).encode())
    return error


def _memory_advice(config: RunConfig, run_dir: Path) -> str:
    """What a step needs by the plan, and how to need less."""
    device = "gpu" if torch.cuda.is_available() else "cpu"
    try:
        step = planning.plan(config, device).step
    except LowmemError as error:
        return f"No plan can be made: {error}."
    largest = ", ".join(f"{kind} {size(nbytes)}" for kind, nbytes in step.items.items() if nbytes >= step.peak / 10)
    plan = f"lowmem plan {shlex.quote(str(run_dir / folder.CONFIG))} --device {device} --memory SIZE"
    return (
        f"By the plan a step needs {size(step.peak)} ({largest}). What needs less: "
        f"{', '.join(planning.ways(config, device))}; `{plan}` says how much. Then continue with: "
        f"{train_command(run_dir)}"
    )


@contextmanager
def _stop_on_signal(trainer: Any) -> Iterator[list[int]]:
    """On the first Ctrl-C or SIGTERM, ends training after the current step with a checkpoint; a second Ctrl-C ends it
    at once. A second SIGTERM does not: a cluster and a launcher may both send one.

    Yields a list to which the signal is added when it arrives.
    """
    signals: list[int] = []

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if _on_any_rank(bool(signals), args.device):
                control.should_save = control.should_training_stop = True

    def restore() -> None:
        for name, handler in handlers.items():
            signal.signal(name, handler)

    def handle(number: int, _: object) -> None:
        signals.append(number)
        restore()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        warn("stopping after this step, with a checkpoint; press Ctrl-C again to stop at once")

    handlers = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}
    trainer.add_callback(Stop())
    for name in handlers:
        signal.signal(name, handle)
    try:
        yield signals
    finally:
        restore()


def _on_any_rank(flag: bool, device: Any) -> bool:
    """Whether `flag` is set on any rank: a signal may arrive in different steps, and all ranks stop in the same one."""
    if not in_group():
        return flag
    flags = torch.tensor(int(flag), device=device)
    distributed.all_reduce(flags, op=distributed.ReduceOp.MAX)
    return bool(flags)


def _describe(config: RunConfig, trainer: Any, counts: TokenCounts) -> None:
    """Prints what is about to be trained, and warnings."""
    data = f"{counts.samples:,} samples, {counts.tokens:,} tokens, loss on {counts.trained_tokens:,}"
    print_topics({**report.describe(config, trainer), "data": data})
    if slow := build.slow_bfloat16(config, trainer.args.device):
        warn(slow)
    if counts.dropped:
        warn(f"{len(counts.dropped)} samples have no answer token within max_length and are left out, "
              f"such as {counts.dropped[0]}")  # fmt: skip
    if counts.without_target:
        warn(f"{counts.without_target} samples do not contribute to the loss")
