"""Some inputs of each surface of `tests/fuzz`, and the command that gives them many more."""

import pytest

from benchmarks import fuzz

INPUTS = {"checkpoints": 40, "resuming": 2, "starts": 4}


@pytest.mark.parametrize("surface", fuzz.SURFACES.values(), ids=list(fuzz.SURFACES))
def test_every_input_is_accepted_or_raises_by_name(surface, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = fuzz.load(surface)
    for seed in range(INPUTS[surface.stem]):
        folder = tmp_path / str(seed)
        folder.mkdir()
        print(f"{surface.stem}, seed {seed}")  # shown of a failure
        ending = run(seed, folder)
        assert ending == "accepted" or ending.endswith("Error")


SURFACE = """
import os, sys, time

def run(seed, folder):
    assert not list(folder.iterdir())
    (folder / "input").touch()
    if seed == 1:
        raise KeyError("nobody expects this")
    if seed == 2:
        time.sleep(600)
    if seed == 3:
        sys.exit(0)
    if seed == 4:
        os.abort()
    return "ConfigError" if seed == 5 else "accepted"
"""


def test_the_script_counts_endings_and_names_defects_by_their_seed(tmp_path):
    (tmp_path / "surface.py").write_text(SURFACE)
    reported = []
    # seconds that a process on a busy machine may need for nothing
    figures = fuzz.fuzz(tmp_path / "surface.py", range(8), 5, lambda figures: reported.append(figures.inputs))
    assert (figures.inputs, figures.accepted, figures.refused) == (8, 3, {"ConfigError": 1})
    assert reported == list(range(1, 9))
    errors = {defect["seed"]: defect["error"] for defect in figures.defects}
    assert errors[1].startswith("KeyError: 'nobody expects this' [")
    assert errors[2] == "no end within 5 seconds"
    assert errors[3].startswith("SystemExit: 0")
    assert errors[4] == "the process ended with status -6"
    assert figures.slowest["seed"] == 2
