"""Arguments of a trainer have the same effect as without the mixin, or raise before the first step."""

import math
import os
from unittest.mock import patch

import accelerate
import pytest
import torch
from support import trainers as builders
from support.products import FULL
from support.trainers import SENTENCES, assert_same_run, both, build, losses, tokenizer
from torch.utils.data import IterableDataset
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

import lowmem
from lowmem.errors import CheckpointError, ConfigError, UnsupportedError
from lowmem.hf import arguments, sharding

CAUSAL = "causal language model"


@pytest.fixture(autouse=True)
def environment():
    """Restores environment variables. transformers sets some to pass torch_compile to Accelerate."""
    with patch.dict(os.environ):
        yield


class Stream(IterableDataset):
    """Twelve rows without a length."""

    def __iter__(self):
        for sentence in SENTENCES:
            ids = tokenizer()(sentence)["input_ids"]
            yield {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids}


def token_loss(outputs, labels, num_items_in_batch=None):
    loss = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss / num_items_in_batch


def evaluated(row):
    return {"eval_dataset": builders.ROWS[row]()[3]["train_dataset"]}


BEST = {
    "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 6,
    "load_best_model_at_end": True, "learning_rate": 0.3,
}  # fmt: skip
EPOCHS = {"max_steps": -1, "num_train_epochs": 2}
EQUAL = {  # a row, keywords of the constructor, arguments
    "a partial last window": (CAUSAL, {}, {"gradient_accumulation_steps": 4, **EPOCHS}),
    "data that end in a window": (
        CAUSAL,
        {"train_dataset": Stream()},
        {"gradient_accumulation_steps": 4, "max_steps": 4, "lr_scheduler_type": "constant"},
    ),
    "a last window of means": ("sequence classification", {}, {"gradient_accumulation_steps": 4, **EPOCHS}),
    "compute_loss_func": (CAUSAL, {"compute_loss_func": token_loss}, {"gradient_accumulation_steps": 2}),
    "label smoothing": (CAUSAL, {}, {"label_smoothing_factor": 0.2, "gradient_accumulation_steps": 2}),
    "label smoothing of SFT": ("SFT", {}, {"label_smoothing_factor": 0.2, "loss_type": "nll"}),
    "model_init": (CAUSAL, {"model": None, "model_init": lambda: builders.llama()}, {}),
    "generation in evaluation": (
        "Seq2SeqTrainer",
        evaluated("Seq2SeqTrainer"),
        {"eval_strategy": "steps", "eval_steps": 2},
    ),
    "load_best_model_at_end": (CAUSAL, evaluated(CAUSAL), BEST),
    "save_only_model": (CAUSAL, evaluated(CAUSAL), {**BEST, "save_only_model": True}),
    "reduce_lr_on_plateau": (
        CAUSAL,
        evaluated(CAUSAL),
        {**BEST, "lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0}},
    ),
    "save_strategy='best'": (CAUSAL, evaluated(CAUSAL), {**BEST, "save_strategy": "best"}),
}

if hasattr(LlamaForCausalLM, "activation_checkpointing_enable"):  # transformers 5.23
    in_turn = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"every_n_layers": 2}}
    EQUAL["layers in turn"] = (CAUSAL, {}, in_turn)
if FULL:  # compilation takes seconds
    EQUAL["torch_compile"] = (CAUSAL, {}, {"torch_compile_backend": "aot_eager", "max_grad_norm": 0.0})


@pytest.mark.parametrize(("row", "keywords", "options"), EQUAL.values(), ids=EQUAL)
def test_a_run_equals_the_plain_trainer_bit_for_bit(row, keywords, options, tmp_path):
    ordinary, fused = both(lambda mixin: build(row, tmp_path / str(mixin), mixin, keywords, **options))
    assert_same_run(fused, ordinary)
    for name in ("global_step", "best_metric", "best_global_step", "epoch"):
        assert getattr(fused.state, name) == getattr(ordinary.state, name)


class Overflow(LlamaForCausalLM):
    """The loss is NaN for the third batch."""

    batches = 0

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        self.batches += 1
        output.loss = output.loss * (torch.nan if self.batches == 3 else 1)
        return output


@pytest.mark.parametrize("filtered", [True, False])
def test_a_non_finite_loss_is_logged_as_by_the_plain_trainer(filtered, tmp_path):
    """The weights stay finite, unlike without the mixin."""
    options = {"logging_nan_inf_filter": filtered, "remove_unused_columns": False, "max_grad_norm": 0.0}
    runs = both(lambda mixin: build(CAUSAL, tmp_path, mixin, {"model": builders.llama(Overflow)}, **options))
    assert [all(param.isfinite().all() for param in run.model.parameters()) for run in runs] == [False, True]
    ordinary, fused = map(losses, runs)
    assert fused == pytest.approx(ordinary, rel=0, abs=0, nan_ok=True)
    assert any(map(math.isnan, fused)) != filtered


REFUSED = {
    "max_grad_norm=None": ({"max_grad_norm": None}, ConfigError, "max_grad_norm=None"),
    "a negative max_grad_norm": ({"max_grad_norm": -1.0}, ConfigError, r"max_grad_norm=-1\.0.*set 0 for no clipping"),
    **{
        name: ({name: True}, UnsupportedError, f"{name}=True: ")
        for name in ("enable_jit_checkpoint", "ddp_broadcast_buffers", "save_on_each_node", "auto_find_batch_size")
        if name in TrainingArguments.__dataclass_fields__
    },
}
if hasattr(accelerate, "ParallelismConfig") and "parallelism_config" in TrainingArguments.__dataclass_fields__:
    within_the_model = {"parallelism_config": accelerate.ParallelismConfig()}
    REFUSED["parallelism"] = (within_the_model, UnsupportedError, "sequence parallelism are not supported")


@pytest.mark.parametrize(("options", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_unsupported_arguments_raise_when_the_trainer_is_created(options, error, message, tmp_path):
    with pytest.raises(error, match=message):
        build(CAUSAL, tmp_path, True, **options)


def test_a_checkpoint_within_a_step_raises(tmp_path):
    options = {"save_strategy": "epoch", "gradient_accumulation_steps": 4}
    with pytest.raises(UnsupportedError, match="an epoch of unknown length may end"):
        build(CAUSAL, tmp_path, True, {"train_dataset": Stream()}, **options)


@pytest.mark.cpu_only("auto takes two passes on a CPU only")
def test_a_compiled_model_with_policy_two_pass_raises(tmp_path):
    trainer = build(CAUSAL, tmp_path, True, torch_compile_backend="aot_eager", max_grad_norm=0.5)
    with pytest.raises(UnsupportedError, match=r"torch_compile=True.*policy='deferred'"):
        trainer.train()


def test_a_sharded_model_is_not_compiled(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), torch_compile_backend="aot_eager", report_to="none")
    with pytest.raises(UnsupportedError, match="torch_compile=True: with fsdp or deepspeed"):
        arguments.complete(lowmem.FusedConfig(), args, object.__new__(sharding.FSDP2Sharding))


def test_resuming_from_weights_only_raises(tmp_path):
    """Hugging Face would continue with empty optimizer states and restart the schedule."""
    build(CAUSAL, tmp_path, True, save_strategy="steps", save_steps=3, save_only_model=True).train()
    with pytest.raises(
        CheckpointError, match=r"checkpoint-3 does not contain optimizer\.safetensors\. It contains only weights"
    ):
        build(CAUSAL, tmp_path, True).train(resume_from_checkpoint=f"{tmp_path}/checkpoint-3")


REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}


def test_reentrant_checkpointing_rules_two_passes_out(make, tiny_llama):
    arguments = {**REENTRANT, "max_grad_norm": 0.5, "max_steps": 3}
    trainer = make(fused=lowmem.FusedConfig(policy="two_pass"), **arguments)
    before = [param.detach().clone() for param in trainer.model.parameters()]
    with pytest.raises(UnsupportedError, match=r"policy='deferred'.*use_reentrant=False"):
        trainer.train()
    assert all(map(torch.equal, trainer.model.parameters(), before))
    trainer, plain = make(model=tiny_llama(), **arguments), make(Trainer, model=tiny_llama(), **arguments)
    trainer.train()
    plain.train()
    assert trainer.optimizer.policy == "deferred"
    assert all(map(torch.equal, trainer.model.parameters(), plain.model.parameters()))
