"""Saved optimizers contain all states by parameter name and load bitwise."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import get_cosine_schedule_with_warmup

import lowmem
from lowmem.errors import CheckpointError
from lowmem.hf import checkpoint, weights

RULES = {
    "compensated": {"rule": "adalomo", "rounding": "compensated"},
    "8 bits": {"rule": "adamw", "state_storage": "8bit", "rounding": "compensated8"},
    "norms of a group": {"rule": "scaled_adam", "clipping_scale": 0.8, "clipping_update_period": 2, "store": "host"},
}


def trained(model, batches, **settings):
    opt = lowmem.FusedOptimizer(model.named_parameters(), lr=1e-2, **settings)
    for batch in batches:
        opt.backward(model(**batch).loss)
    return opt


@pytest.mark.parametrize("settings", RULES.values(), ids=RULES)
def test_a_saved_optimizer_continues_to_the_last_bit(settings, tiny_llama, token_batches, tmp_path):
    before, after = token_batches(6)[:3], token_batches(6)[3:]
    model = tiny_llama(torch.bfloat16, hidden_size=64)
    opt = trained(model, before, **settings)
    checkpoint.save_optimizer(opt, tmp_path / "optimizer.safetensors")
    model.save_pretrained(tmp_path)

    other = tiny_llama(torch.bfloat16, hidden_size=64)
    weights.load_weights(other, tmp_path)
    resumed = lowmem.FusedOptimizer(other.named_parameters(), lr=9.0, **settings)
    checkpoint.load_optimizer(resumed, tmp_path / "optimizer.safetensors")
    for batch in after:
        opt.backward(model(**batch).loss)
        resumed.backward(other(**batch).loss)
    assert resumed.param_groups[0]["lr"] == 1e-2
    for (name, weight), again in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(weight, again), name


def test_saved_files_contain_all_states(tiny_llama, token_batches, tmp_path):
    """8-bit codes are saved as such, with 16-bit scales of groups of 32."""
    path, model = tmp_path / "optimizer.safetensors", tiny_llama(torch.bfloat16, intermediate_size=128)
    checkpoint.save_optimizer(trained(model, token_batches(1), **RULES["8 bits"]), path)
    matrix = "model.layers.0.mlp.up_proj.weight/"  # [128, 32]
    states = {name.removeprefix(matrix): state for name, state in load_file(path).items() if name.startswith(matrix)}
    assert {name: (state.dtype, tuple(state.shape)) for name, state in states.items() if name != "step"} == {
        "exp_avg": (torch.int8, (128, 32)),
        "exp_avg_sq": (torch.uint8, (128, 32)),
        "residual": (torch.int8, (128, 32)),
        "exp_avg.scale": (torch.bfloat16, (128, 1)),
        "exp_avg_sq.scale": (torch.bfloat16, (128, 1)),
    }


def test_unrelated_safetensors_file_raises(tiny_llama, tmp_path):
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="not written by lowmem"):
        checkpoint.load_optimizer(lowmem.FusedOptimizer(model.named_parameters()), tmp_path / "model.safetensors")


def test_states_are_saved_by_parameter_name_beside_plain_json(tiny_llama, token_batches, tmp_path):
    checkpoint.save_optimizer(trained(tiny_llama(torch.bfloat16), token_batches(2)), tmp_path / "o.safetensors")
    with safe_open(tmp_path / "o.safetensors", framework="pt") as file:
        row = file.get_tensor("model.layers.0.mlp.up_proj.weight/exp_avg_sq_row")
        assert (row.shape, row.dtype) == ((64,), torch.float32)
        assert file.get_tensor("model.norm.weight/exp_avg_sq").shape == (32,)
        metadata = json.loads(file.metadata()["lowmem"])
    assert (metadata["step"], metadata["param_groups"][0]["rule"]) == (2, "adalomo")


def test_loading_the_state_of_a_different_schedule_raises(tmp_path):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    schedule = get_cosine_schedule_with_warmup(optimizer, 1, 4)
    torch.save(schedule.state_dict(), tmp_path / "scheduler.pt")
    checkpoint.load_scheduler(schedule, tmp_path / "scheduler.pt")
    with pytest.raises(CheckpointError, match=r"scheduler.pt belongs to another schedule.* Restore lr_scheduler_type"):
        checkpoint.load_scheduler(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), tmp_path / "scheduler.pt")
