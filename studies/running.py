"""Does runs, several at the same time, and stores each one when it is finished."""

import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path

import torch

from lowmem.errors import ConfigError
from studies import plans, tables
from studies.grid import KEYS, Run


def next_run(done: list[Run], begun: list[Run]) -> Run | None:
    """The first requested run that is neither done nor begun."""
    known = [*({key: row[key] for key in KEYS} for row in done), *begun]
    return next((run for run in plans.runs(done) if run not in known), None)


def trained(run: Run) -> Run:
    """The run with its results, in one thread: what a process does."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    return {**run, **plans.train(run), "seconds": time.perf_counter() - start}


def finished(stored: Path, recorded: Path) -> list[Run]:
    """The runs that were finished earlier."""
    if stored.exists():
        return [json.loads(line) for line in stored.read_text().splitlines()]
    return json.loads(recorded.read_text())["runs"] if recorded.exists() else []


def continue_runs(done: list[Run], stored: Path, seconds: float, processes: int) -> None:
    """Does what is missing and adds it to `done`, until no time is left to begin another run.

    Args:
        stored: the file with a line for each run.
        processes: that do a run each at the same time; 1 is this process.
    """
    end = time.monotonic() + seconds
    stored.parent.mkdir(parents=True, exist_ok=True)
    stored.write_text("".join(json.dumps(row) + "\n" for row in done))
    running: dict[Future[Run], Run] = {}
    several = processes > 1
    pool: Executor = ProcessPoolExecutor(processes, get_context("forkserver")) if several else ThreadPoolExecutor(1)
    with pool:
        while True:
            while len(running) < processes and time.monotonic() < end:
                if (run := next_run(done, list(running.values()))) is None:
                    break
                running[pool.submit(trained, run)] = run
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                run = running.pop(future)
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
    chosen = [row for row in done if all(str(row.get(key)) == value for key, value in pairs)]
    if not chosen:
        raise ConfigError(f"no finished run has {' '.join(values)}. The keys are {', '.join(KEYS)}")
    for row in chosen:
        again = trained({key: row[key] for key in KEYS})
        scores = (f"{name}: {row[name]} recorded, {again[name]} now" for name in tables.SCORES if name in again)
        print({key: row[key] for key in KEYS}, *scores)
