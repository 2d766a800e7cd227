"""Tests trainers of models with quantized weights."""

import pytest
import torch
from support import trainers
from support.trainers import losses
from transformers import AutoModelForCausalLM

import lowmem
from lowmem import FusedConfig
from lowmem.tiles.quantized import QuantizedWeight, has_quantized_weights

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4}


@pytest.fixture
def trainer(make, tiny_llama):
    def make_trainer(weight_format="int10", model=None, rule="adalomo", **arguments):
        fused = FusedConfig(rule=rule, weight_format=weight_format)
        return make(model=model or tiny_llama(torch.bfloat16, attention_dropout=0.1, **SIZES), fused=fused, **arguments)

    return make_trainer


@pytest.mark.cpu_only("auto takes two passes on a CPU only")
def test_activation_checkpointing_does_not_change_training(trainer, tiny_llama):
    runs = []
    for checkpointing in (False, True):
        model = tiny_llama(torch.bfloat16, **SIZES)
        settings = {"gradient_checkpointing": checkpointing, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
        run = trainer("int10", model, max_steps=3, max_grad_norm=0.1, **settings)
        run.train()
        assert run.optimizer.policy == "two_pass"
        runs.append(losses(run))
    assert runs[0] == runs[1]


def test_the_saved_model_is_an_ordinary_model(trainer, tmp_path):
    run = trainer(max_steps=2)
    assert has_quantized_weights(run.model)
    run.train()
    run.save_model(str(tmp_path / "saved"))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").to(run.model.device)
    lowmem.dequantize_(run.model)
    assert all(map(torch.equal, saved.state_dict().values(), run.model.state_dict().values()))
    assert not any(isinstance(param, QuantizedWeight) for param in saved.parameters())


def test_a_quantized_model_is_evaluated_and_learns(trainer):
    run = trainer("int12", max_steps=15, learning_rate=5e-2)
    before = run.evaluate()["eval_loss"]
    run.train()
    assert run.evaluate()["eval_loss"] < before - 0.1


def test_a_quantized_model_is_not_quantized_again(trainer, tiny_llama):
    model = lowmem.quantize_(tiny_llama(torch.bfloat16, **SIZES), "int12", group=32)
    run = trainer("int12", model=model, max_steps=1)
    run.train()
    assert model.lm_head.weight.format.size == 32


def test_a_quantized_policy_trains_as_its_matrices_do(tmp_path, monkeypatch):
    """TRL's head writes matrix products into a buffer, which quantized weights must support."""
    monkeypatch.setattr(trainers, "SIZES", trainers.SIZES | SIZES | {"num_attention_heads": 4})
    runs = []
    for quantized in (True, False):
        model = lowmem.quantize_(trainers.llama(), "int8")
        monkeypatch.setattr(trainers, "llama_of_a_path", lambda model=model: model)
        if not quantized:
            lowmem.dequantize_(model)
        run = trainers.build("GRPO", tmp_path, True, max_steps=1, beta=0.0, weight_decay=0.0)
        assert has_quantized_weights(run.model) == quantized
        run.train()
        runs.append([entry["grad_norm"] for entry in run.state.log_history if "loss" in entry] + losses(run))
    assert runs[0] == pytest.approx(runs[1], rel=1e-5, abs=1e-6)
