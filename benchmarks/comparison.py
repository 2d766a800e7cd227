"""Compares the training steps of several methods: a table, a JSON file, a picture.

Times are to be read as ratios to those of one method, the base.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import reports
from benchmarks.baselines import Method, exit_if_ours_failed, runnable, select
from benchmarks.measurement import SIZES, Workload, measure
from benchmarks.processes import Figures, alone, in_rounds, medians
from benchmarks.reports import Bars, draw_bars, formatted, headline, print_missing, print_table


def make_parser(doc: str, batch: int, tokens: int, rounds: int) -> argparse.ArgumentParser:
    """Returns a parser for the workload, `--only` and `--out`."""
    counts = {
        "batch": (batch, "rows per step"),
        "tokens": (tokens, "tokens per row"),
        "steps": (5, "timed steps per round"),
        "rounds": (rounds, "how often all methods are measured in turn"),
    }
    parser = reports.make_parser(doc, counts, only="method")
    parser.add_argument("--size", choices=SIZES, default="100M", help="approximate parameters of the Llama (100M)")
    return parser


@dataclass
class Comparison:
    """The figures of each method, or why it failed, or what it needs and this machine does not have."""

    methods: Mapping[str, Method]
    settings: dict[str, Any]
    results: dict[str, Figures] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def over_weights(self, name: str) -> float:
        """Bytes of all tensors besides the weights, at their peak."""
        return self.results[name]["tensor_peak"] - self.settings["weights"]

    def ratio(self, name: str, base: str) -> float | None:
        """The time of a step relative to `base`, or None if that was not measured."""
        return self.results[name]["seconds"] / self.results[base]["seconds"] if base in self.results else None


def run(methods: Mapping[str, Method], base: str, options: argparse.Namespace, name: str) -> None:
    """Measures the methods and writes `name`.json and `name`.png. Exits with status 1 if the floor or lowmem failed."""
    workload = Workload(options.size, options.batch, options.tokens, options.dtype, options.steps)
    chosen = select(methods, options.only)
    with reports.output(options.out, name):
        comparison = compare(chosen, workload, options.rounds, Console(stderr=True))
        report(comparison, base)
        parts = {"results": comparison.results, "failed": comparison.failed, "left_out": comparison.left_out}
        reports.save(options.out / f"{name}.json", comparison.settings, **parts)
        draw(comparison, base, options.out / f"{name}.png")
    exit_if_ours_failed(methods, comparison.failed)


def compare(methods: Mapping[str, Method], workload: Workload, rounds: int, console: Console) -> Comparison:
    """Measures all methods in turn, `rounds` times.

    Figures are medians, except that the first step is the longest one: every method compiles its code in the first
    round and finds it again in later rounds.
    """
    names, left_out = runnable(methods)

    def one(name: str, folder: Path) -> Figures:
        return alone(measure, methods[name], workload, folder=folder)

    runs, failed = in_rounds(names, rounds, one, console)
    results = {
        name: {**medians(rows), "first_step": max(row["first_step"] for row in rows)} for name, rows in runs.items()
    }
    return Comparison(methods, {**workload.settings(), "rounds": rounds}, results, failed, left_out)


def title(settings: Mapping[str, Any]) -> str:
    """What was measured and on what machine, in two lines."""
    shape = f"{settings['layers']} layers, hidden {settings['hidden']:,}, vocabulary {settings['vocabulary']:,}"
    tokens = f"{settings['batch']} × {settings['tokens']} tokens, activation checkpointing"
    rounds = f"medians of {settings['rounds']} rounds of {settings['steps']} steps"
    return (
        f"Llama of {settings['parameters']:,} parameters ({shape}), {tokens}\n{headline(settings['dtype'])}; {rounds}"
    )


def report(comparison: Comparison, base: str) -> None:
    """Prints what was measured, and a row for each method, with times and the process peak relative to `base`."""
    print(f"{title(comparison.settings)}\n")
    base_process = comparison.results.get(base, {}).get("process_peak")
    tokens = comparison.settings["batch"] * comparison.settings["tokens"]
    rows: list[tuple[str, ...]] = []
    for name in comparison.methods:
        if name in comparison.results:
            row = comparison.results[name]
            process = row.get("process_peak")
            more = None if process is None or base_process is None else (process - base_process) / 2**20
            cells = (
                f"{row['seconds']:.3f}",
                formatted(comparison.ratio(name, base), ".2f"),
                f"{tokens / row['seconds']:,.0f}",
                f"{comparison.over_weights(name) / 2**20:,.0f}",
                formatted(more, ",.0f"),
                f"{row['first_step']:.1f}",
            )
            rows.append((name, *cells))
        elif name in comparison.failed:
            rows.append((name, "failed", *["–"] * 5))
    over = ("tensors over weights, MiB", f"process over {base}, MiB", "first step, s")
    print_table(("method", "s/step", f"× {base}", "tokens/s", *over), rows)
    print_missing(comparison.failed, comparison.left_out)


def draw(comparison: Comparison, base: str, path: Path) -> None:
    """Draws the time and tensor memory of each method as bars."""
    names = list(comparison.results)
    colors = [reports.COLORS[comparison.methods[name].kind] for name in names]
    times = [comparison.ratio(name, base) or comparison.results[name]["seconds"] for name in names]
    memory = [comparison.over_weights(name) / comparison.settings["weights"] for name in names]
    time_label = f"time of a step, × {base}" if base in comparison.results else "time of a step, seconds"
    panels = (
        Bars(time_label, {"time": (times, colors)}),
        Bars("tensor memory over the weights, × weights", {"memory": (memory, colors)}),
    )
    draw_bars(path, title(comparison.settings), names, panels)
