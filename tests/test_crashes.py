"""Runs that are killed and resumed end in the bits of one that was not."""

import contextlib
import random
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import small_runs
from support.processes import Launched
from support.products import FULL

from lowmem import cli
from scripts.make_model import make_model, train_tokenizer

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
# What shows that a run is doing something now: paths in its folder.
MOMENTS = {
    "writing a checkpoint": ".saving/*/model.safetensors",
    "finishing a checkpoint": ".saving/*/checksums.txt",
    "removing a checkpoint": ".removed",
    "drawing": "loss.png",
    "saving the final model": ".saving/model",
    "moving the final model": "tokenizer.json",
}


def kill_at(moment, run, processes, seconds, chance):
    """Waits for the moment and kills all processes; returns whether it came before the run was complete."""
    skipped, begun, end = 0 if "final" in moment else chance.randint(0, 6), set(), time.monotonic() + seconds
    while any(process.is_alive() for process in processes):
        if moment in MOMENTS:
            with contextlib.suppress(OSError):  # it is gone already
                begun |= {path.stat().st_ino for path in run.glob(MOMENTS[moment])}
        if len(begun) > skipped or (moment not in MOMENTS and time.monotonic() > end):
            for process in processes:
                process.kill()
            return True
        time.sleep(0.0005)
    return False


@pytest.mark.parametrize("name", [name for name, kills in KILLS.items() if kills])
def test_killed_runs_end_like_one_that_was_not(name, tmp_path):
    """Half of the kills come at any time, the others at one of `MOMENTS`."""
    (more, ranks), words, chance = SETTINGS[name], small_runs.inputs(tmp_path), random.Random(5)

    def launch(run):
        resume = ["--resume_from_checkpoint=last"] if (run / "config.yaml").exists() else []
        return Launched.ranks(ranks, *words, *more, f"--output_dir={run}", *resume)

    def complete(run):
        done = launch(run).finish()
        assert done.returncode == 0, done.stderr
        return small_runs.results(run)

    begin = time.monotonic()
    expected = complete(tmp_path / "whole")
    seconds, kills, number = time.monotonic() - begin, [], 0
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
def home(tmp_path, monkeypatch):
    """The current directory, with a small model and texts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lowmem.run.report.draw", lambda *_: None)
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "data.jsonl").write_text('{"text": "a few words"}\n' * 8)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokenizer = train_tokenizer(["a few words"], 270)
    tokenizer.chat_template = None
    make_model(Path("model"), tokenizer, max_position_embeddings=64, **sizes)
    return tmp_path


def lowmem(*words):
    with pytest.raises(SystemExit) as done:
        cli.main(words)
    return done.value.code


CONFIG = """
{output_dir: run, model_name_or_path: model, dtype: float32, datasets: [{path: json, data_files: data.jsonl}],
 max_length: 16, max_steps: 2, fused: {rule: adalomo}, learning_rate: 1e-2, max_grad_norm: 0}
"""
RUN = ("sft", "--config", "config.yaml")
ANSWER = ("generate", "run", "a few", "--max-new-tokens", "1")


class Killed(BaseException):
    pass


@pytest.mark.parametrize("after", [0, 2, 4])
def test_a_run_that_dies_while_its_model_is_saved_has_its_last_checkpoint(home, monkeypatch, after):
    """Before the first file, or between two. What is moved is counted; the configuration is the last."""
    move, moved = Path.replace, []

    def die(path, target):
        if path.parent.name == "model" and path.parent.parent.name == ".saving":
            if len(moved) == after:
                raise Killed
            moved.append(path.name)
        return move(path, target)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Path, "replace", die)
        cli.main(RUN)
    assert not Path("run/config.json").exists() and len(moved) == after
    assert lowmem(*ANSWER) == 0
    assert lowmem(*RUN, "--resume_from_checkpoint", "last") == 0
    final, last = (load_file(f"run/{folder}model.safetensors") for folder in ("", "checkpoint-2/"))
    assert all(torch.equal(weight, last[name]) for name, weight in final.items())
    assert not Path("run/.saving").exists()


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_damaged_final_model_is_passed_over(home, capsys, file):
    assert lowmem(*RUN) == 0
    capsys.readouterr()
    assert lowmem(*ANSWER) == 0
    answer = capsys.readouterr().out
    path = Path("run", file)
    path.write_bytes(path.read_bytes()[:99])
    assert lowmem(*ANSWER) == 0
    said = capsys.readouterr()
    assert said.out == answer
    assert f"checkpoint: run/{file}" in said.err and "answering with run/checkpoint-2" in said.err
    shutil.rmtree("run/checkpoint-2")
    assert lowmem(*ANSWER) == 2
    assert f"error: run/{file}" in capsys.readouterr().err


def test_a_full_disk_is_named(home, monkeypatch, capsys):
    def full(staged, folder):
        raise OSError(28, "No space left on device", str(folder / "model.safetensors"))

    with monkeypatch.context() as patch:
        patch.setattr("lowmem.hf.checkpoint.publish_model", full)
        assert lowmem(*RUN) == 2
    assert "the final model could not be written: [Errno 28]" in capsys.readouterr().err
    assert lowmem(*RUN, "--resume_from_checkpoint", "last") == 0
    assert Path("run/model.safetensors").exists()
