"""The rules match trajectories recorded from their reference implementations (golden/README.md)."""

from collections import Counter
from pathlib import Path

import pytest
from golden.load_golden import Case, manifest
from golden.replay import replay

FOLDER = Path(__file__).parents[1] / "golden"
ENTRIES = manifest(FOLDER)["cases"]


def skipped_for(entry):
    """Returns why a case is skipped, or None if it is replayed."""
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
    """Clipping by the global norm gives the same results with policy `deferred`."""
    result = replay(Case(FOLDER, entry), policy="deferred")
    assert result.ok, result


@pytest.mark.parametrize("entry", SKIPPED)
def test_skipped_for_a_reason(entry):
    result = replay(Case(FOLDER, entry))
    assert result.ok is None
    assert skipped_for(entry) in result.reason
