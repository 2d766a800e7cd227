"""Benchmarks against peers: commands measure and write, methods train as they say, and failures are told apart."""

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from benchmarks import (
    dispatch,
    long_context,
    measurement,
    methods,
    step,
    update,
)
from benchmarks.measurement import SIZES, Workload
from benchmarks.methods import FLOOR, Method, all_methods, drop_gradients, fused, hooked, ordinary, select
from benchmarks.processes import MeasurementError, alone

ROOT = Path(__file__).parents[2]
SMALL = ("--size", "1M", "--tokens", "8", "--steps", "1", "--rounds", "1")
WORKLOAD = Workload("1M", batch=1, tokens=8, dtype="float32", steps=1)


def only(*names):
    return [word for name in names for word in ("--only", name)]


def status(main, *arguments):
    with pytest.raises(SystemExit) as done:
        main(arguments)
    return done.value.code


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.setattr(methods, "installed", lambda package: False)


# -- the commands ------------------------------------------------------------------------------------------------------


def fake_peak(model, tokens, setting, **changes):
    """4 MiB, and per token of 512 KiB and of an input per layer, which may be offloaded."""
    model = {**model, **changes}
    layer = 2**20 + (0 if setting.get("offload") else 2 * model["hidden_size"] * tokens)
    return 2**22 + tokens * 2**19 + model["num_hidden_layers"] * layer + 3 * model["vocab_size"]


COMMANDS = {  # arguments, and a line of what is printed
    step: ([*SMALL, "--dtype", "bfloat16", *only(FLOOR, "AdamW, fused", "FlashOptim AdamW")], "| AdamW, fused "),
    update: (["--size", "64", "--rounds", "1", *only("adalomo, eager", update.BASE)], "| adalomo, eager "),
    dispatch: (["--count", "3", "--repeats", "1"], "| 3 tensors of | bare hook |"),
    long_context: (["--tokens", "65536"], "| Llama-3.2-1B | 24 GiB |"),
}


@pytest.fixture
def run(monkeypatch, nothing_installed, tmp_path, capsys):
    """A function: what a command prints and writes, at a small size and without processes of its own."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for module in (step, update):
        monkeypatch.setattr(module, "alone", lambda function, *args, folder=None: function(*args))
    monkeypatch.setattr(long_context, "peak", fake_peak)
    monkeypatch.setattr(long_context, "planned", lambda config, device: SimpleNamespace(items={"weights": 2**20}))

    def of(module):
        words, _ = COMMANDS[module]
        module.main([*words, "--out", str(tmp_path / "new")])
        (file,) = (tmp_path / "new").glob("*.json")
        return capsys.readouterr().out, json.loads(file.read_text())

    return of


@pytest.mark.parametrize("module", COMMANDS, ids=lambda module: module.__name__)
def test_a_command_measures_prints_a_table_and_writes_json(module, run):
    out, report = run(module)
    assert any(line.startswith(COMMANDS[module][1]) for line in out.splitlines()), out
    assert report["machine"]["torch"] == torch.__version__ and not report.get("failed")


def test_results_of_a_step(run):
    out, report = run(step)
    assert "left out: FlashOptim AdamW (pip install flashoptim)" in out
    floor, adamw = (report["results"][name] for name in (FLOOR, "AdamW, fused"))
    weights = report["settings"]["weights"]
    assert weights == 2 * 1_049_472
    assert floor["tensor_peak"] < 2 * weights  # no gradient except the largest, and activations
    assert 4 * weights <= adamw["tensor_peak"] < 5 * weights  # gradients and two moments


def test_figures_of_an_update(run):
    assert run(update)[1]["results"]["adalomo, eager"]["state"] == 4 * (64 + 64) / 64**2
    in_bfloat16 = update.METHODS.keys() - update.methods("float32").keys()
    assert in_bfloat16 >= {"adamw, compensated", f"adamw{update.WIDE}", f"{update.BASE}{update.WIDE}"}


def test_figures_of_long_sequences(run):
    report = run(long_context)[1]
    assert all(row["extrapolated"] == row["full"] for row in report["checked"])
    row = report["peaks"]["Llama-3.2-1B"]["offload to the host"]
    assert row["2048"] == 2**22 + 2**30 + 16 * 2**20 + 3 * 128256
    assert report["fits"]["Llama-3.2-1B"]["offload to the host"] == {"24": 46 * 1024 - 1024, "80": 65536}


MISTAKES = {
    "unknown method": (["--only", "AdamW, fuse"], "method 'AdamW, fuse' is unknown. Did you mean 'AdamW, fused'?"),
    "unknown rule": (["--rule", "lionn"], "Did you mean 'lion'?"),
    "not a count": (["--rounds", "0"], "'0' is not a positive integer"),
    "nothing can run": (["--only", "FlashOptim AdamW"], "can run here. FlashOptim AdamW: pip install"),
    "a file as folder": (["--out", "file"], "cannot be written"),
}


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_exit_with_one_message_and_leave_no_files(
    arguments, message, nothing_installed, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    assert status(step.main, "--out", "bench", *arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "mine")]


def test_ctrl_c_leaves_no_files_or_processes(tmp_path):
    command = [sys.executable, "-m", "benchmarks.step", *SMALL, "--rounds", "50", "--out", str(tmp_path / "bench")]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background job ignores it
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, cwd=ROOT, preexec_fn=heard) as main:
        process = psutil.Process(main.pid)
        while not (measured := [p for p in process.children() if "spawn_main" in "".join(p.cmdline())]):
            time.sleep(0.05)
        while main.poll() is None:  # Python drops an interrupt that comes in the middle of a finalizer
            main.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                main.wait(timeout=30)
        assert (main.returncode, main.stderr.read()[-12:]) == (130, b"interrupted\n")
    assert not psutil.wait_procs(measured, timeout=60)[1]
    assert not list(tmp_path.iterdir())


# -- methods -----------------------------------------------------------------------------------------------------------


def test_methods_are_selected_by_name_and_can_be_sent_to_another_process():
    methods = all_methods(["lion", "torch.optim.SGD"])
    assert {"lowmem lion", "lowmem torch.optim.SGD"} <= pickle.loads(pickle.dumps(methods)).keys()
    assert list(select(methods, ["lowmem lion", FLOOR])) == [FLOOR, "lowmem lion"]
    assert Method(drop_gradients, package="no-such-package").missing() == "pip install no-such-package"
    assert Method(drop_gradients, package="torch").missing() is None


def test_methods_train_as_documented(tiny_llama):
    """The floor trains nothing, and the others train as the ordinary loop. None keeps gradients."""
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


# -- measurements ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_the_settings_count_the_parameters_that_the_model_has(size):
    workload = Workload(size, batch=1, tokens=8, dtype="bfloat16", steps=1)
    params = list(workload.model("meta").parameters())
    count = workload.settings()["parameters"]
    assert (count, workload.settings()["weights"]) == (sum(p.numel() for p in params), sum(p.nbytes for p in params))
    assert count == pytest.approx(float(size[:-1]) * {"M": 1e6, "B": 1e9}[size[-1]], rel=0.06)


def test_a_step_counts_its_allocations_and_frees():
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


# -- all of them -------------------------------------------------------------------------------------------------------


def figures(seconds, process_peak=2**30, **more):
    return {"seconds": seconds, "first_step": 1.0, "tensor_peak": 2**24, "process_peak": process_peak, **more}


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

        monkeypatch.setattr(step, "alone", measured)
        monkeypatch.setattr(Method, "missing", lambda self: None)
        return {name: Method(drop_gradients, "ours" if name == "ours" else "peer", name) for name in runs}

    return give


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


def test_figures_are_medians_and_the_first_step_is_the_longest(simulate, capsys):
    rows = [figures(seconds, first_step=first) for seconds, first in ((3.0, 9.0), (1.0, 2.0), (2.0, 2.0))]
    methods = simulate(ours=rows, peer=[figures(4.0), "ValueError: no"])
    results, failed = step.compare(methods, WORKLOAD, 3)
    assert results == {"ours": figures(2.0, first_step=9.0)}
    assert failed == {"peer": "ValueError: no"}  # and it is not tried again
    assert "round 2 of 3: peer, failed: ValueError: no\n" in capsys.readouterr().err


@pytest.mark.parametrize(("base", "ratio", "more"), [("a", "2.50", "-7"), ("floor", "–", "–")])
def test_the_table_compares_with_the_base(base, ratio, more):
    settings = {**WORKLOAD.settings(), "rounds": 1}
    peak = settings["weights"] + 5 * 2**20
    results = {"a": figures(0.5), "b": figures(1.25, process_peak=2**30 - 7 * 2**20, tensor_peak=peak)}
    table = step.ratios({"settings": settings, "results": results}, base)[""]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert ["b", "1.250", ratio, "6", "5", more, "1.0"] in rows
