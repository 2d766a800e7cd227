"""Every measurement runs in a new process, one after the other, and all of them are repeated for several rounds."""

import contextlib
import itertools
import multiprocessing
import os
import re
import runpy
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

# What a measurement returns, by name: seconds, bytes.
Figures = dict[str, float]

_ROOT = Path(__file__).parent.parent

# Commands are forked from a process that has imported everything: starting Python would take most of their time.
SPAWN, CONTEXT = multiprocessing.get_context("spawn"), multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["trl.scripts.sft", "trl.scripts.dpo", "deepspeed", "lowmem.run.training"])
GRACE = 30  # seconds that the other ranks have to end after one has failed


class MeasurementError(Exception):
    """A measurement failed. The message is one line."""


def alone(function: Callable[..., Any], *args: Any, folder: Path | None = None) -> Any:
    """Calls a module-level function in a new process and returns its result.

    Args:
        folder: for temporary files and compiled code; by default they go where they usually do.

    Raises:
        MeasurementError: the function raised, or its process died.
    """
    variables = {}
    if folder is not None:
        folder.mkdir(exist_ok=True)
        variables = {"TMPDIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(folder)}
    receiving, sending = SPAWN.Pipe(duplex=False)
    process = SPAWN.Process(target=_answer, args=(sending, variables, function, args))
    process.start()
    sending.close()
    try:
        result, failure = receiving.recv()
        process.join()
    except EOFError:
        process.join()
        raise MeasurementError(f"its process exited with status {process.exitcode}") from None
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)  # with the processes that it compiles in
        process.kill()
        process.join()
        raise
    if failure is not None:
        raise MeasurementError(failure)
    return result


def _answer(sending: Any, variables: Mapping[str, str], function: Callable[..., Any], args: Sequence[Any]) -> None:
    """Runs in the new process, which prints nothing."""
    os.setsid()
    os.environ.update(variables)
    tempfile.tempdir = None  # read again
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1), os.dup2(quiet, 2)
    result = failure = None
    try:
        result = function(*args)
    except Exception as error:
        failure = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
    sending.send((result, failure))


def execute(
    words: Sequence[str],
    log: Path,
    ranks: int = 0,
    *,
    environment: Mapping[str, str],
    threads: int = 1,
    seconds: float = 3600,
) -> None:
    """Runs `python -m` with `words` in a forked process, or in `ranks` processes with the environment of torchrun.

    Args:
        log: gets the output of all of them.
        environment: variables to set before the module is imported; torch and DeepSpeed have been imported already.
        threads: of each.
        seconds: after which they are killed.

    Raises:
        MeasurementError: a process failed, with its message, or did not end in time.
    """
    with socket.create_server(("localhost", 0)) as server:
        group = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(server.getsockname()[1])}
    group |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
    environments = [{**group, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)] or [{}]
    processes = [
        CONTEXT.Process(target=_execute, args=(words, {**environment, **each}, log, threads)) for each in environments
    ]
    for process in processes:
        process.start()
    end, running = time.monotonic() + seconds, processes
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


def _execute(words: Sequence[str], environment: Mapping[str, str], log: Path, threads: int) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    os.chdir(_ROOT)
    torch.set_num_threads(threads)
    sys.argv = list(words)
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def in_rounds(
    names: Iterable[str], rounds: int, measure: Callable[[str, Path], Figures], longest: str = ""
) -> tuple[dict[str, Figures], dict[str, str]]:
    """Measures all names in turn, `rounds` times. What has failed once is not tried again.

    Args:
        measure: is called with a name and with a temporary folder that this name has in all rounds.
        longest: a figure of which the largest counts, and not the median.

    Returns:
        The medians of the figures by name, and the errors of those that failed.
    """
    runs: dict[str, list[Figures]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="lowmem-bench-", ignore_cleanup_errors=True) as folder:
        for turn, (number, name) in itertools.product(range(1, rounds + 1), enumerate(runs)):
            if name in failed:
                continue
            try:
                runs[name].append(measure(name, Path(folder, str(number))))
                outcome = f"{runs[name][-1]['seconds']:.3g} s"
            except MeasurementError as error:
                failed[name] = str(error)
                outcome = f"failed: {error}"
            print(f"round {turn} of {rounds}: {name}, {outcome}", file=sys.stderr, flush=True)
    return {name: summary(rows, longest) for name, rows in runs.items() if name not in failed}, failed


def summary(rows: Sequence[Figures], longest: str = "") -> Figures:
    """The median of each figure over the rounds; the largest of `longest`."""
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    return {key: max(values) if key == longest else statistics.median(values) for key, values in columns.items()}


def resident(process: str = "self") -> dict[str, int]:
    """Bytes of a process in memory: its own, pages of files that it has mapped, and shared ones. Empty if it ends."""
    status = Path("/proc", process, "status").read_text()
    names = {"Anon": "own", "File": "mapped", "Shmem": "shared"}
    return {names[kind]: int(size) * 1024 for kind, size in re.findall(r"Rss(Anon|File|Shmem):\s+(\d+)", status)}


@contextlib.contextmanager
def repeated(act: Callable[[], object], seconds: float) -> Iterator[None]:
    """Calls a function in a thread, with a pause of some seconds before each call, until the context is left."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(seconds):
            act()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
