"""Benchmarks of streamed weights: small runs of each, and the goals that the recorded results have to meet."""

import json

import pytest
from support import simgpu

from benchmarks import streamed, traffic, transfers
from benchmarks.pages import RESULTS


def recorded(name):
    return json.loads((RESULTS / f"{name}.json").read_text())["results"]


@pytest.mark.cpu_only("the memory of a process")
def test_a_small_model_is_trained_from_files(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(streamed, "alone", lambda function, *args: function(*args))
    names = (streamed.LOCAL, "streamed", "streamed, page cache dropped")
    words = ["--layers", "4", "--hidden", "128", "--tokens", "8", "--steps", "1", "--out", str(tmp_path)]
    streamed.main([*words, *(word for name in names for word in ("--only", name))])
    assert capsys.readouterr().out.count(" equal |") == len(names)
    results = json.loads((tmp_path / "streamed.json").read_text())["results"]
    for name in names[1:]:
        assert results[name]["fetched"] == pytest.approx(results[name]["written"], rel=1e-6)  # 2 × 4 - 4 layers


def test_recorded_runs_meet_their_goals():
    """Weights of at least 2 GB, of which at most 40 % are resident at any time; or 15 % more than may stay there."""
    results = recorded("streamed")
    assert results.keys() == streamed.METHODS.keys()
    for name, row in results.items():
        assert row["weights"] >= 2e9
        assert row["losses"] == results[streamed.LOCAL]["losses"]
        if name != streamed.LOCAL:
            peak = max(row["peaks"][phase]["all"] for phase in ("load", "first step", "step"))
            share = streamed.METHODS[name].share
            assert peak <= (0.4 if share is None else share + 0.15) * row["weights"], name
            assert row["written"] <= row["layers"] and row["fetched"] <= 2 * row["layers"]


@pytest.mark.skipif(not simgpu.compiler(), reason="no C++ compiler")
@pytest.mark.parametrize("name", ["streamed", "ZeRO-3, `offload_param`, nothing released"])
def test_copies_are_counted_on_the_simulated_gpu(name):
    row = transfers.in_process(name, "cuda", ["--layers", "6", "--hidden", "192"])
    up, down = (row["bytes"][way] for way in transfers.WAYS)
    if name == "streamed":  # 2 × 6 - 4 layers, of whose bytes norms are less than 1 %
        assert up == pytest.approx(8 / 6 * row["layers"], rel=0.01)
        assert down == pytest.approx(row["layers"], rel=0.01)
        assert row["peak"] < row["weights"]
    else:
        assert up == pytest.approx(2 * row["weights"], rel=0.02)
        assert row["bytes"]["host to device, update"] == down == pytest.approx(row["weights"], rel=0.01)


def test_arithmetic_of_traffic():
    """The example of a 70B model on an RTX 4090: 141 GB of weights, and 3,173 tokens at 26 GB/s."""
    model = traffic.Model(70_000_000_000, 70_000_000_000, 80)
    assert model.down(2) == 140e9 and model.up(2) == pytest.approx(2 * 140e9 * 78 / 80)
    assert model.resident(2) == pytest.approx(2 / 80 * 140e9)
    needed = traffic.tokens("RTX 4090", "PCIe 4.0 x16", 2)
    forward = 2 * 70e9 * needed / (165e12 / 2)
    assert forward == pytest.approx(140e9 / 26e9)
