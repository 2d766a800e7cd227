"""Every measurement runs in a new process, one after the other, and all of them are repeated for several rounds."""

import importlib
import multiprocessing
import os
import pickle
import runpy
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

# What a measurement returns, by name: seconds, bytes.
Figures = dict[str, float]

_ROOT = Path(__file__).parent.parent

# Commands are forked from a process that has imported everything: starting Python would take most of their time.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["trl.scripts.sft", "trl.scripts.dpo", "deepspeed", "lowmem.run.training"])
GRACE = 30  # seconds that the other ranks have to end after one has failed


class MeasurementError(Exception):
    """A measurement failed. The message is one line."""


def alone(function: Callable[..., Any], *args: Any, folder: Path | None = None) -> Any:
    """Calls a module-level function in a new process and returns its result.

    Args:
        function: is imported there by its name.
        args: are pickled.
        folder: for temporary files and compiled code; by default they go where they usually do.

    Raises:
        MeasurementError: the function raised, or its process died.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(_ROOT), *filter(None, sys.path)))}
    if folder is not None:
        folder.mkdir(exist_ok=True)
        environment |= {"TMPDIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(folder)}
    # a module that runs as a command is called __main__, but its spec has its name
    spec = sys.modules[function.__module__].__spec__
    assert spec is not None
    call = pickle.dumps((spec.name, function.__qualname__, args))
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", "from benchmarks.processes import serve; serve()"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    with process:
        try:
            answer, _ = process.communicate(call)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it compiles in
            process.wait()
            raise
    if not answer:
        raise MeasurementError(f"its process exited with status {process.returncode}")
    result, failure = pickle.loads(answer)
    if failure is not None:
        raise MeasurementError(failure)
    return result


def serve() -> None:
    """Runs in the new process: reads a call from stdin, and writes its result or its error to stdout."""
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # so that nothing that a library prints gets into the answer
        module, name, args = pickle.load(sys.stdin.buffer)
        result = failure = None
        try:
            result = getattr(importlib.import_module(module), name)(*args)
        except Exception as error:
            failure = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
        pickle.dump((result, failure), answers)


def execute(
    words: Sequence[str],
    log: Path,
    ranks: int = 0,
    *,
    folder: Path = _ROOT,
    environment: Mapping[str, str] | None = None,
    threads: int = 1,
    seconds: float = 3600,
) -> None:
    """Runs `python -m` with `words` in a forked process, or in as many ranks as given, which torchrun would start.

    Args:
        log: gets the output of all of them.
        folder: where they are started.
        environment: variables to set before the module is imported; torch and DeepSpeed have been imported already.
        threads: of each.
        seconds: after which they are killed.

    Raises:
        MeasurementError: one of them failed, with its message, or did not end in time.
    """
    with socket.create_server(("localhost", 0)) as server:
        group = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(server.getsockname()[1])}
    group |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
    environments = [{**group, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)] or [{}]
    processes = [
        CONTEXT.Process(target=_execute, args=(words, {**(environment or {}), **each}, folder, log, threads))
        for each in environments
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + seconds
    running = processes
    while running and (ended := wait([process.sentinel for process in running], end - time.monotonic())):
        running = [process for process in running if process.sentinel not in ended]
        if any(process.exitcode for process in processes):
            end = min(end, time.monotonic() + GRACE)
    for process in running:
        process.kill()
        process.join()
    if any(process.exitcode for process in processes):
        lines = log.read_text().strip().splitlines() or [f"exit status {processes[0].exitcode}"]
        failed = [line for line in lines if line.startswith("error")]
        hung = len(running) == len(processes)
        raise MeasurementError(f"no end in {seconds:.0f} s" if hung else (failed or lines[-1:])[0])


def _execute(words: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path, threads: int) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_num_threads(threads)
    sys.argv = list(words)
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def in_rounds(
    names: Iterable[str], rounds: int, measure: Callable[[str, Path], Figures], console: Console
) -> tuple[dict[str, list[Figures]], dict[str, str]]:
    """Measures all names in turn, `rounds` times, behind a progress bar. What has failed once is not tried again.

    Args:
        measure: is called with a name and with a temporary folder that this name has in all rounds.

    Returns:
        The figures of every round by name, and the errors of those that failed.
    """
    runs: dict[str, list[Figures]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with (
        Progress(*columns, console=console, transient=True) as progress,
        tempfile.TemporaryDirectory(prefix="lowmem-bench-", ignore_cleanup_errors=True) as folder,
    ):
        bar = progress.add_task("", total=rounds * len(runs))
        for turn in range(1, rounds + 1):
            for number, name in enumerate(list(runs)):
                where = f"round {turn} of {rounds}: {name}"
                progress.update(bar, description=where)
                if name not in failed:
                    try:
                        figures = measure(name, Path(folder, str(number)))
                        runs[name].append(figures)
                        outcome = f"{figures['seconds']:.3g} s"
                    except MeasurementError as error:
                        failed[name] = str(error)
                        outcome = f"failed: {error}"
                    progress.console.print(f"{where}, {outcome}", highlight=False, markup=False, soft_wrap=True)
                progress.advance(bar)
    return {name: rows for name, rows in runs.items() if name not in failed}, failed


def medians(rows: Sequence[Mapping[str, float]]) -> Figures:
    """The median of each figure over the rounds."""
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}
