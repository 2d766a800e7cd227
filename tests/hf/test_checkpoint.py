"""What is saved is complete, by parameter name, and loads to the same bits."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    get_cosine_schedule_with_warmup,
)

import lowmem
from lowmem.errors import CheckpointError
from lowmem.hf import checkpoint, weights

RULES = {
    "adalomo": {"rule": "adalomo", "rounding": "stochastic"},
    "compensated": {"rule": "adalomo", "rounding": "compensated"},
    "AdamW": {"rule": torch.optim.AdamW, "betas": (0.8, 0.9)},
    "no states": {"rule": "lomo"},
    "dynamic scale": {"clip_norm": 0.5, "loss_scale": lowmem.DynamicScale(init_scale=1024.0, growth_interval=2)},
    "norms of a group": {"rule": "scaled_adam", "clipping_scale": 0.8, "clipping_update_period": 2, "store": "disk"},
}


def trained(model, batches, **settings):
    opt = lowmem.FusedOptimizer(model.named_parameters(), lr=1e-2, **settings)
    for batch in batches:
        opt.backward(model(**batch).loss)
    return opt


@pytest.mark.parametrize("settings", RULES.values(), ids=RULES)
def test_a_saved_optimizer_continues_to_the_last_bit(settings, tiny_llama, token_batches, tmp_path):
    before, after = token_batches(6)[:3], token_batches(6)[3:]
    model = tiny_llama(torch.bfloat16)
    opt = trained(model, before, **settings)
    checkpoint.save_optimizer(opt, tmp_path / "optimizer.safetensors")
    model.save_pretrained(tmp_path)

    other = tiny_llama(torch.bfloat16)
    weights.load_weights(other, tmp_path)
    resumed = lowmem.FusedOptimizer(other.named_parameters(), lr=9.0, **settings)
    checkpoint.load_optimizer(resumed, tmp_path / "optimizer.safetensors")
    for batch in after:
        opt.backward(model(**batch).loss)
        resumed.backward(other(**batch).loss)
    assert resumed.param_groups[0]["lr"] == 1e-2
    assert resumed.loss_scale == opt.loss_scale
    assert resumed.nonfinite_steps == opt.nonfinite_steps
    for (name, weight), again in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(weight, again), name


def test_states_are_saved_by_parameter_name_in_logical_shapes(tiny_llama, token_batches, tmp_path):
    model = tiny_llama(torch.bfloat16)
    checkpoint.save_optimizer(trained(model, token_batches(1)), tmp_path / "o.safetensors")
    with safe_open(tmp_path / "o.safetensors", framework="pt") as file:
        row = file.get_tensor("model.layers.0.mlp.up_proj.weight/exp_avg_sq_row")
        assert row.shape == (64,)
        assert row.dtype == torch.float32
        assert file.get_tensor("model.norm.weight/exp_avg_sq").shape == (32,)


def test_a_torn_step_is_not_saved(tiny_llama, token_batches, tmp_path):
    model = tiny_llama()
    opt = lowmem.FusedOptimizer(model.named_parameters(), batching=False)
    model.model.embed_tokens.weight.register_hook(lambda _: 1 / 0)  # the last of all gradients
    with pytest.raises(ZeroDivisionError):
        opt.backward(model(**token_batches(1)[0]).loss)
    with pytest.raises(lowmem.LowmemError, match="torn"):
        checkpoint.save_optimizer(opt, tmp_path / "o.safetensors")
    assert not (tmp_path / "o.safetensors").exists()


@pytest.mark.parametrize("shard_size", ["1GB", "10KB"])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_load_from_one_file_or_many(tiny_llama, tmp_path, tied, shard_size):
    model = tiny_llama(tie_word_embeddings=tied)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_()
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard_size == "10KB")
    other = tiny_llama(tie_word_embeddings=tied)
    weights.load_weights(other, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_expert_weights_load_although_files_lay_them_out_differently(tmp_path):
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, num_local_experts=4,
    )  # fmt: skip
    model = MixtralForCausalLM(config).bfloat16()
    model.save_pretrained(tmp_path)
    other = MixtralForCausalLM(config).bfloat16()
    weights.load_weights(other, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_weights_of_another_model_are_refused(tiny_llama, tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"has shape \[64, 32\] in the checkpoint and \[48, 32\] in the model"):
        weights.load_weights(tiny_llama(intermediate_size=48), tmp_path)
    with pytest.raises(CheckpointError, match="weights are missing, such as"):
        weights.load_weights(tiny_llama(num_hidden_layers=3), tmp_path)


def test_another_safetensors_file_is_refused(tiny_llama, tmp_path):
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="not written by lowmem"):
        checkpoint.load_optimizer(lowmem.FusedOptimizer(model.named_parameters()), tmp_path / "model.safetensors")


def test_the_metadata_is_plain_json(tiny_llama, token_batches, tmp_path):
    checkpoint.save_optimizer(trained(tiny_llama(), token_batches(2)), tmp_path / "o.safetensors")
    with safe_open(tmp_path / "o.safetensors", framework="pt") as file:
        metadata = json.loads(file.metadata()["lowmem"])
    assert metadata["step"] == 2
    assert metadata["param_groups"][0]["rule"] == "adalomo"


SCHEDULES = {
    "another class": lambda saved: saved.pop("lr_lambdas"),
    "a function": lambda saved: saved.update(step=1),
    "rates of two groups": lambda saved: saved["base_lrs"].append(0.1),
    "a rate of text": lambda saved: saved.update(base_lrs=["0.1"]),
    "no number": lambda saved: saved.update(last_epoch=None),
    "lambdas of another shape": lambda saved: saved.update(lr_lambdas=[["x"]]),
}


@pytest.mark.parametrize("change", SCHEDULES.values(), ids=SCHEDULES)
def test_the_state_of_another_schedule_is_refused(change, tmp_path):
    def schedule():
        return get_cosine_schedule_with_warmup(torch.optim.SGD([torch.zeros(1)], lr=0.1), 1, 4)

    saved = schedule().state_dict()
    torch.save(saved, tmp_path / "scheduler.pt")
    checkpoint.load_scheduler(schedule(), tmp_path / "scheduler.pt")
    change(saved)
    torch.save(saved, tmp_path / "scheduler.pt")
    with pytest.raises(CheckpointError, match=r"scheduler.pt is damaged or of another schedule"):
        checkpoint.load_scheduler(schedule(), tmp_path / "scheduler.pt")


@pytest.mark.parametrize("change", ["values", "param_groups", "step", "nonfinite", "text"])
def test_damaged_metadata_of_an_optimizer_is_refused(change, tiny_llama, token_batches, tmp_path):
    path = tmp_path / "o.safetensors"
    opt = trained(tiny_llama(), token_batches(1))
    checkpoint.save_optimizer(opt, path)
    with safe_open(path, framework="pt") as file:
        metadata = json.loads(file.metadata()["lowmem"])
    metadata |= {"values": {}} if change == "values" else {change: ["x"]}
    text = "no JSON" if change == "text" else json.dumps(metadata)
    save_file(load_file(path), path, {"lowmem": text})
    with pytest.raises(CheckpointError, match=r"o.safetensors(: the saved optimizer)? (is damaged: |has step)"):
        checkpoint.load_optimizer(opt, path)
