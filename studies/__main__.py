"""Trains models with different rules and formats, compares runs with recorded results, and writes the tables.

    python -m studies task=search method=adalomo lr=0.001 seed=0 seed=1 [--processes 2] [--out benchmarks/results]

Every combination of the values is a run. The default `format` is float32, the default `seed` 0. New runs are added to
the JSON file in `--out`. For runs that are already there, both results are printed. Without runs, tables are written.
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


def asked(words: Sequence[str]) -> list[Run]:
    """Returns the requested runs: every combination of the values in words KEY=VALUE.

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
    if missing := [key for key, given in values.items() if not given]:
        raise ConfigError(f"no {' and no '.join(missing)} is given: write {missing[0]}=VALUE")
    return [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]


def trained(run: Run) -> Run:
    """Runs in a process: trains a run in one thread, and returns it with its results."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    return {**run, **tasks.train(run), "seconds": time.perf_counter() - start}


def results(runs: Sequence[Run], processes: int) -> Iterator[Run]:
    """Yields each run with its results as soon as it ends. Failed runs are reported and omitted."""
    with ProcessPoolExecutor(processes, get_context("forkserver")) as pool:
        futures = {pool.submit(trained, run): run for run in runs}
        for future in as_completed(futures):
            if error := future.exception():
                print(f"{futures[future]} failed: {error!r}", file=sys.stderr, flush=True)
            else:
                yield future.result()


@command
def main(argv: Sequence[str] | None = None) -> None:
    parser = reports.make_parser(__doc__, {"processes": (2, "runs at the same time")}, dtype=False)
    parser.add_argument("runs", nargs="*", metavar="KEY=VALUE", help="values of the runs; a key may have several")
    options = parser.parse_args(argv)
    runs = asked(options.runs) if options.runs else []
    training.WORK.mkdir(parents=True, exist_ok=True)
    with reports.output(options.out):
        file = options.out / f"{NAME}.json"
        done = json.loads(file.read_text())["runs"] if file.exists() else []
        recorded = {tuple(row[key] for key in KEYS): row for row in done}
        ended = []
        for run in results(runs, options.processes):
            ended.append(run)
            before = recorded.get(tuple(run[key] for key in KEYS))
            for name in tables.SCORES if before else ():
                if name in run:
                    print(f"{[run[key] for key in KEYS]}, {name}: {before[name]} recorded, {run[name]} now")
            if not before:
                done.append(run)
                reports.save(file, {}, runs=done)
        reports.publish(options.out, NAME, {}, tables.tables, tables.PICTURES, runs=done)
    if len(ended) < len(runs):
        sys.exit(1)


if __name__ == "__main__":
    main()
