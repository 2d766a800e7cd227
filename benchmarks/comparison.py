"""Contenders in turn, several rounds, and what is left of it: a table, a JSON, a picture.

Seconds are to be read as ratios to those of one contender, the base.
"""

import argparse
import io
import json
import os
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.baselines import PEERS, Contender
from benchmarks.measurement import SIZES, Figures, Workload, alone
from lowmem.errors import ConfigError
from lowmem.files import cpu, version, write_file

_COLORS = {"floor": "#e6e6e6", "ours": "#2a8f7c", "peer": "#c9ced6"}


def add_arguments(parser: argparse.ArgumentParser, batch: int, tokens: int, rounds: int, out: Path) -> None:
    """What is measured, how often, and where the results go."""

    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text!r} is not a count of one or more")
        return int(text)

    parser.add_argument("--size", choices=SIZES, default="100M", help="parameters of the Llama, about (100M)")
    counts = {
        "batch": (batch, "rows of a step"),
        "tokens": (tokens, "tokens of a row"),
        "steps": (5, "steps that are timed in a round"),
        "rounds": (rounds, "how often all are measured in turn"),
    }
    for name, (default, what) in counts.items():
        parser.add_argument(f"--{name}", type=count, default=default, metavar="N", help=f"{what} ({default})")
    dtypes = ("bfloat16", "float32")
    parser.add_argument("--dtype", choices=dtypes, default="bfloat16", help="of the weights (bfloat16)")
    parser.add_argument("--out", type=Path, default=out, metavar="FOLDER", help=f"for a JSON and a picture ({out})")


def workload_of(arguments: argparse.Namespace) -> Workload:
    """As the arguments say that `add_arguments` makes."""
    return Workload(arguments.size, arguments.batch, arguments.tokens, arguments.dtype, arguments.steps)


@dataclass
class Comparison:
    """What was found: the figures of each contender, or why it failed, or what it needs and was not there."""

    contenders: Mapping[str, Contender]
    settings: dict[str, Any]
    results: dict[str, Figures] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def over_weights(self, name: str) -> float:
        """The most that tensors took beside the weights, in bytes."""
        return self.results[name]["tensor_peak"] - self.settings["weights"]

    def ratio(self, name: str, base: str) -> float | None:
        """The time of a step in steps of `base`; None where that was not measured."""
        return self.results[name]["seconds"] / self.results[base]["seconds"] if base in self.results else None


def compare(contenders: Mapping[str, Contender], workload: Workload, rounds: int, console: Console) -> Comparison:
    """Measures all contenders in turn, `rounds` times; figures are medians.

    Of the first step it is the longest: each contender compiles anew, and in later rounds finds that again.
    """
    found = Comparison(contenders, {**workload.settings(), "rounds": rounds})
    found.left_out = {name: why for name, contender in contenders.items() if (why := contender.missing())}
    runs: dict[str, list[Figures]] = {name: [] for name in contenders if name not in found.left_out}
    if not runs:
        needs = "; ".join(f"{name}: {why}" for name, why in found.left_out.items())
        raise ConfigError(f"no contender can run here. {needs}")
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with (
        Progress(*columns, console=console, transient=True) as progress,
        tempfile.TemporaryDirectory(prefix="lowmem-bench-", ignore_cleanup_errors=True) as folder,
    ):
        bar = progress.add_task("", total=rounds * len(runs))
        for turn in range(1, rounds + 1):
            for number, name in enumerate(runs):
                progress.update(bar, description=f"round {turn} of {rounds}: {name}")
                if name not in found.failed:
                    run = alone(contenders[name], workload, Path(folder, str(number)))
                    if isinstance(run, str):
                        found.failed[name] = run
                    else:
                        runs[name].append(run)
                    told = f"failed: {run}" if isinstance(run, str) else f"{run['seconds']:.3f} s/step"
                    progress.console.print(
                        f"round {turn} of {rounds}: {name}, {told}", highlight=False, markup=False, soft_wrap=True
                    )
                progress.advance(bar)
    for name, rows in runs.items():
        if name not in found.failed:
            medians = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
            found.results[name] = {**medians, "first_step": max(row["first_step"] for row in rows)}
    return found


# -- What is left of it --------------------------------------------------------------------------------------------


def headline(settings: Mapping[str, Any]) -> str:
    """What was measured and on what, in two lines."""
    shape = f"{settings['layers']} layers, hidden {settings['hidden']:,}, vocabulary {settings['vocabulary']:,}"
    tokens = f"{settings['batch']} × {settings['tokens']} tokens"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    where = gpu or f"{cpu()}, {settings['threads']} of {os.cpu_count()} cores"
    rounds = f"medians of {settings['rounds']} rounds of {settings['steps']} steps"
    return (
        f"Llama of {settings['parameters']:,} parameters ({shape}), {settings['dtype']}, {tokens}\n"
        f"activation checkpointing; {where}; {rounds}"
    )


def machine() -> dict[str, Any]:
    """What it was measured on, and with which versions."""
    packages = sorted({peer.package for peer in PEERS.values() if peer.package is not None})
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "packages": {name: found for name in packages if (found := version(name)) is not None},
    }


def table(found: Comparison, base: str) -> Table:
    """A row for each contender, with ratios and the process peak relative to `base`; `–` is what was not measured."""
    shown = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    shown.add_column("contender", no_wrap=True, vertical="bottom")
    over = ("tensors,\nMiB over\nweights", f"process,\nMiB over\n{base}", "first\nstep, s")
    for heading in ("s/step", f"×\n{base}", "tokens/s", *over):
        shown.add_column(heading, justify="right", vertical="bottom")
    process_floor = found.results.get(base, {}).get("process_peak")
    tokens = found.settings["batch"] * found.settings["tokens"]
    for name in found.contenders:
        if name in found.results:
            row = found.results[name]
            process = row.get("process_peak")
            more = None if process is None or process_floor is None else (process - process_floor) / 2**20
            cells = [
                f"{row['seconds']:.3f}",
                _number(found.ratio(name, base), ".2f"),
                f"{tokens / row['seconds']:,.0f}",
                f"{found.over_weights(name) / 2**20:,.0f}",
                _number(more, ",.0f"),
                f"{row['first_step']:.1f}",
            ]
            shown.add_row(name, *cells)
        elif name in found.failed:
            shown.add_row(name, "failed", *["–"] * 5)
    return shown


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def tell(found: Comparison, base: str, console: Console) -> None:
    """Prints what was measured, the table, and who is not in it and why."""
    console.print(f"{headline(found.settings)}\n", highlight=False, soft_wrap=True)
    # a file is 80 columns wide to rich, which would cut the figures off
    Console(file=console.file, width=max(console.width, 120)).print(table(found, base), highlight=False)
    for name, why in found.failed.items():
        console.print(f"\n{name} failed: {why}", style="red", highlight=False, markup=False, soft_wrap=True)
    for name, why in found.left_out.items():
        console.print(f"\nleft out: {name} ({why})", highlight=False, soft_wrap=True)


def save(path: Path, settings: Mapping[str, Any], **parts: Any) -> None:
    """Writes figures as JSON, beside what they are of and the machine."""
    report = {"settings": settings, "machine": machine(), **parts}
    write_file(path, (json.dumps(report, indent=2) + "\n").encode())


def save_all(found: Comparison, base: str, folder: Path, name: str) -> None:
    """Writes `name`.json and `name`.png into a folder that is there."""
    save(folder / f"{name}.json", found.settings, results=found.results, failed=found.failed, left_out=found.left_out)
    write_file(folder / f"{name}.png", picture(found, base))


def picture(found: Comparison, base: str) -> bytes:
    """Time and tensor memory of each contender as bars, as PNG."""
    from matplotlib.figure import Figure

    names = list(found.results)[::-1]
    colors = [_COLORS[found.contenders[name].kind] for name in names]
    times = [found.ratio(name, base) or found.results[name]["seconds"] for name in names]
    memory = [found.over_weights(name) / found.settings["weights"] for name in names]
    figure = Figure(figsize=(10, 1.6 + 0.31 * len(names)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    time_label = f"time of a step, × {base}" if base in found.results else "time of a step, seconds"
    panels = ((left, times, time_label), (right, memory, "tensor memory over the weights, × weights"))
    for axes, values, label in panels:
        bars = axes.barh(names, values, color=colors)
        axes.bar_label(bars, [f"{value:.2f}" for value in values], padding=3, fontsize=9)
        axes.set_xlabel(label)
        axes.margins(x=0.14, y=0.02)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(headline(found.settings), fontsize=11)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=150)
    return png.getvalue()
