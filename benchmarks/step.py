"""A training step by lowmem and by its peers: time and memory.

python -m benchmarks.step [--size 100M --batch 1 --tokens 128] [--rule lion] [--only floor --only "AdamW, fused"]
"""

from collections.abc import Sequence

from benchmarks import comparison
from benchmarks.baselines import FLOOR, all_methods
from benchmarks.reports import command


@command
def main(argv: Sequence[str] | None = None) -> None:
    parser = comparison.make_parser(__doc__, batch=1, tokens=128, rounds=3)
    parser.add_argument(
        "--rule", action="append", default=[], metavar="NAME", help="measure this rule of lowmem too; repeatable"
    )
    options = parser.parse_args(argv)
    comparison.run(all_methods(options.rule), FLOOR, options, "step")


if __name__ == "__main__":
    main()
