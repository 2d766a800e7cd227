"""Rehearsals: three of `benchmarks.rehearsal` for a few steps, which ones there are."""

import itertools
import json
import math

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import rehearsal
from benchmarks.pages import RESULTS
from benchmarks.processes import MeasurementError
from benchmarks.rehearsal import AXES, REFUSED, Outcome, Rehearsal, combinations, rehearse

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


def test_a_combination_that_is_not_supported_is_refused_before_its_first_step(folder):
    outcome = rehearse(combinations()["SFT, untied, int12, as they come, AdaLomo, ZeRO-3"], STEPS, folder)
    assert outcome.outcome == "refused" and "use FSDP2, or omit weight_format" in outcome.message


WORDS = ("sft", "--model_name_or_path={folder}/model")
ONE = Rehearsal(WORDS)
ENDS = [[1.0, 3.0]] * 3  # the weights of the run, the resumed run and the run by tiles


@pytest.fixture
def simulate(monkeypatch, tmp_path):
    """Rehearses runs that write the given weights and losses instead of training."""
    (tmp_path / "model").mkdir()
    save_file({"w": torch.tensor([0.0, 3.0])}, tmp_path / "model" / "model.safetensors")
    monkeypatch.setattr(rehearsal, "alone", lambda *args, folder: (100, 110))

    def give(ends, losses=((2.0, 1.0),) * 3, log="compiled the optimizer in 9 s", one=ONE):
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
    outcome = simulate([[1.0, 3.0], [1.0, 3.0], [1.0, 3.001]], losses=((2.0, 1.0), (2.0, 1.0), (2.0, 1.0001)))
    assert outcome.outcome == "passed" and (outcome.peak, outcome.planned) == (100, 110)
    assert outcome.weights == pytest.approx(1e-3, rel=1e-3) and outcome.losses == pytest.approx(1e-4, rel=1e-3)


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        (
            {"ends": [[1.0, 3.0], [1.0, 3.0000002], [1.0, 3.0]]},
            "the run that was resumed after step 1 ends in other bits",
        ),
        ({"ends": ENDS, "losses": ((2.0, 1.0), (2.0, 0.9), (2.0, 1.0))}, "ends in other bits"),
        ({"ends": [*ENDS[:2], [1.1, 3.0]]}, "differs from the run by tiles"),
        ({"ends": [*ENDS[:2], [math.nan, 3.0]]}, "differs from the run by tiles"),
        ({"ends": ENDS, "losses": ((2.0, 1.0), (2.0, 1.0), (2.0, 1.1))}, "differs from the run by tiles"),
        ({"ends": ENDS, "log": "trained"}, "nothing was compiled"),
        ({"ends": ["error: no"] * 3}, "no"),
        ({"ends": ["error on rank 1: no"] * 3}, "no"),
        ({"ends": ENDS, "one": Rehearsal(WORDS, ("int12", "ZeRO-3"))}, "it was to be refused"),
        ({"ends": ["error: unexpected TypeError"] * 3, "one": Rehearsal(WORDS, ("int12", "ZeRO-3"))}, "unexpected"),
    ],
)
def test_a_rehearsal_fails(simulate, runs, message):
    outcome = simulate(**runs)
    assert outcome.outcome == "failed" and message in outcome.message


@pytest.mark.parametrize("prefix", ["error: ", "error on rank 1: "])
def test_whichever_rank_ends_first_a_rehearsal_is_refused(simulate, prefix):
    refused = simulate([f"{prefix}not supported"] * 3, one=Rehearsal(WORDS, ("int12", "ZeRO-3")))
    assert (refused.outcome, refused.message) == ("refused", "not supported")


def test_weights_that_stay_where_they_began_do_not_differ():
    still, moved = {"w": torch.ones(2)}, {"w": torch.tensor([1.0, 1.5])}
    assert rehearsal.difference(still, still, still) == 0
    assert rehearsal.difference(moved, still, still) > 1
    assert rehearsal.difference(still, moved, still) == 1


def test_every_pair_of_values_is_rehearsed_and_every_pair_that_is_refused():
    axes, chosen = list(AXES.values()), combinations().values()
    pairs = {pair for two in itertools.combinations(axes, 2) for pair in itertools.product(*two)}
    seen = {pair for one in chosen if not one.refused for pair in itertools.combinations(one.values, 2)}
    assert {frozenset(pair) for pair in pairs - seen} == {frozenset(pair) for pair in REFUSED}
    assert all(any(pair <= set(one.values) for one in chosen) for pair in REFUSED)
    assert len(combinations(every=True)) == len(list(itertools.product(*axes)))
    assert {one.ranks for one in chosen if "FSDP2" in one.values} == {2}


def test_chats_have_many_lengths_up_to_the_longest():
    lengths = rehearsal.chat_lengths(2048)
    assert len(lengths) == rehearsal.CHATS and len(set(lengths)) > 50
    assert min(lengths) == 8 and max(lengths) == 2048 and lengths != sorted(lengths)


def test_no_rehearsal_is_missing_or_failed():
    runs = json.loads((RESULTS / "rehearsal.json").read_text())["runs"]
    assert {*rehearsal.USUAL, *combinations()} == runs.keys()
    assert not [name for name, run in runs.items() if run["outcome"] == "failed"]


def test_rows_that_are_not_run_again_stay(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(rehearsal, "write_inputs", lambda folder, steps: None)
    monkeypatch.setattr(
        rehearsal, "rehearse", lambda one, steps, folder, peak=True: Outcome("passed", losses=steps / 10)
    )
    first, second = list(combinations())[2:4]
    rehearsal.main(["--steps", "2", "--only", first, "--out", str(tmp_path)])
    rehearsal.main(["--steps", "4", "--only", second, "--out", str(tmp_path)])
    runs = json.loads((tmp_path / "rehearsal.json").read_text())["runs"]
    assert {name: run["losses"] for name, run in runs.items()} == {first: 0.2, second: 0.4}
    assert f"| {second} | passed | 0 | 4e-01 |" in capsys.readouterr().out
