"""Trains models with different rules and formats, compares runs with recorded results, and writes the tables.

    python -m studies task=search method=adalomo lr=0.001 seed=0 seed=1 [--processes 2] [--out benchmarks/results]

Every combination of the values is a run. By default, `format` is float32 and `seed` is 0. New runs are added to the
JSON file in `--out`. For recorded runs, the recorded and new scores are printed. Without runs, only tables are written.
"""

import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

import torch

from benchmarks import reports
from benchmarks.reports import command
from lowmem.errors import ConfigError, did_you_mean
from studies import tables, tasks, training
from studies.grid import KEYS, Run
from studies.tasks import METHODS, TASKS

NAME = "studies"
NAMES: dict[str, Mapping[str, Any]] = {"task": TASKS, "method": METHODS}


def requested_runs(words: Sequence[str]) -> list[Run]:
    """Parses arguments of the form KEY=VALUE and returns the runs with all combinations of their values.

    Raises:
        ConfigError: a key, task or method is unknown or missing.
    """
    values: dict[str, list[Any]] = {key: [] for key in KEYS}
    for word in words:
        key, _, text = word.partition("=")
        if key not in KEYS:
            raise ConfigError(f"{word!r} is not KEY=VALUE. The keys are {', '.join(KEYS)}")
        if key in NAMES and text not in NAMES[key]:
            raise ConfigError(f"{key} {text!r} is unknown.{did_you_mean(text, NAMES[key])}")
        values[key].append(KEYS[key](text))
    values["format"] = values["format"] or ["float32"]
    values["seed"] = values["seed"] or [0]
    if missing := [key for key, texts in values.items() if not texts]:
        raise ConfigError(f"{' and '.join(missing)} must be specified. Add {missing[0]}=VALUE")
    return [dict(zip(values, combination, strict=True)) for combination in itertools.product(*values.values())]


def trained(run: Run) -> Run:
    """Trains one run in a single thread of a worker process, and returns its settings and results."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    return {**run, **tasks.train(run), "seconds": time.perf_counter() - start}


def finished_runs(runs: Sequence[Run], processes: int) -> Iterator[Run]:
    """Yields each run with its results as soon as it has finished. Failed runs are reported and omitted."""
    with ProcessPoolExecutor(processes, get_context("forkserver")) as pool:
        futures = {pool.submit(trained, run): run for run in runs}
        for future in as_completed(futures):
            if error := future.exception():
                print(f"{futures[future]} failed: {error!r}", file=sys.stderr, flush=True)
            else:
                yield future.result()


@command
def main(argv: Sequence[str] | None = None) -> None:
    parser = reports.make_parser(__doc__, {"processes": (2, "number of concurrent runs")}, dtype=False)
    parser.add_argument("runs", nargs="*", metavar="KEY=VALUE", help="a value of the runs; keys are repeatable")
    options = parser.parse_args(argv)
    runs = requested_runs(options.runs) if options.runs else []
    training.WORK.mkdir(parents=True, exist_ok=True)
    with reports.output(options.out):
        file = options.out / f"{NAME}.json"
        rows = json.loads(file.read_text())["runs"] if file.exists() else []
        recorded = {tuple(row[key] for key in KEYS): row for row in rows}
        finished = 0
        for run in finished_runs(runs, options.processes):
            finished += 1
            previous = recorded.get(tuple(run[key] for key in KEYS))
            for name in tables.SCORES if previous else ():
                if name in run:
                    print(f"{[run[key] for key in KEYS]}, {name}: {previous[name]} recorded, {run[name]} now")
            if not previous:
                rows.append(run)
                reports.save(file, {}, runs=rows)
        reports.publish(options.out, NAME, {}, tables.tables, tables.PICTURES, runs=rows)
    if finished < len(runs):
        sys.exit(1)


if __name__ == "__main__":
    main()
