"""`lowmem sft` under launchers: several processes over gloo form one run."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from support.processes import PATIENCE, Launched, free_port
from support.products import FULL

from scripts.make_model import make_model, train_tokenizer

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
SHARDED = {
    "zero3": ("--deepspeed", str(ROOT / "configs" / "zero3.json")),
    "fsdp2": ("--fsdp", "--fsdp_config", '{"cpu_ram_efficient_loading": true}'),
}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Creates the configuration of a tiny run, its data and its model."""
    folder = tmp_path_factory.mktemp("launch")
    words = ["one two", "three", "four five six"]
    rows = [{"text": " ".join(words[n % 3] for n in range(i, i + 5))} for i in range(64)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = train_tokenizer([row["text"] for row in rows], 280)
    make_model(folder / "model", tokenizer, num_key_value_heads=2, **SIZES)
    config = {
        "output_dir": str(folder / "run"), "model_name_or_path": str(folder / "model"), "dtype": "float32",
        "datasets": [{"path": "json", "data_files": str(folder / "data.jsonl")}], "max_length": 32,
        "fused": {"rule": "adalomo"}, "learning_rate": 1e-2, "max_grad_norm": 1.0, "max_steps": 6, "logging_steps": 1,
        "save_steps": 3, "per_device_train_batch_size": 4, "report_to": "none",
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def launched(folder, *arguments, ranks=0):
    """Starts one process, or `ranks` processes with the environment that a launcher sets."""
    words = ("lowmem", "sft", "--config", str(folder / "config.yaml"), *arguments)
    return Launched.ranks(ranks, *words, environment=ENVIRONMENT)


def run(folder, run_dir, *arguments, ranks=0, batch=None):
    """Completes a run. One process uses batches of eight, and two processes use batches of four."""
    size = ("--per_device_train_batch_size", str(batch or 8 // max(ranks, 1)))
    done = launched(folder, "--output_dir", str(run_dir), *size, *arguments, ranks=ranks).finish()
    assert done.returncode == 0, done.stderr
    return done


def metrics(run_dir, key="loss"):
    return [line for line in map(json.loads, (run_dir / "metrics.jsonl").open()) if key in line]


@pytest.fixture(scope="module")
def one_process(folder):
    """Returns the folder of the run in one process."""
    run(folder, folder / "one")
    return folder / "one"


def assert_same_metrics(run_dir, one_process):
    """Compares the loss, gradient norm and clip coefficient of every step."""
    actual, expected = metrics(run_dir), metrics(one_process)
    assert [line["step"] for line in actual] == [line["step"] for line in expected] == list(range(1, 1 + len(expected)))
    for line, reference in zip(actual, expected, strict=True):
        for key in ("loss", "grad_norm", "clip_coef", "num_input_tokens_seen"):
            assert line[key] == pytest.approx(reference[key], rel=1e-4), key


def assert_same_weights(run_dir, other, **tolerance):
    ours, its = (load_file(path / "model.safetensors") for path in (run_dir, other))
    torch.testing.assert_close(ours, its, **(tolerance or {"rtol": 1e-5, "atol": 1e-5}))


def assert_one_run(done, run_dir, one_process):
    """Checks for the losses, norms and weights of one process on the same batches, and for a single set of files."""
    assert done.returncode == 0, done.stderr
    assert_same_metrics(run_dir, one_process)
    assert len(metrics(one_process)) == 6
    assert done.stdout.count("step 6/6  loss") == done.stdout.count("\ndone\n") == 1
    assert "destroy_process_group" not in done.stderr
    assert_same_weights(run_dir, one_process)
    assert_same_weights(run_dir, run_dir / "checkpoint-6", rtol=0, atol=0)


AT_EXIT = """
import atexit, os, sys

class Last:
    def __del__(self, write=os.write):
        write(1, b"interpreter shut down ")

sys.last = Last()
atexit.register(print, "registered", end=" ")
"""


def test_a_rank_exits_before_gloo_threads_meet_the_interpreter_shutdown(tmp_path):
    """Exit handlers must run, and the exit status must be the command's."""
    (tmp_path / "sitecustomize.py").write_text(AT_EXIT)
    paths = os.pathsep.join((str(tmp_path), str(ROOT)))
    environment = {**ENVIRONMENT, "PYTHONPATH": paths, "WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "lowmem", "--nonsense"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "registered " in done.stdout and "interpreter shut down " not in done.stdout


@pytest.mark.parametrize("shards", SHARDED.values(), ids=SHARDED)
def test_a_model_sharded_over_processes(folder, tmp_path, shards):
    """Losses, norms, scores and files must be the same as with one process."""
    settings = ("--test_split_size", "0.25", "--eval_strategy", "steps", "--eval_steps", "2", "--max_steps", "4",
                "--gradient_accumulation_steps", "2", "--per_device_eval_batch_size", "8")  # fmt: skip
    run(folder, tmp_path / "one", *settings)
    done = run(folder, tmp_path / "run", *settings, *shards, ranks=2)
    assert "each of 2 processes has a shard of the parameters" in done.stdout
    assert done.stdout.count("step 4/4  loss") == 1
    assert "destroy_process_group" not in done.stderr
    assert_same_metrics(tmp_path / "run", tmp_path / "one")
    for inside in (".", "checkpoint-4"):
        files = [{path.name for path in (tmp_path / name / inside).iterdir()} for name in ("run", "one")]
        assert {name for name in files[0] ^ files[1] if "rng_state" not in name} == set()
    for file in ("model.safetensors", "checkpoint-4/model.safetensors", "checkpoint-4/optimizer.safetensors"):
        ours, its = (load_file(tmp_path / name / file) for name in ("run", "one"))
        torch.testing.assert_close(ours, its, rtol=1e-4, atol=1e-5)
    scores = [[line["eval_loss"] for line in metrics(tmp_path / name, "eval_loss")] for name in ("run", "one")]
    assert len(scores[0]) == 2
    assert scores[0] == pytest.approx(scores[1], rel=1e-3)  # the mean of means over different batches


# Prints the number of elements of the model that a rank has after loading, before the trainer shards it.
PROBE = """
import sys
from lowmem import cli
from lowmem.hf.sharding import Zero3Sharding
def shard(self, model, accelerator, shard=Zero3Sharding.shard):
    if self._engine is None:
        print("loaded", sum(param.numel() for param in model.parameters()), "elements")
    shard(self, model, accelerator)
Zero3Sharding.shard = shard
cli.main(sys.argv[1:])
"""


def test_the_configuration_of_an_8b_model_trains_a_small_one(folder, tmp_path, monkeypatch):
    """The model and the data are replaced. No rank may ever have the full model."""
    config = yaml.safe_load((ROOT / "configs" / "llama3_8b_zero3.yaml").read_text())
    for key in ("dataset_name", "dataset_train_split", "dataset_test_split"):
        del config[key]
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two three"}]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 24)
    config |= {
        "output_dir": str(tmp_path / "run"), "model_name_or_path": str(folder / "model"), "test_split_size": 0.25,
        "datasets": [{"path": "json", "data_files": str(tmp_path / "chats.jsonl")}], "dataset_num_proc": None,
        "max_steps": 4, "warmup_steps": 1, "logging_steps": 1, "eval_steps": 2, "save_steps": 1, "report_to": "none",
    }  # fmt: skip
    config["deepspeed"] = str(ROOT / config["deepspeed"])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "probe.py").write_text(PROBE)
    monkeypatch.syspath_prepend(tmp_path)  # inherited by forked processes
    words = ("probe", "sft", "--config", str(tmp_path / "config.yaml"))
    done = Launched.ranks(2, *words, environment=ENVIRONMENT).finish()
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loaded 0 elements") == done.stdout.count("loaded ") == 2
    assert "zero3: each of 2 processes has a shard of the parameters" in done.stdout
    assert {path.name for path in (tmp_path / "run").glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-4"}
    assert load_file(tmp_path / "run" / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16


def test_a_run_resumes_in_any_placement(folder, tmp_path):
    """The run moves from ZeRO-3 on two ranks to one device, FSDP2 on three, and ZeRO-3, with the losses of one device.
    Resuming in the same placement is bitwise exact.
    """
    constant = ("--lr_scheduler_type", "constant", "--save_steps", "1")  # all steps are within an epoch of 64 rows
    resume = ("--resume_from_checkpoint", "last")
    legs = [(1, 2, 6, "zero3"), (2, 0, 12, None), (3, 3, 4, "fsdp2"), (4, 2, 6, "zero3")]
    for last, ranks, batch, shards in legs:
        settings = [*constant, "--max_steps", str(last), *SHARDED.get(shards, ()), *(resume if last > 1 else ())]
        run(folder, tmp_path / "run", *settings, ranks=ranks, batch=batch)
        if last == 1:  # for comparison, continues on one device
            shutil.copytree(tmp_path / "run", tmp_path / "one")
            alone = launched(tmp_path / "one", *resume).finish()
            assert alone.returncode == 2
            assert "Or omit deepspeed: a single device can resume" in alone.stderr
    run(folder, tmp_path / "one", *constant, "--max_steps", "4", *resume, batch=12)
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 5))
    for ours, its in zip(metrics(tmp_path / "run"), metrics(tmp_path / "one"), strict=True):
        assert ours["loss"] == pytest.approx(its["loss"], rel=1e-5)
    (tmp_path / "run" / "checkpoint-4").rename(tmp_path / "whole")
    run(folder, tmp_path / "run", *settings, ranks=2, batch=6)
    assert_same_weights(tmp_path / "run", tmp_path / "whole", rtol=0, atol=0)


# -- mistakes and stops ------------------------------------------------------------------------------------------------


def test_a_mistake_ends_every_process(folder, tmp_path):
    batch = ("--deepspeed", '{"zero_optimization": {"stage": 3}, "train_batch_size": 7}')
    started = launched(folder, "--output_dir", str(tmp_path / "run"), *batch, ranks=2)
    done = started.finish()
    assert started.statuses == [2, 2]
    assert "train_batch_size" in done.stderr and "error on rank 1: " in done.stderr
    assert not (tmp_path / "run").exists()


FAILING = """
import itertools, os, torch
calls = itertools.count()
class Failing(torch.optim.SGD):
    def step(self, closure=None):
        if os.environ["RANK"] == "1" and next(calls) == 100:  # of parameters, in a later step than the first
            raise RuntimeError("a bad cable")
        super().step(closure)
"""


def test_a_rank_that_fails_is_named(folder, tmp_path, monkeypatch):
    (tmp_path / "failing.py").write_text(FAILING)
    monkeypatch.syspath_prepend(tmp_path)  # inherited by forked processes
    words = ("--output_dir", str(tmp_path / "run"), "--fused.rule", "failing.Failing", "--max_grad_norm", "0")
    started = launched(folder, *words, ranks=2)
    done = started.finish()
    assert "error on rank 1: unexpected RuntimeError: a bad cable" in done.stderr
    assert started.statuses[1] == 3 and started.statuses[0] > 0
    assert "a bad cable" in (tmp_path / "run" / "traceback-1.txt").read_text()


@pytest.mark.parametrize(("shards", "number"), [(None, signal.SIGTERM), ("zero3", signal.SIGINT)])
def test_ranks_that_are_asked_to_stop(folder, tmp_path, shards, number):
    """Even if only one rank gets the signal, all ranks agree on a step and save it."""
    settings = ("--output_dir", str(tmp_path / "run"), "--max_steps", "100000", "--save_steps", "100000")
    started = launched(folder, *settings, *SHARDED.get(shards, ()), ranks=2)
    started.wait_for("  loss ")
    for process in started.processes[number != signal.SIGTERM :]:
        os.kill(process.pid, number)
    output = started.finish().stdout
    saved = [path.name for path in (tmp_path / "run").glob("checkpoint-*")]
    assert started.statuses == [128 + number] * 2
    step = int(output.partition("stopped at step ")[2].partition(";")[0])
    assert saved == [f"checkpoint-{step}"]
    assert step - 1 <= metrics(tmp_path / "run")[-1]["step"] <= step


# -- job scripts -------------------------------------------------------------------------------------------------------

JOBS = ROOT / "scripts" / "jobs"
SRUN = """#!/usr/bin/env bash
# starts two tasks on this machine, as srun would
[ "$1" = --kill-on-bad-exit=1 ] && shift
for task in 0 1; do SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_NTASKS=2 "$@" & done
wait -n && wait
"""

# Replaces the package: records its arguments and environment, and exits when the file `ended` exists.
RECORDER = """
import json, os, sys, time
from pathlib import Path
record = Path(f"start-{os.getpid()}.json")
record.with_suffix(".tmp").write_text(json.dumps([["lowmem", *sys.argv[1:]], dict(os.environ)]))
record.with_suffix(".tmp").rename(record)
while not Path("ended").exists():
    time.sleep(0.05)
"""


def job(name, folder, directory):
    """Starts a job script in the folder `here`, which contains all its files."""
    for tool, text in {"srun": SRUN, "scontrol": "#!/usr/bin/env bash\necho localhost\n"}.items():
        (directory / tool).write_text(text)
        (directory / tool).chmod(0o755)
    (directory / ".venv" / "bin").mkdir(parents=True)
    (directory / ".venv" / "bin" / "activate").write_text("")
    path = f"{directory}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    slurm = {"SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_ID": "1", "SLURM_SUBMIT_DIR": str(directory)}
    environment = {**ENVIRONMENT, **slurm, "PATH": path, "PROCESSES": "2", "PORT": str(free_port())}
    command = [str(JOBS / f"{name}.sh"), str(folder / "config.yaml"), "--output_dir", str(directory / "run")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=directory, env=environment, **pipes)


@pytest.mark.parametrize("name", ["torchrun", "slurm", "accelerate", "deepspeed"][: None if FULL else 2])
def test_job_scripts(folder, one_process, tmp_path, name):
    """Each script starts one run of two processes, with the losses and weights of a single process.

    The launchers are real. The processes that they start are forked from this one with their arguments and
    environment, which saves their imports.
    """
    (tmp_path / "lowmem").mkdir()
    (tmp_path / "lowmem" / "__init__.py").touch()
    (tmp_path / "lowmem" / "__main__.py").write_text(RECORDER)
    with job(name, folder, tmp_path) as script:
        while len(records := list(tmp_path.glob("start-*.json"))) < 2:
            assert script.poll() is None, script.stderr.read()
            time.sleep(0.05)
        done = Launched([tuple(json.loads(record.read_text())) for record in records]).finish()
        (tmp_path / "ended").touch()
        _, err = script.communicate(timeout=PATIENCE)
    assert script.returncode == 0, err
    assert_one_run(done, tmp_path / "run", one_process)
    assert "each of 2 processes has all parameters" in done.stdout
