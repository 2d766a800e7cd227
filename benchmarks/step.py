"""A training step by lowmem and by its peers: time and memory.

python -m benchmarks.step [--size 100M --batch 1 --tokens 128] [--rule lion] [--only floor --only "AdamW, fused"]
"""

from collections.abc import Sequence
from functools import partial

from benchmarks import comparison
from benchmarks.methods import FLOOR, all_methods
from benchmarks.reports import command

tables = partial(comparison.tables, base=FLOOR)


@command
def main(argv: Sequence[str] | None = None) -> None:
    parser = comparison.make_parser(__doc__, batch=1, tokens=128, rounds=3)
    what = "measure this rule of lowmem too; repeatable"
    parser.add_argument("--rule", action="append", default=[], metavar="NAME", help=what)
    options = parser.parse_args(argv)
    comparison.run(all_methods(options.rule), options, "step", tables)


if __name__ == "__main__":
    main()
