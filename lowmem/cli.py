"""The command line: TRL's training commands; `plan` and `inspect` before training; `generate`, and `rules`.

For invalid input, it prints one message to stderr, exits with status 2 and does not leave files behind.
"""

import argparse
import inspect as python_inspect
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from lowmem import rules
from lowmem.errors import ConfigError, LowmemError
from lowmem.files import write_file
from lowmem.hf import processes
from lowmem.options import parse_bytes
from lowmem.rules import require
from lowmem.rules.rule import describe_rates
from lowmem.run.boundary import is_out_of_memory, reason
from lowmem.run.memory import StepMemory, state_bytes
from lowmem.run.secrets import redacted
from lowmem.run.terminal import err, out, print_topics, progress_in_lines, rank, size, stage, versions
from lowmem.run.yaml_file import configured

# Modules that import transformers, trl or datasets are imported in functions, so that `lowmem --help` is fast.
if TYPE_CHECKING:
    from lowmem.run.plan import RunPlan
    from lowmem.run.recipe import Recipe

# TRL's training commands, and the summary of each in `--help`.
COMMANDS = {
    "sft": "Fine-tune on texts, chats, or prompts and completions.",
    "dpo": "Direct preference optimization on chosen and rejected answers.",
    "kto": "Kahneman-Tversky optimization on answers that are good or bad.",
    "reward": "Train a reward model on chosen and rejected answers.",
    "grpo": "Group relative policy optimization with reward functions.",
    "rloo": "Reinforce leave-one-out with reward functions.",
}


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs one command and exits.

    The exit status is 0 for success, 1 for a plan that does not fit, 2 for an error with a message for users, 3 for an
    unexpected error (a defect), and 128 + N after signal N: 130 for Ctrl-C, 143 for SIGTERM. After a signal, a training
    run has saved a checkpoint, unless a second Ctrl-C ended it.
    """
    out.quiet = err.quiet = rank() > 0
    command, rest = _parser().parse_known_args(argv)
    traceback = "--traceback" in rest or getattr(command, "traceback", False)
    try:
        if rest and not hasattr(command, "training"):
            raise ConfigError(f"unknown arguments: {' '.join(rest)}")
        with processes.explained(), nullcontext() if out.is_terminal and not rank() else progress_in_lines():
            status = command.run(command, rest)
    except KeyboardInterrupt:
        err.print("interrupted", style="red")
        sys.exit(130)
    except BrokenPipeError:  # as in `lowmem rules | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:
        if traceback:
            raise
        if isinstance(error, LowmemError):
            status, message = 2, str(error)
        elif is_out_of_memory(error):
            status, message = 2, f"out of memory: {reason(error)}"
        else:
            status, message = 3, f"unexpected {type(error).__name__}: {error}. Add --traceback to see where"
        place = f"error on rank {rank()}: " if rank() else "error: "
        Console(stderr=True).print(Text.assemble((place, "bold red"), redacted(message)), soft_wrap=True)
    sys.exit(status or 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lowmem",
        description="Full-parameter fine-tuning in little more memory than the weights. The training commands take "
        "the arguments and YAML files of `trl`, and two more sections: fused and layers.",
        epilog="example:\n  lowmem sft --config configs/quickstart.yaml --learning_rate 2e-2",
        formatter_class=argparse.RawDescriptionHelpFormatter,  # examples must not be wrapped
        allow_abbrev=False,
    )
    lines = "\n".join(f"{name} {number or 'is not installed'}" for name, number in versions().items())
    parser.add_argument("--version", action="version", version=lines)
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)  # from DeepSpeed's launcher
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, summary: str, example: str = "", **options: Any) -> argparse.ArgumentParser:
        options |= {"formatter_class": parser.formatter_class, "allow_abbrev": False}
        shown = f"example:\n  lowmem {name} {example}"
        subparser = commands.add_parser(name, help=summary, description=summary, epilog=shown, **options)
        subparser.set_defaults(run=run)
        return subparser

    for name, summary in COMMANDS.items():  # run/parser.py adds their arguments and --help
        command(name, train, summary, add_help=False).set_defaults(training=name)
    for name, run, summary in (
        ("plan", plan, "Predict the memory of a run, without downloading or allocating weights."),
        ("inspect", inspect, "Show the first training rows, and the tokens that contribute to the loss."),
    ):
        sub = command(name, run, summary, "sft --config configs/llama3_8b_chat_24gb.yaml")
        several = f"one of {', '.join(COMMANDS)}; `lowmem {name} COMMAND --help` lists the options"
        methods = sub.add_subparsers(required=True, metavar="COMMAND", help=several)
        for method in COMMANDS:
            methods.add_parser(method, add_help=False, allow_abbrev=False).set_defaults(training=method)
    sub = command("generate", generate, "Answer a prompt with the model of a run.", 'runs/quickstart "a prompt"')
    sub.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="a run folder, or a checkpoint in it")
    sub.add_argument("prompt", metavar="PROMPT", help="the user's message; a text to continue without a chat template")
    sub.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    sub.add_argument("--image", metavar="FILE", type=Path, action="append", help="an image before the prompt")
    sub.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="maximum length of the answer (256)")
    sub.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (the default)")
    sub.add_argument("--seed", type=int, default=0, metavar="N", help="seed of sampling (0)")
    sub.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    sub = command("rules", show_rules, "List the rules, or the options of one rule.", "adalomo")
    sub.add_argument("rule", metavar="NAME", nargs="?", help="show the hyperparameters of this rule")
    sub.add_argument("--model", type=Path, metavar="DIR", help="suggest learning rates for weights in this directory")
    sub.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    return parser


def train(command: argparse.Namespace, rest: Sequence[str]) -> int:
    recipe = _recipe(command, rest, _train_options, device=None)
    one = recipe.values.get("use_cpu") or recipe.values.get("fused.placement") == "streamed"
    count = _count("--num_processes", recipe.options.num_processes, 1 if one else max(1, torch.cuda.device_count()))
    started = os.environ.get("WORLD_SIZE")
    if started is None and count > 1:
        _launch(count, [command.training, *rest], recipe.values)
    if started is not None and recipe.options.num_processes not in (None, int(started)):
        raise ConfigError(
            f"--num_processes is {count}, but the launcher started {started} processes. Omit --num_processes"
        )
    from lowmem.run import training

    stopped = training.train(recipe)
    return 0 if stopped is None else 128 + stopped


def _launch(count: int, words: Sequence[str], values: Mapping[str, Any]) -> NoReturn:
    """Replaces this process by torchrun, which starts the command `count` times."""
    shards = next((name for name in ("fsdp", "deepspeed") if values.get(name)), None)
    how = "each with a full copy of the weights" if shards is None else f"which shard the weights ({shards})"
    out.print(f"starting {count} processes, {how} (--num_processes 1 starts a single process)", soft_wrap=True)
    sys.stdout.flush()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
    os.execv(sys.executable, [*torchrun, "-m", "lowmem", *words])


def inspect(command: argparse.Namespace, rest: Sequence[str]) -> None:
    recipe = _recipe(command, rest, _inspect_options)
    from lowmem.run import data

    samples = _count("--samples", recipe.options.samples, 3)
    train = data.first(data.load(recipe)[0], samples)
    trainer = data.tiny_trainer(recipe, train)
    opening, closing = ("", "") if out.is_terminal else ("⟦", "⟧")  # a file shows no colors
    for number, parts in enumerate(data.rows(trainer, samples), start=1):
        trained = sum(part.tokens for part in parts if part.trained)
        out.rule(f"row {number}: {sum(part.tokens for part in parts)} tokens, trained on {trained}", style="dim")
        text = Text()
        for part in parts:
            if part.trained:
                text.append(f"{opening}{part.text}{closing}", style="bold green")
            else:
                text.append(part.text, style="dim")
        out.print(text, soft_wrap=True)
    out.rule(style="dim")
    counts = data.check(trainer, train)  # after the rows, which may show why it raises
    marks = "in green" if out.is_terminal else "in ⟦ ⟧"
    out.print(f"Trained on: the text {marks}. First rows: {counts}", soft_wrap=True)


def plan(command: argparse.Namespace, rest: Sequence[str]) -> int:
    recipe = _recipe(command, rest, _plan_options)
    from lowmem.run import plan as planning

    options = recipe.options
    ranks = _count("--ranks", options.ranks, 1)
    memory = None if options.memory is None else parse_bytes(options.memory, "--memory")
    stage("planning a run")
    planned = planning.plan(recipe, ranks, memory)
    print_topics(planned.summary)
    out.print("", _step_table(planned.step), "", _phase_table(planned, ranks), sep="\n")
    figures = {"device": recipe.device, "ranks": ranks, **planned.figures(), "memory": memory, "reductions": {}}
    fits = memory is None or planned.needed <= memory
    fitting: Recipe | None = recipe
    if memory is not None:
        limit, margin = size(memory), size(abs(memory - planned.needed))
        verdict = f"fits in {limit}: {margin} to spare" if fits else f"exceeds {limit} by {margin}"
        out.print(f"\n{verdict}", style="bold")
        if not fits:
            fitting, figures["reductions"] = _fitting(recipe, ranks, memory)
    if options.json is not None:
        write_file(options.json, (json.dumps(figures, indent=2) + "\n").encode())
    if options.write is not None:
        if fitting is None:
            out.print(f"not written: {options.write}, because no change of the arguments fits", soft_wrap=True)
        else:
            write_file(options.write, fitting.to_yaml().encode())
            out.print(f"written: {options.write}", soft_wrap=True)
    return 0 if fits else 1


def _recipe(
    command: argparse.Namespace, rest: Sequence[str], options: Callable[[Any], None], device: str | None = "gpu"
) -> "Recipe":
    """Parses a training command with additional options, for this machine or for the device in `--device`."""
    stage("starting")
    configured(rest)  # sets environment variables before libraries are imported
    _quiet()
    from lowmem.run.recipe import parse

    return parse(command.training, rest, device=device, more=options)


def _count(name: str, value: int | None, default: int) -> int:
    """Returns the value of an option, or its default. Raises `ConfigError` unless it is a whole number >= 1."""
    count = default if value is None else value
    require.number(">= 1", whole=True)(name, count)
    return count


def _train_options(group: Any) -> None:
    group.add_argument("--force", action="store_true", help="do not check that the run fits in the free memory")
    group.add_argument("--num_processes", type=int, metavar="N", help="processes to start (one per visible GPU)")


def _inspect_options(group: Any) -> None:
    group.add_argument("--samples", type=int, metavar="N", help="number of rows to show (3)")
    group.add_argument("--device", choices=("gpu", "cpu"), help="the device to train on (gpu)")


def _plan_options(group: Any) -> None:
    memory = "free memory of a device, such as 23GiB: whether the run fits, and what to change"
    group.add_argument("--memory", metavar="SIZE", help=memory)
    group.add_argument("--ranks", type=int, metavar="N", help="number of processes, each with one device (1)")
    group.add_argument("--write", type=Path, metavar="FILE", help="write the YAML of the run, or of a change that fits")
    group.add_argument("--device", choices=("gpu", "cpu"), help="the device to train on (gpu)")
    group.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")


def _fitting(recipe: "Recipe", ranks: int, memory: int) -> tuple["Recipe | None", dict[str, int]]:
    """Plans and prints arguments that reduce memory. Returns the recipe with the first arguments with which the run
    fits, if any, and the bytes that each device needs, by argument.
    """
    from lowmem.run import reductions

    fitting, needs = None, {}
    stage("planning arguments that reduce memory")
    for reduction, changed, needed in reductions.planned(recipe, ranks, memory):
        needs[reduction.words] = needed
        verdict = Text("fits", "green") if needed <= memory else "does not fit"
        out.print(
            Text.assemble(f"  {reduction.words}  {size(needed)}, ", verdict, f" ({reduction.cost})"), soft_wrap=True
        )
        if fitting is None and needed <= memory and reduction.ranks is None:
            fitting = changed
    return fitting, needs


def generate(command: argparse.Namespace, rest: Sequence[str]) -> None:
    _quiet()
    from lowmem.run import generation

    generation.generate(command)


def _table(*headings: str, numbers: Sequence[str]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="right" if heading in numbers else "left", no_wrap=heading != headings[-1])
    return table


def _step_table(step: StepMemory) -> Table:
    table = _table(f"peak of a step, in {step.during}", "memory", numbers=["memory"])
    for kind, nbytes in step.items.items():
        table.add_row(kind, size(nbytes))
    table.add_row("total", size(step.peak), style="bold")
    return table


def _phase_table(planned: "RunPlan", ranks: int) -> Table:
    here = ["on each device", "on the host, per rank"] if ranks > 1 else ["on the device", "on the host"]
    columns = [*here, "on the disk"]
    table = _table("phase", *columns, numbers=columns)
    for name, phase in planned.phases.items():
        table.add_row(name, *(size(nbytes) if nbytes >= 2**20 else "" for nbytes in phase))
    table.add_row("reserve", size(planned.reserve), "", "")
    table.add_row("needed", size(planned.needed), "", "", style="bold")
    return table


def show_rules(arguments: argparse.Namespace, rest: Sequence[str]) -> None:
    logging.getLogger("lowmem").setLevel(logging.ERROR)  # rules that round to nearest would warn
    if arguments.rule is not None:
        _show_rule(arguments.rule, arguments.model)
        return
    if arguments.model is not None:
        raise ConfigError("--model needs the name of a rule: lowmem rules NAME --model DIR")
    table = _table("rule", "states", "usual lr", "stores", numbers=["states", "usual lr"])
    for row in rules.table():
        table.add_row(row.name, f"{state_bytes(row.name):.3g}", f"{row.usual_lr[0]:g}", row.keeps)
    foreign = "the states of the class; float32 unless rounding is nearest"
    table.add_row("torch.optim.AdamW", f"{state_bytes('torch.optim.AdamW'):.3g}", "", foreign)
    states = "Bytes of optimizer states per parameter (measured on a 1024 x 1024 bfloat16 matrix)"
    source = "`lowmem rules NAME` shows the source of a rate"
    out.print(f"{states}, and usual learning rates for fine-tuning. {source}.\n", soft_wrap=True)
    out.print(table)
    more = "Most torch.optim classes and third-party optimizers can be selected by import path"
    out.print(f"\n`lowmem rules NAME` shows the options of a rule. {more}.", soft_wrap=True)


def _show_rule(name: str, model: Path | None) -> None:
    rule = rules.resolve(name)
    weights: Iterable[Tensor] = ()
    if model is not None:
        from lowmem.files import SafetensorsFile
        from lowmem.hf.weights import weight_files

        files = map(SafetensorsFile, weight_files(model))
        weights = (file.get_tensor(name) for file in files for name in file.keys())  # noqa: SIM118 (not a mapping)
    known = next((row for row in rules.table() if row.name == rule.name), None)
    if known is not None:
        print_topics({"rule": known.name, "source": known.source, "exactness": known.exactness, "states": known.keeps})
        out.print(f"\n{python_inspect.getdoc(type(rule))}\n", soft_wrap=True)
    out.print(f"{state_bytes(name):.3g} bytes of states per parameter.", soft_wrap=True)
    out.print("Options, as keys of the section fused:")
    for option, default in rule.defaults.items():
        out.print(f"  {option}: {json.dumps(default, default=str)}", soft_wrap=True)
    out.print(f"Learning rate: {describe_rates(rule, weights)}.", soft_wrap=True)


def _quiet() -> None:
    """Limits the output of libraries to errors and progress bars, and disables their telemetry."""
    import datasets
    import huggingface_hub
    import transformers

    huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY = True  # TRL 1.16 reports each trainer
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # datasets 4 (load.py) reports each data set, even local ones
    warnings.filterwarnings("ignore", category=FutureWarning)  # meant for developers
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
