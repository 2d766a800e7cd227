"""Trainers of transformers and TRL with tiny models and data, and comparisons of their runs."""

import os
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache, partial
from tempfile import TemporaryDirectory

import pytest
import torch
import transformers as hf
import trl
from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from datasets import Dataset

from lowmem.options import LayersConfig
from lowmem.trainer import FusedTrainerMixin
from scripts.make_model import train_tokenizer

SENTENCES = [f"the {a} {b} {c}" for a in ("old", "new") for b in ("cat", "dog") for c in ("sat", "ran", "ate")]
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@cache
def tokenizer():
    tokenizer = train_tokenizer(SENTENCES, 300)
    tokenizer.mask_token = "<|user|>"  # a token that does not occur in the text
    return tokenizer


def fused(cls):
    """Returns a trainer class with the mixin, as a user would define it."""
    return type(f"Fused{cls.__name__}", (FusedTrainerMixin, cls), {})


def special():
    return {"pad_token_id": tokenizer().pad_token_id, "bos_token_id": None, "eos_token_id": tokenizer().eos_token_id}


def llama(head=hf.LlamaForCausalLM, **options):
    torch.manual_seed(0)
    return head(hf.LlamaConfig(**SIZES, vocab_size=len(tokenizer()), attention_dropout=0.1, **special(), **options))


def bert(head, **options):
    torch.manual_seed(0)
    return head(hf.BertConfig(**SIZES, vocab_size=len(tokenizer()), max_position_embeddings=32, **special(), **options))


def t5():
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 1, "num_heads": 2}
    start = {"decoder_start_token_id": tokenizer().pad_token_id}
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, **start, **special(), vocab_size=len(tokenizer())))


def tokens(labels: Callable[[list[int], int], object]):
    """Returns tokenized sentences. labels: a function of the token ids and the row number."""
    rows = [(tokenizer()(sentence)["input_ids"], n) for n, sentence in enumerate(SENTENCES)]
    return [{"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels(ids, n)} for ids, n in rows]


def plain(cls, config, model, collator, rows, **options):
    """Returns a row of `ROWS` for a trainer of transformers."""
    return cls, config, options, {"model": model, "data_collator": collator, "train_dataset": rows}


def of_trl(name, rows, model, options, **keywords):
    """Returns a row of `ROWS` for a trainer of TRL."""
    data = {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer()}
    return getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config"), options, {"model": model, **data, **keywords}


def causal_lm():
    collator = hf.DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    return plain(hf.Trainer, hf.TrainingArguments, llama(), collator, tokens(lambda ids, n: ids))


def masked_lm():
    collator = hf.DataCollatorForLanguageModeling(tokenizer(), mlm=True)
    rows = [{name: row[name] for name in ("input_ids", "attention_mask")} for row in tokens(lambda ids, n: ids)]
    return plain(hf.Trainer, hf.TrainingArguments, bert(hf.BertForMaskedLM), collator, rows)


def sequence_classification():
    model = bert(hf.BertForSequenceClassification, num_labels=3)
    collator = hf.DataCollatorWithPadding(tokenizer())
    return plain(hf.Trainer, hf.TrainingArguments, model, collator, tokens(lambda ids, n: n % 3))


def seq2seq(cls=hf.Trainer, config=hf.TrainingArguments, **options):
    model = t5()
    collator = hf.DataCollatorForSeq2Seq(tokenizer(), model)
    return plain(cls, config, model, collator, tokens(lambda ids, n: ids[::-1]), **options)


def sft(model=llama, **options):
    rows = [{"prompt": "the " + a, "completion": f" {b}"} for a, b in zip(SENTENCES, reversed(SENTENCES), strict=True)]
    return of_trl("SFT", rows, model(), options)


def preferences():
    pairs = zip(SENTENCES, reversed(SENTENCES), strict=True)
    return [{"prompt": "the ", "chosen": a, "rejected": f"{b} too"} for a, b in pairs]


def dpo(**options):
    return of_trl("DPO", preferences(), llama(), options, ref_model=llama())


def kto(**options):
    rows = [{"prompt": "the ", "completion": text, "label": n % 2 == 0} for n, text in enumerate(SENTENCES)]
    return of_trl("KTO", rows, llama(), options, ref_model=llama())


def reward():
    return of_trl("Reward", preferences(), llama(hf.LlamaForSequenceClassification, num_labels=1), {})


@cache
def saved(**options):
    """Returns a directory with a saved model, from which TRL loads the reference model. options: those of `llama`."""
    folder = TemporaryDirectory()
    llama(**options).save_pretrained(folder.name)
    return folder


def llama_of_a_path():
    model = llama()
    model.config._name_or_path = saved().name
    return model


def length_of(completions, **_):
    return [float(len(set(text))) for text in completions]


GENERATION = {"num_generations": 2, "max_completion_length": 4, "temperature": 1.0}


def grpo(**options):
    rows = [{"prompt": text} for text in SENTENCES]
    return of_trl("GRPO", rows, llama_of_a_path(), GENERATION | options, reward_funcs=length_of)


def rloo(**options):
    rows = [{"prompt": text} for text in SENTENCES]
    return of_trl("RLOO", rows, llama_of_a_path(), GENERATION | options, reward_funcs=length_of)


def distillation():
    rows = [{"prompt": "the " + a, "completion": f" {a}"} for a in SENTENCES]
    options = {"max_completion_length": 4}
    return of_trl("Distillation", rows, llama(), options, teacher_model=llama())


# Training arguments of each placement
SHARDED = {
    "fsdp2": {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}},
    # with the default threshold, all parameters of a small model would stay gathered
    "zero3": {
        "deepspeed": {
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "train_micro_batch_size_per_gpu": "auto",
        }
    },
    "replicated": {},
}


def require_sharding(kind):
    """Skips the test if Accelerate requires a GPU for FSDP2."""
    if kind == "fsdp2":
        try:
            FullyShardedDataParallelPlugin(fsdp_version=2)
        except RuntimeError as error:
            pytest.skip(f"this Accelerate: {error}")


def require(row):
    """Skips the test if the installed TRL does not provide the trainer."""
    if (name := row.partition(",")[0]) in ("SFT", "DPO", "KTO", "Reward", "GRPO", "RLOO", "Distillation"):
        try:
            getattr(trl, f"{name}Trainer")
        except (AttributeError, ImportError, RuntimeError) as error:
            pytest.skip(f"TRL {trl.__version__}: {error}")


ROWS = {
    "causal language model": causal_lm,
    "masked language model": masked_lm,
    "sequence classification": sequence_classification,
    "seq2seq": seq2seq,
    "Seq2SeqTrainer": partial(
        seq2seq, hf.Seq2SeqTrainer, hf.Seq2SeqTrainingArguments, predict_with_generate=True, generation_max_length=4
    ),
    "SFT": sft,
    "SFT, dft loss": partial(sft, loss_type="dft"),
    "SFT, packed": partial(sft, packing=True, max_length=16),
    "DPO": dpo,
    "DPO, precomputed": partial(dpo, precompute_ref_log_probs=True),
    "DPO, synchronized": partial(dpo, sync_ref_model=True, ref_model_sync_steps=1),
    "DPO, several losses": partial(dpo, loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.5]),
    "KTO": kto,
    "KTO, precomputed": partial(kto, precompute_ref_log_probs=True),
    "Reward": reward,
    "GRPO": grpo,
    "GRPO, with a reference": partial(grpo, beta=0.1),
    "GRPO, several iterations": partial(grpo, num_iterations=2),
    "RLOO": rloo,
    "RLOO, several iterations": partial(rloo, num_iterations=2),
    "Distillation": distillation,
}


def quiet(folder, **arguments):
    """Returns arguments of a short float32 run that logs every step, saves nothing and prints nothing."""
    usual = {
        "output_dir": str(folder), "max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 1e-2,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "bf16": False,
        "dataloader_pin_memory": False,
    }  # fmt: skip
    return usual | arguments


def build(row, folder, mixin, keywords=(), **arguments):
    """Creates the trainer of a row, with or without the mixin. keywords: additional arguments of the constructor."""
    require(row)
    cls, config, options, row_keywords = ROWS[row]()
    args = config(**quiet(folder, optim="adamw_torch", weight_decay=0.1) | options | arguments)
    if mixin:  # uses TRL's head, because results must be bitwise equal
        keywords = {"layers": LayersConfig(computed_gradients=False), **dict(keywords)}
    return (fused(cls) if mixin else cls)(args=args, **{**row_keywords, **dict(keywords)})


def both(make):
    """Trains with both trainers, without and with the mixin, and returns them. make: creates a trainer."""
    trainers = []
    for mixin in (False, True):  # in turn, because the constructor sets the seed
        trainers.append(make(mixin))
        trainers[-1].train()
    return trainers


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def assert_same_run(fused, ordinary, approximate=("grad_norm",), other=()):
    """Compares weights and logs bitwise. approximate: metrics with a tolerance. other: metrics that are ignored."""
    pairs = zip(fused.model.parameters(), ordinary.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    for actual, expected in zip(fused.state.log_history, ordinary.state.log_history, strict=True):
        names = {name for name in expected if not any(part in name for part in ("time", "runtime", "per_second"))}
        exact = names.difference(approximate, other)
        assert {name: actual[name] for name in exact} == pytest.approx(
            {name: expected[name] for name in exact}, rel=0, abs=0, nan_ok=True
        )
        for name in names & {*approximate}:
            assert actual[name] == pytest.approx(expected[name], rel=1e-5, nan_ok=True)


@contextmanager
def joined(rank):
    """Makes trainers created in this context use the process group of this rank."""
    before = dict(os.environ)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    os.environ["MASTER_PORT"] = "29500"  # required by Accelerate, although the group already exists
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
