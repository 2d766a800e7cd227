"""Does the runs of a study that are missing, and writes their tables.

    python -m studies finetune [--minutes 600] [--out benchmarks/results]

A study is a module of this folder. Its `runs(done)` yields the next runs, after the ones in `done`; `train(run, work)`
returns the results of a run; `tables(report)` shows the runs. Finished runs and pretrained models are stored in
`--work`, so that an interrupted study continues.
"""

import importlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import reports
from benchmarks.reports import command

STUDIES = ("convergence", "finetune", "states", "weights")


def next_run(study: Any, done: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The first requested run that is not done."""
    known = [{key: row[key] for key in study.KEYS} for row in done]
    return next((run for run in study.runs(done) if run not in known), None)


def continue_runs(study: Any, stored: Path, seconds: float, work: Path) -> list[dict[str, Any]]:
    """All finished runs, after doing what is missing until the time is over."""
    done = [json.loads(line) for line in stored.read_text().splitlines()] if stored.exists() else []
    end = time.monotonic() + seconds
    while time.monotonic() < end and (run := next_run(study, done)) is not None:
        start = time.perf_counter()
        done.append({**run, **study.train(run, work), "seconds": time.perf_counter() - start})
        with stored.open("a") as file:
            file.write(json.dumps(done[-1]) + "\n")
        print(f"{run}: {done[-1]['seconds']:.0f} s", file=sys.stderr, flush=True)
    return done


@command
def main(argv: Sequence[str] | None = None) -> None:
    parser = reports.make_parser(__doc__, {"minutes": (600, "no run is begun after this time")}, dtype=False)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--work", type=Path, default=Path("data/studies"), metavar="DIR", help="runs and models")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    study = importlib.import_module(f"studies.{options.study}")
    options.work.mkdir(parents=True, exist_ok=True)
    with reports.output(options.out):
        stored = options.work / f"{options.study}.runs.jsonl"
        done = continue_runs(study, stored, 60 * options.minutes, options.work)
        draw, parts = getattr(study, "draw", None), getattr(study, "parts", lambda work: {})(options.work)
        reports.publish(options.out, options.study, study.SETTINGS, study.tables, draw, **parts, runs=done)


if __name__ == "__main__":
    main()
