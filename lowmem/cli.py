"""The command line: `lowmem train`, `inspect`, `generate`, `plan`, `rules`.

A mistake of the user is one message on stderr and exit status 2, and leaves no partial files.
"""

import argparse
import json
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import distributed

from lowmem import __version__, rules
from lowmem.errors import CheckpointError, LowmemError
from lowmem.files import write_file
from lowmem.placements import in_group
from lowmem.run.memory import state_bytes
from lowmem.tiles import storage

# What imports transformers, trl or datasets is imported in functions, so that `lowmem --help` is fast.
if TYPE_CHECKING:
    from lowmem.run.config import RunConfig
    from lowmem.run.data import TokenCounts
    from lowmem.run.memory import StepMemory

# Under a launcher every process runs the command. Only rank 0 prints, except that any rank reports its own failure.
RANK = int(os.environ.get("RANK", 0))
out = Console(quiet=RANK > 0, highlight=False)
err = Console(quiet=RANK > 0, highlight=False, stderr=True)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs one command and exits.

    The exit status is 0 for success, 1 for a plan that does not fit, 2 for a mistake of the user, and 130 if
    interrupted before training began.
    """
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    # argparse does not collect key=value after an option
    if rest and not (hasattr(arguments, "overrides") and all("=" in word and word[0] != "-" for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides += rest
    try:
        arguments.command(arguments)
    except LowmemError as error:
        rank = f"error on rank {RANK}: " if RANK else "error: "
        Console(stderr=True).print(Text.assemble((rank, "bold red"), str(error)), soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        err.print("interrupted", style="red")
        sys.exit(130)
    sys.exit(0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lowmem", description="Full-parameter fine-tuning at the memory of the weights."
    )
    parser.add_argument("--version", action="version", version=f"lowmem {__version__}")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # DeepSpeed's launcher passes it
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, summary: str, config: bool = True) -> argparse.ArgumentParser:
        subparser = commands.add_parser(name, help=summary, description=summary)
        subparser.set_defaults(command=run)
        if config:
            subparser.add_argument("config", metavar="CONFIG", help="a YAML file, such as configs/quickstart.yaml")
            subparser.add_argument("overrides", metavar="key=value", nargs="*", help="such as optimizer.lr=2e-3")
        return subparser

    sub = command("train", train, "Train a model; all results are written to the run folder.")
    sub.add_argument("--resume", action="store_true", help="continue from the newest complete checkpoint in the folder")
    sub = command("inspect", inspect, "Show training samples, and the tokens on which the loss is computed.")
    sub.add_argument("--samples", type=int, default=3, metavar="N", help="number of samples to show (3)")
    sub = command("generate", generate, "Answer a prompt with the newest checkpoint of a run.", config=False)
    sub.add_argument("run_dir", metavar="RUN_DIR", help="a run folder, or a checkpoint in it")
    sub.add_argument("prompt", metavar="PROMPT", help="the user's message; a model trained on raw text continues it")
    sub.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    sub.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="maximum length of the answer (256)")
    sub.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (the default)")
    sub.add_argument("--seed", type=int, default=0, metavar="N", help="seed of sampling (0)")
    sub = command("plan", plan, "Predict the memory of a training step, without downloading or allocating anything.")
    sub.add_argument("--memory", metavar="SIZE", help="such as 24GiB: say whether a step fits, and if not, what would")
    sub.add_argument("--device", choices=("gpu", "cpu"), default="gpu", help="the device to train on (gpu)")
    sub.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    sub.add_argument("--picture", type=Path, metavar="FILE", help="draw the memory through the step as PNG")
    command("rules", show_rules, "List rules with their states and hyperparameters, and storages.", config=False)
    return parser


def train(arguments: argparse.Namespace) -> None:
    """`lowmem train`."""
    _quiet()
    from lowmem.hf import checkpoint
    from lowmem.run import build, report
    from lowmem.run.config import load, save
    from lowmem.run.data import check_tokenized

    config = load(arguments.config, arguments.overrides)
    with report.run_folder(config.run_dir, arguments.resume, RANK) as folder:
        resume_from = None
        if arguments.resume:
            resume_from, damaged = checkpoint.find_last(folder)
            for reason in damaged:
                _warn(f"skipped a damaged checkpoint: {reason}")
            out.print(f"resuming from {resume_from}", soft_wrap=True)
        samples = build.samples(config, resume_from)
        args = build.arguments(config, samples)
        model = build.model(config, samples.tokenizer, args)
        trainer = build.trainer(config, samples, model, args)
        trainer.create_optimizer()  # raises what it does not support before anything is written
        counts = check_tokenized(trainer.train_dataset, samples.train, config.data)
        _describe(config, trainer, counts)
        if RANK == 0:
            save(config, folder / "config.yaml")
            report.write_environment(folder)
        with report.RunReport(folder, out).attached(trainer), _stop_on_signal(trainer) as signals:
            trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
    _leave_group()
    end = f"done: see {folder}/README.md for the results and how to continue"
    if signals:
        resume = f"{report.command()} train {folder}/config.yaml --resume"
        end = f"stopped at step {trainer.state.global_step}; continue with: {resume}"
    out.print(end, style="bold", soft_wrap=True)


@contextmanager
def _stop_on_signal(trainer: Any) -> Iterator[list[int]]:
    """On the first Ctrl-C or SIGTERM, ends training after the current step with a checkpoint; a second ends it at once.

    Yields a list to which the signal is added when it arrives.
    """
    from transformers import TrainerCallback

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
        _warn("stopping after this step, with a checkpoint; press Ctrl-C again to stop at once")

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


def _describe(config: "RunConfig", trainer: Any, counts: "TokenCounts") -> None:
    """Prints what is about to be trained, and warnings."""
    from lowmem.run import build, report

    data = f"{counts.samples:,} samples, {counts.tokens:,} tokens, loss on {counts.trained_tokens:,}"
    _print_topics({**report.describe(config, trainer), "data": data})
    dtype, optimizer = config.model.dtype, config.optimizer
    rule = rules.resolve(optimizer.rule)
    nearest = optimizer.rounding == "nearest" == rule.rounding({**rule.defaults, **optimizer.hyper})
    if nearest and dtype != "float32":
        lost = "0.2 %" if dtype == "bfloat16" else "0.02 %"
        _warn(f"{dtype} weights with rounding nearest lose every update smaller than about {lost} of the weight; "
              "optimizer.rounding=stochastic loses none and needs no more memory")  # fmt: skip
    if slow := build.slow_bfloat16(config, trainer.args.device):
        _warn(slow)
    if counts.dropped:
        _warn(f"{len(counts.dropped)} samples have no answer token within max_length and are left out, "
              f"such as {counts.dropped[0]}")  # fmt: skip
    if counts.without_target:
        _warn(f"{counts.without_target} samples do not contribute to the loss")


def inspect(arguments: argparse.Namespace) -> None:
    """`lowmem inspect`."""
    _quiet()
    from lowmem.run import build
    from lowmem.run.config import load
    from lowmem.run.data import check_tokenized, segments
    from lowmem.run.plan import empty_model

    config = load(arguments.config, arguments.overrides)
    samples = build.samples(config)
    rows = build.tokenized(config, samples)
    counts = check_tokenized(rows, samples.train, config.data)
    if config.optimizer.groups:
        with torch.device("meta"):
            model = empty_model(config.model, samples.tokenizer)
        for group in config.optimizer.param_groups(model.named_parameters()):
            names = [name for name, _ in group["params"]]
            examples = ", ".join([*names[:3], *["..."][: len(names) - 3]])
            count = "1 parameter" if len(names) == 1 else f"{len(names)} parameters"
            _print_topics({group.get("rule", config.optimizer.rule): f"{count}: {examples}"})
    # brackets mark the trained parts where there are no colors
    opening, closing = ("", "") if out.is_terminal else ("⟦", "⟧")
    for number, row in enumerate(rows.select(range(min(arguments.samples, len(rows)))), start=1):
        parts = segments(row, samples.tokenizer)
        trained_tokens = sum(part.tokens for part in parts if part.trained)
        out.rule(f"sample {number}: {sum(part.tokens for part in parts)} tokens, loss on {trained_tokens}", style="dim")
        text = Text()
        for part in parts:
            text.append(f"{opening}{part.text}{closing}" if part.trained else part.text,
                        style="bold green" if part.trained else "dim")  # fmt: skip
        out.print(text, soft_wrap=True)
    out.rule(style="dim")
    legend = "in green" if out.is_terminal else "in ⟦ ⟧"
    trained = f"loss on {counts.trained_tokens:,} ({counts.trained_tokens / counts.tokens:.0%})"
    other = f"{counts.at_max_length:,} fill max_length, {len(counts.dropped):,} are left out"
    out.print(f"The loss is computed on the text {legend}.", soft_wrap=True)
    out.print(f"All {counts.samples:,} samples: {counts.tokens:,} tokens, {trained}; {other}", soft_wrap=True)


def generate(arguments: argparse.Namespace) -> None:
    """`lowmem generate`."""
    _quiet()
    from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer, set_seed

    from lowmem.hf import adapters, checkpoint

    folder = Path(arguments.run_dir)
    if (folder / "config.json").exists() or adapters.files(folder):
        checkpoint.check_model(folder)
    else:
        folder, _ = checkpoint.find_last(folder, checkpoint.check_model)
    if adapters.files(folder):
        raise CheckpointError(
            f"{folder} has PEFT adapters without their base model. Merge them first, in Python: "
            f'peft.PeftModel.from_pretrained(model, "{folder}").merge_and_unload().save_pretrained("merged"), and '
            'tokenizer.save_pretrained("merged"); then lowmem generate merged "..."'
        )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    if tokenizer.chat_template is not None:
        messages = [{"role": "user", "content": arguments.prompt}]
        if arguments.system:
            messages.insert(0, {"role": "system", "content": arguments.system})
        options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        inputs = tokenizer.apply_chat_template(messages, **options)
    else:
        inputs = tokenizer(arguments.prompt, return_tensors="pt")
    sampled = arguments.temperature > 0
    set_seed(arguments.seed)
    model.generate(
        **inputs.to(model.device),
        max_new_tokens=arguments.max_new_tokens,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        do_sample=sampled,
        **({"temperature": arguments.temperature} if sampled else {}),
    )


def plan(arguments: argparse.Namespace) -> None:
    """`lowmem plan`."""
    _quiet()
    from lowmem.run import plan as planning
    from lowmem.run.config import load
    from lowmem.run.pictures import draw_step, size

    config, device = load(arguments.config, arguments.overrides), arguments.device
    memory = None if arguments.memory is None else planning.parse_bytes(arguments.memory)
    step, summary = planning.plan(config, device)
    _print_topics(summary)
    out.print()
    out.print(_step_table(step))
    out.print(f"\nNot counted: {planning.NOT_COUNTED[device]}.", soft_wrap=True)
    figures = {"device": device, **summary, **step.figures(), "memory": memory, "ways": {}}
    fits = True
    if memory is not None:
        fits = step.peak <= memory
        margin = f"{size(abs(memory - step.peak))} {'to spare' if fits else 'too much'}"
        verdict = "fits in" if fits else "does not fit in"
        out.print(f"\n{verdict} {size(memory)}: {margin}", style="bold")
        if not fits:
            figures["ways"] = _ways(arguments, config, memory)
    if arguments.json is not None:
        write_file(arguments.json, (json.dumps(figures, indent=2) + "\n").encode())
    if arguments.picture is not None:
        title = f"{Path(arguments.config).stem}: memory through a step"
        write_file(arguments.picture, draw_step(step, title, memory))
    if not fits:
        sys.exit(1)


def _table(*headings: str, numbers: Sequence[str]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="right" if heading in numbers else "left", no_wrap=heading != headings[-1])
    return table


def _step_table(step: "StepMemory") -> Table:
    from lowmem.run.pictures import size

    table = _table(f"peak, in {step.during}", "memory", "", numbers=["memory"])
    for kind, nbytes in step.items.items():
        largest = (f"{tensor}: {size(part)}" for tensor, part in step.temporaries if part >= nbytes / 10)
        table.add_row(kind, size(nbytes), ", ".join(largest) if kind == "temporaries" else "")
    table.add_row("total", size(step.peak), style="bold")
    table.add_row("floor", size(step.floor), "weights, states, buffers, batch and the largest gradient")
    if step.host_peak >= 2**20:
        table.add_row("on the host", size(step.host_peak), "offloaded gradients and activations")
    return table


def _ways(arguments: argparse.Namespace, config: "RunConfig", memory: int) -> dict[str, int]:
    """Plans overrides that reduce memory, one by one and, if none is enough, together: override → bytes at the peak."""
    from lowmem.run import plan as planning
    from lowmem.run.config import load
    from lowmem.run.pictures import size

    def peak(*overrides: str) -> int | None:
        try:
            changed = load(arguments.config, [*arguments.overrides, *overrides])
            return planning.plan(changed, arguments.device).step.peak
        except LowmemError:  # the override conflicts with another setting
            return None

    peaks: dict[str, int] = {}
    for way in planning.ways(config, arguments.device):
        if (nbytes := peak(way)) is not None:
            peaks[way] = nbytes
    if peaks and min(peaks.values()) > memory and (nbytes := peak(*peaks)) is not None:
        peaks[" ".join(peaks)] = nbytes
    for way, nbytes in peaks.items():
        verdict = "[green]fits[/green]" if nbytes <= memory else "does not fit"
        out.print(f"  {way}  {size(nbytes)}, {verdict}", soft_wrap=True)
    return peaks


def show_rules(arguments: argparse.Namespace) -> None:
    """`lowmem rules`."""
    table = _table("rule", "states", "keeps", numbers=["states"])
    rows = rules.table()
    foreign = ("torch.optim.AdamW", "what the class keeps; float32 with another rounding than nearest")
    for name, keeps in [*((row.name, row.keeps) for row in rows), foreign]:
        table.add_row(name, f"{state_bytes(name):.3g}", keeps)
    out.print("Bytes of optimizer states per parameter (measured on a 1024 x 1024 bfloat16 matrix)\n")
    out.print(table)
    out.print("\nBytes per element of a bfloat16 weight, by rounding, and of an elementwise state, by state_storage\n")
    table = _table("storage", "weight", "state", numbers=["weight", "state"])
    weights = {name: storage.of_weight(name, torch.bfloat16) for name in storage.roundings()}
    states = {name: storage.of_state(name, signed=True) for name in storage.state_storages()}
    for name in {**weights, **states}:
        cells = (f"{held[name].bytes_per_element:.4g}" if name in held else "" for held in (weights, states))
        table.add_row(name, *cells)
    out.print(table)
    out.print("\nAny torch.optim.Optimizer is a rule by its import path. The rules of this package:")
    for row in rows:
        hyper = ", ".join(f"{name}={value}" for name, value in row.defaults.items())
        header = f"\n[bold]{row.name}[/bold]  {row.source}"
        out.print(f"{header}\n  equals {row.exactness}\n  {hyper}", soft_wrap=True)


def _print_topics(topics: dict[str, str]) -> None:
    for topic, text in topics.items():
        out.print(f"{topic:10} {text}", soft_wrap=True)


def _warn(message: str) -> None:
    err.print(message, style="yellow", soft_wrap=True)


def _quiet() -> None:
    """Limits libraries to errors, without progress bars."""
    import datasets
    import transformers

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would warn that it found no accelerator
    warnings.filterwarnings("ignore", category=FutureWarning)  # for developers of libraries
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
