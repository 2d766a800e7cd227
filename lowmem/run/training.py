"""One run from its first line to its last: data, model and trainer in a run folder, signals, and the end."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed
from transformers import TrainerCallback

from lowmem import rules
from lowmem.hf import checkpoint
from lowmem.placements import in_group
from lowmem.run import build, folder, report
from lowmem.run.config import RunConfig, save
from lowmem.run.data import TokenCounts, check_tokenized
from lowmem.run.terminal import RANK, command, out, print_topics, warn


def train(config: RunConfig, *, resume: bool = False) -> None:
    """Trains in `config.run_dir`, from the beginning or from its newest complete checkpoint.

    Raises:
        LowmemError: what is wrong with the configuration, the data, the run folder or a checkpoint.
    """
    with folder.run_folder(config.run_dir, resume, RANK) as run_dir:
        resume_from = None
        if resume:
            resume_from, damaged = checkpoint.find_last(run_dir)
            for reason in damaged:
                warn(f"skipped a damaged checkpoint: {reason}")
            out.print(f"resuming from {resume_from}", soft_wrap=True)
        samples = build.samples(config, resume_from)
        args = build.arguments(config, samples)
        model = build.model(config, samples.tokenizer, args)
        trainer = build.trainer(config, samples, model, args)
        trainer.create_optimizer()  # raises what it does not support before anything is written
        counts = check_tokenized(trainer.train_dataset, samples.train, config.data)
        _describe(config, trainer, counts)
        if RANK == 0:
            save(config, run_dir / "config.yaml")
            folder.write_environment(run_dir)
        with report.RunReport(run_dir, out).attached(trainer), _stop_on_signal(trainer) as signals:
            trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
    _leave_group()
    end = f"done: see {run_dir}/README.md for the results and how to continue"
    if signals:
        go_on = f"{command()} train {run_dir}/config.yaml --resume"
        end = f"stopped at step {trainer.state.global_step}; continue with: {go_on}"
    out.print(end, style="bold", soft_wrap=True)


@contextmanager
def _stop_on_signal(trainer: Any) -> Iterator[list[int]]:
    """On the first Ctrl-C or SIGTERM, ends training after the current step with a checkpoint; a second ends it at once.

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


def _leave_group() -> None:
    """Destroys the process group: a process that ends without this aborts."""
    if in_group():
        distributed.barrier()
        distributed.destroy_process_group()


def _describe(config: RunConfig, trainer: Any, counts: TokenCounts) -> None:
    """Prints what is about to be trained, and warnings."""
    data = f"{counts.samples:,} samples, {counts.tokens:,} tokens, loss on {counts.trained_tokens:,}"
    print_topics({**report.describe(config, trainer), "data": data})
    dtype, optimizer = config.model.dtype, config.optimizer
    rule = rules.resolve(optimizer.rule)
    nearest = optimizer.rounding == "nearest" == rule.rounding({**rule.defaults, **optimizer.hyper})
    if nearest and dtype != "float32":
        lost = "0.2 %" if dtype == "bfloat16" else "0.02 %"
        warn(f"{dtype} weights with rounding nearest lose every update smaller than about {lost} of the weight; "
              "optimizer.rounding=stochastic loses none and needs no more memory")  # fmt: skip
    if slow := build.slow_bfloat16(config, trainer.args.device):
        warn(slow)
    if counts.dropped:
        warn(f"{len(counts.dropped)} samples have no answer token within max_length and are left out, "
              f"such as {counts.dropped[0]}")  # fmt: skip
    if counts.without_target:
        warn(f"{counts.without_target} samples do not contribute to the loss")
