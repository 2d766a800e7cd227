"""The command line: `lowmem train`, `inspect`, `generate`, `plan`, `rules`.

What a user did wrong is one message on stderr and exit status 2; nothing is left half written.
"""

import argparse
import json
import logging
import math
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lowmem import __version__, rules
from lowmem.errors import LowmemError
from lowmem.placements import in_group, shape_of
from lowmem.run.memory import state_bytes
from lowmem.tiles.storage import ROUNDINGS

if TYPE_CHECKING:
    from lowmem.run.config import RunConfig
    from lowmem.run.data import TokenCounts
    from lowmem.run.memory import StepMemory

# Under a launcher every process runs the whole command; the first one speaks, and the others when they fail.
RANK = int(os.environ.get("RANK", 0))
out = Console(quiet=RANK > 0)
err = Console(stderr=True, quiet=RANK > 0)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs one command and exits.

    0 is done, 1 a plan that does not fit, 2 a user's mistake, 130
    interrupted before training began.
    """
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    # argparse takes no further key=value once an option came between
    if rest and not (hasattr(arguments, "overrides") and all("=" in word and word[0] != "-" for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides += rest
    try:
        arguments.command(arguments)
    except LowmemError as error:
        where = f"error on rank {RANK}: " if RANK else "error: "
        Console(stderr=True).print(Text.assemble((where, "bold red"), str(error)), soft_wrap=True)
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
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # DeepSpeed's launcher says it, and RANK
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, summary: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=summary, description=summary)
        made.set_defaults(command=run)
        return made

    def config_arguments(made: argparse.ArgumentParser) -> None:
        made.add_argument("config", metavar="CONFIG", help="a YAML file, such as configs/quickstart.yaml")
        made.add_argument("overrides", metavar="key=value", nargs="*", help="as in optimizer.lr=2e-3, to any depth")

    made = command("train", train, "Train as a configuration says; everything goes into its run folder.")
    config_arguments(made)
    made.add_argument("--resume", action="store_true", help="go on from the newest whole checkpoint in the run folder")
    made = command("inspect", inspect, "Show samples as they are trained on, and on which tokens the loss is taken.")
    config_arguments(made)
    made.add_argument("--samples", type=int, default=3, metavar="N", help="how many to show (3)")
    made = command("generate", generate, "Answer a prompt with the newest checkpoint of a run.")
    made.add_argument("run_dir", metavar="RUN_DIR", help="a run folder, or one checkpoint in it")
    made.add_argument("prompt", metavar="PROMPT", help="what the user says; a run on raw text continues it")
    made.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    made.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="longest answer (256)")
    made.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (the default)")
    made.add_argument("--seed", type=int, default=0, metavar="N", help="of sampling (0)")
    made = command("plan", plan, "What a run will take, itemised, before anything is downloaded or allocated.")
    config_arguments(made)
    made.add_argument("--memory", metavar="SIZE", help="as in 24GiB: whether a step fits, and if not, what would")
    made.add_argument("--device", choices=("gpu", "cpu"), default="gpu", help="where the run is to train (gpu)")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    made.add_argument("--picture", type=Path, metavar="FILE", help="draw what is alive through the step, as PNG")
    command("rules", show_rules, "The table of rules: name, bytes per parameter, what each keeps, source.")
    return parser


# -- train ---------------------------------------------------------------------------------------------------------


def train(arguments: argparse.Namespace) -> None:
    """`lowmem train`."""
    _quiet()
    from lowmem.hf import checkpoint
    from lowmem.run import build, report
    from lowmem.run.config import load, save
    from lowmem.run.data import check_tokenized

    config = load(arguments.config, arguments.overrides)
    with _run_folder(config, arguments.resume) as folder:
        resume_from = None
        if arguments.resume:
            resume_from, damaged = checkpoint.find_last(folder)
            for reason in damaged:
                err.print(f"passed over a damaged checkpoint: {reason}", style="yellow", soft_wrap=True)
            out.print(f"resuming from {resume_from}", soft_wrap=True)
        found = build.samples(config, resume_from)
        args = build.arguments(config, found)
        model = build.model(config, found.tokenizer, args)
        trainer = build.trainer(config, found, model, args)
        trainer.create_optimizer()  # refuses what it cannot update before anything is written
        counts = check_tokenized(trainer.train_dataset, found.train, config.data)
        _describe(config, trainer, counts)
        if RANK == 0:
            save(config, folder / "config.yaml")
            report.write_environment(folder)
        with report.RunReport(folder, out).attached(trainer), _stop_on_signal(trainer) as stopped:
            trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
    _leave_group()
    if stopped:
        again = f"{report.command()} train {folder}/config.yaml --resume"
        last = f"stopped at step {trainer.state.global_step}; go on with: {again}"
    else:
        last = f"done: {folder}/README.md says what is there and how to go on"
    out.print(last, style="bold", highlight=False, soft_wrap=True)


@contextmanager
def _run_folder(config: "RunConfig", resume: bool) -> Iterator[Path]:
    """The run folder; taken away again if the run fails before it has written anything there. Rank 0 makes it."""
    from lowmem.run.report import start_run_folder

    if RANK:
        yield Path(config.run_dir)
        return
    folder = start_run_folder(config.run_dir, resume)
    try:
        yield folder
    except BaseException:
        if not any(folder.iterdir()):
            folder.rmdir()
        raise


@contextmanager
def _stop_on_signal(trainer: Any) -> Iterator[list[int]]:
    """At the first Ctrl-C or SIGTERM ends training after the running step, with a checkpoint; a second ends at once.

    Yields a list that holds the signal once it came.
    """
    from transformers import TrainerCallback

    came: list[int] = []

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if _on_any_rank(bool(came), args.device):
                control.should_save = control.should_training_stop = True

    def restore() -> None:
        for name, handler in kept.items():
            signal.signal(name, handler)

    def note(number: int, _: object) -> None:
        came.append(number)
        restore()
        err.print("stopping after this step, with a checkpoint (again: at once)", style="yellow")

    kept = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}
    trainer.add_callback(Stop())
    for name in kept:
        signal.signal(name, note)
    try:
        yield came
    finally:
        restore()


def _on_any_rank(here: bool, device: Any) -> bool:
    """Whether something is so on some rank: a signal comes at another step on each, and they must stop at one."""
    import torch
    from torch import distributed

    if not in_group():
        return here
    flag = torch.tensor(int(here), device=device)
    distributed.all_reduce(flag, op=distributed.ReduceOp.MAX)
    return bool(flag)


def _leave_group() -> None:
    """A process that ends without leaving its process group aborts."""
    from torch import distributed

    if in_group():
        distributed.barrier()
        distributed.destroy_process_group()


def _describe(config: "RunConfig", trainer: Any, counts: "TokenCounts") -> None:
    """What is about to be trained, in five lines; samples that were dropped are said."""
    fused, model = config.optimizer.fused, trainer.model
    compiled = ", compiled in the first step (up to a minute)" if trainer.optimizer.compiled else ""
    parameters = sum(math.prod(shape_of(p)) for p in model.parameters())
    out.print(f"model      {type(model).__name__}, {parameters / 1e6:,.1f}M parameters, {config.model.dtype}")
    settings = f"{fused.rule}, lr {config.optimizer.lr:g}, rounding {fused.rounding}"
    out.print(f"optimizer  {settings}, fused into backward{compiled}", highlight=False)
    if in_group():
        how = "shares the parameters" if trainer.optimizer.placement in ("zero3", "fsdp2") else "holds all parameters"
        placed = f"{trainer.optimizer.placement}: each of {trainer.args.world_size} processes {how}"
        out.print(f"placement  {placed}", highlight=False)
    policy = f"{trainer.optimizer.policy}: {trainer.optimizer.policy_reason}"
    out.print(f"policy     {policy}", highlight=False, soft_wrap=True)
    out.print(f"loss       {_loss(trainer.args)}", highlight=False, soft_wrap=True)
    out.print(
        f"data       {counts.samples:,} samples, {counts.tokens:,} tokens, loss on {counts.trained_tokens:,}",
        highlight=False,
    )
    if config.model.dtype != "float32" and fused.rounding == "nearest":
        lost = "0.2 %" if config.model.dtype == "bfloat16" else "0.02 %"
        err.print(
            f"{config.model.dtype} weights with rounding nearest lose every update below about {lost} of its weight; "
            "optimizer.rounding=stochastic loses none, and costs no memory",
            style="yellow",
            soft_wrap=True,
        )
    if counts.dropped:
        err.print(
            f"{len(counts.dropped)} samples have no answer token inside max_length and are left out, "
            f"such as {counts.dropped[0]}",
            style="yellow",
            soft_wrap=True,
        )
    if counts.without_target:
        err.print(f"{counts.without_target} samples add nothing to the loss", style="yellow")


def _loss(args: Any) -> str:
    """How the loss is computed, and what becomes of activations until backward."""
    logits = "logits in tiles"
    if args.label_smoothing_factor:
        logits = f"labels smoothed by {args.label_smoothing_factor:g}, which takes all logits at once"
    kwargs = args.activation_checkpointing_kwargs or {}
    recomputed = args.activation_checkpointing or (args.fsdp and args.fsdp_config.get("activation_checkpointing"))
    activations = "recomputed in backward" if recomputed else "kept for backward"
    offloaded = ", on the host until then" if args.activation_offloading or kwargs.get("offload") else ""
    return f"{args.loss_type}, {logits}; activations {activations}{offloaded}"


# -- inspect -------------------------------------------------------------------------------------------------------


def inspect(arguments: argparse.Namespace) -> None:
    """`lowmem inspect`."""
    _quiet()
    from lowmem.run import build
    from lowmem.run.config import load
    from lowmem.run.data import check_tokenized, segments

    config = load(arguments.config, arguments.overrides)
    found = build.samples(config)
    rows = build.tokenized(config, found)
    counts = check_tokenized(rows, found.train, config.data)
    # without colours the trained parts stand in brackets
    opening, closing = ("", "") if out.is_terminal else ("⟦", "⟧")
    for number, row in enumerate(rows.select(range(min(arguments.samples, len(rows)))), start=1):
        parts = segments(row, found.tokenizer)
        tokens, trained = sum(p.tokens for p in parts), sum(p.tokens for p in parts if p.trained)
        out.rule(f"sample {number}: {tokens} tokens, loss on {trained}", style="dim")
        text = Text()
        for part in parts:
            text.append(f"{opening}{part.text}{closing}" if part.trained else part.text,
                        style="bold green" if part.trained else "dim")  # fmt: skip
        out.print(text, soft_wrap=True)
    out.rule(style="dim")
    legend = "green" if out.is_terminal else "in ⟦ ⟧"
    share = counts.trained_tokens / counts.tokens
    out.print(
        f"loss on what is {legend}. All {counts.samples:,} samples: {counts.tokens:,} tokens, "
        f"loss on {counts.trained_tokens:,} ({share:.0%}); {counts.at_max_length:,} fill max_length, "
        f"{len(counts.dropped):,} were left out",
        highlight=False,
        soft_wrap=True,
    )


# -- generate ------------------------------------------------------------------------------------------------------


def generate(arguments: argparse.Namespace) -> None:
    """`lowmem generate`."""
    _quiet()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer, set_seed

    from lowmem.hf import checkpoint

    folder = Path(arguments.run_dir)
    if (folder / "config.json").exists():
        checkpoint.check_model(folder)
    else:
        folder, _ = checkpoint.find_last(folder, checkpoint.check_model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    if tokenizer.chat_template is not None:
        messages = [{"role": "user", "content": arguments.prompt}]
        if arguments.system:
            messages.insert(0, {"role": "system", "content": arguments.system})
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer(arguments.prompt, return_tensors="pt")
    sampling = {"do_sample": True, "temperature": arguments.temperature} if arguments.temperature > 0 else {}
    set_seed(arguments.seed)
    model.generate(
        **inputs.to(model.device),
        max_new_tokens=arguments.max_new_tokens,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        **{"do_sample": False, **sampling},
    )


# -- plan ----------------------------------------------------------------------------------------------------------


def plan(arguments: argparse.Namespace) -> None:
    """`lowmem plan`."""
    _quiet()
    from lowmem.files import write_file
    from lowmem.run import plan as planning
    from lowmem.run.config import load
    from lowmem.run.pictures import draw_step, size

    config, device = load(arguments.config, arguments.overrides), arguments.device
    memory = None if arguments.memory is None else planning.parse_bytes(arguments.memory)
    planned = planning.plan(config, device)
    step = planned.step
    for topic, words in planned.of.items():
        out.print(f"{topic:10} {words}", highlight=False, soft_wrap=True)
    out.print()
    out.print(_step_table(step))
    out.print(f"\nNot counted: {planning.NOT_COUNTED[device]}.", highlight=False, soft_wrap=True)
    found = {"device": device, **planned.of, **step.figures(), "memory": memory, "ways": {}}
    too_much = memory is not None and step.peak > memory
    if memory is not None:
        margin = f"{size(abs(memory - step.peak))} {'too much' if too_much else 'to spare'}"
        fits = "does not fit" if too_much else "fits"
        out.print(f"\n{fits} into {size(memory)}: {margin}", style="bold", highlight=False)
    if memory is not None and too_much:
        found["ways"] = _ways(arguments, config, memory)
    if arguments.json is not None:
        write_file(arguments.json, (json.dumps(found, indent=2) + "\n").encode())
    if arguments.picture is not None:
        title = f"{Path(arguments.config).stem}: memory through a step"
        write_file(arguments.picture, draw_step(step, title, memory))
    if too_much:
        sys.exit(1)


def _step_table(step: "StepMemory") -> Table:
    from lowmem.run.pictures import size

    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(f"the peak, in {step.during}")
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("")
    for kind, count in step.items.items():
        largest = (f"{like}: {size(of_it)}" for like, of_it in step.temporaries if of_it >= count / 10)
        table.add_row(kind, size(count), ", ".join(largest) if kind == "temporaries" else "")
    table.add_row("together", size(step.peak), style="bold")
    table.add_row("the floor", size(step.floor), "weights, states, buffers, batch and the largest gradient")
    if step.host_peak >= 2**20:
        table.add_row("on the host", size(step.host_peak), "gradients that wait, and what is offloaded")
    return table


def _ways(arguments: argparse.Namespace, config: "RunConfig", memory: int) -> dict[str, int]:
    """Plans what would take less, each by itself and, where none is enough, all of it; override → bytes at the peak."""
    from lowmem.run import plan as planning
    from lowmem.run.config import load
    from lowmem.run.pictures import size

    def peak(*overrides: str) -> int | None:
        try:
            changed = load(arguments.config, [*arguments.overrides, *overrides])
            return planning.plan(changed, arguments.device).step.peak
        except LowmemError:  # it does not go with something else that is set
            return None

    found: dict[str, int] = {}
    for way in planning.ways(config, arguments.device):
        if (needed := peak(way)) is not None:
            found[way] = needed
    if found and min(found.values()) > memory and (needed := peak(*found)) is not None:
        found[" ".join(found)] = needed
    for way, needed in found.items():
        verdict = "[green]fits[/green]" if needed <= memory else "does not fit"
        out.print(f"  {way}  {size(needed)}, {verdict}", highlight=False, soft_wrap=True)
    return found


# -- rules ---------------------------------------------------------------------------------------------------------


def show_rules(arguments: argparse.Namespace) -> None:
    """`lowmem rules`."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("rule", *ROUNDINGS, "keeps"):
        table.add_column(heading, justify="right" if heading in ROUNDINGS else "left", no_wrap=heading == "rule")
    known = rules.table()
    for row in known:
        kept = (f"{state_bytes(row.name, rounding):.3g}" for rounding in ROUNDINGS)
        table.add_row(row.name, *kept, row.keeps)
    of_torch = (f"{state_bytes('torch.optim.AdamW', rounding):.3g}" for rounding in ROUNDINGS)
    table.add_row("torch.optim.AdamW", *of_torch, "what the class keeps")
    out.print("Bytes kept for each bfloat16 weight beside its own 2, by rounding (measured on a 1024 x 1024 matrix)\n")
    out.print(table)
    out.print("\nAny torch.optim.Optimizer is a rule by its import path. The others, with their hyperparameters:")
    for row in known:
        settings = ", ".join(f"{name}={value}" for name, value in row.defaults.items())
        out.print(
            f"\n[bold]{row.name}[/bold]  {row.source}\n  equals {row.exactness}\n  {settings}",
            highlight=False,
            soft_wrap=True,
        )


def _quiet() -> None:
    """Leaves the terminal to this command: libraries report errors, and draw no bars of their own."""
    import datasets
    import torch
    import transformers

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would warn that it found none
    warnings.filterwarnings("ignore", category=FutureWarning)  # between libraries, not for their users
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
