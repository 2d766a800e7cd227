"""Runs training in a run folder: loads the data and the model, trains, handles signals, and saves the model."""

import shlex
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed
from transformers import DefaultFlowCallback, TrainerCallback, TrainerControl
from transformers.trainer_utils import has_length

from lowmem.errors import ConfigError, LowmemError
from lowmem.hf.arguments import Inputs
from lowmem.hf.resuming import steps_with_completions
from lowmem.placements import in_group, streaming_of
from lowmem.run import build, data, plan, precheck, publishing, reductions, report
from lowmem.run.boundary import convert_errors, convert_library_errors, is_out_of_memory, reason
from lowmem.run.description import describe
from lowmem.run.folder import RunFolder
from lowmem.run.recipe import Recipe
from lowmem.run.terminal import out, print_topics, rank, stage, warn


def train(recipe: Recipe) -> int | None:
    """Trains in `output_dir`, from the beginning or from a checkpoint, and saves the model there. Raises `LowmemError`.

    Returns:
        The signal that stopped the run after it saved a checkpoint, or None if the run is complete.
    """
    Inputs(None, recipe.training, None, recipe.fused).check_before_loading()
    folder = RunFolder(Path(recipe.training.output_dir), recipe.training.resume_from_checkpoint)
    with folder.opened(), _with_advice(recipe, folder):
        checkpoint = folder.start()
        if not recipe.options.force:
            precheck.require_fit(recipe)
        stage("loading the data")
        train_data, evaluation_data = data.load(recipe)
        stage("loading the model and tokenizing")
        trainer = build.trainer(recipe, train_data, evaluation_data)
        counts = data.check(trainer, train_data, evaluation_data)
        with convert_library_errors("this model cannot be trained"):
            trainer.create_optimizer()  # raises for unsupported models before anything is written
        topics = {**describe(trainer), "data": counts}
        print_topics(topics)
        _require_metric(trainer)
        first_step, stop = _FirstStep(recipe, folder), _StopOnSignal(trainer)
        trainer.add_callback(first_step)
        trainer.add_callback(stop)
        with report.RunReport(folder.path).attached(trainer), stop.handling():
            with first_step.convert_errors:
                trainer.train(resume_from_checkpoint=checkpoint)
            first_step.on_step_end()  # also if no steps remained
            if stop.number is None:
                folder.save_model(trainer)
        if recipe.training.push_to_hub and stop.number is None and rank() == 0:
            with convert_errors(f"push_to_hub: {folder.path} has the complete model, but its upload failed"):
                publishing.publish(trainer, recipe, folder.path, topics)
        if in_group():  # otherwise the process aborts at its end
            distributed.barrier()
            distributed.destroy_process_group()
    if rank() == 0:
        _print_end(recipe, trainer, folder, stopped=stop.number is not None)
    return stop.number


def _require_metric(trainer: Any) -> None:
    """Raises `ConfigError` if an evaluation of one batch does not return `metric_for_best_model`."""
    name, data = trainer.args.metric_for_best_model, trainer.eval_dataset
    if data is None or name in (None, "loss", "eval_loss"):
        return
    handler, device = trainer.callback_handler, trainer.args.device
    count = trainer.args.per_device_eval_batch_size * trainer.args.world_size
    forked = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with forked, patch.object(handler, "callbacks", []):  # they would report this evaluation
        metrics = trainer.evaluate(data.take(min(count, len(data)) if has_length(data) else count))
    names = [metric.removeprefix("eval_") for metric in metrics]
    if name.removeprefix("eval_") not in names:
        raise ConfigError(f"metric_for_best_model {name!r} is unknown. An evaluation has {', '.join(names)}")


class _FirstStep(TrainerCallback):  # type: ignore[misc]
    """Writes the configuration after the first step. Library errors before the first update mention this step."""

    def __init__(self, recipe: Recipe, folder: RunFolder) -> None:
        self.recipe, self.folder, self.written = recipe, folder, False
        self.convert_errors = ExitStack()
        self.convert_errors.enter_context(convert_library_errors("the first step cannot be computed"))

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.convert_errors.pop_all()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if not self.written:
            self.folder.write_config(self.recipe)
        self.written = True


class _StopOnSignal(TrainerCallback):  # type: ignore[misc]
    """On the first Ctrl-C or SIGTERM, ends training after the current step with a checkpoint and without evaluation. A
    second Ctrl-C ends it at once. A second SIGTERM does not, because a cluster and a launcher may both send one.
    """

    def __init__(self, trainer: Any) -> None:
        self.number: int | None = None  # the signal that has ended training
        self._received = 0
        self._began = False  # whether this process has begun a step
        self._trainer = trainer

    @contextmanager
    def handling(self) -> Iterator[None]:
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def receive(number: int, _: object) -> None:
            self._received = number
            signal.signal(signal.SIGINT, handlers[signal.SIGINT])
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            warn("stopping after this step is saved; press Ctrl-C again to stop at once")

        for number in handlers:
            signal.signal(number, receive)
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Evaluates the weights of the checkpoint, if the stop after this step skipped their evaluation."""
        if _evaluation_is_missing(args, state, at_epoch_end=self._trainer._position.start[1] == 0):
            self._trainer._determine_best_metric(self._trainer._evaluate(None, None), None)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._stop(args, state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.number is not None:  # its last step was saved
            control.should_save = control.should_evaluate = False
        self._stop(args, state, control)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._stop(args, state, control, saved=True)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ends an evaluation, which may take longer than a cluster waits after SIGTERM. Before the first step, nothing
        would be saved, so the evaluation is completed.
        """
        if self._began and self._stop(args, state, control):
            raise build.EvaluationStopped

    def _stop(self, args: Any, state: Any, control: Any, *, saved: bool = False) -> bool:
        """Stops in the same step on every rank, although the signal may reach ranks in different steps. The Trainer
        waits for all ranks in every micro-batch to count tokens, so waiting here takes little time. Training stops
        only after the last of the steps that share completions.
        """
        if self.number is not None or state.global_step % steps_with_completions(args):
            return False
        number = self._received
        if in_group():
            largest = torch.tensor(number, device=args.device)
            distributed.all_reduce(largest, op=distributed.ReduceOp.MAX)
            number = int(largest)
        if number:
            self.number, control.should_save, control.should_evaluate = number, not saved, False
            control.should_training_stop = True
        return bool(number)


def _evaluation_is_missing(args: Any, state: Any, *, at_epoch_end: bool) -> bool:
    """Returns whether the last step of a run should have been followed by an evaluation, but was not."""
    flow, control = DefaultFlowCallback(), TrainerControl()
    flow.on_step_end(args, state, control)
    if at_epoch_end:
        flow.on_epoch_end(args, state, control)
    records = (record for record in state.log_history if record["step"] == state.global_step)
    evaluated = any(name.startswith("eval_") for record in records for name in record)
    return state.global_step > 0 and control.should_evaluate and not evaluated


def _print_end(recipe: Recipe, trainer: Any, folder: RunFolder, *, stopped: bool) -> None:
    """Prints how the run ended, and how to continue it or use its results."""
    if stopped:
        end = f"stopped at step {trainer.state.global_step}; continue with: {folder.train_command(recipe)}"
        out.print(end, style="bold", soft_wrap=True)
        return
    out.print("done", style="bold")
    topics = {"results": f"{folder.path}: model, config.yaml, metrics.jsonl, loss.png"}
    code = getattr(trainer.model.config, "auto_map", None)  # `generate` does not execute it
    fits = streaming_of(trainer.model) is None  # `generate` loads the model as a whole
    if fits and trainer.model.can_generate() and not code:
        topics["try it"] = f"lowmem generate {shlex.quote(str(folder.path))} 'a prompt'"
    print_topics(topics)


@contextmanager
def _with_advice(recipe: Recipe, folder: RunFolder) -> Iterator[None]:
    """Adds advice to an out-of-memory error. Writes the traceback of errors that have no message for users."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            again = f" Then continue with: {folder.train_command(recipe)}" if folder.begun else ""
            advice = ""
            with suppress(Exception):  # the first error matters more
                if arguments := ", ".join(each.words for each in reductions.reductions(recipe)):
                    advice = f" Arguments that reduce the memory of a step: {arguments}."
                plan.require_plannable(recipe, recipe.training.world_size)
                advice += " `lowmem plan` shows by how much."
            raise LowmemError(f"out of memory: {reason(error)}.{advice}{again}") from error
        if not isinstance(error, LowmemError):
            folder.write_traceback(error)
        raise
