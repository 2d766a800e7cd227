"""Rehearsals: three of `benchmarks.rehearsal` for a few steps, and the list of combinations."""

import itertools
import json

import pytest

from benchmarks import rehearsal
from benchmarks.pages import RESULTS
from benchmarks.rehearsal import AXES, REFUSED, combinations, rehearse

STEPS = 4
CHOSEN = (
    "SFT, untied, float32, neither, AdaLomo, one process",
    "SFT, untied, bfloat16, accumulated, AdamW, 8-bit states, one process",
    "SFT, untied, float32, clipped, AdaLomo, FSDP2",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rehearsal")
    rehearsal.write_inputs(folder, STEPS, ["untied"], longest=96)
    return folder


@pytest.mark.parametrize("name", CHOSEN)
def test_a_real_run_equals_the_run_by_tiles_and_the_resumed_run(folder, name):
    outcome = rehearse(combinations(every=True)[name], STEPS, folder, peak=False)
    assert outcome.outcome == "passed", outcome


def test_unsupported_combinations_raise_before_the_first_step(folder):
    outcome = rehearse(combinations()["SFT, untied, int12, neither, AdaLomo, ZeRO-3"], STEPS, folder)
    assert outcome.outcome == "refused" and "use FSDP2, or omit weight_format" in outcome.message


def test_every_pair_of_values_is_rehearsed():
    axes, chosen = list(AXES.values()), combinations().values()
    pairs = {pair for two in itertools.combinations(axes, 2) for pair in itertools.product(*two)}
    seen = {pair for one in chosen if not one.refused for pair in itertools.combinations(one.values, 2)}
    assert {frozenset(pair) for pair in pairs - seen} == {frozenset(pair) for pair in REFUSED}
    assert all(any(pair <= set(one.values) for one in chosen) for pair in REFUSED)


def test_no_rehearsal_is_missing_or_failed():
    runs = json.loads((RESULTS / "rehearsal.json").read_text())["runs"]
    assert {*rehearsal.USUAL, *combinations()} == runs.keys()
    assert not [name for name, run in runs.items() if run["outcome"] == "failed"]
