"""Families of models whose head and embedding have gradients that are computed as they are read: as with TRL's head."""

import pytest
import torch
import trl
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM

import lowmem
from lowmem.hf import layers
from lowmem.trainer import FusedSFTTrainer, FusedTrainerMixin
from scripts.make_model import train_tokenizer

EXPERTS = {
    "num_key_value_heads": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.1,
}
FAMILIES = {
    "llama": {},
    "qwen2": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 4, "tie_word_embeddings": True, "head_dim": 8},
    "mistral": {"num_key_value_heads": 4},
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 5.0, "tie_word_embeddings": True},
    "gemma3_text": {"head_dim": 8, "tie_word_embeddings": True},
    "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 4, "tie_word_embeddings": True},
    "mixtral": EXPERTS,
    "cohere": {"logit_scale": 4.0, "tie_word_embeddings": True},
    "granite": {"logits_scaling": 8.0, "embedding_multiplier": 3.0},
    "phi": {},
}
VOCABULARY = 1024
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["some words to learn from, and some more of them"], 270)


def model_of(kind, **config):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes = {**sizes, "intermediate_size": 48, **SPECIAL, **FAMILIES[kind], **config}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))


@pytest.fixture
def train(tokenizer, tmp_path):
    """Trains by SGD, in which a weight differs by as much as its gradient; returns the trainer and its losses."""
    rows = torch.randint(3, VOCABULARY, (16, 12)).tolist()
    labels = [[-100] * 4 + row[4:] for row in rows]
    data = Dataset.from_dict({"input_ids": rows, "labels": labels})

    def run(model, options, cls=FusedSFTTrainer, **arguments):
        args = trl.SFTConfig(
            output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=4, learning_rate=0.1, save_strategy="no",
            report_to="none", disable_tqdm=True, bf16=False, max_grad_norm=0.0, dataloader_pin_memory=False,
            logging_steps=1, loss_type="nll", **arguments,
        )  # fmt: skip
        trainer = cls(
            model, args=args, train_dataset=data, processing_class=tokenizer, layers=options,
            fused=lowmem.FusedConfig(rule="lomo"),
        )  # fmt: skip
        trainer.train()
        left_out = "time", "changed_share"  # which samples gradients that are tensors
        logged = trainer.state.log_history[:2]
        return trainer, [
            {k: v for k, v in entry.items() if not any(each in k for each in left_out)} for entry in logged
        ]

    return run


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family_is_trained_as_with_trls_head(kind, train, offers):
    tensors, theirs = train(model_of(kind), lowmem.LayersConfig(computed_gradients=False))
    assert not offers
    computed, mine = train(model_of(kind), lowmem.LayersConfig(head_memory="64MiB"))
    assert {takes for kinds in offers.values() for _, takes in kinds} == {True}
    assert {name for kinds in offers.values() for name, _ in kinds} == {"HeadGradient", "EmbeddingGradient"}
    for entry, expected in zip(mine, theirs, strict=True):
        assert entry == pytest.approx(expected, rel=1e-4, abs=1e-6)
    for one, other in zip(computed.model.parameters(), tensors.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert layers.described(computed.model, computed.optimizer).endswith(": computed as they are read")


def test_smoothed_labels_are_those_of_the_full_logits(train):
    """Hugging Face's LabelSmoother, without the logits that it needs."""
    smoothed = {"label_smoothing_factor": 0.2}
    tensors, theirs = train(model_of("llama"), lowmem.LayersConfig(computed_gradients=False), **smoothed)
    computed, mine = train(model_of("llama"), None, **smoothed)
    plain, _ = train(model_of("llama"), None)
    for entry, expected in zip(mine, theirs, strict=True):
        assert entry == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert tensors.evaluate(tensors.train_dataset)["eval_loss"] == pytest.approx(
        computed.evaluate(computed.train_dataset)["eval_loss"], rel=1e-5
    )
    for one, other in zip(computed.model.parameters(), tensors.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(plain.model.lm_head.weight, computed.model.lm_head.weight, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("rule", "vocabulary", "words"),
    [
        ("torch.optim.SGD", VOCABULARY, ": tensors"),
        ("lomo", 300, ": tensors"),
        ("lomo", VOCABULARY, ": computed as they are read"),
    ],
)
def test_a_run_says_which_gradients_are_tensors(rule, vocabulary, words, tmp_path):
    from transformers import TrainingArguments

    from lowmem.trainer import FusedTrainer

    net = model_of("llama", vocab_size=vocabulary)
    args = TrainingArguments(output_dir=str(tmp_path), report_to="none", max_grad_norm=0.0, learning_rate=1e-2)
    trainer = FusedTrainer(net, args=args, fused=lowmem.FusedConfig(rule=rule))
    assert layers.described(net, trainer.create_optimizer()).endswith(words)
    net.requires_grad_(False)
    assert layers.described(net, trainer.optimizer) == "the head and the embedding are not trained"


@pytest.mark.skipif(not hasattr(trl.trainer.utils, "add_fused_lm_head"), reason="this TRL has no fused head")
def test_a_loss_of_the_entropy_keeps_trls_head(tokenizer, tmp_path):
    """An entropy bonus has a gradient, which the head of this package does not compute."""
    args = trl.GRPOConfig(output_dir=str(tmp_path), bf16=False, report_to="none", max_completion_length=4)
    rows = Dataset.from_list([{"prompt": "some words"}] * 8)
    trainer = type("Fused", (FusedTrainerMixin, trl.GRPOTrainer), {})(
        model_of("llama"), reward_funcs=len, args=args, train_dataset=rows, processing_class=tokenizer
    )
    ids = torch.randint(3, VOCABULARY, (1, 8)).to(trainer.model.device)
    output = trainer.model(input_ids=ids, labels=ids, fused_lm_head=True)
    assert output.entropy.requires_grad and output.log_probs.requires_grad
