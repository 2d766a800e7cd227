"""A run's result depends only on its configuration and seed, even if the run is killed and resumed."""

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support import runs
from support.nets import assert_same
from support.processes import Launched
from support.products import FULL

from lowmem.files import checksum

ROOT = Path(__file__).parents[1]
KILLS = {"local": 50 if FULL else 2, **dict.fromkeys(("deferred", "adapters", "ZeRO-3", "FSDP2"), 10 if FULL else 0)}
# Arguments of a run, and its ranks.
SETTINGS = {
    "local": (("--fused.rule=adamw", "--fused.rounding=stochastic", "--dtype=bfloat16"), 0),
    "deferred": (("--max_grad_norm=1", "--gradient_accumulation_steps=2", "--packing=true"), 0),
    "adapters": (("--use_peft=true", "--lora_r=4", "--lora_dropout=0.1", "--fused.rule=adamw"), 0),
    "ZeRO-3": ((f"--deepspeed={ROOT / 'configs' / 'zero3.json'}",), 2),
    "FSDP2": (("--fsdp",), 2),
}
# Paths in the run folder whose existence shows what the run is doing.
MOMENTS = {
    "writing a checkpoint": ".saving/*/model.safetensors",
    "finishing a checkpoint": ".saving/*/checksums.txt",
    "drawing": "loss.png",
    "saving the final model": ".saving/model",
    "moving the final model": "tokenizer.json",
}

STEPS = 24 if FULL else 12


def inputs(folder):
    """Returns the arguments of a short run that saves, evaluates, rotates checkpoints and draws random numbers."""
    saves = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    scores = {"eval_strategy": "steps", "eval_steps": 6, "test_split_size": 0.2}
    dropout = {"attention_dropout": 0.1}
    config = runs.write(folder, max_steps=STEPS, learning_rate=0.02, model_init_kwargs=dropout, **saves, **scores)
    return ["lowmem", "sft", f"--config={config}"]


def results(run):
    """Returns results that must not depend on crashes: the last checkpoint, the final model and the log."""
    checkpoint = run / f"checkpoint-{STEPS}"
    lines = (checkpoint / "checksums.txt").read_text().splitlines()
    files = {name: checksum for checksum, name in (line.split("  ", 1) for line in lines)}
    for name in ("trainer_state.json", "training_args.bin"):  # these contain times and the path of the folder
        files.pop(name, None)
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    keys = ("loss", "eval_loss", "num_input_tokens_seen")
    logged = {(record["step"], key): record[key] for record in records for key in keys if key in record}
    # a run that is killed right after its last save has one more checkpoint
    names = sorted(path.name for path in run.iterdir() if not path.name.startswith((".", "checkpoint-")))
    return files, checksum(*run.glob("*model.safetensors")), logged, names


def kill_at(moment, run, processes, seconds, chance):
    """Waits for the moment and kills all processes. Returns False if they have ended before."""
    skipped, begun, end = 0 if "final" in moment else chance.randint(0, 6), set(), time.monotonic() + seconds
    while any(process.is_alive() for process in processes):
        if moment in MOMENTS:
            with contextlib.suppress(OSError):  # already removed
                begun |= {path.stat().st_ino for path in run.glob(MOMENTS[moment])}
        if len(begun) > skipped or (moment not in MOMENTS and time.monotonic() > end):
            for process in processes:
                process.kill()
            return True
        time.sleep(0.0005)
    return False


@pytest.mark.parametrize("name", [name for name, kills in KILLS.items() if kills])
def test_killed_runs_end_like_an_uninterrupted_one(name, tmp_path):
    """Half of the kills come at random times, the others at one of `MOMENTS`.

    With LOWMEM_FULL, another hash seed, folder and number of workers must not change the results of a local run."""
    (more, ranks), words, chance = SETTINGS[name], inputs(tmp_path), random.Random(5)

    def launch(run):
        resume = ["--resume_from_checkpoint=last"] if (run / "config.yaml").exists() else []
        return Launched.ranks(ranks, *words, *more, f"--output_dir={run}", *resume)

    def complete(run):
        done = launch(run).finish()
        assert done.returncode == 0, done.stderr
        return results(run)

    begin = time.monotonic()
    expected = complete(tmp_path / "whole")
    seconds, kills, number = time.monotonic() - begin, [], 0
    if FULL and not ranks:
        others = ["--dataloader_num_workers=2", "--dataset_num_proc=2", "--fused.log_norms=true"]
        command = [sys.executable, "-m", *words, *more, f"--output_dir={tmp_path / 'elsewhere' / 'whole'}", *others]
        environment = os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert results(tmp_path / "elsewhere" / "whole") == expected
    while len(kills) < KILLS[name]:
        run, number = tmp_path / f"run-{number}", number + 1
        for _ in range(chance.randint(1, 4)):
            moment, launched = chance.choice(["any time"] * len(MOMENTS) + list(MOMENTS)), launch(run)
            if kill_at(moment, run, launched.processes, chance.uniform(0, seconds), chance):
                kills.append(moment)
                launched.finish()
            else:
                assert launched.finish().returncode == 0
        assert complete(run) == expected, kills
        shutil.rmtree(run)


# -- the final model ---------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Returns a function that trains a small run with additional arguments, or generates text from it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lowmem.run.report.RunReport._draw", lambda *_: None)
    config = runs.write(tmp_path, save_strategy="steps", save_steps=2)
    return lambda *words: runs.lowmem(*(words if "generate" in words else ("sft", "--config", config, *words)))


ANSWER = ("generate", "run", "a few", "--max-new-tokens", "1")
RESUME = ("--resume_from_checkpoint", "last")


class Killed(BaseException):
    pass


@pytest.mark.parametrize("after", [0, 2, 4])
def test_a_run_killed_while_saving_its_model_keeps_its_last_checkpoint(run, monkeypatch, after):
    """The kill comes before the first file or between two files. The configuration is moved last."""
    move, moved = Path.replace, []

    def die(path, target):
        if path.parent.name == "model" and path.parent.parent.name == ".saving":
            if len(moved) == after:
                raise Killed
            moved.append(path.name)
        return move(path, target)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Path, "replace", die)
        run()
    assert not Path("run/config.json").exists() and len(moved) == after
    assert run(*ANSWER).status == 0
    assert run(*RESUME).status == 0
    final, last = (load_file(f"run/{folder}model.safetensors") for folder in ("", "checkpoint-2/"))
    assert_same(final, last)
    assert not Path("run/.saving").exists()


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_damaged_final_model_is_an_error(run, file):
    assert run().status == 0
    answer, path = run(*ANSWER), Path("run", file)
    assert answer.status == 0
    path.write_bytes(path.read_bytes()[:99])
    ended = run(*ANSWER)
    assert ended.status == 2 and f"error: run/{file}" in ended.err


def test_a_full_disk_is_named(run, monkeypatch):
    def full(staged, folder):
        raise OSError(28, "No space left on device", str(folder / "model.safetensors"))

    with monkeypatch.context() as patch:
        patch.setattr("lowmem.hf.checkpoint.publish_model", full)
        ended = run()
    assert ended.status == 2 and "the final model could not be written: [Errno 28]" in ended.err
    assert run(*RESUME).status == 0
    assert Path("run/model.safetensors").exists()
