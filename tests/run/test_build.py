"""What a run is built from: DeepSpeed where it is needed, and a warning where bfloat16 is slow."""

import importlib.util
import json
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig

from lowmem.errors import ConfigError
from lowmem.run import build
from lowmem.run.config import load


@pytest.fixture
def config(tmp_path):
    rows = [{"text": f"one two {i}"} for i in range(8)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    written = {
        "run_dir": str(tmp_path / "run"),
        "model": {"config": {"model_type": "llama", **sizes}, "train_tokenizer": {"vocab_size": 280}},
        "data": {"path": str(tmp_path / "data.jsonl"), "max_length": 32},
        "optimizer": {"lr": 1e-2},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(written))
    return load(tmp_path / "run.yaml")


def test_a_run_that_needs_deepspeed_names_the_extra(config, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "deepspeed" else find_spec(name, *rest)
    )
    sharded = replace(config, trainer={"deepspeed": {"zero_optimization": {"stage": 3}}})
    with pytest.raises(ConfigError, match=r'pip install "lowmem\[deepspeed\]"'):
        build.arguments(sharded, build.samples(sharded))
    assert build.arguments(config, build.samples(config)).learning_rate == 1e-2


def test_a_model_without_a_tokenizer_says_what_to_set(config, tmp_path):
    LlamaConfig(vocab_size=280).save_pretrained(tmp_path / "model")
    for name in (tmp_path / "model", tmp_path / "missing"):
        of_path = replace(config, model=replace(config.model, path=str(name), config=None, train_tokenizer=None))
        with pytest.raises(ConfigError, match=r"model\.tokenizer: .* from '.*'; set it to a directory"):
            build.samples(of_path)


CPUS = {
    "avx512_bf16": ("flags\t\t: fpu avx2 avx512_bf16\n", True),
    "amx_bf16": ("flags\t\t: fpu amx_bf16 amx_tile\n", True),
    "arm": ("Features\t: fp asimd bf16\n", True),
    "none": ("flags\t\t: fpu avx2 avx512f\n", False),
    "unknown": ("processor\t: 0\n", True),
}


@pytest.mark.parametrize(("cpuinfo", "expected"), CPUS.values(), ids=CPUS)
def test_bfloat16_instructions_of_a_cpu(cpuinfo, expected, tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(build, "_CPUINFO", tmp_path / "cpuinfo")
    assert build.has_bfloat16(torch.device("cpu")) == expected


def test_slow_bfloat16_is_named_with_the_way_out(config, monkeypatch):
    cpu = torch.device("cpu")
    single = replace(config, model=replace(config.model, dtype="float32"))
    autocast = replace(single, trainer={"bf16": True})
    monkeypatch.setattr(build, "has_bfloat16", lambda device: True)
    assert build.slow_bfloat16(config, cpu) is None
    monkeypatch.setattr(build, "has_bfloat16", lambda device: False)
    assert "set model.dtype=float32" in build.slow_bfloat16(config, cpu)
    assert "set trainer.bf16=false" in build.slow_bfloat16(autocast, cpu)
    assert build.slow_bfloat16(single, cpu) is None
