"""Does runs, several at the same time, and stores each one when it is finished."""

import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path

import torch

from lowmem.errors import ConfigError
from lowmem.files import write_file
from studies import plans, tables
from studies.grid import KEYS, Run


def next_run(done: list[Run], begun: list[Run]) -> Run | None:
    """The first requested run that is neither done nor begun."""
    known = [{key: row[key] for key in KEYS} for row in (*done, *begun)]
    return next((run for run in plans.runs(done) if run not in known), None)


def trained(run: Run) -> Run:
    """The run with its results, in one thread: what a process does."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    return {**run, **plans.train(run), "seconds": time.perf_counter() - start}


def finished(stored: Path, recorded: Path) -> list[Run]:
    """The runs that were finished earlier, in either file."""
    rows = json.loads(recorded.read_text())["runs"] if recorded.exists() else []
    rows += map(json.loads, stored.read_text().splitlines() if stored.exists() else ())
    return list({tuple(row[key] for key in KEYS): row for row in rows}.values())


def continue_runs(done: list[Run], stored: Path, seconds: float, processes: int) -> bool:
    """Does what is missing and adds it to `done`, until no time is left to begin another run.

    Args:
        stored: the file with a line for each run.
        processes: that do a run each at the same time.

    Returns:
        Whether none failed.
    """
    end = time.monotonic() + seconds
    write_file(stored, "".join(json.dumps(row) + "\n" for row in done).encode())
    running: dict[Future[Run], Run] = {}
    failed: list[Run] = []
    with ProcessPoolExecutor(processes, get_context("forkserver")) as pool:
        while True:
            while len(running) < processes and time.monotonic() < end:
                if (run := next_run(done, [*running.values(), *failed])) is None:
                    break
                running[pool.submit(trained, run)] = run
            if not running:
                return not failed
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                run = running.pop(future)
                if error := future.exception():
                    failed.append(run)
                    print(f"{run} failed: {error!r}", file=sys.stderr, flush=True)
                    continue
                done.append(future.result())
                with stored.open("a") as file:
                    file.write(json.dumps(done[-1]) + "\n")
                print(f"{run}: {done[-1]['seconds']:.0f} s", file=sys.stderr, flush=True)


def repeat(done: list[Run], values: Sequence[str]) -> None:
    """Does the finished runs again that have these values, and prints both results.

    Raises:
        ConfigError: there is none.
    """
    pairs = [text.partition("=")[::2] for text in values]
    here = (row for row in done if row["task"] in plans.PLANS)
    chosen = [row for row in here if all(key in KEYS and type(row[key])(value) == row[key] for key, value in pairs)]
    if not chosen:
        raise ConfigError(f"no run in data/studies or --out has {' '.join(values)}. The keys are {', '.join(KEYS)}")
    for row in chosen:
        again = trained({key: row[key] for key in KEYS})
        scores = (f"{name}: {row[name]} recorded, {again[name]} now" for name in tables.SCORES if name in again)
        print({key: row[key] for key in KEYS}, *scores)
