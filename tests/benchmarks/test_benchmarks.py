"""Benchmarks against peers: what is measured, what is reported, what happens to methods that fail; except for times."""

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
    memory_bars,
    methods,
    policies,
    rehearsal,
    reports,
    step,
    timeline,
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


def figures(seconds, process_peak=2**30, **more):
    return {"seconds": seconds, "first_step": 1.0, "tensor_peak": 2**24, "process_peak": process_peak, **more}


def status(main, *arguments):
    with pytest.raises(SystemExit) as done:
        main(arguments)
    return done.value.code


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.setattr(methods, "installed", lambda package: False)


@pytest.fixture
def in_this_process(monkeypatch):
    """Starts no process for a measurement."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for module in (step, update):
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

        monkeypatch.setattr(step, "alone", measured)
        monkeypatch.setattr(Method, "missing", lambda self: None)
        return {name: Method(drop_gradients, "ours" if name == "ours" else "peer", name) for name in runs}

    return give


# -- the commands ------------------------------------------------------------------------------------------------------


def test_steps_are_measured_compared_and_written(nothing_installed, in_this_process, tmp_path, capsys):
    folder = tmp_path / "new" / "bench"
    step.main([*SMALL, "--dtype", "bfloat16", *only(FLOOR, "AdamW, fused", "FlashOptim AdamW"), "--out", str(folder)])
    out, err = capsys.readouterr()
    assert ", bfloat16, " in out
    assert "left out: FlashOptim AdamW (pip install flashoptim)" in out
    assert "wrote " in out
    assert "round 1 of 1: AdamW, fused, " in err
    assert [path.name for path in folder.iterdir()] == ["step.json"]

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
    update.main(["--size", "64", "--rounds", "1", *only(*names), "--out", str(tmp_path)])
    assert "left out: optimi Lion (pip install torch-optimi)" in capsys.readouterr().out
    results = json.loads((tmp_path / "update.json").read_text())["results"]
    assert results["adamw, eager"]["state"] == pytest.approx(8, rel=1e-3)
    assert results["adalomo, eager"]["state"] == 4 * (64 + 64) / 64**2


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


def test_long_sequences_are_planned_drawn_and_written(monkeypatch, tmp_path, capsys):
    def peak(model, tokens, setting, **changes):
        """4 MiB, and per token of 512 KiB and of an input per layer, which may be offloaded."""
        model = {**model, **changes}
        layer = 2**20 + (0 if setting.get("offload") else 2 * model["hidden_size"] * tokens)
        return 2**22 + tokens * 2**19 + model["num_hidden_layers"] * layer + 3 * model["vocab_size"]

    monkeypatch.setattr(long_context, "peak", peak)
    monkeypatch.setattr(long_context, "planned", lambda config, device: SimpleNamespace(items={"weights": 2**20}))
    long_context.main(["--tokens", "65536", "--out", str(tmp_path)])
    report = json.loads((tmp_path / "long_context.json").read_text())
    for row in report["checked"]:
        assert row["extrapolated"] == row["full"]
    row = report["peaks"]["Llama-3.2-1B"]["offload to the host"]
    assert row["2048"] == 2**22 + 2**30 + 16 * 2**20 + 3 * 128256
    assert report["fits"]["Llama-3.2-1B"]["offload to the host"] == {"24": 46 * 1024 - 1024, "80": 65536}
    assert (tmp_path / "long_context.png").exists()
    assert "| Llama-3.2-1B | 24 GiB |" in capsys.readouterr().out


def test_every_command_has_a_help_that_names_its_options(capsys):
    for module in (step, policies, update, dispatch, long_context, memory_bars, timeline, rehearsal):
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
            measured := [p for p in psutil.Process(main.pid).children() if "spawn_main" in "".join(p.cmdline())]
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
    assert step.make_parser("Doc.", 1, 1, 1).parse_args([]).dtype == dtype
    assert reports.machine()["bfloat16_instructions"] == (dtype == "bfloat16")


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
    results, failed = step.compare(methods, WORKLOAD, 3)
    assert results == {"ours": figures(2.0, first_step=9.0)}
    assert failed == {"peer": "ValueError: no"}  # and it is not tried again
    assert "round 2 of 3: peer, failed: ValueError: no\n" in capsys.readouterr().err


def test_the_table_shows_what_was_measured():
    settings = {**WORKLOAD.settings(), "rounds": 1}
    peak = settings["weights"] + 5 * 2**20
    results = {
        "a": figures(0.5, tensor_peak=peak),
        "b": figures(1.25, process_peak=2**30 - 7 * 2**20, tensor_peak=peak),
    }

    def rows_of(base):
        table = step.ratios({"settings": settings, "results": results}, base)[""]
        return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]

    assert ["a", "0.500", "1.00", "16", "5", "0", "1.0"] in rows_of("a")
    assert ["b", "1.250", "2.50", "6", "5", "-7", "1.0"] in rows_of("a")
    assert ["a", "0.500", "–", "16", "5", "–", "1.0"] in rows_of("floor")
    del results["a"]["process_peak"]
    assert ["b", "1.250", "2.50", "6", "5", "–", "1.0"] in rows_of("a")
