"""Benchmark commands write their results, and the methods that they compare train as documented."""

import json
import shlex
from functools import partial

import pytest
import torch
from support import runs
from transformers import LlamaConfig

from benchmarks import defaults, host, memory, methods, step, update
from benchmarks.methods import FLOOR, drop_gradients, fused, hooked, ordinary
from benchmarks.pages import ROOT
from lowmem import FusedConfig

SMALL = ("--size", "1M", "--tokens", "8", "--steps", "1", "--rounds", "1")


def only(*names):
    return [word for name in names for word in ("--only", name)]


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.setattr(methods, "installed", lambda package: False)


COMMANDS = {  # Arguments and a line of the output.
    step: ([*SMALL, "--dtype", "bfloat16", *only(FLOOR, "AdamW, fused", "optimi AdamW")], "| AdamW, fused "),
    update: (["--size", "64", "--rounds", "1", *only("adalomo, eager", update.BASE)], "| adalomo, eager "),
    defaults: (["--rounds", "1"], "| 512 × 64 | 55% of the weights | 16 |"),
    host: (["--count", "2", "--repeats", "1", "--rounds", "1"], "| adalomo, kernels of a GPU |"),
}


@pytest.fixture
def run(monkeypatch, nothing_installed, tmp_path, capsys):
    """Returns a function that runs a command at a small size in this process and returns its output and report."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for module in (step, update):
        monkeypatch.setattr(module, "alone", lambda function, *args, folder=None: function(*args))
    monkeypatch.setattr(defaults, "SHAPES", ((1, 64, 512, 16),))
    monkeypatch.setattr(defaults, "FusedConfig", lambda **options: FusedConfig(rule="lomo"))

    def run_module(module):
        words, _ = COMMANDS[module]
        module.main([*words, "--out", str(tmp_path / "new")])
        (file,) = (tmp_path / "new").glob("*.json")
        return capsys.readouterr().out, json.loads(file.read_text())

    return run_module


@pytest.mark.parametrize("module", COMMANDS, ids=lambda module: module.__name__)
def test_a_command_measures_prints_a_table_and_writes_json(module, run):
    out, report = run(module)
    assert any(line.startswith(COMMANDS[module][1]) for line in out.splitlines()), out
    assert report["machine"]["torch"] == torch.__version__ and not report.get("failed")


def test_a_plan_is_the_one_of_the_command_line(monkeypatch, tmp_path):
    """Compares plans of a small model on two ranks. The tables must need only plans that the benchmark makes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / memory.CONFIG).write_text((ROOT / memory.CONFIG).read_text())
    LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2).save_pretrained("configs/models/small")
    words = memory.arguments_of("small", "adalomo", ranks=2)
    sizes = memory.planned(words)
    config = ["--config", memory.CONFIG, "--eval_strategy", "no", *shlex.split(words)]
    assert runs.lowmem("plan", "sft", *config, "--json", tmp_path / "plan.json").status == 0
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert sum(sizes.values()) == plan["needed"]
    assert sizes["weights"] == plan["items"]["weights"]

    plans = {words: dict.fromkeys(memory.COLORS, 2**30) for words in memory.all_arguments()}
    assert len(memory.tables({"plans": plans})) == 5


def test_methods_train_as_documented(tiny_llama):
    """The floor does not train, and the other methods train as the plain loop. No method leaves gradients."""
    adamw = {"cls": torch.optim.AdamW, "foreach": False}
    ours = {"rule": torch.optim.AdamW, "foreach": False, "accumulation_dtype": "gradient", "policy": "deferred"}
    rows = torch.randint(97, (2, 8)).split(1)

    def trained(make, rows):
        model = tiny_llama()
        step = make(model)
        for _ in range(2):
            step([partial(lambda ids: model(input_ids=ids, labels=ids).loss, ids) for ids in rows])
        assert all(param.grad is None for param in model.parameters())
        return [param.detach() for param in model.parameters()]

    start = [param.detach() for param in tiny_llama().parameters()]
    for make, reference, count in (
        (drop_gradients, lambda model: lambda losses: None, 2),
        (partial(fused, **ours), partial(ordinary, **adamw), 2),
        (partial(hooked, **adamw), partial(ordinary, **adamw), 1),
    ):
        ends = trained(make, rows[:count])
        assert all(map(torch.equal, ends, trained(reference, rows[:count])))
        assert all(map(torch.equal, ends, start)) == (make is drop_gradients)
