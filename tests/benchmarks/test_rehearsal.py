"""Rehearsals: three of `benchmarks.rehearsal` for a few steps, which ones there are, and when one fails."""

import itertools
import json
import math

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import rehearsal
from benchmarks.pages import RESULTS
from benchmarks.processes import MeasurementError
from benchmarks.rehearsal import AXES, REFUSED, Rehearsal, combinations, rehearse

STEPS = 4
CHOSEN = (
    "SFT, untied, float32, as they come, AdaLomo, one process",
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
    outcome = rehearse(combinations()["SFT, untied, int12, as they come, AdaLomo, ZeRO-3"], STEPS, folder)
    assert outcome.outcome == "refused" and "use FSDP2, or omit weight_format" in outcome.message


WORDS = ("sft", "--model_name_or_path={folder}/model")
ONE, PAST_REFUSAL = Rehearsal(WORDS), Rehearsal(WORDS, ("int12", "ZeRO-3"))
ENDS = [[1.0, 3.0]] * 3  # the weights of the run, the resumed run and the run by tiles
LOSSES = [(2.0, 1.0)] * 3


@pytest.fixture
def simulate(monkeypatch, tmp_path):
    """Rehearses runs that write the given weights and losses, or raise, instead of training."""
    (tmp_path / "model").mkdir()
    save_file({"w": torch.tensor([0.0, 3.0])}, tmp_path / "model" / "model.safetensors")
    monkeypatch.setattr(rehearsal, "alone", lambda *args, folder: (100, 110))

    def give(ends=ENDS, losses=LOSSES, log="compiled the optimizer in 9 s", one=ONE):
        runs = iter(zip(ends, losses, strict=True))

        def execute(words, log_file, *args, **kwargs):
            log_file.write_text(log)
            (weights, values), run = next(runs), log_file.with_suffix("")
            if isinstance(weights, str):
                raise MeasurementError(weights)
            (run / "checkpoint-2").mkdir(parents=True, exist_ok=True)
            (run / "metrics.jsonl").write_text("".join(json.dumps({"loss": loss}) + "\n" for loss in values))
            save_file({"w": torch.tensor(weights)}, run / "model.safetensors")

        monkeypatch.setattr(rehearsal, "execute", execute)
        return rehearse(one, 2, tmp_path)

    return give


def test_the_figures_of_a_rehearsal(simulate):
    outcome = simulate([*ENDS[:2], [1.0, 3.001]], losses=[*LOSSES[:2], (2.0, 1.0001)])
    assert outcome.outcome == "passed" and (outcome.peak, outcome.planned) == (100, 110)
    assert outcome.weights == pytest.approx(1e-3, rel=1e-3) and outcome.losses == pytest.approx(1e-4, rel=1e-3)


RANKS = [f"error{rank}: not supported" for rank in ("", " on rank 1")]  # whichever ends first
OUTCOMES = [  # what is simulated, and the outcome
    ({"ends": [ENDS[0], [1.0, 3.0000002], ENDS[0]]}, "failed", "that was resumed after step 1 ends in other bits"),
    ({"losses": [LOSSES[0], (2.0, 0.9), LOSSES[0]]}, "failed", "ends in other bits"),
    *(({"ends": [*ENDS[:2], end]}, "failed", "differs from the run by tiles") for end in ([1.1, 3.0], [math.nan, 3.0])),
    ({"losses": [*LOSSES[:2], (2.0, 1.1)]}, "failed", "differs from the run by tiles"),
    ({"log": "trained"}, "failed", "nothing was compiled"),
    *(({"ends": [said] * 3}, "failed", "not supported") for said in RANKS),
    *(({"ends": [said] * 3, "one": PAST_REFUSAL}, "refused", "not supported") for said in RANKS),
    ({"one": PAST_REFUSAL}, "failed", "it was to be refused"),
    ({"ends": ["error: unexpected TypeError"] * 3, "one": PAST_REFUSAL}, "failed", "unexpected"),
]


@pytest.mark.parametrize(("runs", "outcome", "message"), OUTCOMES)
def test_outcomes_of_a_rehearsal(simulate, runs, outcome, message):
    result = simulate(**runs)
    assert result.outcome == outcome and message in result.message


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
