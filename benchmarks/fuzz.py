"""Runs random arguments and changes of runs, and reports inputs that are neither accepted nor rejected by name.

    python -m benchmarks.fuzz [--inputs 10000] [--seed 0] [--out DIR] [--only resuming,starts]

Each module of `tests/fuzz` is a surface. Its function `run(seed, folder)` creates one input in an empty folder, passes
it to the public code, and returns "accepted" or the name of the error that rejects it. Any exception that it raises is
a defect, and so is an input that takes longer than `--timeout` seconds or ends the process. Exits with status 1 if a
defect is found.
"""

import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.progress import MofNCompleteColumn, Progress

from benchmarks import reports
from benchmarks.pages import ROOT, markdown

SURFACES = {path.stem: path for path in sorted((ROOT / "tests" / "fuzz").glob("*.py"))}
STARTING = 600  # seconds for a process to import the package


@dataclass
class Figures:
    """Counts of the outcomes of one surface."""

    inputs: int = 0
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # name of the error → number of inputs
    defects: list[dict[str, Any]] = field(default_factory=list)  # the seed and the error of each defect
    slowest: dict[str, Any] = field(default_factory=lambda: {"seed": None, "seconds": 0.0})
    seconds: float = 0.0

    def add(self, seed: int, ending: str, error: str | None, seconds: float) -> None:
        self.inputs += 1
        self.seconds = round(self.seconds + seconds, 3)
        if seconds > self.slowest["seconds"]:
            self.slowest = {"seed": seed, "seconds": round(seconds, 3)}
        if error is not None:
            self.defects.append({"seed": seed, "error": error})
        elif ending == "accepted":
            self.accepted += 1
        else:
            self.refused[ending] += 1


class Worker:
    """A process that runs one input after another. It can be killed, and does not inherit resources."""

    def __init__(self, surface: Path, folder: Path) -> None:
        self.usable = True  # until an input hangs or ends the process
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(surface, folder, other), daemon=True)
        self.process.start()
        other.close()
        if not self.connection.poll(STARTING):
            raise RuntimeError(f"{surface} was not imported within {STARTING} seconds")
        self.connection.recv()  # EOFError: the surface cannot be imported

    def run(self, seed: int, timeout: float) -> tuple[str, str | None]:
        """Returns the outcome of an input, and the error if the input reveals a defect."""
        self.connection.send(seed)
        if not self.connection.poll(timeout):
            self.usable = False
            return "", f"no end within {timeout:g} seconds"
        try:
            return self.connection.recv()
        except EOFError:
            self.usable = False
            self.process.join()
            return "", f"the process ended with status {self.process.exitcode}"

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def load(surface: Path) -> Callable[[int, Path], str]:
    """Returns the function `run` of a surface."""
    spec = importlib.util.spec_from_file_location(f"fuzz_{surface.stem}", surface)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.run


def _serve(surface: Path, folder: Path, connection: Connection) -> None:
    run = load(surface)
    connection.send(None)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    while True:
        seed = connection.recv()
        with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as temporary:
            try:
                ending = run(seed, Path(temporary))
                error = None
            except BaseException as raised:  # SystemExit is also a defect
                ending = ""
                error = _shortened(raised)
        connection.send((ending, error))


def _shortened(error: BaseException) -> str:
    """Returns the error and where it was raised."""
    frames = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
    return f"{type(error).__name__}: {str(error)[:2000]} [{' > '.join(frames[-6:])}]"


def fuzz(surface: Path, seeds: Iterable[int], timeout: float, report: Callable[[Figures], None]) -> Figures:
    """Runs one surface, and calls `report` after every input."""
    figures = Figures()
    worker = None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            for seed in seeds:
                worker = worker or Worker(surface, Path(folder))
                begin = time.perf_counter()
                ending, error = worker.run(seed, timeout)
                figures.add(seed, ending, error, time.perf_counter() - begin)
                report(figures)
                if not worker.usable:
                    worker.end()
                    worker = None
        finally:
            if worker is not None:
                worker.end()
    return figures


def tables(report: Any) -> dict[str, str]:
    rows = []
    for name, figures in report["surfaces"].items():
        refused = Counter(figures["refused"]).most_common()
        rows.append(
            {
                "surface": name, "inputs": f"{figures['inputs']:,}", "accepted": f"{figures['accepted']:,}",
                "rejected": ", ".join(f"{error} {count:,}" for error, count in refused),
                "defects": str(len(figures["defects"])), "slowest": f"{figures['slowest']['seconds']:.1f} s",
            }
        )  # fmt: skip
    return {"": markdown(rows)}


def main() -> None:
    parser = reports.make_parser(__doc__, {"inputs": (10_000, "inputs per surface")}, dtype=False)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the first input (0)")
    parser.add_argument("--only", metavar="NAMES", help=f"comma-separated surfaces from {', '.join(SURFACES)}")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="seconds for one input (120)")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(SURFACES)
    if unknown := set(names) - SURFACES.keys():
        parser.error(f"unknown surfaces: {', '.join(sorted(unknown))}")

    sys.path.insert(0, str(ROOT / "tests"))  # inherited by the processes
    file = options.out / "fuzz.json"
    surfaces = json.loads(file.read_text())["surfaces"] if file.exists() else {}  # others are unchanged
    defects = 0
    with reports.output(options.out):
        for name in names:
            seeds = range(options.seed, options.seed + options.inputs)
            with Progress(*Progress.get_default_columns(), MofNCompleteColumn()) as progress:
                task = progress.add_task(name, total=options.inputs)
                figures = fuzz(SURFACES[name], seeds, options.timeout, lambda _, p=progress, t=task: p.advance(t))
            surfaces[name] = vars(figures)
            for defect in figures.defects:
                print(f"{name}, seed {defect['seed']}: {defect['error']}")
            defects += len(figures.defects)
        settings = {"seed": options.seed, "timeout_seconds": options.timeout}
        reports.publish(options.out, "fuzz", settings, tables, surfaces=surfaces)
    sys.exit(defects > 0)


if __name__ == "__main__":
    main()
