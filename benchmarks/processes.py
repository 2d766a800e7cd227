"""Runs each measurement in a new process, one at a time, for several rounds."""

import contextlib
import itertools
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

# The numbers of a measurement by name, in seconds or bytes.
Figures = dict[str, float]

SPAWN = multiprocessing.get_context("spawn")


class MeasurementError(Exception):
    """Raised if a measurement failed. The message is a single line."""


def alone(function: Callable[..., Any], *args: Any, folder: Path | None = None) -> Any:
    """Calls a module-level function in a new process and returns its result.

    Args:
        folder: directory for temporary files and compiled code, instead of the default directories.

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
        raise MeasurementError(f"the process exited with status {process.exitcode}") from None
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)  # includes its compiler processes
        process.kill()
        process.join()
        raise
    if failure is not None:
        raise MeasurementError(failure)
    return result


def _answer(sending: Any, variables: Mapping[str, str], function: Callable[..., Any], args: Sequence[Any]) -> None:
    """Runs in the new process: sends the result or the error, and discards the output."""
    os.setsid()
    os.environ.update(variables)
    tempfile.tempdir = None  # makes tempfile read TMPDIR again
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    result = failure = None
    try:
        result = function(*args)
    except Exception as error:
        failure = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
    sending.send((result, failure))


def in_rounds(
    names: Iterable[str], rounds: int, measure: Callable[[str, Path], Figures], longest: str = ""
) -> tuple[dict[str, Figures], dict[str, str]]:
    """Measures all names once per round. A name that failed is skipped in later rounds.

    Args:
        measure: called with a name and a temporary directory, which a name reuses in all rounds.
        longest: name of a figure that is summarized by its maximum instead of its median.

    Returns:
        The median figures of each name, and the error messages of names that failed.
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
    """Returns the median of each figure over the rounds, but the maximum of `longest`."""
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    return {key: max(values) if key == longest else statistics.median(values) for key, values in columns.items()}
