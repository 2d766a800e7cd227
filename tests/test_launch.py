"""`lowmem train` under launchers: several processes over gloo are one run."""

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
from processes import PATIENCE, Launched, free_port
from products import FULL
from safetensors.torch import load_file

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m")
DEEPSPEED = ("deepspeed.launcher.runner", "--num_gpus", "2", "--module")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A configuration of a tiny run, with its data."""
    folder = tmp_path_factory.mktemp("launch")
    rows = [
        {"text": " ".join(["one two", "three", "four five six"][n % 3] for n in range(i, i + 5))} for i in range(64)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "run_dir": str(folder / "run"),
        "model": {
            "config": {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                       "num_attention_heads": 4, "num_key_value_heads": 2},
            "train_tokenizer": {"vocab_size": 280},
            "dtype": "float32",
        },
        "data": {"path": str(folder / "data.jsonl"), "max_length": 32},
        "optimizer": {"lr": 1e-2, "clip_norm": 1.0},
        "trainer": {"max_steps": 6, "logging_steps": 1, "save_steps": 3, "per_device_train_batch_size": 4,
                    "dataloader_pin_memory": False},
    }  # fmt: skip
    (folder / "config.yaml").write_text(json.dumps(config))
    return folder


def run(folder, *arguments, ranks=0):
    """One process, or as many ranks as given, with the environment that a launcher sets."""
    return launched(folder, *arguments, ranks=ranks).finish()


def launched(folder, *arguments, ranks=0):
    return Launched.ranks(ranks, "lowmem", "train", str(folder / "config.yaml"), *arguments, environment=ENVIRONMENT)


def command(folder, *arguments, launcher):
    port = ["--master_port", str(free_port())] if launcher == DEEPSPEED else []
    start = [sys.executable, "-m", *launcher[:-1], *port, *launcher[-1:], "lowmem", "train"]
    return [*start, str(folder / "config.yaml"), *arguments]


def metrics(run_dir):
    return [line for line in map(json.loads, (run_dir / "metrics.jsonl").open()) if "loss" in line]


@pytest.fixture(scope="module")
def one_process(folder):
    """The run directory of the run in one process."""
    done = run(folder, f"run_dir={folder}/one", "trainer.per_device_train_batch_size=8")
    assert done.returncode == 0, done.stderr
    return folder / "one"


def assert_same_metrics(run_dir, one_process):
    """Of all steps, and loss, norm and clip coefficient of each."""
    actual, expected = metrics(run_dir), metrics(one_process)
    assert [line["step"] for line in actual] == [line["step"] for line in expected] == list(range(1, 1 + len(expected)))
    for line, reference in zip(actual, expected, strict=True):
        for key in ("loss", "grad_norm", "clip_coef", "tokens"):
            assert line[key] == pytest.approx(reference[key], rel=1e-4), key


def assert_one_run(done, run_dir, one_process):
    """The same losses, norms and weights as one process on the same batches, and one set of files."""
    assert done.returncode == 0, done.stderr
    assert_same_metrics(run_dir, one_process)
    assert len(metrics(one_process)) == 6
    assert done.stdout.count("step 6/6  loss") == 1
    assert "destroy_process_group" not in done.stderr
    weights = [load_file(path / "checkpoint-6" / "model.safetensors") for path in (run_dir, one_process)]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weight, weights[1][name], rtol=1e-5, atol=1e-5)


def test_two_processes_are_one_run(folder, one_process, tmp_path):
    assert_one_run(run(folder, f"run_dir={tmp_path}/run", ranks=2), tmp_path / "run", one_process)


def test_a_run_resumes_with_as_many_processes_or_fewer(folder, one_process, tmp_path):
    """Bit for bit with as many, with the same losses in one."""
    assert run(folder, f"run_dir={tmp_path}/run", ranks=2).returncode == 0
    whole = load_file(tmp_path / "run" / "checkpoint-6" / "model.safetensors")
    for ranks, batch in ((2, 4), (0, 8)):
        shutil.rmtree(tmp_path / "run" / "checkpoint-6")
        batch_size = f"trainer.per_device_train_batch_size={batch}"
        done = run(folder, f"run_dir={tmp_path}/run", batch_size, "--resume", ranks=ranks)
        assert done.returncode == 0, done.stderr
        again = load_file(tmp_path / "run" / "checkpoint-6" / "model.safetensors")
        for name, weight in whole.items():
            if ranks:
                assert torch.equal(weight, again[name]), name
            else:
                torch.testing.assert_close(weight, again[name], rtol=1e-5, atol=1e-5)
        assert [line["loss"] for line in metrics(tmp_path / "run")] == pytest.approx(
            [line["loss"] for line in metrics(one_process)], rel=1e-4
        )


ZERO3 = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": "auto", "reduce_bucket_size": "auto",
                          "stage3_prefetch_bucket_size": "auto", "overlap_comm": True, "contiguous_gradients": True},
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"},
}  # fmt: skip
SHARDED = {"zero3": "trainer.deepspeed=" + json.dumps(ZERO3), "fsdp2": "trainer.fsdp=true"}


@pytest.mark.parametrize("shards", SHARDED.values(), ids=SHARDED)
def test_a_model_sharded_over_processes(folder, one_process, tmp_path, shards):
    """From saved weights: the same losses, norms, scores and files as one process."""
    settings = [
        f"model={{path: {one_process}/checkpoint-3, dtype: float32}}", "data.eval_fraction=0.25",
        "trainer.eval_strategy=steps", "trainer.eval_steps=2", "trainer.max_steps=4",
        "trainer.gradient_accumulation_steps=2", "trainer.per_device_eval_batch_size=8",
    ]  # fmt: skip
    one = run(folder, *settings, f"run_dir={tmp_path}/one", "trainer.per_device_train_batch_size=8")
    assert one.returncode == 0, one.stderr
    done = run(folder, *settings, f"run_dir={tmp_path}/run", shards, ranks=2)
    assert done.returncode == 0, done.stderr
    assert "each of 2 processes holds a shard of the parameters" in done.stdout
    assert done.stdout.count("step 4/4  loss") == 1
    assert "destroy_process_group" not in done.stderr
    assert_same_metrics(tmp_path / "run", tmp_path / "one")
    files = [{p.name for p in (tmp_path / name / "checkpoint-4").iterdir()} for name in ("run", "one")]
    assert {name for name in files[0] if "rng_state" not in name} == {n for n in files[1] if "rng_state" not in n}
    for file in ("model.safetensors", "optimizer.safetensors"):
        ours, its = (load_file(tmp_path / name / "checkpoint-4" / file) for name in ("run", "one"))
        assert ours.keys() == its.keys()
        for name, tensor in its.items():
            assert tensor.dtype == ours[name].dtype
            torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    scores = [[line["eval_loss"] for line in map(json.loads, (tmp_path / name / "metrics.jsonl").open())
               if "eval_loss" in line] for name in ("run", "one")]  # fmt: skip
    assert len(scores[0]) == 2
    assert scores[0] == pytest.approx(scores[1], rel=1e-3)  # a mean of means over other batches


def test_a_run_resumes_in_any_placement(folder, tmp_path):
    """ZeRO-3 over two, one device, FSDP2 over three, ZeRO-3 again: the losses of one device all the way; and resumed
    as it was saved, bit for bit.
    """
    constant = ["trainer.lr_scheduler_type=constant", "trainer.save_steps=1"]  # all within an epoch of 64 samples
    zero3 = "trainer.deepspeed=" + json.dumps(ZERO3)
    legs = [
        (1, 2, 6, zero3),
        (2, 0, 12, None),
        (4, 3, 4, "trainer.fsdp=true"),
        (5, 2, 6, zero3),
    ]
    for last, ranks, batch, shards in legs:
        settings = [*constant, f"trainer.max_steps={last}", f"trainer.per_device_train_batch_size={batch}"]
        settings += [f"run_dir={tmp_path}/run", *([shards] if shards else []), *(["--resume"] if last > 1 else [])]
        done = run(folder, *settings, ranks=ranks)
        assert done.returncode == 0, done.stderr
        if last == 1:  # one device continues from here, for comparison
            shutil.copytree(tmp_path / "run", tmp_path / "one")
            alone = run(tmp_path / "one", "--resume")
            assert alone.returncode == 2
            assert "trainer.deepspeed=null in a run): one device resumes any checkpoint" in alone.stderr
    again = run(tmp_path / "one", *constant, "trainer.max_steps=5", "trainer.per_device_train_batch_size=12",
                "trainer.deepspeed=null", "--resume")  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 6))
    for ours, its in zip(metrics(tmp_path / "run"), metrics(tmp_path / "one"), strict=True):
        assert ours["loss"] == pytest.approx(its["loss"], rel=1e-5)
    whole = load_file(tmp_path / "run" / "checkpoint-5" / "model.safetensors")
    shutil.rmtree(tmp_path / "run" / "checkpoint-5")
    done = run(folder, *settings, ranks=2)
    assert done.returncode == 0, done.stderr
    for name, weight in load_file(tmp_path / "run" / "checkpoint-5" / "model.safetensors").items():
        assert torch.equal(weight, whole[name]), name


def test_a_mistake_ends_every_process(folder, tmp_path):
    done = run(folder, f"run_dir={tmp_path}/run", "optimizer.rule=adalmo", ranks=2)
    assert done.returncode != 0
    assert "Did you mean 'adalomo'" in done.stderr
    assert not (tmp_path / "run").exists()


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def ranks_below(pid):
    """The processes that a launcher has started, which start none themselves."""
    found = children(pid)
    return [pid] if not found else [rank for child in found for rank in ranks_below(child)]


ENDINGS = {
    "one is killed, fsdp2": (None, "trainer.fsdp=true", signal.SIGKILL),
    "all are asked to stop": (None, None, signal.SIGTERM),
}
if FULL:  # starting a launcher and two ranks from nothing takes most of a minute of processor time
    ENDINGS |= {
        "the launcher is asked to stop": (TORCHRUN, None, signal.SIGTERM),
        "one is killed": (TORCHRUN, None, signal.SIGKILL),
        "one is killed, zero3": (DEEPSPEED, "trainer.deepspeed=" + json.dumps(ZERO3), signal.SIGKILL),
        "all are asked to stop, zero3": (None, "trainer.deepspeed=" + json.dumps(ZERO3), signal.SIGTERM),
    }


@pytest.mark.parametrize(("launcher", "shards", "number"), ENDINGS.values(), ids=ENDINGS)
def test_a_run_that_ends_early(folder, tmp_path, launcher, shards, number):
    """A killed rank ends all with an error, and none hangs; asked to stop, they agree on a step and save it."""
    settings = [f"run_dir={tmp_path}/run", "trainer.max_steps=100000", "trainer.save_steps=100000"]
    settings += [shards] if shards else []
    output = end_launched(launcher, folder, settings, number) if launcher else end_ranks(folder, settings, number)
    saved = list((tmp_path / "run").glob("checkpoint-*"))
    assert len(saved) == (number == signal.SIGTERM)
    assert ("stopped at step" in output) == (number == signal.SIGTERM)


def end_launched(launcher, folder, settings, number):
    """A launcher is asked to stop; or one of its ranks is killed, and it has to end the others."""
    started = subprocess.Popen(
        command(folder, *settings, launcher=launcher),
        env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    while "  loss  " not in (line := started.stdout.readline()):
        assert line, "it ended before its first step"
    time.sleep(0.5)
    os.kill(ranks_below(started.pid)[-1] if number == signal.SIGKILL else started.pid, number)
    rest = started.communicate(timeout=PATIENCE)[0]
    assert started.returncode != 0
    return rest


def end_ranks(folder, settings, number):
    """All ranks are asked to stop; or one is killed, and the others have nobody who ends them."""
    started = launched(folder, *settings, ranks=2)
    started.wait_for("  loss  ")
    for process in started.processes[number == signal.SIGKILL :]:
        os.kill(process.pid, number)
    done = started.finish()
    if number == signal.SIGKILL:
        assert started.statuses[0] > 0
    else:
        assert started.statuses == [128 + number] * 2
    return done.stdout


def test_batch_sizes_that_do_not_fit_the_processes(folder, tmp_path):
    shards = "trainer.deepspeed=" + json.dumps(ZERO3 | {"train_batch_size": 7})
    done = run(folder, f"run_dir={tmp_path}/run", shards, ranks=2)
    assert done.returncode != 0
    assert "trainer.deepspeed: " in done.stderr and "7" in done.stderr
    assert not (tmp_path / "run").exists()


def test_data_that_does_not_divide(folder, tmp_path):
    """61 samples over two ranks, in batches of 4: a whole epoch, to its end, on both."""
    lines = (folder / "data.jsonl").read_text().splitlines(keepends=True)[:61]
    (tmp_path / "data.jsonl").write_text("".join(lines))
    settings = [f"data.path={tmp_path}/data.jsonl", "trainer.max_steps=-1", "trainer.num_train_epochs=1"]
    for name, shards in (("zero3", "trainer.deepspeed=" + json.dumps(ZERO3)), ("fsdp2", "trainer.fsdp=true")):
        done = run(folder, f"run_dir={tmp_path}/{name}", *settings, shards, ranks=2)
        assert done.returncode == 0, done.stderr
        assert len(metrics(tmp_path / name)) == 8


# -- job scripts -------------------------------------------------------------------------------------------------------

JOBS = Path(__file__).parents[1] / "scripts" / "jobs"
SRUN = """#!/usr/bin/env bash
# starts two tasks on this machine, as srun would
[ "$1" = --kill-on-bad-exit=1 ] && shift
for task in 0 1; do SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_NTASKS=2 "$@" & done
wait -n && wait
"""


# Stands for the package: says with which words and in which environment it was started, and ends when it is told to.
RECORDER = """
import json, os, sys, time
from pathlib import Path
record = Path(f"start-{os.getpid()}.json")
record.with_suffix(".tmp").write_text(json.dumps([["lowmem", *sys.argv[1:]], dict(os.environ)]))
record.with_suffix(".tmp").rename(record)
while not Path("ended").exists():
    time.sleep(0.05)
"""


def job(name, folder, here, *overrides):
    """Starts a job script in the folder `here`, where there is all that it needs."""
    for tool, text in {"srun": SRUN, "scontrol": "#!/usr/bin/env bash\necho localhost\n"}.items():
        (here / tool).write_text(text)
        (here / tool).chmod(0o755)
    (here / ".venv" / "bin").mkdir(parents=True)
    (here / ".venv" / "bin" / "activate").write_text("")
    path = f"{here}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    slurm = {"SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_ID": "1", "SLURM_SUBMIT_DIR": str(here)}
    environment = {**ENVIRONMENT, **slurm, "PATH": path, "PROCESSES": "2", "PORT": str(free_port())}
    command = [str(JOBS / f"{name}.sh"), str(folder / "config.yaml"), f"run_dir={here}/run", *overrides]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=here, env=environment, **pipes)


def assert_a_run_of_two(done, shards, run_dir, one_process):
    assert_one_run(done, run_dir, one_process)
    held = "holds a shard of the parameters" if shards else "holds all parameters"
    assert f"each of 2 processes {held}" in done.stdout


@pytest.mark.parametrize(("name", "shards"), [("torchrun", None), ("slurm", None), ("deepspeed", "zero3")])
def test_job_scripts(folder, one_process, tmp_path, name, shards):
    """What each starts is one run of two processes, with the losses and weights of one.

    The processes that it starts are forked here, with their words and environment: they need not import anything.
    """
    (tmp_path / "lowmem").mkdir()
    (tmp_path / "lowmem" / "__init__.py").touch()
    (tmp_path / "lowmem" / "__main__.py").write_text(RECORDER)
    with job(name, folder, tmp_path, *([SHARDED[shards]] if shards else [])) as script:
        while len(found := list(tmp_path.glob("start-*.json"))) < 2:
            assert script.poll() is None, script.stderr.read()
            time.sleep(0.05)
        done = Launched([tuple(json.loads(record.read_text())) for record in found]).finish()
        (tmp_path / "ended").touch()
        _, err = script.communicate(timeout=PATIENCE)
    assert script.returncode == 0, err
    assert_a_run_of_two(done, shards, tmp_path / "run", one_process)


STARTED = [("torchrun", None), ("accelerate", None), ("deepspeed", None), ("slurm", None)]
STARTED += [("deepspeed", "zero3"), ("torchrun", "zero3"), ("torchrun", "fsdp2")]


@pytest.mark.skipif(not FULL, reason="starts a launcher and two ranks from nothing")
@pytest.mark.parametrize(("name", "shards"), STARTED)
def test_job_scripts_from_nothing(folder, one_process, tmp_path, name, shards):
    script = job(name, folder, tmp_path, *([SHARDED[shards]] if shards else []))
    out, err = script.communicate(timeout=PATIENCE)
    done = subprocess.CompletedProcess(script.args, script.returncode, out, err)
    assert_a_run_of_two(done, shards, tmp_path / "run", one_process)


def test_job_scripts_want_something_to_run_on(folder):
    environment = {**ENVIRONMENT, "PATH": "/usr/bin:/bin"}
    done = subprocess.run([str(JOBS / "torchrun.sh"), "c.yaml"], env=environment, capture_output=True, text=True)
    assert (done.returncode, "PROCESSES=2" in done.stderr) == (2, True)


def test_processes_that_do_not_find_each_other_are_refused(folder, tmp_path):
    done = run(folder, f"run_dir={tmp_path}/run", "trainer.use_cpu=false", ranks=2)
    assert done.returncode != 0
    assert "2 processes were started, but Accelerate sees only this one" in done.stderr
