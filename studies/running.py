"""Does the runs of a study, several at the same time, and stores each one when it is finished."""

import importlib
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from studies import training


def study_of(name: str) -> Any:
    return importlib.import_module(f"studies.{name}")


def next_run(study: Any, done: list[dict[str, Any]], begun: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The first requested run that is neither done nor begun."""
    known = [*({key: row[key] for key in study.KEYS} for row in done), *begun]
    return next((run for run in study.runs(done) if run not in known), None)


def trained(name: str, run: dict[str, Any]) -> dict[str, Any]:
    """The run with its results, in one thread: what a process does."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    results = study_of(name).train(run)
    return {**run, **results, "seconds": time.perf_counter() - start}


def finished(name: str, out: Path) -> list[dict[str, Any]]:
    """The runs that were finished earlier."""
    stored, recorded = training.WORK / f"{name}.runs.jsonl", out / f"{name}.json"
    if stored.exists():
        return [json.loads(line) for line in stored.read_text().splitlines()]
    return json.loads(recorded.read_text())["runs"] if recorded.exists() else []


def continue_runs(name: str, done: list[dict[str, Any]], seconds: float, processes: int) -> None:
    """Does what is missing and adds it to `done`, until no time is left to begin another run.

    Args:
        processes: that do a run each at the same time; 1 is this process.
    """
    stored, end = training.WORK / f"{name}.runs.jsonl", time.monotonic() + seconds
    stored.parent.mkdir(parents=True, exist_ok=True)
    stored.write_text("".join(json.dumps(row) + "\n" for row in done))
    running: dict[Future[dict[str, Any]], dict[str, Any]] = {}
    several = processes > 1
    pool: Executor = ProcessPoolExecutor(processes, get_context("forkserver")) if several else ThreadPoolExecutor(1)
    with pool:
        while True:
            while len(running) < processes and time.monotonic() < end:
                if (run := next_run(study_of(name), done, list(running.values()))) is None:
                    break
                running[pool.submit(trained, name, run)] = run
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                run = running.pop(future)
                done.append(future.result())
                with stored.open("a") as file:
                    file.write(json.dumps(done[-1]) + "\n")
                print(f"{run}: {done[-1]['seconds']:.0f} s", file=sys.stderr, flush=True)


def repeat(name: str, done: list[dict[str, Any]], wanted: Sequence[str]) -> None:
    values = dict(text.split("=", 1) for text in wanted)
    study = study_of(name)
    for row in done:
        if all(str(row[key]) == value for key, value in values.items()):
            run = {key: row[key] for key in study.KEYS}
            again = trained(name, run)
            print(run, *(f"{key}: {row[key]} recorded, {again[key]} now" for key in again if key in study.SCORES))
