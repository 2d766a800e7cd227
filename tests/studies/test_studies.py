"""The studies run completely at a small size."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset
from transformers import BertConfig, BertModel

from benchmarks.measurement import llama
from scripts.make_model import train_tokenizer
from studies import __main__ as command
from studies import chat, formats, grid, llamas, packages, search, tables, tasks, training


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """Stores models in a folder of the test, and starts runs in this process."""
    monkeypatch.setattr(training, "WORK", tmp_path)
    monkeypatch.setattr(command, "ProcessPoolExecutor", lambda processes, context: ThreadPoolExecutor(processes))


@pytest.fixture
def small(monkeypatch):
    """Shrinks the task `docstrings` to seconds: a tiny Llama, and a few rows of tokens."""
    monkeypatch.setattr(llamas, "SIZES", {"1M": (1, 128, 2, 1e-3)})
    rows = torch.arange(8 * 4).view(8, 4)
    text = {"old": rows, "new": rows.flip(0)}, {"old": rows[:2], "new": rows[2:4]}
    monkeypatch.setattr(llamas, "texts", lambda *sizes: text)
    task = llamas.LlamaTask(updates=2, length=4, vocab=300, held_out=2)
    monkeypatch.setitem(tasks.TASKS, "docstrings", task)
    return task


def run_studies(tmp_path, *words):
    command.main(["--processes", "1", "--out", str(tmp_path), "task=docstrings", *words])
    return json.loads((tmp_path / "studies.json").read_text())["runs"]


def test_runs_are_done_recorded_and_repeated(small, tmp_path, capsys):
    names = ("float32", "stochastic", "nearest", "int12")
    run_studies(tmp_path, "method=adamw", "lr=0.01", "format=stochastic, 8bit states")
    runs = run_studies(tmp_path, *(f"format={name}" for name in names), "method=adamw", "method=adalomo", "lr=0.01")
    assert len(runs) == 1 + 2 * len(names)
    assert all(run["curve"][-1][0] == 1.0 and 0 < run["step"] < 1 for run in runs)
    assert (tmp_path / "studies.png").exists()
    assert "| adalomo | float32 | 0.01 |" in tables.tables({"runs": runs})["docstrings"]

    assert run_studies(tmp_path, "method=adalomo", "format=stochastic", "lr=0.01") == runs
    loss = next(run["loss"] for run in runs if (run["method"], run["format"]) == ("adalomo", "stochastic"))
    assert f"loss: {loss} recorded, {loss} now" in capsys.readouterr().out


def test_chats_are_trained(monkeypatch):
    for cached in (chat.chats, chat.prose):
        cached.cache_clear()
    tokenizer = train_tokenizer((question.text for question in chat.questions()[:50]), 400)
    monkeypatch.setattr(packages, "chat_tokenizer", lambda: tokenizer)
    monkeypatch.setattr(packages, "chat_model", lambda: llama(1, 64, 64, 400, "float32", checkpointing=False))
    monkeypatch.setitem(tasks.TASKS, "chats", chat.Chat(updates=1, batch=2))
    run = tasks.train(grid.run_of("chats", "adalomo", lr=1e-2))
    assert run["exact"] == 0.0 and run["step"] > 0
    assert run["curve"][-1][1] < run["curve"][0][1]


def test_code_is_searched(monkeypatch):
    """Training makes a random encoder find the functions in its training data."""
    config = BertConfig(vocab_size=50, hidden_size=64, num_hidden_layers=1, num_attention_heads=1, intermediate_size=64)
    model = BertModel(config)
    ids = torch.randint(1, 50, (2, 8, 6), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(packages, "encoder", lambda: model.train())
    monkeypatch.setattr(search, "HELD_OUT", len(ids[0]))
    monkeypatch.setattr(search, "functions", lambda: TensorDataset(*torch.cat([ids, ids], 1)))
    monkeypatch.setattr(search, "sentences", lambda: TensorDataset(*ids))
    task = search.Search(updates=20, batch=8, compiled=False)
    run = training.train(task, task.model(), "adamw", 1e-2, {}, formats.format_of("float32"))
    assert run["mrr"] > run["curve"][0][2] and run["loss"] < run["curve"][0][1] / 2


def test_an_incomplete_directory_is_created_again(tmp_path):
    """An interrupted process may leave part of a package or a model."""

    def fail(target):
        (target / "part").mkdir(parents=True)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        training.once(tmp_path / "model", fail)
    assert [*training.once(tmp_path / "model", Path.mkdir).iterdir()] == []
