"""Combines the values of test parameters into cases."""

import itertools
import math
import os
import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

FULL = bool(os.environ.get("LOWMEM_FULL"))


def sample(cases: Iterable[str], share: float) -> list[str]:
    """Returns a fixed random share of the cases in their order, or all cases if LOWMEM_FULL is set."""
    cases = list(cases)
    selected = set(cases if FULL else random.Random(0).sample(cases, math.ceil(share * len(cases))))
    return [case for case in cases if case in selected]


def in_turn(*axes: Iterable[Any], full: bool = FULL) -> list[tuple[Any, ...]]:
    """Returns a tuple for each value of the longest axis, cycling through the other axes, or returns the full product.
    Suitable for axes that are nearly independent.
    """
    values = [list(axis) for axis in axes]
    if full:
        return list(itertools.product(*values))
    return [tuple(axis[n % len(axis)] for axis in values) for n in range(max(map(len, values)))]


def pairwise(*axes: Iterable[Any], full: bool = FULL) -> list[tuple[Any, ...]]:
    """Returns tuples with one value per axis. Every pair of values of two axes occurs in at least one tuple.

    With three or more axes, these are far fewer tuples than the full product, which is returned if `full` is true (by
    default, if LOWMEM_FULL is set). The result is deterministic and has the order of the product.
    """
    values = [list(axis) for axis in axes]
    sizes = [range(len(axis)) for axis in values]
    if full or len(values) < 3:
        return list(itertools.product(*values))
    rows, used = [], Counter[tuple[int, int]]()
    columns = list(itertools.combinations(range(len(values)), 2))
    missing = {(a, i, b, j): None for a, b in columns for i in sizes[a] for j in sizes[b]}  # an ordered set

    def pairs(row: dict[int, int]) -> Iterable[tuple[int, int, int, int]]:
        return ((a, row[a], b, row[b]) for a, b in itertools.combinations(sorted(row), 2))

    while missing:
        a, i, b, j = next(iter(missing))
        row = {a: i, b: j}
        for axis in sorted(set(range(len(values))) - {a, b}, key=lambda axis: -len(values[axis])):
            gain = {n: sum(pair in missing for pair in pairs(row | {axis: n})) for n in sizes[axis]}
            row[axis] = max(sizes[axis], key=lambda n: (gain[n], -used[axis, n], -n))
        for pair in pairs(row):
            missing.pop(pair, None)
        used.update(row.items())
        rows.append(tuple(row[axis] for axis in range(len(values))))
    return [tuple(axis[n] for axis, n in zip(values, row, strict=True)) for row in sorted(rows)]
