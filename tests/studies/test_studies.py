"""The studies of quality run end to end at a small size, and continue where they stopped."""

import dataclasses
import itertools
import json
import math
import statistics
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.data import TensorDataset
from transformers import BertConfig, BertModel

from benchmarks.measurement import llama
from scripts.make_model import train_tokenizer
from studies import __main__ as command
from studies import chat, formats, grid, llamas, packages, plans, running, search, tables, training


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """Models and runs in a folder of the test, and runs in its process."""
    monkeypatch.setattr(training, "WORK", tmp_path)
    monkeypatch.setattr(running, "ProcessPoolExecutor", lambda processes, context: ThreadPoolExecutor(processes))


@pytest.fixture
def small(monkeypatch):
    """A task of seconds: a tiny Llama, and a few rows of tokens for text."""
    monkeypatch.setattr(llamas, "SIZES", {"1M": (1, 128, 2, 1e-3)})
    rows = torch.arange(8 * 4).view(8, 4)
    text = {"old": rows, "new": rows.flip(0)}, {"old": rows[:2], "new": rows[2:4]}
    monkeypatch.setattr(llamas, "texts", lambda *sizes: text)
    return llamas.LlamaTask(updates=2, length=4, vocab=300, held_out=2)


def run_studies(tmp_path, *more):
    command.main(["--processes", "1", "--out", str(tmp_path), *more])
    return json.loads((tmp_path / "studies.json").read_text())["runs"]


def test_runs_are_done_continued_and_repeated(monkeypatch, small, tmp_path, capsys):
    monkeypatch.setattr(plans, "PLANS", {"docstrings": plans.Plan(small, 1.0, plans.MAIN, usual=(1e-3, 0.1))})
    methods, forms = ("adamw", "adalomo", plans.MAIN[2]), ("float32", *plans.ROUNDINGS)
    asked = [grid.like("docstrings", name, form, lr=1e-2) for name, form in itertools.product(methods, forms)]
    monkeypatch.setattr(plans, "runs", lambda done: iter(asked))
    runs = run_studies(tmp_path)
    assert [{key: run[key] for key in grid.KEYS} for run in runs] == asked
    assert all(run["curve"][-1][0] == 1.0 and 0 < run["moved"] <= 1 for run in runs)
    assert (tmp_path / "studies.png").exists() and "| adalomo | float32 | 0.01 |" in capsys.readouterr().out

    run_studies(tmp_path, "--repeat", "method=adalomo", "format=stochastic")
    out = capsys.readouterr().out
    loss = next(run["loss"] for run in runs if (run["method"], run["format"]) == ("adalomo", "stochastic"))
    assert f"loss: {loss} recorded, {loss} now" in out and "int12" not in out
    with pytest.raises(SystemExit):
        run_studies(tmp_path, "--repeat", "method=sgd")
    assert "no run in data/studies or --out has method=sgd" in capsys.readouterr().err
    monkeypatch.setattr(plans, "train", lambda *args: pytest.fail("a finished run was repeated"))
    assert run_studies(tmp_path) == runs


def test_a_failed_run_is_left_out(monkeypatch, small, tmp_path, capsys):
    monkeypatch.setattr(plans, "PLANS", {"docstrings": plans.Plan(small)})
    asked = [grid.like("docstrings", "adamw", lr=lr) for lr in (1e-3, 1e-2)]
    monkeypatch.setattr(plans, "runs", lambda done: iter(asked))
    train = plans.train
    monkeypatch.setattr(plans, "train", lambda run: train(run) if run["lr"] == 1e-2 else int("no number"))
    with pytest.raises(SystemExit, match="1"):
        run_studies(tmp_path)
    assert [run["lr"] for run in json.loads((tmp_path / "studies.json").read_text())["runs"]] == [1e-2]
    assert "'lr': 0.001, 'seed': 0} failed: ValueError" in capsys.readouterr().err


def test_a_search_ends_with_the_best_rate_inside(monkeypatch):
    """The loss is a parabola over the logarithm of the rate, with its minimum two places above the grid."""
    run, rows = grid.like("search", "adamw"), []
    monkeypatch.setattr(plans, "runs", lambda rows: grid.Done(rows).search(run, 1e-3, fine=True))
    while asked := running.next_run(rows, []):
        rows.append({**asked, "loss": math.log10(asked["lr"] / 1e-2) ** 2})
    assert sorted(row["lr"] for row in rows) == [3.2e-4, 1e-3, 3.2e-3, 5.6e-3, 1e-2, 1.8e-2, 3.2e-2]
    assert grid.Done(rows).best({**run, "seed": 2}) == {**run, "seed": 2, "lr": 1e-2}


def test_plans_end_with_other_formats_after_float32(monkeypatch):
    """Each run is asked for once; tasks whose packages are not there are left out."""
    every = {name: plans.PLANS[name] for name in ("search", "docstrings", "10,000 updates, lr 1e-6")}
    monkeypatch.setattr(plans, "PLANS", every)
    monkeypatch.setattr(plans, "available", lambda packages: not packages)
    rows = []
    while asked := running.next_run(rows, []):
        rows.append({**asked, "loss": abs(math.log10(asked["lr"]) + 2.5)})
        assert len(rows) < 200
    assert {row["task"] for row in rows} == {*every} - {"search"}
    assert [row["format"] for row in rows if row["task"] == "10,000 updates, lr 1e-6"] == list(plans.LOW)


@pytest.mark.parametrize("method", ["adalomo", "lora"])
@pytest.mark.parametrize("task", [chat.Chat(updates=1, batch=2), chat.Preference(updates=1, batch=2)])
def test_chats_are_trained(monkeypatch, task, method):
    """By a tiny model, with all weights and with adapters."""
    for cached in (chat.chats, chat.prose, chat.compared):
        cached.cache_clear()
    tokenizer = train_tokenizer((each.text for each in chat.questions()[:50]), 400)
    monkeypatch.setattr(packages, "chat_tokenizer", lambda: tokenizer)
    monkeypatch.setattr(packages, "chat_model", lambda: llama(1, 64, 64, 400, "float32", checkpointing=False))
    monkeypatch.setitem(plans.PLANS, "chats", plans.Plan(task))
    run = plans.train(grid.like("chats", method, lr=1e-2))
    assert run["exact"] == 0.0 and run["step"] > 0
    assert [point[1] for point in run["curve"]][-1] < run["curve"][0][1]


def test_the_wrong_answer_is_another_one():
    assert all(each.answer != each.wrong for each in chat.questions())


def test_code_is_searched(monkeypatch):
    """Training makes a random encoder find the functions that it is trained on."""
    config = BertConfig(vocab_size=50, hidden_size=64, num_hidden_layers=1, num_attention_heads=1, intermediate_size=64)
    model = BertModel(config)
    ids = torch.randint(1, 50, (2, 8, 6), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(packages, "encoder", lambda: model.train())
    monkeypatch.setattr(search, "HELD_OUT", len(ids[0]))
    monkeypatch.setattr(search, "functions", lambda: TensorDataset(*torch.cat([ids, ids], 1)))
    monkeypatch.setattr(search, "sentences", lambda: TensorDataset(*ids))
    task = search.Search(updates=20, batch=8)
    run = training.train(task, task.model(0), "adamw", 1e-2, {}, formats.format_of("float32"))
    assert run["mrr"] > run["curve"][0][2] and run["loss"] < run["curve"][0][1] / 2


def test_a_package_that_is_not_there_is_named(capsys):
    assert packages.available(()) and not packages.available(("no-such-package-of-this-name==0",))
    assert "left out: this study needs no-such-package-of-this-name==0" in capsys.readouterr().err


def test_formats_are_trained_and_compared(monkeypatch, small, tmp_path):
    old = dataclasses.replace(small, updates=10, trained="old", compiled=True)
    forms = ("float32", "int8", "int10")
    adamw = {"adamw, β₂ 0.95": 1e-2}
    states = ("float32", "stochastic, 8bit states", "compensated8, 8bit_nearest states")
    changed = {
        "old text": plans.Plan(old, formats=forms, rates={"adalomo": 1e-2}, seeds=2),
        "fine-tuning, β₂ 0.95": plans.Plan(small, formats=states, rates=adamw, seeds=2),
        "from scratch, β₂ 0.95": plans.Plan(
            dataclasses.replace(small, pretrained=False), formats=states[:1], rates=adamw, seeds=2
        ),
        "10 updates, lr 0.01": plans.Plan(small, formats=("float32", "nearest"), rates={"adamw": 1e-2}, seeds=1),
    }
    monkeypatch.setattr(plans, "PLANS", changed)
    monkeypatch.setattr(tables, "PLANS", changed)
    monkeypatch.setattr(tables, "draw", lambda report, path: None)
    runs = run_studies(tmp_path)
    assert len(runs) == 6 + 6 + 2 + 2
    first = {name: {run["curve"][0][1] for run in runs if run["task"] == name} for name in changed}
    assert len(first["from scratch, β₂ 0.95"]) == 2  # other weights for each seed

    ours, exact = (
        [run["loss"] for run in runs if (run["task"], run["format"]) == ("old text", name)]
        for name in ("int8", "float32")
    )
    low = [run for run in runs if run["task"].startswith("10 updates")]
    assert (low[0]["way"], low[0]["drift"]) == (pytest.approx(1.0, rel=1e-5), pytest.approx(0.0, abs=1e-3))
    assert low[1]["drift"] > 0

    out = tables.tables({"runs": runs})
    above = [a - b for a, b in zip(ours, exact, strict=True)]
    assert f"| int8 | 1.031 | {statistics.mean(above):+.4f} ± {statistics.stdev(above):.4f} | " in out["formats"]
    assert "| compensated8, 8bit_nearest states | 5.125 | " in out["formats, states"]
    assert (
        f"| float32 | 4 | 0 ({statistics.mean(exact):.4f} ± {statistics.stdev(exact):.4f}) | 100% |" in out["formats"]
    )
    assert "| float32 | 12 | 0 (" in out["formats, states"]
    assert "| 10 updates, lr 0.01 | float32 | 100.0% | 0.00 |" in out["long"]


def test_weights_pretrained_on_other_code_are_not_reused(monkeypatch):
    pretrained = []
    monkeypatch.setattr(llamas.LlamaTask, "_pretrained", lambda self: pretrained.append(self) or {})
    for ids in ([1, 2], [1, 3], [1, 2]):
        monkeypatch.setattr(llamas, "texts", lambda *_, ids=ids: ({"old": torch.tensor(ids)}, {}))
        llamas.LlamaTask().weights()
    assert len(pretrained) == 2
