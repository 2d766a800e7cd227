"""The cases of a test cover all pairs."""

import itertools

import pytest
from support.products import in_turn, pairwise


@pytest.mark.parametrize("sizes", [(2, 2, 2), (8, 7, 3), (2, 9, 2, 5), (1, 4, 3), (3, 3, 3, 3, 3)])
def test_every_pair_of_values_occurs(sizes):
    axes = [[f"{axis}-{n}" for n in range(size)] for axis, size in enumerate(sizes)]
    cases = pairwise(*axes, full=False)
    assert len(set(cases)) == len(cases) < len(list(itertools.product(*axes))) + (1 in sizes)
    for (a, first), (b, second) in itertools.combinations(enumerate(axes), 2):
        for pair in itertools.product(first, second):
            assert any((case[a], case[b]) == pair for case in cases)
    largest = sorted(sizes)[-2:]
    assert len(cases) <= 2 * largest[0] * largest[1]
    assert cases == pairwise(*axes, full=False)


def test_every_value_of_every_axis_occurs():
    assert in_turn("ab", (1, 2, 3), full=False) == [("a", 1), ("b", 2), ("a", 3)]


def test_full_products_have_every_combination():
    axes = [(1, 2), "abc", (None, True)]
    assert pairwise(*axes, full=True) == in_turn(*axes, full=True) == list(itertools.product(*axes))
    assert pairwise(*axes[:2], full=False) == list(itertools.product(*axes[:2]))
