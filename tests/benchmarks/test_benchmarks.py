"""Benchmarks against peers: what is measured, what is reported, what happens to methods that fail; except for times."""

import contextlib
import dataclasses
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from rich.console import Console

import lowmem
from benchmarks import (
    baselines,
    comparison,
    convergence,
    determinism,
    dispatch,
    finetune,
    finetune_report,
    finetune_runs,
    growth,
    long_context,
    long_context_plans,
    loop,
    measurement,
    one_update,
    policies,
    reports,
    states,
    step,
    update,
    weights,
)
from benchmarks.baselines import FLOOR, Method, all_methods, drop_gradients, fused, hooked, ordinary, select
from benchmarks.comparison import Comparison
from benchmarks.measurement import SIZES, Workload
from benchmarks.processes import MeasurementError, alone
from lowmem.tiles import storage

ROOT = Path(__file__).parents[2]
SMALL = ("--size", "1M", "--tokens", "8", "--steps", "1", "--rounds", "1")
WORKLOAD = Workload("1M", batch=1, tokens=8, dtype="float32", steps=1)


def only(*names):
    return [word for name in names for word in ("--only", name)]


def figures(seconds, process_peak=2**30, **more):
    return {"seconds": seconds, "first_step": 1.0, "tensor_peak": 2**24, "process_peak": process_peak, **more}


def status(main, *arguments):
    with pytest.raises(SystemExit) as done:
        main(arguments)
    return done.value.code


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.setattr(baselines, "version", lambda package: None)


@pytest.fixture
def in_this_process(monkeypatch):
    """Starts no process for a measurement."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for module in (comparison, long_context, loop, update):
        monkeypatch.setattr(module, "alone", lambda function, *args, folder=None: function(*args))


@pytest.fixture
def simulate(monkeypatch):
    """A function: each method gets the figures or errors listed under its name, one per round, and runs nothing."""

    def give(**runs):
        listed = {name: iter(rows) for name, rows in runs.items()}

        def measured(function, method, workload, folder):
            row = next(listed[method.package])
            if isinstance(row, str):
                raise MeasurementError(row)
            return row

        monkeypatch.setattr(comparison, "alone", measured)
        monkeypatch.setattr(Method, "missing", lambda self: None)
        return {name: Method(drop_gradients, "ours" if name == "ours" else "peer", name) for name in runs}

    return give


# -- the commands ------------------------------------------------------------------------------------------------------


def test_steps_are_measured_compared_and_written(nothing_installed, in_this_process, tmp_path, capsys):
    folder = tmp_path / "new" / "bench"
    step.main([*SMALL, "--dtype", "bfloat16", *only(FLOOR, "AdamW, fused", "FlashOptim AdamW"), "--out", str(folder)])
    out, err = capsys.readouterr()
    assert "Llama of 1,049,472 parameters (3 layers, hidden 128, vocabulary 1,024), 1 × 8 tokens" in out
    assert "; bfloat16" in out
    assert "left out: FlashOptim AdamW (pip install flashoptim)" in out
    assert "wrote step.json and step.png to " in out
    assert "round 1 of 1: AdamW, fused, " in err
    assert sorted(path.name for path in folder.iterdir()) == ["step.json", "step.png"]
    assert (folder / "step.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")

    report = json.loads((folder / "step.json").read_text())
    assert report["settings"]["threads"] == torch.get_num_threads()
    assert report["machine"]["torch"] == torch.__version__
    assert list(report["left_out"]) == ["FlashOptim AdamW"] and report["failed"] == {}
    floor, adamw = (report["results"][name] for name in (FLOOR, "AdamW, fused"))
    weights = report["settings"]["weights"]
    assert weights == 2 * 1_049_472
    assert floor["tensor_peak"] < 2 * weights  # no gradient except the largest, and activations
    assert 4 * weights <= adamw["tensor_peak"] < 5 * weights  # gradients and two moments
    (line,) = (line for line in out.splitlines() if line.startswith("| AdamW, fused "))
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[3] == f"{adamw['seconds'] / floor['seconds']:.2f}"
    assert cells[5] == f"{(adamw['tensor_peak'] - weights) / 2**20:.0f}"


def test_updates_are_measured_and_written(nothing_installed, in_this_process, tmp_path, capsys):
    names = ("adamw, eager", "adalomo, eager", update.BASE, "optimi Lion")
    update.main(["--size", "64", "--repeats", "1", "--rounds", "1", *only(*names), "--out", str(tmp_path)])
    assert "left out: optimi Lion (pip install torch-optimi)" in capsys.readouterr().out
    results = json.loads((tmp_path / "update.json").read_text())["results"]
    assert results["adamw, eager"]["state"] == pytest.approx(8, rel=1e-3)
    assert results["adalomo, eager"]["state"] == 4 * (64 + 64) / 64**2
    assert (tmp_path / "update.png").exists()


def test_updates_that_need_bfloat16_are_left_out_in_float32():
    assert update.methods("bfloat16") == update.METHODS
    assert update.METHODS.keys() - update.methods("float32").keys() >= {
        "adamw, compensated",
        f"adamw{update.WIDE}",
        f"{update.BASE}{update.WIDE}",
    }


def test_the_cost_of_hooks_is_measured_and_written(tmp_path, capsys):
    dispatch.main(["--count", "3", "--repeats", "1", "--out", str(tmp_path)])
    results = json.loads((tmp_path / "dispatch.json").read_text())["milliseconds"]
    assert list(results["64 x 64"]) == ["bare hook", "lowmem lomo", "lowmem adalomo", "lowmem adamw"]


def test_one_update_is_measured_profiled_and_compared(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(one_update, "SHAPES", ((64, 64),))
    for number in (1, 2):
        compare = ("--compare", str(tmp_path / "1" / "one_update.json")) if number == 2 else ()
        one_update.main(("--repeats", "2", "--dtype", "float32", "--out", str(tmp_path / str(number)), *compare))
    result = json.loads((tmp_path / "2" / "one_update.json").read_text())
    assert list(result["profiles"]) == [f"before: lowmem {lowmem.__version__}", f"lowmem {lowmem.__version__}"]
    assert {part for part, _, _ in result["profiles"][f"lowmem {lowmem.__version__}"]} >= {"Python", "compiled code"}
    assert (tmp_path / "2" / "one_update.png").exists()
    assert "64 x 64" in capsys.readouterr().out


def test_loops_are_measured_compared_and_written(in_this_process, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(loop, "LOADS", {"2x8": (2, 8, 2)})
    peers = ("TRL's SFTTrainer, AdamW(fused=True)", "transformers.Trainer, AdamW(fused=True)", loop.BASE)
    ours = (f"{loop.OURS}, AdamW(fused=True)", "PyTorch loop, lowmem adalomo")
    arguments = ("--size", "1M", "--dtype", "float32", "--rounds", "1", "--out", str(tmp_path))
    loop.main([*arguments, *only(*peers, *ours)])
    report = json.loads((tmp_path / "loop.json").read_text())
    assert report["failed"] == {} and report["settings"]["loads"] == {"2x8": [2, 8, 2]}
    results = report["results"]["2x8"]
    assert set(results) == {*peers, *ours}
    for row in results.values():
        phases = sum(row[name] for name in loop.PHASES)
        assert min(row.values()) > 0 and 0 < row["share"] < 1 and phases < row["seconds"]
    assert "A step of 2 × 8 tokens" in capsys.readouterr().out


def test_growth_is_fitted_drawn_and_written(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(growth, "SIZES", {"1K": (1, 64, 64), "2K": (1, 64, 128)})
    monkeypatch.setattr(growth, "seconds", lambda size, *rest: {"floor": 1.0, "step": {"1K": 2.0, "2K": 3.0}[size]})
    growth.main(["--tokens", "2", "--timed", "2K", "--dtype", "float32", "--out", str(tmp_path)])
    report = json.loads((tmp_path / "growth.json").read_text())
    for row in report["results"].values():
        assert row["peak"] == row["real peak"] > row["weights"]
    assert report["lines"]["update, seconds over parameters"]["deviation"] < 1e-9
    assert (tmp_path / "growth.png").exists()


def test_long_sequences_are_planned_drawn_and_written(monkeypatch, tmp_path, capsys):
    def peak(model, tokens, setting, **changes):
        """4 MiB, and per token of 512 KiB and of an input per layer, which may be offloaded."""
        model = {**model, **changes}
        layer = 2**20 + (0 if setting.get("offload") else 2 * model["hidden_size"] * tokens)
        return 2**22 + tokens * 2**19 + model["num_hidden_layers"] * layer + 3 * model["vocab_size"]

    monkeypatch.setattr(long_context_plans, "peak", peak)
    monkeypatch.setattr(long_context_plans, "weights", lambda model: 2**20)
    long_context.main(["--only", "planned", "--tokens", "65536", "--out", str(tmp_path)])
    report = json.loads((tmp_path / "long_context_planned.json").read_text())
    for row in report["checked"]:
        assert row["extrapolated"] == row["full"]
    row = report["peaks"]["Llama-3.2-1B"]["offload to the host"]
    assert row["2048"] == 2**22 + 2**30 + 16 * 2**20 + 3 * 128256
    assert report["fits"]["Llama-3.2-1B"]["offload to the host"] == {"24": 46 * 1024 - 1024, "80": 65536}
    assert (tmp_path / "long_context.png").exists()
    assert "7 of 7 plans" in capsys.readouterr().out


def test_real_steps_of_long_sequences_equal_their_plans(in_this_process, monkeypatch, tmp_path, capsys):
    small = {**long_context.SMALL, "num_hidden_layers": 1, "vocab_size": 300}
    for name, value in {"SHORTEST": 128, "SMALL": small, "MEASURED": {"tiled MLP": {"mlp_tile": 32}}}.items():
        monkeypatch.setattr(long_context, name, value)
    long_context.main(["--only", "measured", "--measured", "128", "--dtype", "float32", "--out", str(tmp_path)])
    results = json.loads((tmp_path / "long_context_measured.json").read_text())["results"]
    assert results["tiled MLP"]["128"]["real"] == pytest.approx(results["tiled MLP"]["128"]["planned"], rel=0.05)


def test_steps_of_long_sequences_take_turns(monkeypatch, tmp_path, capsys):
    turns = []
    monkeypatch.setattr(long_context, "step_of", lambda config: lambda: turns.append(str(config.arguments)))
    arguments = ("--only", "time", "--rounds", "2", "--dtype", "float32", "--out", str(tmp_path))
    long_context.main(arguments)
    report = json.loads((tmp_path / "long_context_time.json").read_text())
    assert [len(row) for row in report["results"].values()] == [2, 4]
    assert turns[6:10] == turns[10:14] == turns[14:18] and len(set(turns[6:10])) == 4
    assert report["results"]["float32, 2048 tokens"]["defaults"]["ratios"] == [1, 1]


def test_optimizers_are_trained_searched_and_drawn(monkeypatch, tmp_path, capsys):
    sizes = {"steps": 2, "hidden": 64, "layers": 1, "batch": 2, "length": 4, "vocab": 300, "every": 1, "seed": 0}
    settings = convergence.Settings(**sizes)
    rows = torch.arange(8 * 4).view(8, 4)
    monkeypatch.setattr(convergence, "corpus", lambda settings: (rows, rows))
    names = ["AdamW", "lomo"]
    runs = {name: [convergence.train(name, lr, settings) for lr in (1e-2, 2e-2)] for name in names}
    assert [run.tokens for run in runs["lomo"]] == [[0, 8, 16]] * 2
    assert runs["AdamW"][0].state_bytes == pytest.approx(8, rel=0.01)
    convergence.report(runs, settings, tmp_path)
    assert json.loads((tmp_path / "convergence.json").read_text())["optimizers"].keys() == set(names)
    assert (tmp_path / "convergence.png").exists()

    best = convergence.best_of(runs["AdamW"]).lr
    done = {"AdamW": [run for run in runs["AdamW"] if run.lr == best] * 4}
    monkeypatch.setitem(convergence.CANDIDATES, "AdamW", convergence.Candidate(torch.optim.AdamW, (best,) * 2))
    assert convergence.missing_runs(done, ["AdamW"], {"AdamW": 3}) == []


@pytest.fixture
def small_study(monkeypatch):
    """A study of seconds: a tiny Llama, and a few rows of tokens for text."""
    monkeypatch.setattr(finetune_runs, "SIZES", {"1M": (1, 64, 2, 1e-3)})
    rows = torch.arange(8 * 4).view(8, 4)
    text = finetune_runs.Texts(old=rows, new=rows.flip(0), old_held_out=rows[:2], new_held_out=rows[2:4])
    monkeypatch.setattr(finetune_runs, "texts", lambda study: text)
    return finetune_runs.Study(updates=2, length=4, vocab=300, rows=2)


def test_fine_tuning_is_studied_and_continued(monkeypatch, small_study, tmp_path, capsys):
    asked = [finetune.Run(name, rounding, 1e-2) for name in ("adalomo", "lomo") for rounding in finetune.ROUNDINGS]
    monkeypatch.setattr(finetune, "PARTS", {"some": lambda results: iter([asked])})
    assert finetune.do_runs(small_study, ["some"], tmp_path, minutes=0) == {}
    results = finetune.do_runs(small_study, ["some"], tmp_path, minutes=10)
    assert list(results) == asked
    assert all(result.curve[-1][0] == 1.0 and 0 < result.moved <= 1 for result in results.values())

    monkeypatch.setattr(finetune, "train", lambda *args: pytest.fail("a finished run was repeated"))
    assert finetune.do_runs(small_study, ["some"], tmp_path, minutes=10) == results
    finetune_report.report(results, small_study, tmp_path, tmp_path)
    assert len(json.loads((tmp_path / "finetune.json").read_text())["runs"]) == 8
    assert len(list(tmp_path.glob("finetune_*.png"))) == 4


def test_learning_rates_are_searched_until_the_best_is_inside():
    asked, results = finetune.Run("adamw", "float32", 1e-3), {}

    def finish(runs):
        for run in runs:  # the best learning rate is 4e-2
            loss = abs(torch.tensor(run.lr / 4e-2).log10().item())
            results[run] = finetune_runs.Result(loss, 0.0, [], 0.0, 0.0, 0.0, 0.0)
        return [run.lr for run in runs]

    assert finish(finetune.search(results, asked)) == [3.2e-4, 1e-3, 3.2e-3]
    assert finish(finetune.search(results, asked)) == [1e-2]
    assert finish(finetune.search(results, asked)) == [3.2e-2]
    assert finish(finetune.search(results, asked)) == [1e-1]
    assert finish(finetune.search(results, asked)) == []
    assert finish(finetune.search(results, asked, fine=True)) == [1.8e-2, 5.6e-2]
    assert finish(finetune.search(results, asked, fine=True)) == []


def test_formats_of_states_are_compared_with_float32_seed_by_seed(monkeypatch, small_study, tmp_path, capsys):
    random = dataclasses.replace(small_study, pretraining=0.0)
    settings = {"tuned": states.Setting(small_study, 1e-2, 0.95), "new": states.Setting(random, 1e-2, 0.99)}
    settings = {name: dataclasses.replace(setting, compile=False) for name, setting in settings.items()}
    monkeypatch.setattr(states, "SETTINGS", settings)
    monkeypatch.setattr(states, "SEEDS", (0, 1))
    monkeypatch.setattr(
        states, "PAIRS", [("float32", "float32"), ("compensated8", "8bit"), ("stochastic", states.LINEAR)]
    )
    monkeypatch.setattr(storage, "TABLE", dict(storage.TABLE))  # the linear one is to be forgotten
    out = ["--work", str(tmp_path / "work"), "--out", str(tmp_path)]
    states.main(out)
    found = json.loads((tmp_path / "states.json").read_text())
    assert len(found["runs"]) == 12 and (tmp_path / "states.png").stat().st_size > 10_000
    rows = {(row["setting"], row["states"]): row for row in found["table"]}
    assert [row["bytes per parameter"] for row in rows.values()] == 2 * [12.0, 5.125, 4.25]
    for setting in settings:
        base, ours = rows[setting, "float32"], rows[setting, "8bit"]
        losses = [run["new"] for run in found["runs"] if (run["setting"], run["states"]) == (setting, "float32")]
        assert losses[0] != losses[1] and base["noise"] == pytest.approx(abs(losses[0] - losses[1]) / 2**0.5)
        assert base["differences"] == [0.0, 0.0] and base["codes changed by the last update"] is None
        assert all(difference != 0.0 for difference in ours["differences"])
        assert ours["loss"] == pytest.approx(base["loss"] + ours["difference"])
        assert 0 < ours["codes changed by the last update"] <= 1

    monkeypatch.setattr(states, "train", lambda *args: pytest.fail("a finished run was repeated"))
    states.main(out)
    assert json.loads((tmp_path / "states.json").read_text())["table"] == found["table"]
    assert "12 runs" in capsys.readouterr().out


@pytest.fixture
def integers():
    """The storages of the benchmark of weights, which are forgotten afterwards."""
    makers = {**weights.STORAGES, "packed": lambda dtype, signed: storage.Integer(10)}
    for name, maker in makers.items():
        storage.register(name)(maker)
    yield
    for name in makers:
        del storage.TABLE[name]


def test_formats_of_weights_are_compared_with_float32_seed_by_seed(
    monkeypatch, small_study, integers, tmp_path, capsys
):
    monkeypatch.setattr(finetune_runs, "SIZES", {"1M": (1, 128, 2, 1e-3)})
    old = dataclasses.replace(small_study, trained="old", looks=(0.5, 1.0))
    method, formats = finetune_runs.Method("adalomo", 1e-2), ("float32", "int8", "int10, embedding bfloat16")
    known = {"old text": weights.Setting(old, method, formats, 2),
             "outliers": weights.Setting(small_study, method, formats[:2], 1, outliers=True)}  # fmt: skip
    monkeypatch.setattr(weights, "SETTINGS", known)
    out = ["--work", str(tmp_path / "work"), "--out", str(tmp_path)]
    weights.main(out)
    found = json.loads((tmp_path / "weights.json").read_text())
    assert len(found["runs"]) == 8 and (tmp_path / "weights.png").stat().st_size > 10_000
    rows = {(row["setting"], row["format"]): row for row in found["table"]}
    assert [row["bytes per weight"] for row in rows.values()] == [4, 1 + 1 / 32, 1.25 + 1 / 32, 4, 1 + 1 / 32]
    base, ours = rows["old text", "float32"], rows["old text", "int8"]
    assert base["kept"] == 1.0 and base["above"] == [0.0, 0.0] and ours["updates"] == [1, 2]
    runs = {(run["setting"], run["format"], run["seed"]): run for run in found["runs"]}
    for seed in (0, 1):
        one, other = (runs["old text", name, seed]["old"] for name in ("int8", "float32"))
        assert ours["differences"][seed] == pytest.approx(one - other) != 0.0
    before = {run["curve"][0][1] for run in runs.values() if run["setting"] == "outliers"}
    assert len(before) == 1 and before == {runs["old text", "int8", 0]["curve"][0][1]}  # the same function

    monkeypatch.setattr(weights, "train", lambda *args, **more: pytest.fail("a finished run was repeated"))
    weights.main(out)
    assert json.loads((tmp_path / "weights.json").read_text())["table"] == found["table"]
    assert "8 runs" in capsys.readouterr().out


def test_formats_of_weights_with_products_of_float32(monkeypatch, small_study, integers, tmp_path):
    monkeypatch.setattr(finetune_runs, "SIZES", {"1M": (1, 128, 2, 1e-3)})
    formats = ("float32", "bfloat16 in float32", "int8, to nearest", "int10, groups of 32")
    study = dataclasses.replace(small_study, products="float32")
    setting = weights.Setting(study, finetune_runs.Method("adalomo", 1e-2), formats, 1)
    monkeypatch.setattr(weights, "SETTINGS", {"groups": setting})
    weights.main(["--work", str(tmp_path / "work"), "--out", str(tmp_path)])
    found = json.loads((tmp_path / "weights.json").read_text())
    assert [row["bytes per weight"] for row in found["table"]] == [4, 2, 1 + 1 / 32, 1.25 + 1 / 16]
    assert len({run["curve"][0][1] for run in found["runs"]}) == 1  # the pretrained weights are bfloat16 numbers
    assert len({run["new"] for run in found["runs"]}) == len(formats)


def test_integers_without_packing_have_the_same_values(integers):
    """Those of the benchmark and those of the package; what the model sees of the upper bits lies on either side."""

    def trained(name):
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.randn(16, 256).bfloat16())
        opt = lowmem.FusedOptimizer([("w", param)], rule="lomo", lr=1e-2, rounding=name, compile=False)
        for _ in range(3):
            opt.backward((param * torch.randn(16, 256)).sum())
        return param.detach().float(), opt.named_state_dict()["state"]["w"]

    (packed, state), (other, kept) = trained("packed"), trained("int10")
    assert torch.equal(packed, other) and torch.equal(state["unit"], kept["unit"])
    assert torch.equal(kept["codes"].div(4).floor(), state["codes"].float())
    assert not torch.equal(trained("int10, fresh units")[0], packed)
    for name, shift in (("int10, 8 bits shown", 1.5), ("int10, 8 bits shown, low", 0.0)):
        shown, state = trained(name)
        codes = state["codes"].div(4).floor() * 4 + shift
        units = state["unit"].float().repeat_interleave(64, -1)
        torch.testing.assert_close(shown, (codes * units).bfloat16().float(), rtol=0, atol=0)


def test_runs_are_compared_by_their_bits_and_their_losses(monkeypatch, tmp_path, capsys):
    weights = {name: {"w": torch.tensor([1.0, -4.0])} for name in determinism.RUNS}
    weights["2 threads"] = {"w": torch.tensor([1.5, -4.0])}

    def train(run, steps, folder):
        (name,) = (name for name, known in determinism.RUNS.items() if known is run)
        if name == "resumed twice":
            raise MeasurementError("it failed")
        return weights[name], {20: 2.0 + (name == "2 threads")}

    monkeypatch.setattr(determinism, "train", train)
    monkeypatch.setattr(determinism, "write_inputs", lambda folder: None)
    names = ("another directory", "2 threads", "resumed twice")
    determinism.main([*only(*names), "--out", str(tmp_path)])
    found = json.loads((tmp_path / "determinism.json").read_text())
    same = {"against": "a run", "identical": True, "weights": 0.0, "loss": 0.0}
    other = {"against": "a run", "identical": False, "weights": 0.125, "loss": 0.5}
    assert found["differences"] == {"another directory": same, "2 threads": other}
    assert found["failed"] == {"resumed twice": "it failed"}
    assert "1.2e-01" in capsys.readouterr().out


def test_every_command_has_a_help_that_names_its_options(capsys):
    for module in (step, policies, update, dispatch, growth, long_context, loop, convergence, states, determinism):
        assert status(module.main, "--help") == 0
        assert "--out DIR" in capsys.readouterr().out


def test_ctrl_c_leaves_nothing_behind(tmp_path):
    small = [*SMALL, "--rounds", "50"]  # it is not to end by itself
    command = [sys.executable, "-m", "benchmarks.step", *small, "--out", str(tmp_path / "bench")]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background job ignores it
    with subprocess.Popen(command, **pipes, env=environment, cwd=ROOT, preexec_fn=heard) as main:
        while not (
            measured := [
                p for p in psutil.Process(main.pid).children() if "benchmarks.processes" in "".join(p.cmdline())
            ]
        ):
            assert main.poll() is None
            time.sleep(0.05)
        err = None
        while err is None:  # Python drops an interrupt that comes in the middle of a finalizer; press again
            main.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                _, err = main.communicate(timeout=15)
    assert main.returncode == 130
    assert err.endswith("interrupted\n") and "Traceback" not in err
    assert not psutil.wait_procs(measured, timeout=60)[1]  # one that was killed has to be reaped by its new parent
    assert not (tmp_path / "bench").exists()
    assert not list(temporary.iterdir())


MISTAKES = {
    "unknown method": (["--only", "AdamW, fuse"], "method 'AdamW, fuse' is unknown. Did you mean 'AdamW, fused'?"),
    "list of names": (["--only", "x"], "floor; lowmem adalomo; lowmem adalomo, stochastic; lowmem adalomo, int10; "),
    "unknown rule": (["--rule", "lionn"], "Did you mean 'lion'?"),
    "unknown size": (["--size", "3M"], "invalid choice: '3M'"),
    "not a count": (["--rounds", "0"], "'0' is not a positive integer"),
    "nothing can run": (
        ["--only", "FlashOptim AdamW"],
        "none of the methods can run here. FlashOptim AdamW: pip install",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_message_and_nothing_is_left(arguments, message, nothing_installed, tmp_path, capsys):
    assert status(step.main, *arguments, "--out", str(tmp_path / "bench")) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert not (tmp_path / "bench").exists()


def test_a_folder_that_cannot_be_created_is_reported_before_anything_runs(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert status(step.main, "--out", str(tmp_path / "file")) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("who", ["ours", "peer"])
def test_only_a_failure_of_lowmem_is_an_exit_status(who, simulate, monkeypatch, tmp_path, capsys):
    methods = simulate(**{"other": [figures(1.0)], who: ["ValueError: no"]})
    monkeypatch.setattr(step, "all_methods", lambda rules: methods)
    arguments = [*SMALL, "--out", str(tmp_path)]
    if who == "ours":
        assert status(step.main, *arguments) == 1
    else:
        step.main(arguments)
    assert f"{who} failed: ValueError: no" in capsys.readouterr().out
    report = json.loads((tmp_path / "step.json").read_text())
    assert report["failed"] == {who: "ValueError: no"} and list(report["results"]) == ["other"]
    assert (tmp_path / "step.png").exists()


@pytest.mark.parametrize(
    ("line", "dtype"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16", "bfloat16"),
        ("flags\t\t: amx_bf16 fpu", "bfloat16"),
        ("Features\t: fp asimd bf16", "bfloat16"),
        ("flags\t\t: fpu avx512f", "float32"),
        ("", "float32"),
    ],
)
def test_float32_is_the_default_where_the_cpu_emulates_bfloat16(line, dtype, monkeypatch, tmp_path):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\nbugs\t\t: none\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(reports, "CPUINFO", tmp_path / "cpuinfo")
    assert comparison.make_parser("Doc.", 1, 1, 1).parse_args([]).dtype == dtype
    emulated = dtype == "float32"
    assert ("no bfloat16 instructions" in reports.headline(dtype)) == emulated
    assert reports.machine()["bfloat16_instructions"] != emulated


# -- methods -----------------------------------------------------------------------------------------------------------


def test_rules_can_be_added_and_every_method_can_be_sent_to_another_process():
    methods = all_methods(["lion", "torch.optim.SGD"])
    assert {"lowmem lion", "lowmem torch.optim.SGD"} <= methods.keys()
    assert pickle.loads(pickle.dumps(methods)).keys() == methods.keys()
    assert [name for name, method in methods.items() if method.kind == "floor"] == [FLOOR]
    assert list(select(methods, ["lowmem lion", FLOOR])) == [FLOOR, "lowmem lion"]


def test_a_peer_that_is_not_installed_says_how_to_install_it():
    assert Method(drop_gradients, package="no-such-package").missing() == "pip install no-such-package"
    assert Method(drop_gradients, package="torch").missing() is None
    assert (Method(drop_gradients, gpu=True).missing() is None) == torch.cuda.is_available()


def trained(make, tiny_llama, rows):
    """The weights after two steps of the micro-batches in `rows`, and how many gradients are left."""
    model = tiny_llama()
    step = make(model)
    losses = [partial(lambda ids: model(input_ids=ids, labels=ids).loss, ids) for ids in rows]
    for _ in range(2):
        step(losses)
    return [p.detach() for p in model.parameters()], sum(p.grad is not None for p in model.parameters())


def test_methods_train_as_documented(tiny_llama):
    adamw = {"cls": torch.optim.AdamW, "foreach": False}
    rows = torch.randint(97, (2, 8)).split(1)
    start = [p.detach() for p in tiny_llama().parameters()]
    weights, gradients = trained(drop_gradients, tiny_llama, rows)
    torch.testing.assert_close(weights, start, rtol=0, atol=0)
    assert gradients == 0

    expected, gradients = trained(partial(ordinary, **adamw), tiny_llama, rows)
    assert gradients == 0 and not all(map(torch.equal, expected, start))
    options = {"rule": torch.optim.AdamW, "foreach": False, "accumulation_dtype": "gradient", "policy": "deferred"}
    weights, _ = trained(partial(fused, **options), tiny_llama, rows)
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)

    expected, _ = trained(partial(ordinary, **adamw), tiny_llama, rows[:1])
    weights, gradients = trained(partial(hooked, **adamw), tiny_llama, rows[:1])
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)
    assert gradients == 0


# -- one measurement ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_the_settings_count_the_parameters_that_the_model_has(size):
    workload = Workload(size, batch=1, tokens=8, dtype="bfloat16", steps=1)
    params = list(workload.model("meta").parameters())
    settings = workload.settings()
    assert settings["parameters"] == sum(p.numel() for p in params)
    assert settings["weights"] == sum(p.nbytes for p in params)
    about = float(size[:-1]) * {"M": 1e6, "B": 1e9}[size[-1]]
    assert settings["parameters"] == pytest.approx(about, rel=0.06)


def test_what_a_step_allocates_and_frees_is_counted():
    live = [torch.zeros(2**20)]

    def transient():
        for _ in range(3):
            torch.zeros(2**20)

    def replaced():
        live.append(torch.zeros(2**20))
        del live[0]

    nothing = measurement.peak_of_tensors(lambda: None)
    assert nothing >= live[0].nbytes
    assert measurement.peak_of_tensors(transient) == nothing + 4 * 2**20
    assert measurement.peak_of_tensors(replaced) == nothing + 4 * 2**20
    assert measurement.peak_of_temporaries(transient) == 4 * 2**20


def test_a_process_returns_its_result_its_error_or_its_status(tmp_path):
    assert alone(os.getpid, folder=tmp_path / "new") != os.getpid()
    with pytest.raises(MeasurementError, match=r"^json.decoder.JSONDecodeError: Expecting value: line 1 column 1 .*$"):
        alone(json.loads, "")
    with pytest.raises(MeasurementError, match=f"^its process exited with status {-signal.SIGABRT}$"):
        alone(os.abort)


def test_a_command_can_call_its_own_functions_in_a_process(tmp_path):
    lines = ("from benchmarks.processes import alone", "def six():", "    return 6", "if __name__ == '__main__':")
    (tmp_path / "mine.py").write_text("\n".join((*lines, "    print(alone(six))")))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mine"]
    assert subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout == "6\n"


# -- all of them -------------------------------------------------------------------------------------------------------


def test_figures_are_medians_and_the_first_step_is_the_longest(simulate, capsys):
    rows = [figures(seconds, first_step=first) for seconds, first in ((3.0, 9.0), (1.0, 2.0), (2.0, 2.0))]
    methods = simulate(ours=rows, peer=[figures(4.0), "ValueError: no"])
    result = comparison.compare(methods, WORKLOAD, 3, Console(stderr=True))
    assert result.results == {"ours": figures(2.0, first_step=9.0)}
    assert result.failed == {"peer": "ValueError: no"}  # and it is not tried again
    assert "round 2 of 3: peer, failed: ValueError: no\n" in capsys.readouterr().err


def rows_of(result, base, capsys):
    comparison.report(result, base)
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]


def test_the_table_shows_what_was_measured(capsys):
    settings = {**WORKLOAD.settings(), "rounds": 1}
    peak = settings["weights"] + 5 * 2**20
    methods = {name: Method(drop_gradients) for name in ("a", "b", "c")}
    results = {
        "a": figures(0.5, tensor_peak=peak),
        "b": figures(1.25, process_peak=2**30 - 7 * 2**20, tensor_peak=peak),
    }
    result = Comparison(methods, settings, results, failed={"c": "ValueError: [no]"})
    rows = rows_of(result, "a", capsys)
    assert ["a", "0.500", "1.00", "16", "5", "0", "1.0"] in rows
    assert ["b", "1.250", "2.50", "6", "5", "-7", "1.0"] in rows
    assert ["c", "failed", *["–"] * 5] in rows
    comparison.report(result, "a")
    assert "c failed: ValueError: [no]" in capsys.readouterr().out
    assert ["a", "0.500", "–", "16", "5", "–", "1.0"] in rows_of(result, "floor", capsys)
    del results["b"]["process_peak"]
    assert ["b", "1.250", "2.50", "6", "5", "–", "1.0"] in rows_of(result, "a", capsys)
