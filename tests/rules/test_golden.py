"""The rules against trajectories recorded from the code that defines them (golden/README.md)."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from golden.replay import FORMAT, Case, main, manifest, replay

FOLDER = Path(__file__).parents[1] / "golden"
ENTRIES = manifest(FOLDER)["cases"]
ADALOMO = next(entry for entry in ENTRIES if entry["optimizer"] == "adalomo")


def skipped_for(entry):
    """Why a case is skipped: what its reason says; None if it is to be replayed."""
    if entry["name"] == "al_o18_stale_coef":
        return "clip factor of an earlier step"
    if entry["expect_nonfinite"]:
        return "gradient of zeros"
    return None


REPLAYED = [pytest.param(entry, id=entry["name"]) for entry in ENTRIES if skipped_for(entry) is None]
SKIPPED = [pytest.param(entry, id=entry["name"]) for entry in ENTRIES if skipped_for(entry) is not None]


def test_enough_cases():
    count = Counter(param.values[0]["optimizer"] for param in REPLAYED)
    assert count == {"scaled_adam": 12, "t2t_adafactor": 14, "lans": 24, "t5x_adafactor": 20, "adalomo": 17}


@pytest.mark.filterwarnings("ignore:.*the heuristic is used")
@pytest.mark.parametrize("entry", REPLAYED)
def test_replay(entry):
    result = replay(Case(FOLDER, entry))
    assert result.ok, result


NORMED = [
    pytest.param(entry, id=entry["name"])
    for entry in ENTRIES
    if skipped_for(entry) is None
    and any(
        entry["hyperparameters"].get(name)
        for name in ("clip_grad_norm", "clipping_scale", "global_norm_clip_threshold")
    )
]


@pytest.mark.filterwarnings("ignore:.*the heuristic is used")
@pytest.mark.parametrize("entry", NORMED)
def test_replay_deferred(entry):
    """What clips by a norm over all gradients, once more with the other policy that knows it."""
    result = replay(Case(FOLDER, entry), policy="deferred")
    assert result.ok, result


@pytest.mark.parametrize("entry", SKIPPED)
def test_skipped_for_a_reason(entry):
    result = replay(Case(FOLDER, entry))
    assert result.ok is None
    assert skipped_for(entry) in result.reason


def small_copy(tmp_path, **changes):
    """A folder with one case, its manifest entry changed."""
    entry = {**ADALOMO, **changes}
    (tmp_path / "cases").mkdir()
    shutil.copy(FOLDER / ADALOMO["file"], tmp_path / "cases")
    (tmp_path / "manifest.json").write_text(json.dumps({"format": FORMAT, "cases": [entry]}))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("changes", "status", "ok"),
    [
        ({}, 0, True),
        ({"tolerance": {"param": 1e-12, "state": 1.0}}, 1, False),
        ({"tolerance": {"param": 1.0, "state": 1e-12}}, 1, False),
        ({"hyperparameters": {**ADALOMO["hyperparameters"], "decay_rate": -0.7}}, 1, False),
        ({"hyperparameters": {**ADALOMO["hyperparameters"], "clip_grad_norm": 1.0}, "two_pass_steps": []}, 0, None),
        ({"optimizer": "unheard_of"}, 0, None),
    ],
)
def test_tool_verdict(tmp_path, capsys, changes, status, ok):
    assert main([small_copy(tmp_path, **changes), "--json"]) == status
    line = json.loads(capsys.readouterr().out)
    assert line["ok"] is ok
    assert (line["param"] is None) == (line["state"] is None) == (ok is None)
    assert ("reason" in line) == (ok is not True)
    main([str(tmp_path), "--optimizer", changes.get("optimizer", "adalomo")])
    assert capsys.readouterr().out.split()[-1] == "ok" or ok is not True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "is not a folder of golden trajectories"),
        ([str(FOLDER / "cases")], "is not a folder of golden trajectories"),
        ([str(FOLDER), "--optimizer", "adalmo"], "Did you mean 'adalomo'?"),
    ],
)
def test_the_tool_rejects_invalid_cases(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
