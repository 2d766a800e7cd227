"""Packed samples train like separate samples, or the trainer raises an error."""

import pytest
import torch
import trl
from datasets import Dataset
from support.products import FULL
from support.shards import SHARDS
from support.trainers import losses, quiet, tokenizer
from transformers import CONFIG_MAPPING, AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import lowmem
from lowmem.errors import UnsupportedError
from lowmem.hf.packing import check_borders
from lowmem.trainer import FusedSFTTrainer

SIZES = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS = {
    "llama": {"intermediate_size": 48, "num_key_value_heads": 2},
    "mistral": {"intermediate_size": 48, "num_key_value_heads": 2, "sliding_window": 4},
    "biogpt": {"intermediate_size": 48},
    "afmoe": {
        "intermediate_size": 48, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
        "head_dim": 8, "num_key_value_heads": 2,
    },
}  # fmt: skip
SAMPLES = [torch.arange(7, 7 + length).mul(5 + length).remainder(97).tolist() for length in (9, 4, 6, 5)]
PACKED = {"packing": True, "max_length": 24}  # one row with all samples
PADDING_FREE = {"padding_free": True, "max_length": None, "per_device_train_batch_size": 4}
PADDED = {"per_device_train_batch_size": 4, "max_length": 24}


def small(kind="llama", attention="sdpa"):
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {kind}")
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES, **MODELS[kind])
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for param in model.parameters():  # sharp attention makes leaks large
        torch.nn.init.normal_(param, std=0.3)
    return model


@pytest.fixture
def make(tmp_path):
    def factory(model, cls=FusedSFTTrainer, samples=SAMPLES, **arguments):
        usual = quiet(tmp_path, max_steps=2, per_device_train_batch_size=1, max_grad_norm=0.0)
        options = {"fused": lowmem.FusedConfig(rule="lomo")} if cls is FusedSFTTrainer else {}
        return cls(
            model,
            args=trl.SFTConfig(**usual | arguments),
            train_dataset=Dataset.from_list([{"input_ids": ids, "labels": ids} for ids in samples]),
            processing_class=tokenizer(),
            **options,
        )

    return factory


ROWS = [("llama", "sdpa", PACKED), ("mistral", "eager", PACKED), ("llama", "sdpa", PADDING_FREE)]


@pytest.mark.parametrize(("kind", "attention", "arguments"), ROWS)
def test_packed_samples_train_as_padded_ones(kind, attention, arguments, make):
    """All samples are in one row, or in a batch of one row each. Sums are computed in another order."""
    runs = []
    for options in (arguments, PADDED):
        trainer = make(small(kind, attention), **options)
        batch = trainer.data_collator([trainer.train_dataset[n] for n in range(len(trainer.train_dataset))])
        assert len(batch["input_ids"]) == (1 if options is arguments else 4)
        trainer.train()
        runs.append(trainer)
    assert losses(runs[0]) == pytest.approx(losses(runs[1]), rel=1e-5)
    for packed, padded in zip(*(trainer.model.parameters() for trainer in runs), strict=True):
        torch.testing.assert_close(packed, padded, rtol=1e-4, atol=1e-6)


# --- Unsupported packing ------------------------------------------------------------------------------------------


def without_mask(module, query, key, value, attention_mask, **options):
    return sdpa_attention_forward(module, query, key, value, None, **options)


AttentionInterface.register("without_mask", without_mask)
LEAKING = {
    "a model that makes no mask": ("afmoe", "sdpa", PACKED),
    "an old model": ("biogpt", "sdpa", PADDING_FREE),
    "a sliding window": ("mistral", "without_mask", PADDING_FREE),
}


@pytest.mark.parametrize(("kind", "attention", "arguments"), LEAKING.values(), ids=LEAKING)
def test_packing_without_sample_boundaries_raises_before_the_first_update(kind, attention, arguments, make):
    model = small(kind, attention)
    before = [param.clone() for param in model.parameters()]
    with pytest.raises(UnsupportedError, match=rf"{type(model).__name__} a sample depends.*Omit both"):
        make(model, **arguments).train()
    assert all(torch.equal(now.cpu(), then) for now, then in zip(model.parameters(), before, strict=True))
    make(model, **PADDED).create_optimizer()


def test_wrapped_rows_are_one_sample_each_by_design(make):
    """TRL cuts a stream of all samples into rows, which do not record where samples begin."""
    trainer = make(small("afmoe"), packing=True, packing_strategy="wrapped", max_length=12)
    assert {len(row["input_ids"]) for row in trainer.train_dataset} == {12}
    assert "position_ids" not in trainer.data_collator([trainer.train_dataset[0]])
    trainer.create_optimizer()


# --- The check itself ---------------------------------------------------------------------------------------------


def test_the_packing_check_changes_no_state(make):
    model = small().eval()
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_(False)
    trainer, state = make(model, **PACKED), torch.get_rng_state()
    before = [param.clone() for param in model.parameters()]
    trainer.create_optimizer()
    assert trainer.optimizer.last_step is None
    assert not model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(param.grad is None for param in model.parameters())
    assert all(map(torch.equal, model.parameters(), before))


def checked(rank, kind):
    net = SHARDS[kind](rank, small)
    collate = trl.trainer.sft_trainer.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    check_borders(net, collate, torch.device("cpu"))
    opt = lowmem.FusedOptimizer(net.named_parameters(), model=net, rule="lomo", lr=1e-3)
    ids = torch.tensor([SAMPLES[0]])
    opt.backward(net(input_ids=ids, labels=ids).loss)
    assert opt.last_step.step == 1


@pytest.mark.parametrize("kind", ["fsdp2", *(["zero3"] if FULL else [])])
def test_packing_of_sharded_models_is_checked_too(two, kind):
    two.run(checked, kind)
