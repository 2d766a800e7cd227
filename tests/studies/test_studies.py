"""The studies of quality run end to end at a small size, and continue where they stopped."""

import dataclasses
import json

import pytest
import torch

from studies import __main__ as runner
from studies import finetune, states, training, weights


@pytest.fixture
def small(monkeypatch):
    """A task of seconds: a tiny Llama, and a few rows of tokens for text."""
    monkeypatch.setattr(training, "SIZES", {"1M": (1, 128, 2, 1e-3)})
    rows = torch.arange(8 * 4).view(8, 4)
    text = training.Texts(old=rows, new=rows.flip(0), old_held_out=rows[:2], new_held_out=rows[2:4])
    monkeypatch.setattr(training, "texts", lambda *sizes: text)
    return training.Task(updates=2, length=4, vocab=300, rows=2)


def run_study(name, tmp_path, *more):
    runner.main([name, "--work", str(tmp_path / "work"), "--out", str(tmp_path), *more])
    return json.loads((tmp_path / f"{name}.json").read_text())["runs"]


def test_fine_tuning_is_studied_and_continued(monkeypatch, small, tmp_path, capsys):
    asked = [finetune.like(name, rounding, lr=1e-2) for name in ("adalomo", "lomo") for rounding in finetune.ROUNDINGS]
    monkeypatch.setattr(finetune, "TASK", small)
    monkeypatch.setattr(finetune, "SIZES", ("1M",))
    monkeypatch.setattr(finetune, "runs", lambda done: iter(asked))
    runs = run_study("finetune", tmp_path)
    assert [{key: run[key] for key in finetune.KEYS} for run in runs] == asked
    assert all(run["curve"][-1][0] == 1.0 and 0 < run["moved"] <= 1 for run in runs)
    assert (tmp_path / "finetune.png").exists() and "| `lomo` | 0.01 |" in capsys.readouterr().out

    monkeypatch.setattr(finetune, "train", lambda *args: pytest.fail("a finished run was repeated"))
    assert run_study("finetune", tmp_path) == runs


@pytest.mark.usefixtures("restore_storages")
def test_formats_of_states_are_trained_and_compared(monkeypatch, small, tmp_path, capsys):
    settings = {name: states.Setting(small, 1e-2, 0.95) for name in ("a", "b")}
    settings["b"] = settings["b"]._replace(task=dataclasses.replace(small, pretrained=False))
    monkeypatch.setattr(states, "SETTINGS_OF", settings)
    monkeypatch.setattr(states, "PAIRS", [("float32", "float32"), ("stochastic", states.LINEAR)])
    runs = run_study("states", tmp_path)
    assert len(runs) == 12 and len({run["new"] for run in runs}) == 12
    out = capsys.readouterr().out
    assert "| float32 | `float32` | 12 | 0 (" in out and "| bfloat16, stochastic | `8bit_linear` | 4.25 | " in out


@pytest.mark.usefixtures("restore_storages")
def test_formats_of_weights_are_trained_and_compared(monkeypatch, small, tmp_path):
    old = dataclasses.replace(small, trained="old", looks=(0.5, 1.0))
    formats = ("float32", "int8", "int10, embedding bfloat16")
    settings = {
        "old text": weights.Setting(old, 1e-2, formats, 2),
        "outliers": weights.Setting(small, 1e-2, formats[:2], 1, outliers=True),
        "wide": weights.Setting(
            dataclasses.replace(small, products="float32"), 1e-2, ("float32", "bfloat16 in float32"), 1
        ),
    }
    monkeypatch.setattr(weights, "SETTINGS_OF", settings)
    monkeypatch.setattr(weights, "tables", lambda report: {"": ""})
    runs = run_study("weights", tmp_path)
    assert len(runs) == 10
    before = {run["curve"][0][1] for run in runs if run["setting"] != "wide"}
    assert len(before) == 1  # the same function, with outliers too
    losses = weights.Losses({"runs": runs}, "old text")
    old = [run for run in runs if run["setting"] == "old text"]
    ours, exact = ([run["old"] for run in old if run["format"] == name] for name in ("int8", "float32"))
    assert losses.above("int8") == pytest.approx([a - b for a, b in zip(ours, exact, strict=True)])
    assert losses.kept("float32") == 1.0
