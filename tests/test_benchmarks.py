"""Peers side by side: what is measured, what is said of it, what becomes of those that fail; but for no time."""

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from functools import partial

import psutil
import pytest
import torch
from rich.console import Console

from benchmarks import comparison, contenders, measurement
from benchmarks.baselines import FLOOR, Contender, chosen, drop_gradients, fused, hooked, ordinary
from benchmarks.comparison import Comparison
from benchmarks.measurement import SIZES, Workload, alone
from lowmem import cli

SMALL = ("--size", "1M", "--tokens", "8", "--steps", "1", "--rounds", "1")
WORKLOAD = Workload("1M", batch=1, tokens=8, dtype="float32", steps=1)


def bench(capsys, folder, *arguments):
    """Runs `lowmem bench` into a folder; its exit status, stdout and stderr."""
    with pytest.raises(SystemExit) as done:
        cli.main(["bench", *arguments, "--out", str(folder)])
    printed = capsys.readouterr()
    return done.value.code, printed.out, printed.err


def only(*names):
    return [word for name in names for word in ("--only", name)]


def figures(seconds, process_peak=2**30, **more):
    return {"seconds": seconds, "first_step": 1.0, "tensor_peak": 2**24, "process_peak": process_peak, **more}


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.setattr(contenders, "version", lambda package: None)


@pytest.fixture
def pretend(monkeypatch):
    """A function: lets each contender find what is given by its name, one run after the other, and no process start."""

    def give(**runs):
        found = {name: iter(rows) for name, rows in runs.items()}
        monkeypatch.setattr(comparison, "alone", lambda contender, workload, folder: next(found[contender.package]))
        monkeypatch.setattr(Contender, "missing", lambda self: None)
        return {name: Contender(drop_gradients, "ours" if name == "ours" else "peer", name) for name in runs}

    return give


# -- The command ---------------------------------------------------------------------------------------------------


def test_a_bench_from_end_to_end(nothing_installed, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # for the processes that are measured
    folder = tmp_path / "new" / "bench"
    code, out, err = bench(capsys, folder, *SMALL, *only(FLOOR, "AdamW, fused", "FlashOptim AdamW"))
    assert code == 0, err
    assert "Llama of 1,049,472 parameters (3 layers, hidden 128, vocabulary 1,024), bfloat16, 1 × 8 tokens" in out
    assert "left out: FlashOptim AdamW (pip install flashoptim)" in out
    assert "round 1 of 1: AdamW, fused, " in err
    assert sorted(path.name for path in folder.iterdir()) == ["bench.json", "bench.png"]
    assert (folder / "bench.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")

    report = json.loads((folder / "bench.json").read_text())
    assert report["settings"]["threads"] == torch.get_num_threads()
    assert report["machine"]["torch"] == torch.__version__
    assert list(report["left_out"]) == ["FlashOptim AdamW"] and report["failed"] == {}
    floor, adamw = (report["results"][name] for name in (FLOOR, "AdamW, fused"))
    weights = report["settings"]["weights"]
    assert weights == 2 * 1_049_472
    assert floor["tensor_peak"] < 2 * weights  # no gradient but the largest, and activations
    assert 4 * weights <= adamw["tensor_peak"] < 5 * weights  # gradients and two states
    (line,) = (line for line in out.splitlines() if line.startswith("AdamW, fused "))
    assert line.split()[3] == f"{adamw['seconds'] / floor['seconds']:.2f}"
    assert line.split()[5] == f"{(adamw['tensor_peak'] - weights) / 2**20:.0f}"


def test_ctrl_c_leaves_nothing_behind(tmp_path):
    command = [sys.executable, "-m", "lowmem", "bench", *SMALL, "--out", str(tmp_path / "bench")]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as main:
        while not (
            measured := [p for p in psutil.Process(main.pid).children() if "measurement.serve" in "".join(p.cmdline())]
        ):
            assert main.poll() is None
            time.sleep(0.05)
        err = None
        while err is None:  # Python drops one that comes in the middle of a finalizer; whoever pressed it presses again
            main.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                _, err = main.communicate(timeout=15)
    assert main.returncode == 130
    assert err.endswith("interrupted\n") and "Traceback" not in err
    assert not any(process.is_running() for process in measured)
    assert not (tmp_path / "bench").exists()
    assert not list(temporary.iterdir())


MISTAKES = {
    "unknown contender": (
        ["--only", "AdamW, fuse"],
        "contender 'AdamW, fuse' is unknown. Did you mean 'AdamW, fused'?",
    ),
    "no list of names": (
        ["--only", "x"],
        "floor; lowmem adalomo; lowmem adalomo, stochastic; lowmem adamw; AdamW, fused",
    ),
    "unknown rule": (["--rule", "lionn"], "Did you mean 'lion'?"),
    "unknown size": (["--size", "3M"], "invalid choice: '3M'"),
    "not a count": (["--rounds", "0"], "'0' is not a count of one or more"),
    "nothing can run": (["--only", "FlashOptim AdamW"], "no contender can run here. FlashOptim AdamW: pip install"),
}


@pytest.mark.parametrize(("arguments", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_message_and_nothing_is_left(arguments, said, nothing_installed, tmp_path, capsys):
    code, out, err = bench(capsys, tmp_path / "bench", *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert not (tmp_path / "bench").exists()


def test_a_folder_that_cannot_be_made_is_said_before_anything_runs(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    code, _, err = bench(capsys, tmp_path / "file")
    assert code == 2 and "can't be written" in err
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(("who", "status"), [("ours", 1), ("peer", 0)])
def test_the_exit_status_is_of_ours_alone(who, status, pretend, monkeypatch, tmp_path, capsys):
    taking_part = pretend(**{"other": [figures(1.0)], who: ["ValueError: no"]})
    monkeypatch.setattr(cli, "chosen", lambda rules, only: taking_part)
    code, out, _ = bench(capsys, tmp_path, *SMALL)
    assert code == status
    assert f"{who} failed: ValueError: no" in out
    report = json.loads((tmp_path / "bench.json").read_text())
    assert report["failed"] == {who: "ValueError: no"} and list(report["results"]) == ["other"]
    assert (tmp_path / "bench.png").exists()


# -- Contenders ----------------------------------------------------------------------------------------------------


def test_rules_of_ours_can_be_added_and_all_can_go_to_another_process():
    known = chosen(["lion", "torch.optim.SGD"])
    assert {"lowmem lion", "lowmem torch.optim.SGD"} <= known.keys()
    assert pickle.loads(pickle.dumps(known)).keys() == known.keys()
    assert [name for name, contender in known.items() if contender.kind == "floor"] == [FLOOR]
    assert list(chosen(["lion"], ["lowmem lion", FLOOR])) == [FLOOR, "lowmem lion"]


def test_a_peer_that_is_not_installed_says_what_installs_it():
    assert Contender(drop_gradients, package="no-such-package").missing() == "pip install no-such-package"
    assert Contender(drop_gradients, package="torch").missing() is None
    assert (Contender(drop_gradients, gpu=True).missing() is None) == torch.cuda.is_available()


def trained(make, tiny_llama, rows):
    """The weights after two steps of the micro-batches in `rows`, and how many gradients are left."""
    model = tiny_llama()
    step = make(model)
    losses = [partial(lambda ids: model(input_ids=ids, labels=ids).loss, ids) for ids in rows]
    for _ in range(2):
        step(losses)
    return [p.detach() for p in model.parameters()], sum(p.grad is not None for p in model.parameters())


def test_contenders_train_as_they_say(tiny_llama):
    adamw = {"cls": torch.optim.AdamW, "foreach": False}
    rows = torch.randint(97, (2, 8)).split(1)
    start = [p.detach() for p in tiny_llama().parameters()]
    weights, gradients = trained(drop_gradients, tiny_llama, rows)
    torch.testing.assert_close(weights, start, rtol=0, atol=0)
    assert gradients == 0

    expected, gradients = trained(partial(ordinary, **adamw), tiny_llama, rows)
    assert gradients == 0 and not all(map(torch.equal, expected, start))
    settings = {"rule": torch.optim.AdamW, "foreach": False, "accumulation_dtype": "gradient", "policy": "deferred"}
    weights, _ = trained(partial(fused, **settings), tiny_llama, rows)
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)

    expected, _ = trained(partial(ordinary, **adamw), tiny_llama, rows[:1])
    weights, gradients = trained(partial(hooked, **adamw), tiny_llama, rows[:1])
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)
    assert gradients == 0


# -- One measurement -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_the_settings_count_the_parameters_that_the_model_has(size):
    workload = Workload(size, batch=1, tokens=8, dtype="bfloat16", steps=1)
    params = list(workload.model("meta").parameters())
    settings = workload.settings()
    assert settings["parameters"] == sum(p.numel() for p in params)
    assert settings["weights"] == sum(p.nbytes for p in params)
    about = float(size[:-1]) * {"M": 1e6, "B": 1e9}[size[-1]]
    assert settings["parameters"] == pytest.approx(about, rel=0.06)


def test_what_a_step_allocates_is_counted_and_what_it_frees_as_well():
    kept = [torch.zeros(2**20)]

    def transient():
        for _ in range(3):
            torch.zeros(2**20)

    def replaced():
        kept.append(torch.zeros(2**20))
        del kept[0]

    nothing = measurement._most_allocated(lambda: None)
    assert nothing >= kept[0].nbytes
    assert measurement._most_allocated(transient) == nothing + 4 * 2**20
    assert measurement._most_allocated(replaced) == nothing + 4 * 2**20


def dies(model):
    os.abort()


def test_a_failure_is_its_line_and_a_death_its_status(tmp_path):
    why = alone(Contender(partial(ordinary, cls=torch.optim.LBFGS)), WORKLOAD, tmp_path)
    assert why.startswith("TypeError: ") and "closure" in why and "\n" not in why
    assert alone(Contender(dies), WORKLOAD, tmp_path) == f"its process ended with status {-signal.SIGABRT}"


# -- All of them ---------------------------------------------------------------------------------------------------


def test_figures_are_medians_and_the_first_step_the_longest(pretend, capsys):
    firsts = [figures(seconds, first_step=first) for seconds, first in ((3.0, 9.0), (1.0, 2.0), (2.0, 2.0))]
    taking_part = pretend(ours=firsts, peer=[figures(4.0), "ValueError: no"])
    found = comparison.compare(taking_part, WORKLOAD, 3, Console(stderr=True))
    assert found.results == {"ours": figures(2.0, first_step=9.0)}
    assert found.failed == {"peer": "ValueError: no"}  # and it is not tried again
    assert "round 2 of 3: peer, failed: ValueError: no\n" in capsys.readouterr().err


def rows_of(found, base, capsys):
    console = Console(width=40)  # as narrow as it may be, no figure is cut off
    comparison.tell(found, base, console)
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_the_table_is_of_what_was_measured(capsys):
    settings = {**WORKLOAD.settings(), "rounds": 1}
    peak = settings["weights"] + 5 * 2**20
    taking_part = {name: Contender(drop_gradients) for name in ("a", "b", "c")}
    results = {
        "a": figures(0.5, tensor_peak=peak),
        "b": figures(1.25, process_peak=2**30 - 7 * 2**20, tensor_peak=peak),
    }
    found = Comparison(taking_part, settings, results, failed={"c": "ValueError: [no]"})
    rows = rows_of(found, "a", capsys)
    assert ["a", "0.500", "1.00", "16", "5", "0", "1.0"] in rows
    assert ["b", "1.250", "2.50", "6", "5", "-7", "1.0"] in rows
    assert ["c", "failed", *["–"] * 5] in rows
    assert ["c", "failed:", "ValueError:", "[no]"] in rows
    assert ["a", "0.500", "–", "16", "5", "–", "1.0"] in rows_of(found, "floor", capsys)
    del results["b"]["process_peak"]
    assert ["b", "1.250", "2.50", "6", "5", "–", "1.0"] in rows_of(found, "a", capsys)
