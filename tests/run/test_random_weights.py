"""A seed gives the same random weights in every placement, the same batches and dropout, and the same bits again."""

import json
import os
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from nets import Memory
from processes import PATIENCE, Launched
from safetensors.torch import load_file
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from lowmem import placements
from lowmem.hf import sharding

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2}
SIZES = {"hidden_size": 32, "intermediate_size": 48, **HEADS}
MODELS = {
    "llama": {"model_type": "llama", **SIZES, "num_key_value_heads": 2},
    "llama, tied": {"model_type": "llama", **SIZES, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **SIZES, "head_dim": 8, "tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4},
    "mixtral": {"model_type": "mixtral", **SIZES, "num_local_experts": 4},
}
ZERO3 = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto"}
TRAINERS = {"zero3": {"deepspeed": ZERO3}, "fsdp2": {"fsdp": True}, "replicated": {}}


class Tokenizer(SimpleNamespace):
    def __len__(self):
        return 101


def write(folder, model, dtype="float32", trainer=None):
    written = {
        "run_dir": str(folder / "run"),
        "seed": 3,
        "model": {"config": model, "train_tokenizer": {"vocab_size": 300}, "dtype": dtype},
        "data": {"path": "unread.jsonl", "max_length": 32},
        "optimizer": {"lr": 1e-2},
        "trainer": {"use_cpu": True, **(trainer or {})},
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(written))
    return path


def create(path, shard=True):
    """A model as a run creates it, and as its trainer shards it."""
    from datasets import Dataset

    from lowmem.run import build
    from lowmem.run.config import load

    config = load(path)
    tokenizer = Tokenizer(bos_token_id=None, eos_token_id=0, pad_token_id=1)
    args = build.arguments(config, build.Samples(tokenizer, Dataset.from_dict({"text": ["a"]}), None))
    torch.manual_seed(12345)  # whatever was drawn before
    model = build.model(config, tokenizer, args)
    drawn = torch.rand(4)
    sharded = sharding.of(args)
    if sharded is not None and shard:
        sharded.shard(model, SimpleNamespace(is_main_process=args.process_index == 0, device=args.device))
    return model, drawn


def contents(model, drawn):
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: placements.full_tensor(tensor).clone() for name, tensor in tensors.items()}, drawn


def as_rank(rank, world, function, *args):
    """Calls a function with the environment of a rank, and forgets what Accelerate and transformers keep of it."""
    before = dict(os.environ)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "DS_ACCELERATOR": "cpu"}
    try:
        return function(*args)
    finally:
        os.environ.clear()
        os.environ |= before
        unset_hf_deepspeed_config()
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


def created(rank, world, path):
    return as_rank(rank, world, lambda: contents(*create(path)))


@pytest.mark.parametrize(("placement", "count"), [("zero3", 1), *((name, 2) for name in TRAINERS)])
def test_weights_are_those_of_one_device(ranks_of, placement, count, tmp_path):
    for name, config in MODELS.items():
        for dtype in ("float32", "bfloat16") if name == "llama" else ("float32",):
            alone, drawn = contents(*create(write(tmp_path, config, dtype)))
            path = write(tmp_path, config, dtype, TRAINERS[placement])
            for full, drawn_there in ranks_of(count).run(created, count, path):
                assert full.keys() == alone.keys()
                for key, weight in alone.items():
                    assert full[key].dtype == weight.dtype, (name, key)
                    assert torch.equal(full[key], weight), (name, key)
                assert torch.equal(drawn_there, drawn)


def peak(rank, world, path):
    """The most bytes of tensors while a model is created, and the bytes of its weights."""
    with warnings.catch_warnings(action="ignore"), Memory() as memory:
        model, _ = as_rank(rank, world, create, path, False)
    weights = sum(torch.Size(placements.shape_of(param)).numel() * param.itemsize for param in model.parameters())
    return memory.most, weights


def test_no_rank_of_zero3_holds_the_full_model(two, tmp_path):
    """Half of it, the parameters of one module, and a copy of the largest while its values are drawn or gathered."""
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 16, "num_attention_heads": 4}
    path = write(tmp_path, {"model_type": "llama", **sizes}, trainer=TRAINERS["zero3"])
    for most, weights in two.run(peak, 2, path):
        assert weights / 2 <= most <= 0.6 * weights


def losses(rank, world, path):
    """The losses of a run, and its seeded random state at the end."""
    return as_rank(rank, world, _losses, path)


def _losses(path):
    from lowmem.run import build
    from lowmem.run.config import load

    config = load(path)
    samples = build.samples(config)
    args = build.arguments(config, samples)
    trainer = build.trainer(config, samples, build.model(config, samples.tokenizer, args), args)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], torch.rand(4)


def write_run(folder, trainer):
    """A configuration of a few steps of a model with dropout, with its data."""
    rows = [{"text": " ".join(("one", "two", "three", "four")[n % 4] for n in range(i, i + 9))} for i in range(24)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = {"max_steps": 4, "logging_steps": 1, "per_device_train_batch_size": 2, "disable_tqdm": True}
    path = write(folder, MODELS["gpt2"], trainer={**arguments, **trainer})
    path.write_text(path.read_text().replace("unread.jsonl", str(folder / "data.jsonl")))
    return path


def test_batches_and_dropout_are_the_same_in_every_placement(two, tmp_path):
    found = {}
    for name, sharded in TRAINERS.items():
        found[name] = two.run(losses, 2, write_run(tmp_path, {"save_strategy": "no", **sharded}))
    reference, drawn = found["replicated"][0]
    assert len(set(reference)) == 4
    for ranks in found.values():
        for each, drawn_there in ranks:
            assert each == pytest.approx(reference, rel=1e-6)
            assert torch.equal(drawn_there, drawn)


def test_a_seed_gives_the_same_bits_in_every_process(tmp_path):
    """Whatever the hash seed of Python is, and the number of workers that load data."""
    path, hash_seed = write_run(tmp_path, {}), "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    started = Launched.ranks(0, "lowmem", "train", str(path), f"run_dir={tmp_path}/forked")
    command = [sys.executable, "-m", "lowmem", "train", str(path), f"run_dir={tmp_path}/run"]
    done = subprocess.run(
        [*command, "trainer.dataloader_num_workers=2"],
        env={**os.environ, "PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    for end in (done, started.finish()):
        assert end.returncode == 0, end.stderr
    weights, others = (load_file(tmp_path / run / "checkpoint-4" / "model.safetensors") for run in ("run", "forked"))
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, others[name]), name
