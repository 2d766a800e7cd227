"""The studies of quality run end to end at a small size, and continue where they stopped."""

import dataclasses
import itertools
import json
import math
from types import SimpleNamespace

import pytest
import torch
from transformers import BertConfig, BertModel

from benchmarks.measurement import llama
from scripts.make_model import train_tokenizer
from studies import __main__ as command
from studies import chat, formats, grid, llamas, packages, rules, running, search, training


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(training, "WORK", tmp_path / "work")


@pytest.fixture
def small(monkeypatch):
    """A task of seconds: a tiny Llama, and a few rows of tokens for text."""
    monkeypatch.setattr(llamas, "SIZES", {"1M": (1, 128, 2, 1e-3)})
    rows = torch.arange(8 * 4).view(8, 4)
    text = llamas.Texts(old=rows, new=rows.flip(0), old_held_out=rows[:2], new_held_out=rows[2:4])
    monkeypatch.setattr(llamas, "texts", lambda *sizes: text)
    return llamas.LlamaTask(updates=2, length=4, vocab=300, held_out=2)


def run_study(name, tmp_path, *more):
    command.main([name, "--processes", "1", "--out", str(tmp_path), *more])
    return json.loads((tmp_path / f"{name}.json").read_text())["runs"]


def test_rules_are_studied_continued_and_repeated(monkeypatch, small, tmp_path, capsys):
    monkeypatch.setattr(rules, "PLANS", {"docstrings": rules.Plan(small, 1.0, usual=(1e-3, 0.1))})
    both = itertools.product(("adamw", "adalomo", rules.THREE_BYTES), ("float32", *rules.FORMATS))
    asked = [rules.like("docstrings", name, rounding, lr=1e-2) for name, rounding in both]
    monkeypatch.setattr(rules, "runs", lambda done: iter(asked))
    runs = run_study("rules", tmp_path)
    assert [{key: run[key] for key in rules.KEYS} for run in runs] == asked
    assert all(run["curve"][-1][0] == 1.0 and 0 < run["moved"] <= 1 for run in runs)
    assert (tmp_path / "rules.png").exists() and "| adalomo | 0.01 |" in capsys.readouterr().out

    run_study("rules", tmp_path, "--repeat", "method=adalomo", "rounding=stochastic")
    out = capsys.readouterr().out
    loss = next(run["loss"] for run in runs if (run["method"], run["rounding"]) == ("adalomo", "stochastic"))
    assert f"loss: {loss} recorded, {loss} now" in out and "int12" not in out
    monkeypatch.setattr(rules, "train", lambda *args: pytest.fail("a finished run was repeated"))
    assert run_study("rules", tmp_path) == runs


def test_a_search_ends_with_the_best_rate_inside():
    """The loss is a parabola over the logarithm of the rate, with its minimum two places above the grid."""
    run, rows = rules.like("search", "adamw"), []
    study = SimpleNamespace(KEYS=rules.KEYS, runs=lambda rows: grid.Done(rows, rules.KEYS).search(run, 1e-3, fine=True))
    while asked := running.next_run(study, rows, []):
        rows.append({**asked, "loss": math.log10(asked["lr"] / 1e-2) ** 2})
    assert sorted(row["lr"] for row in rows) == [3.2e-4, 1e-3, 3.2e-3, 5.6e-3, 1e-2, 1.8e-2, 3.2e-2]
    done = grid.Done(rows, rules.KEYS)
    assert done.best(run) == 1e-2
    assert [(asked["lr"], asked["seed"]) for asked in done.again(run)] == [(1e-2, 0), (1e-2, 1), (1e-2, 2)]


@pytest.mark.parametrize("method", ["adalomo", "lora"])
@pytest.mark.parametrize("task", [chat.Chat(updates=1, batch=2), chat.Preference(updates=1, batch=2)])
def test_chats_are_trained(monkeypatch, task, method):
    """By a tiny model, with all weights and with adapters."""
    for cached in (chat.chats, chat.prose, chat._pairs):
        cached.cache_clear()
    tokenizer = train_tokenizer((each.text for each in chat.questions()[:50]), 400)
    monkeypatch.setattr(packages, "chat_tokenizer", lambda: tokenizer)
    monkeypatch.setattr(packages, "chat_model", lambda: llama(1, 64, 64, 400, "float32", checkpointing=False))
    monkeypatch.setitem(rules.PLANS, "chats", rules.Plan(task))
    run = rules.train(rules.like("chats", method, lr=1e-2))
    assert run["exact"] == 0.0 and run["step"] > 0
    assert [point[1] for point in run["curve"]][-1] < run["curve"][0][1]


def test_the_wrong_answer_is_another_one():
    assert all(each.answer != each.wrong for each in chat.questions())


def test_code_is_searched(monkeypatch):
    """Training makes a random encoder find the functions that it is trained on."""
    config = BertConfig(vocab_size=50, hidden_size=64, num_hidden_layers=1, num_attention_heads=1, intermediate_size=64)
    model = BertModel(config)
    ids = torch.randint(1, 50, (2, 8, 6), generator=torch.Generator().manual_seed(0))
    pairs = search.Pairs(*ids)
    monkeypatch.setattr(packages, "encoder", lambda: model.train())
    monkeypatch.setattr(search, "functions", lambda: (pairs, pairs))
    monkeypatch.setattr(search, "sentences", lambda: pairs)
    run = training.train(search.Search(updates=20, batch=8), "adamw", 1e-2, {})
    assert run["mrr"] > run["curve"][0][2] and run["loss"] < run["curve"][0][1] / 2


def test_a_package_that_is_not_there_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(packages, "ENCODER", "no-such-package-of-this-name==0")
    with pytest.raises(packages.MissingPackageError, match="no-such-package-of-this-name"):
        packages.installed(packages.ENCODER)


@pytest.mark.usefixtures("restore_storages")
def test_formats_are_trained_and_compared(monkeypatch, small, tmp_path, capsys):
    old = dataclasses.replace(small, updates=10, trained="old", looks=formats.OLD.looks)
    form = ("float32", "int8", "int10, embedding bfloat16")
    adamw = formats.BETAS[0.95]
    states = ("float32", "bfloat16, 8bit states", "bfloat16, 8bit_linear states")
    settings = {
        "old text": formats.Setting(old, 1e-2, form, 2),
        "old text, outliers": formats.Setting(small, 1e-2, form[:2], 1, outliers=True),
        "fine-tuning, β₂ 0.95": formats.Setting(small, 1e-2, states, 2, "adamw", adamw),
        "from scratch, β₂ 0.95": formats.Setting(
            dataclasses.replace(small, pretrained=False), 1e-2, states[:1], 2, "adamw", adamw
        ),
        "10 updates at 0.01": formats.Setting(small, 1e-2, ("float32", "bfloat16, to nearest"), 1, "adamw", adamw),
    }
    monkeypatch.setattr(formats, "SETTINGS_OF", settings)
    tables = formats.tables
    monkeypatch.setattr(formats, "tables", lambda report: {"": "", **tables(report)})
    runs = run_study("formats", tmp_path)
    assert len(runs) == 6 + 2 + 6 + 2 + 2
    first = {
        run["setting"]: {each["curve"][0][1] for each in runs if each["setting"] == run["setting"]} for run in runs
    }
    assert len(first["old text, outliers"]) == 1  # the same function
    assert len(first["from scratch, β₂ 0.95"]) == 2  # other weights for each seed

    losses = formats.Losses({"runs": runs}, "old text")
    ours, exact = (
        [run["loss"] for run in runs if (run["setting"], run["format"]) == ("old text", name)]
        for name in ("int8", "float32")
    )
    assert losses.above("int8") == pytest.approx([a - b for a, b in zip(ours, exact, strict=True)])
    assert losses.kept("float32") == 1.0
    low = [run for run in runs if run["setting"].startswith("10 updates")]
    assert (low[0]["way"], low[0]["drift"]) == (pytest.approx(1.0), pytest.approx(0.0, abs=1e-3))
    assert low[1]["drift"] > 0

    out = formats.tables({"runs": runs})
    assert "| bfloat16, 8bit_linear states | 4.25 | " in out["states"] and "| float32 | 12 | 0 (" in out["states"]
    assert "| 10 updates at 0.01 | float32 | 100.0% | 0.00 |" in out["long"]
