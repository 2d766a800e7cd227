"""Gives damaged and nonsensical inputs to the package, and reports each that is neither accepted nor refused by name.

    python -m benchmarks.fuzz [--inputs 10000] [--seed 0] [--out FILE] [--only checkpoints,attack]

Each module of `tests/fuzz` is a surface, and so are `attack.py` and `resuming.py` of `tests/support`: its function
`run(seed, folder)` makes one input in an empty folder, gives it to the code that users reach, and returns "accepted" or
the name of the error by which it is refused; whatever it raises is a defect. So is an input that takes longer than
`--timeout` seconds, or that ends the process. Exits with status 1 if there is a defect.
"""

import argparse
import contextlib
import importlib.util
import json
import multiprocessing
import os
import platform
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

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
SURFACES = {path.stem: path for path in sorted((ROOT / "tests" / "fuzz").glob("*.py"))}
# Training loops of every kind, and runs that are resumed with something changed, none of them damaged.
ATTACK = {name: ROOT / "tests" / "support" / f"{name}.py" for name in ("attack", "resuming")}
STARTING = 600  # seconds in which a process has to import the package

out = Console(highlight=False)


@dataclass
class Figures:
    """How the inputs of one surface ended."""

    inputs: int = 0
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # inputs by the name of the error
    defects: list[dict[str, Any]] = field(default_factory=list)  # seed and error of each
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
    """A process that runs one input after another; it can be killed, and inherits nothing that a hang could hold."""

    def __init__(self, surface: Path, folder: Path) -> None:
        self.usable = True  # until an input hangs or ends it
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(surface, folder, other), daemon=True)
        self.process.start()
        other.close()
        if not self.connection.poll(STARTING):
            raise RuntimeError(f"{surface} was not imported within {STARTING} seconds")
        self.connection.recv()  # EOFError: it can't be imported

    def run(self, seed: int, timeout: float) -> tuple[str, str | None]:
        """How an input ended, and the error if that is a defect."""
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
    """The function `run` of a surface."""
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
                ending, error = run(seed, Path(temporary)), None
            except BaseException as raised:  # SystemExit is a defect too
                ending, error = "", _shortened(raised)
        connection.send((ending, error))


def _shortened(error: BaseException) -> str:
    """The error and where it was raised."""
    frames = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
    return f"{type(error).__name__}: {str(error)[:2000]} [{' > '.join(frames[-6:])}]"


def fuzz(surface: Path, seeds: Iterable[int], timeout: float, report: Callable[[Figures], None]) -> Figures:
    """Runs one surface; `report` is called after every input."""
    figures, worker = Figures(), None
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


def main() -> None:
    every = SURFACES | ATTACK
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=10_000, metavar="N", help="inputs per surface (10000)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the first input (0)")
    parser.add_argument("--only", metavar="NAMES", help=f"surfaces, with commas between them, of {', '.join(every)}")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="seconds for one input (120)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "fuzz.json", metavar="FILE")
    options = parser.parse_args()
    surfaces = options.only.split(",") if options.only else list(every)
    if unknown := set(surfaces) - every.keys():
        parser.error(f"unknown surfaces: {', '.join(sorted(unknown))}")

    sys.path.insert(0, str(ROOT / "tests"))  # which the processes take over
    results: dict[str, Figures] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=out) as progress:
        for name in surfaces:
            task = progress.add_task(name, total=options.inputs, note="")

            def report(figures: Figures, task: Any = task) -> None:
                note = f"{len(figures.defects)} defects" if figures.defects else ""
                progress.update(task, completed=figures.inputs, note=note)

            seeds = range(options.seed, options.seed + options.inputs)
            results[name] = fuzz(every[name], seeds, options.timeout, report)
    write(results, options)
    out.print(table(results))
    for name, figures in results.items():
        for defect in figures.defects:
            out.print(f"{name}, seed {defect['seed']}: {defect['error']}", style="red", markup=False, soft_wrap=True)
    sys.exit(any(figures.defects for figures in results.values()))


def write(results: dict[str, Figures], options: argparse.Namespace) -> None:
    """Writes the figures; those of surfaces that were not run stay in the file."""
    from lowmem.files import write_file
    from lowmem.run.environment import version

    surfaces = {name: vars(figures) for name, figures in results.items()}
    with contextlib.suppress(FileNotFoundError):
        surfaces = json.loads(options.out.read_text())["surfaces"] | surfaces
    packages = ("torch", "transformers", "trl", "accelerate", "datasets", "deepspeed")
    record = {
        "inputs": options.inputs,
        "seed": options.seed,
        "timeout_seconds": options.timeout,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
        "surfaces": surfaces,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_file(options.out, (json.dumps(record, indent=2) + "\n").encode())


def table(results: dict[str, Figures]) -> Table:
    made = Table("surface", "inputs", "accepted", "refused", "defects", "slowest", "seconds")
    for name, figures in results.items():
        refused = ", ".join(f"{error} {count:,}" for error, count in figures.refused.most_common())
        slowest = f"{figures.slowest['seconds']:.1f} s (seed {figures.slowest['seed']})"
        row = (f"{figures.inputs:,}", f"{figures.accepted:,}", refused, str(len(figures.defects)))
        made.add_row(name, *row, slowest, f"{figures.seconds:,.0f}")
    return made


if __name__ == "__main__":
    main()
