"""Studies what rules and formats learn: does the runs that are missing, and writes their tables and the picture.

    python -m studies [--minutes 600] [--processes 2] [--out benchmarks/results]
    python -m studies --repeat task=search method=adalomo lr=0.001 seed=0 --out benchmarks/results

Finished runs and models are stored in `data/studies`, so that an interrupted study continues, after the runs that are
recorded in `--out`. Tasks whose models cannot be installed are left out. `--repeat` does finished runs again.
"""

import sys
from collections.abc import Sequence

import torch

from benchmarks import reports
from benchmarks.reports import command
from studies import plans, running, tables, training

NAME = "studies"


@command
def main(argv: Sequence[str] | None = None) -> None:
    numbers = {"minutes": (600, "no run is begun after this time"), "processes": (2, "runs at the same time")}
    parser = reports.make_parser(__doc__, numbers, dtype=False)
    parser.add_argument("--repeat", nargs="+", metavar="KEY=VALUE", help="do the finished runs with these values again")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    training.WORK.mkdir(parents=True, exist_ok=True)
    with reports.output(options.out):
        stored = training.WORK / "runs.jsonl"
        done = running.finished(stored, options.out / f"{NAME}.json")
        if options.repeat:
            running.repeat(done, options.repeat)
            return
        complete = running.continue_runs(done, stored, 60 * options.minutes, options.processes)
        reports.publish(options.out, NAME, plans.SETTINGS, tables.tables, tables.PICTURES, runs=done)
    if not complete:
        sys.exit(1)


if __name__ == "__main__":
    main()
