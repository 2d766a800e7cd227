"""Which rule, learning rate and rounding to fine-tune with: small Llamas, pretrained on code, trained on docstrings.

    python -m benchmarks.finetune [--minutes 90] [--only main_rules]

Every rule with float32 weights and with each rounding of bfloat16 weights, at learning rates until the best one is
inside; then small learning rates, other seeds, batches and sizes, and variants of the rules. All text is that of this
machine's Python standard library. Finished runs and pretrained models are stored in `--work`, so that an interrupted
study continues.
"""

import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from benchmarks import finetune_report, reports
from benchmarks.baselines import select
from benchmarks.finetune_runs import METHODS, Result, Run, Study, as_line, train
from benchmarks.reports import command

Results = Mapping[Run, Result]

PER_DECADE = 4  # learning rates on the grid: 1, 1.8, 3.2, 5.6, 10; a search takes every other one at first
EXTENSIONS = 4  # how often the grid of a search may be extended by one learning rate
ROUNDINGS = ("float32", "stochastic", "nearest", "compensated")
SMALL_RATES = {"adamw": (1e-6, 2e-5, 1e-4), "adalomo": (5e-5, 1e-3)}
MORE_SMALL_RATES = {"adamw": (5e-6, 4e-4), "adalomo": (2e-4, 4e-3)}
USUAL_RATES = {"adamw": 2e-5, "adalomo": 1e-3}
MAIN = ("adalomo", "adamw")
OTHERS = tuple(name for name, method in METHODS.items() if name not in MAIN and not method.variant)
LARGER = ("5M", "20M")


def on_grid(lr: float, steps: int = 0) -> float:
    """The learning rate of the grid that is next to `lr`, or so many places above it."""
    place = round(math.log10(lr) * PER_DECADE) + steps
    return float(f"{10 ** (place / PER_DECADE):.2g}")


def best(results: Results, like: Run) -> Run | None:
    """The best run among those that differ from `like` in the learning rate."""
    lr = finetune_report.best_lr(results, like)
    return None if lr is None else replace(like, lr=lr)


def search(results: Results, like: Run, *, fine: bool = False, wide: bool = True) -> list[Run]:
    """The runs that a search for the best learning rate does next; none if it is inside of the grid.

    Args:
        like: a run at the learning rate in the middle.
        fine: go on with the places of the grid next to the best one.
        wide: extend a grid whose best learning rate is on its edge.
    """
    first = on_grid(like.lr)
    lrs = {on_grid(first, steps) for steps in (-2, 0, 2)}
    while True:
        if missing := [replace(like, lr=lr) for lr in sorted(lrs) if replace(like, lr=lr) not in results]:
            return missing
        top = min(lrs, key=lambda lr: results[replace(like, lr=lr)].new)
        if not wide or min(lrs) < top < max(lrs) or len(lrs) == 3 + EXTENSIONS:
            break
        lrs.add(on_grid(top, 2 if top == max(lrs) else -2))
    return [run for steps in (-1, 1) if (run := replace(like, lr=on_grid(top, steps))) not in results] if fine else []


# -- the parts of the study, in the order in which they run ------------------------------------------------------------


def searches(results: Results, names: Sequence[str], roundings: Sequence[str]) -> Iterator[list[Run]]:
    """Searches for the best learning rate of rules and roundings; that of float32 weights is where others begin."""
    for name in names:
        for rounding in roundings:
            lr, middle = METHODS[name].lr, best(results, Run(name, "float32", 0.0))
            if rounding != "float32" and middle is not None:  # at the next place that searches try at first
                places = round(math.log(middle.lr / on_grid(lr)) / math.log(10) * PER_DECADE)
                lr = on_grid(lr, 2 * math.ceil(places / 2))
            fine = name in MAIN and rounding in ("float32", "stochastic")
            yield search(results, Run(name, rounding, lr), fine=fine)


def main_rules(results: Results) -> Iterator[list[Run]]:
    """AdaLomo and AdamW with every rounding."""
    yield from searches(results, MAIN, ROUNDINGS)


def small(results: Results) -> Iterator[list[Run]]:
    """What each rounding learns at small learning rates."""
    for name, rounding in itertools.product(MAIN, ("nearest", "float32", "stochastic")):
        yield [Run(name, rounding, lr) for lr in SMALL_RATES[name]]


def seeds(results: Results, names: Sequence[str] = MAIN) -> Iterator[list[Run]]:
    """Two more seeds of what is recommended, and of what it is compared with, at the best learning rate of each."""
    for name, rounding in itertools.product(names, ("stochastic", "float32") if names is MAIN else ("stochastic",)):
        if (top := best(results, Run(name, rounding, 0.0))) is not None:
            yield [replace(top, seed=seed) for seed in (1, 2)]


def others(results: Results) -> Iterator[list[Run]]:
    """The other rules: float32 weights searched, then each rounding where they are best."""
    yield from searches(results, OTHERS, ("float32",))
    for name in OTHERS:
        if (top := best(results, Run(name, "float32", 0.0))) is not None:
            yield [replace(top, rounding=rounding) for rounding in ROUNDINGS]


def sizes(results: Results) -> Iterator[list[Run]]:
    """Larger models: bfloat16 weights at learning rates around the best one of the smallest, then float32 ones."""
    for size, name in itertools.product(LARGER, MAIN):
        top = best(results, Run(name, "stochastic", 0.0))
        if top is not None:
            yield search(results, Run(name, "stochastic", on_grid(top.lr, -1), size), fine=True)
    for size, name in itertools.product(LARGER, MAIN):
        if (top := best(results, Run(name, "stochastic", 0.0, size))) is not None:
            yield [replace(top, rounding="float32")]


def batch(results: Results) -> Iterator[list[Run]]:
    """Other numbers of rows per update, at equal tokens; stochastic."""
    for (rows, steps), name in itertools.product(((16, 1), (1, -1), (64, 1)), MAIN):
        top = best(results, Run(name, "stochastic", 0.0))
        if top is not None:
            yield search(results, Run(name, "stochastic", on_grid(top.lr, steps), batch=rows))


def variants(results: Results) -> Iterator[list[Run]]:
    """Rules without one of their parts; float32."""
    for name, method in METHODS.items():
        if method.variant:
            yield search(results, Run(name, "float32", method.lr))


def others_small(results: Results) -> Iterator[list[Run]]:
    """Small learning rates of the other rules, to find those that end where AdamW does at its usual ones; float32."""
    for name in OTHERS:
        if (top := best(results, Run(name, "float32", 0.0))) is not None:
            yield [replace(top, lr=on_grid(METHODS[name].lr, steps)) for steps in (-6, -9)]


def small_in_larger(results: Results) -> Iterator[list[Run]]:
    """Small learning rates of larger models."""
    for size, (name, lr), rounding in itertools.product(
        LARGER, USUAL_RATES.items(), ("float32", "nearest", "stochastic")
    ):
        yield [Run(name, rounding, lr, size)]


def rest(results: Results) -> Iterator[list[Run]]:
    """What has to wait: other seeds, float32 weights in larger models, and searches for every rounding."""
    tops = [best(results, Run(name, "stochastic", 0.0, size)) for size, name in itertools.product(LARGER, MAIN)]
    for top in tops:
        if top is not None:
            yield [replace(top, seed=seed) for seed in (1, 2)]
    yield from seeds(results, OTHERS)
    for top in tops:
        if top is not None:
            yield search(results, replace(top, rounding="float32"), wide=False)
    yield from searches(results, OTHERS, ("stochastic", "nearest", "compensated"))
    for name, rounding in itertools.product(MAIN, ("nearest", "float32", "stochastic")):
        yield [Run(name, rounding, lr) for lr in MORE_SMALL_RATES[name]]


PARTS: dict[str, Callable[[Results], Iterator[list[Run]]]] = {
    part.__name__: part
    for part in (main_rules, small, seeds, others, sizes, batch, variants, others_small, small_in_larger, rest)
}


# -- the study ---------------------------------------------------------------------------------------------------------


def next_run(results: Results, parts: Sequence[str]) -> tuple[str, Run] | None:
    """The first run of the first part that is not finished."""
    for part in parts:
        for runs in PARTS[part](results):
            for run in runs:
                if run not in results:
                    return part, run
    return None


def finished_runs(stored: Path, study: Study) -> dict[Run, Result]:
    results = {}
    for line in stored.read_text().splitlines() if stored.exists() else []:
        known = json.loads(line)
        looks = tuple(known["study"].get("looks", Study.looks))
        if Study(**{**known["study"], "looks": looks}) == study:
            run, result = ({f.name: known[f.name] for f in fields(kind) if f.name in known} for kind in (Run, Result))
            results[Run(**run)] = Result(**{**result, "curve": [tuple(point) for point in result["curve"]]})
    return results


class Cell(Protocol):
    """One run of another benchmark that trains as this one does."""

    @property
    def study(self) -> Study: ...

    @property
    def run(self) -> Run: ...

    def train(self, work: Path) -> Result: ...


CellType = TypeVar("CellType", bound=Cell)


def continue_runs(cells: Sequence[CellType], work: Path, name: str, minutes: float) -> dict[CellType, Result]:
    """Does what is missing until the time is over, and returns the results of all runs that are finished. They are
    stored in the file `name`.runs.jsonl.
    """
    work.mkdir(parents=True, exist_ok=True)
    stored, start, results = work / f"{name}.runs.jsonl", time.monotonic(), {}
    finished = {study: finished_runs(stored, study) for study in {cell.study for cell in cells}}
    for cell in cells:
        study, run = cell.study, cell.run
        if run in finished[study]:
            results[cell] = finished[study][run]
        elif time.monotonic() - start < 60 * minutes:
            result = results[cell] = cell.train(work)
            with stored.open("a") as file:
                file.write(json.dumps({**as_line(run, result), "study": asdict(study)}) + "\n")
            print(
                f"{cell}: new {result.new:.4f}, old {result.old:.4f}, {result.seconds:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    return results


def do_runs(study: Study, parts: Sequence[str], work: Path, minutes: float) -> dict[Run, Result]:
    """Does what is missing, until nothing is or the time is over, and returns all results."""
    work.mkdir(parents=True, exist_ok=True)
    stored, start = work / "finetune.runs.jsonl", time.monotonic()
    results = finished_runs(stored, study)
    while time.monotonic() - start < 60 * minutes and (found := next_run(results, parts)) is not None:
        part, run = found
        result = results[run] = train(run, study, work)
        with stored.open("a") as file:
            file.write(json.dumps({"part": part, **as_line(run, result), "study": asdict(study)}) + "\n")
        shown = f"{run.size} {run.method}, {run.rounding}, lr {run.lr:g}, {run.batch} rows, seed {run.seed}"
        losses = f"new {result.new:.4f} old {result.old:.4f} moved {result.moved:.3f} step {result.step:.2g}"
        print(f"{part}: {shown}: {losses}, {result.seconds:.0f} s", file=sys.stderr, flush=True)
    return results


@command
def main(argv: Sequence[str] | None = None) -> None:
    shared = Study()
    counts = {"updates": (shared.updates, "updates of 4 rows"), "minutes": (600, "no run is begun after this time")}
    parser = reports.make_parser(__doc__, counts, dtype=False, only="part")
    parser.add_argument("--work", type=Path, default=Path("data/finetune"), metavar="DIR", help="runs and models")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    study = Study(updates=options.updates)
    parts = list(select(PARTS, options.only))
    with reports.output(options.out, "finetune"):
        results = do_runs(study, parts, options.work, options.minutes)
        finetune_report.report(results, study, options.work, options.out)


if __name__ == "__main__":
    main()
