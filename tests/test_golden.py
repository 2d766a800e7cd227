"""AdaLomo against trajectories recorded from its authors' code (golden/README.md)."""

import json
import shutil
from pathlib import Path

import pytest
from golden.replay import FORMAT, Case, main, manifest, replay

FOLDER = Path(__file__).parent / "golden"
ENTRIES = manifest(FOLDER)["cases"]
ONE_PASS = [pytest.param(entry, id=entry["name"]) for entry in ENTRIES if not entry["two_pass_steps"]]
TWO_PASS = [pytest.param(entry, id=entry["name"]) for entry in ENTRIES if entry["two_pass_steps"]]


def test_enough_cases():
    assert len(ONE_PASS) >= 13
    assert all(entry["optimizer"] == "adalomo" for entry in ENTRIES)


@pytest.mark.parametrize("entry", ONE_PASS)
def test_replay(entry):
    result = replay(Case(FOLDER, entry))
    assert result.ok, result


@pytest.mark.parametrize("entry", TWO_PASS)
def test_clipping_by_norm_is_skipped_for_a_reason(entry):
    result = replay(Case(FOLDER, entry))
    assert result.ok is None
    assert ("clip factor of an earlier step" if "stale" in entry["name"] else "policy 'immediate'") in result.reason


def small_copy(tmp_path, **changes):
    """A folder with one case, its manifest entry changed."""
    entry = {**ENTRIES[0], **changes}
    (tmp_path / "cases").mkdir()
    shutil.copy(FOLDER / ENTRIES[0]["file"], tmp_path / "cases")
    (tmp_path / "manifest.json").write_text(json.dumps({"format": FORMAT, "cases": [entry]}))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("changes", "status", "ok"),
    [
        ({}, 0, True),
        ({"tolerance": {"param": 1e-12, "state": 1.0}}, 1, False),
        ({"tolerance": {"param": 1.0, "state": 1e-12}}, 1, False),
        ({"hyperparameters": {**ENTRIES[0]["hyperparameters"], "decay_rate": -0.7}}, 1, False),
        ({"hyperparameters": {**ENTRIES[0]["hyperparameters"], "clip_grad_norm": 1.0}, "two_pass_steps": []}, 0, None),
        ({"optimizer": "unheard_of"}, 0, None),
    ],
)
def test_tool_verdict(tmp_path, capsys, changes, status, ok):
    assert main([small_copy(tmp_path, **changes), "--json"]) == status
    line = json.loads(capsys.readouterr().out)
    assert line["ok"] is ok
    assert (line["param"] is None) == (line["state"] is None) == (ok is None)
    assert ("reason" in line) == (ok is not True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "no folder of golden trajectories"),
        ([str(FOLDER / "cases")], "no folder of golden trajectories"),
        ([str(FOLDER), "--optimizer", "adalmo"], "Did you mean 'adalomo'?"),
    ],
)
def test_tool_refuses(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_tool_text(tmp_path, capsys):
    assert main([small_copy(tmp_path), "--optimizer", "adalomo"]) == 0
    assert capsys.readouterr().out.split()[-1] == "ok"
