"""The rules match trajectories recorded from their reference implementations (golden/README.md)."""

from collections import Counter
from itertools import product
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


CLIPPING = ("clip_grad_norm", "clipping_scale", "global_norm_clip_threshold")
REPLAYED = [entry for entry in ENTRIES if skipped_for(entry) is None]
CLIPPED = [entry for entry in REPLAYED if any(entry["hyperparameters"].get(name) for name in CLIPPING)]
SKIPPED = [entry for entry in ENTRIES if skipped_for(entry) is not None]


def id_of(value):
    return value["name"] if isinstance(value, dict) else value


def test_enough_cases():
    count = Counter(entry["optimizer"] for entry in REPLAYED)
    assert count == {"scaled_adam": 12, "t2t_adafactor": 14, "lans": 24, "t5x_adafactor": 20, "adalomo": 17}


@pytest.mark.filterwarnings("ignore:.*the heuristic is used")
@pytest.mark.parametrize(
    ("entry", "policy"), [*product(REPLAYED, ["auto"]), *product(CLIPPED, ["deferred"])], ids=id_of
)
def test_replay(entry, policy):
    """Clipping by the global norm gives the same results with policy `deferred`."""
    result = replay(Case(FOLDER, entry), policy=policy)
    assert result.ok, result


@pytest.mark.parametrize("entry", SKIPPED, ids=id_of)
def test_skipped_for_a_reason(entry):
    result = replay(Case(FOLDER, entry))
    assert result.ok is None
    assert skipped_for(entry) in result.reason
