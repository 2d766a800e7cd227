"""Does the runs of a study that are missing, and writes their tables.

    python -m studies rules [--minutes 600] [--processes 2] [--out benchmarks/results]
    python -m studies rules --repeat task=search method=adalomo lr=0.001 seed=0

A study is a module of this folder. Its `runs(done)` yields the next runs, after the ones in `done`; `train(run)`
returns the results of a run; `tables(report)` shows the runs. Finished runs are stored in `data/studies`, so that an
interrupted study continues, after the ones in `--out`. `--repeat` does finished runs again and shows both results.
"""

from collections.abc import Sequence

from benchmarks import reports
from benchmarks.reports import command
from studies import running

STUDIES = ("rules", "formats")


@command
def main(argv: Sequence[str] | None = None) -> None:
    numbers = {"minutes": (600, "no run is begun after this time"), "processes": (2, "runs at the same time")}
    parser = reports.make_parser(__doc__, numbers, dtype=False)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--repeat", nargs="+", metavar="KEY=VALUE", help="do the finished runs with these values again")
    options = parser.parse_args(argv)
    name, study = options.study, running.study_of(options.study)
    with reports.output(options.out):
        done = running.finished(name, options.out)
        if options.repeat:
            running.repeat(name, done, options.repeat)
            return
        running.continue_runs(name, done, 60 * options.minutes, options.processes)
        parts = getattr(study, "parts", dict)()
        reports.publish(
            options.out, name, study.SETTINGS, study.tables, getattr(study, "draw", None), **parts, runs=done
        )


if __name__ == "__main__":
    main()
