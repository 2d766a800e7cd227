"""Some inputs of each surface of `tests/fuzz`; `benchmarks/fuzz.py` tries many more."""

import pytest

from benchmarks import fuzz

INPUTS = {"resuming": 6, "starts": 4}


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
