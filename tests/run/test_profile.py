"""A profile measures the steps that a plan predicts, and draws them."""

import json

import pytest
import torch
from support import runs
from transformers import LlamaConfig

from lowmem.run import profile
from lowmem.run.recipe import parse

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
USUAL = ("--dtype", "bfloat16", "--bf16", "false", "--max_length", "64", "--fused.compile", "false",
         "--fused.rule", "adalomo", "--learning_rate", "1e-3", "--output_dir", "unused")  # fmt: skip


@pytest.fixture
def arguments(tmp_path):
    LlamaConfig(**SIZES, vocab_size=4096).save_pretrained(tmp_path / "model")
    return ["--model_name_or_path", str(tmp_path / "model"), *USUAL]


@pytest.mark.usefixtures("planned_here")
def test_the_measured_peak_is_the_planned_one(arguments, tmp_path):
    folder = tmp_path / "folder"
    ended = runs.lowmem("profile", "sft", *arguments, "--steps", 3, "--eval_strategy", "steps", "--out", folder)
    assert ended.status == 0, ended.err
    figures = json.loads((folder / profile.FIGURES).read_text())
    measured, planned = figures["measured"], figures["planned"]
    assert measured["peak"] == pytest.approx(planned["peak"], rel=0.01)
    assert measured["evaluation"] == pytest.approx(planned["evaluation"], rel=0.01)
    assert figures["process"] > measured["peak"]
    assert (folder / profile.PICTURE).read_bytes().startswith(b"\x89PNG")
    row = next(line.split() for line in ended.out.splitlines() if line.startswith("total"))
    assert row[1:3] == row[3:5]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_leaves_a_snapshot_of_its_allocator(arguments, tmp_path, monkeypatch):
    monkeypatch.setattr(profile, "plan_elsewhere", lambda recipe: (None, "not here"))
    result = profile.profile(parse("sft", arguments), 1, tmp_path)
    assert (tmp_path / profile.SNAPSHOT).exists() and result.process >= result.measured.peak


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("sft", ["--steps", 0], "--steps=0 is out of range"),
        ("sft", ["--load_in_4bit", "true"], "load_in_4bit cannot be profiled: its kernels need data"),
        ("rloo", [], "rloo cannot be profiled: its step also generates text"),
        ("sft", ["--model_name_or_path", "none"], "model_name_or_path: "),
    ],
)
def test_invalid_input_leaves_no_files(arguments, tmp_path, command, options, message):
    if command != "sft":  # which has no max_length
        at = arguments.index("--max_length")
        del arguments[at : at + 2]
    ended = runs.lowmem("profile", command, *arguments, *options, "--out", tmp_path / "folder")
    assert ended.status == 2 and f"error: {message}" in ended.err
    assert not (tmp_path / "folder").exists()
