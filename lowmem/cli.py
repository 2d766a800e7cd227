"""The command line: `lowmem train`, `inspect`, `generate`, `plan`, `rules`.

A mistake of the user is one message on stderr and exit status 2, and leaves no partial files.
"""

import argparse
import inspect as python_inspect
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from lowmem import __version__, rules
from lowmem.errors import ConfigError, LowmemError
from lowmem.files import write_file
from lowmem.hf import failures
from lowmem.layers.config import parse_bytes
from lowmem.run.memory import state_bytes
from lowmem.run.secrets import redacted
from lowmem.run.terminal import err, out, print_topics, rank, stage
from lowmem.tiles import storage

# What imports transformers, trl or datasets is imported in functions, so that `lowmem --help` is fast.
if TYPE_CHECKING:
    from lowmem.run.config import RunConfig
    from lowmem.run.memory import StepMemory


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs one command and exits.

    The exit status is 0 for success, 1 for a plan that does not fit, 2 for an error with a message, 3 for one without
    (a defect), and 128 + N after signal N: 130 for Ctrl-C, 143 for SIGTERM. A run that was training has saved a
    checkpoint then.
    """
    out.quiet = err.quiet = rank() > 0
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    # argparse does not collect key=value after an option
    if rest and not (hasattr(arguments, "overrides") and all("=" in word and word[0] != "-" for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides += rest
    try:
        with failures.explained():
            status = arguments.command(arguments)
    except KeyboardInterrupt:
        err.print("interrupted", style="red")
        sys.exit(130)
    except BrokenPipeError:  # as in `lowmem rules | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:
        if arguments.debug:
            raise
        expected = isinstance(error, LowmemError)
        message = str(error) if expected else f"unexpected {type(error).__name__}: {error}. --debug shows the traceback"
        place = f"error on rank {rank()}: " if rank() else "error: "
        Console(stderr=True).print(Text.assemble((place, "bold red"), redacted(message)), soft_wrap=True)
        sys.exit(2 if expected else 3)
    sys.exit(status or 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lowmem",
        description="Full-parameter fine-tuning at the memory of the weights.",
        epilog="example:\n  lowmem train configs/quickstart.yaml optimizer.lr=2e-3",
        formatter_class=argparse.RawDescriptionHelpFormatter,  # an example is copied, and must not be wrapped
    )
    parser.add_argument("--version", action="version", version=f"lowmem {__version__}")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # DeepSpeed's launcher passes it
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, summary: str, example: str, config: bool = True) -> argparse.ArgumentParser:
        subparser = commands.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=f"example:\n  lowmem {name} {example}",
            formatter_class=parser.formatter_class,
        )
        subparser.set_defaults(command=run)
        subparser.add_argument("--debug", action="store_true", help="show the traceback of an error")
        if config:
            subparser.add_argument("config", metavar="CONFIG", help="a YAML file, such as configs/quickstart.yaml")
            subparser.add_argument("overrides", metavar="key=value", nargs="*", help="such as optimizer.lr=2e-3")
        return subparser

    sub = command("train", train, "Train a model; all results are written to the run folder.",
                  "configs/quickstart.yaml optimizer.lr=2e-3 run_dir=runs/first")  # fmt: skip
    sub.add_argument("--resume", action="store_true", help="continue from the newest complete checkpoint in the folder")
    sub = command("inspect", inspect, "Show training samples, and the tokens on which the loss is computed.",
                  "configs/quickstart.yaml --samples 5")  # fmt: skip
    sub.add_argument("--samples", type=int, default=3, metavar="N", help="number of samples to show (3)")
    sub = command("generate", generate, "Answer a prompt with the newest checkpoint of a run.",
                  'runs/quickstart "a prompt"', config=False)  # fmt: skip
    sub.add_argument("run_dir", metavar="RUN_DIR", help="a run folder, or a checkpoint in it")
    sub.add_argument("prompt", metavar="PROMPT", help="the user's message; a model trained on raw text continues it")
    sub.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    sub.add_argument("--max-new-tokens", type=int, metavar="N", help="maximum length of the answer (256)")
    sub.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (the default)")
    sub.add_argument("--seed", type=int, default=0, metavar="N", help="seed of sampling (0)")
    sub = command("plan", plan, "Predict the memory of a training step; nothing is downloaded or allocated.",
                  "configs/llama3_8b_chat_24gb.yaml --memory 24GiB")  # fmt: skip
    sub.add_argument("--memory", metavar="SIZE", help="such as 24GiB: say whether a step fits, and if not, what would")
    sub.add_argument("--device", choices=("gpu", "cpu"), default="gpu", help="the device to train on (gpu)")
    sub.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    sub.add_argument("--picture", type=Path, metavar="FILE", help="draw the memory through the step as PNG")
    sub = command("rules", show_rules, "List rules and storages, or the options of one rule.", "adalomo", config=False)
    sub.add_argument("rule", metavar="NAME", nargs="?", help="show the hyperparameters of this rule")
    sub.add_argument("--model", type=Path, metavar="DIR", help="name learning rates for the weights in this directory")
    return parser


def train(arguments: argparse.Namespace) -> int:
    """`lowmem train`."""
    with stage("starting"):
        _quiet()
        from lowmem.run import training
        from lowmem.run.config import load
        from lowmem.run.folder import resumed_in_place

    config = load(arguments.config, arguments.overrides)
    if arguments.resume:
        config = resumed_in_place(config, Path(arguments.config), arguments.overrides)
    stopped = training.train(config, resume=arguments.resume)
    return 0 if stopped is None else 128 + stopped


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
            print_topics({str(group.get("rule", config.optimizer.rule)): f"{count}: {examples}"})
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
    from lowmem.run import generation

    generation.generate(
        Path(arguments.run_dir),
        arguments.prompt,
        system=arguments.system,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        seed=arguments.seed,
    )


def plan(arguments: argparse.Namespace) -> int:
    """`lowmem plan`."""
    with stage("starting"):
        _quiet()
        from lowmem.run import plan as planning
        from lowmem.run.config import load
        from lowmem.run.pictures import draw_step, size

    config, device = load(arguments.config, arguments.overrides), arguments.device
    memory = None if arguments.memory is None else parse_bytes(arguments.memory, "--memory")
    with stage("planning a step"):
        step, summary = planning.plan(config, device)
    print_topics(summary)
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
    return 0 if fits else 1


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
        with stage(f"planning with {way}"):
            nbytes = peak(way)
        if nbytes is not None:
            peaks[way] = nbytes
    if peaks and min(peaks.values()) > memory and (nbytes := peak(*peaks)) is not None:
        peaks[" ".join(peaks)] = nbytes
    for way, nbytes in peaks.items():
        verdict = Text("fits", "green") if nbytes <= memory else "does not fit"
        out.print(Text.assemble(f"  {way}  {size(nbytes)}, ", verdict), soft_wrap=True)
    return peaks


def show_rules(arguments: argparse.Namespace) -> None:
    """`lowmem rules`."""
    if arguments.rule is not None:
        _show_rule(arguments.rule, arguments.model)
        return
    if arguments.model is not None:
        raise ConfigError("--model needs the name of a rule: lowmem rules NAME --model DIR")
    table = _table("rule", "states", "usual lr", "keeps", numbers=["states", "usual lr"])
    foreign = ("torch.optim.AdamW", "what the class keeps; float32 with another rounding than nearest", ())
    for name, keeps, usual in [*((row.name, row.keeps, row.usual_lr) for row in rules.table()), foreign]:
        table.add_row(name, f"{state_bytes(name):.3g}", f"{usual[0]:g}" if usual else "", keeps)
    out.print("Bytes of optimizer states per parameter (measured on a 1024 x 1024 bfloat16 matrix), and usual learning "
              "rates for fine-tuning, whose origin `lowmem rules NAME` says\n", soft_wrap=True)  # fmt: skip
    out.print(table)
    out.print("\nBytes per element of a bfloat16 weight, by rounding, and of an elementwise state, by state_storage\n")
    table = _table("storage", "weight", "state", numbers=["weight", "state"])
    weights = {name: storage.of_weight(name, torch.bfloat16) for name in storage.roundings()}
    states = {name: storage.of_state(name, signed=True) for name in storage.state_storages()}
    for name in {**weights, **states}:
        cells = (f"{held[name].bytes_per_element:.4g}" if name in held else "" for held in (weights, states))
        table.add_row(name, *cells)
    out.print(table)
    out.print("\n`lowmem rules NAME` shows the options of a rule. Any torch.optim.Optimizer is one by its import path.")


def _show_rule(name: str, model: Path | None) -> None:
    rule = rules.resolve(name)
    weights: Iterable[Tensor] = ()
    if model is not None:
        from lowmem.hf.weights import saved_weights

        weights = saved_weights(model)
    known = next((row for row in rules.table() if row.name == rule.name), None)
    if known is not None:
        print_topics({"rule": known.name, "source": known.source, "equals": known.exactness, "keeps": known.keeps})
        out.print(f"\n{python_inspect.getdoc(type(rule))}\n", soft_wrap=True)
    out.print(f"{state_bytes(name):.3g} bytes of states per parameter. Options, as keys of the section optimizer:")
    for option, default in rule.defaults.items():
        out.print(f"  {option}: {json.dumps(default, default=str)}", soft_wrap=True)
    out.print(f"Learning rate: {rule.rates(weights)}.", soft_wrap=True)


def _quiet() -> None:
    """Limits libraries to errors, without progress bars and without reports to their authors."""
    import datasets
    import huggingface_hub
    import transformers

    huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY = True  # TRL 1.16 reports each trainer that is made

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would warn that it found no accelerator
    warnings.filterwarnings("ignore", category=FutureWarning)  # for developers of libraries
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
