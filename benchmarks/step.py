"""Measures the time and memory of a training step with lowmem and its peers.

    python -m benchmarks.step [--size 100M --batch 1 --tokens 128] [--rule lion] [--only floor --only "AdamW, fused"]

Times depend on the machine and the day, so compare only their ratios to the time of `floor`.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import reports
from benchmarks.measurement import SIZES, Workload, measure
from benchmarks.methods import FLOOR, Method, all_methods
from benchmarks.pages import markdown
from benchmarks.processes import Figures, alone
from benchmarks.reports import command, formatted, ratio


def make_parser(doc: str, batch: int, tokens: int, rounds: int) -> argparse.ArgumentParser:
    """Returns a parser for the workload, `--only` and `--out`."""
    counts = {
        "batch": (batch, "rows per step"),
        "tokens": (tokens, "tokens per row"),
        "steps": (5, "timed steps per round"),
        "rounds": (rounds, "number of measurements of each method"),
    }
    parser = reports.make_parser(doc, counts, only="method")
    parser.add_argument("--size", choices=SIZES, default="100M", help="approximate parameters of the Llama (100M)")
    return parser


def run(
    methods: Mapping[str, Method], options: argparse.Namespace, name: str, tables: Callable[[Any], dict[str, str]]
) -> None:
    """Compares the methods. Numbers are medians over the rounds, but the first step is the maximum, because a method
    compiles its code in the first round and reuses it in later rounds.
    """
    workload = Workload(options.size, options.batch, options.tokens, options.dtype, options.steps)
    settings = {**workload.settings(), "rounds": options.rounds}

    def measure_one(method: str, folder: Path) -> Figures:
        return alone(measure, methods[method], workload, folder=folder)

    reports.compare(methods, options, name, settings, tables, measure_one, longest="first_step")


def ratios(report: Any, base: str) -> dict[str, str]:
    """Returns a table with a row per method, with times and memory relative to `base`."""
    results, settings = report["results"], report["settings"]
    reference = results.get(base, {})
    rows = []
    for name, row in results.items():
        excess = None
        if "process_peak" in reference:
            excess = (row["process_peak"] - reference["process_peak"]) / 2**20
        columns = {
            "s/step": f"{row['seconds']:.3f}", f"× {base}": ratio(results, name, base),
            "tokens/s": f"{settings['batch'] * settings['tokens'] / row['seconds']:,.0f}",
            "tensors over weights, MiB": f"{(row['tensor_peak'] - settings['weights']) / 2**20:,.0f}",
            f"process over {base}, MiB": formatted(excess, ",.0f"),
        }  # fmt: skip
        first = {"first step, s": f"{row['first_step']:.1f}"} if "first_step" in row else {}
        rows.append({"method": name, **columns, **first})
    return {"": markdown(rows)}


tables = partial(ratios, base=FLOOR)


@command
def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, batch=1, tokens=128, rounds=3)
    description = "also measure this rule of lowmem; repeatable"
    parser.add_argument("--rule", action="append", default=[], metavar="NAME", help=description)
    options = parser.parse_args(argv)
    run(all_methods(options.rule), options, "step", tables)


if __name__ == "__main__":
    main()
