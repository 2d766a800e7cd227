"""Trainers of packages that train embeddings, rankers and taggers: each of them with the mixin is its own to the last bit.

Their classes choose the optimizer, its groups, and how checkpoints are loaded.
"""

import importlib

import pytest
import torch
import transformers as hf
from datasets import Dataset
from judged import EQUAL, judge, report
from support.trainers import SENTENCES, bert, fused, tokenizer

WAYS = {
    "immediate": {"max_grad_norm": 0.0},
    "two_pass": {"max_grad_norm": 0.1},
    "deferred": {"max_grad_norm": 0.1, "gradient_accumulation_steps": 2},
}
ARGUMENTS = {
    "max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no",
    "report_to": "none", "disable_tqdm": True, "optim": "adamw_torch", "dataloader_pin_memory": False,
    "weight_decay": 0.1,
}  # fmt: skip
PAIRS = {"anchor": SENTENCES, "positive": SENTENCES[::-1]}
SCORED = {**PAIRS, "label": [float(n % 2) for n in range(len(SENTENCES))]}


def saved(head, folder, **options):
    """A tiny BERT with this head, saved with its tokenizer."""
    bert(head, **options).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def sentence_transformers():
    return importlib.import_module("sentence_transformers")


def bi_encoder(wrap, folder, loss="MultipleNegativesRankingLoss", data=PAIRS, keywords=(), **arguments):
    st = sentence_transformers()
    losses = importlib.import_module("sentence_transformers.sentence_transformer.losses")
    model = st.SentenceTransformer(saved(hf.BertModel, folder / "bert"), device="cpu")
    torch.manual_seed(0)
    return wrap(st.SentenceTransformerTrainer)(
        model, st.SentenceTransformerTrainingArguments(**ARGUMENTS | {"output_dir": str(folder)} | arguments),
        train_dataset=Dataset.from_dict(data), loss=getattr(losses, loss)(model, **dict(keywords)),
    )  # fmt: skip


def bi_encoder_with_rates(wrap, folder, **arguments):
    return bi_encoder(wrap, folder, learning_rate_mapping={r"embeddings": 1e-3, r"query|key": 2e-2}, **arguments)


def cross_encoder(wrap, folder, **arguments):
    st = sentence_transformers()
    model = st.CrossEncoder(
        saved(hf.BertForSequenceClassification, folder / "bert", num_labels=1), device="cpu", max_length=16
    )
    losses = importlib.import_module("sentence_transformers.cross_encoder.losses")
    torch.manual_seed(0)
    trainer, options = st.CrossEncoderTrainer, st.CrossEncoderTrainingArguments
    return wrap(trainer)(
        model, options(**ARGUMENTS | {"output_dir": str(folder)} | arguments),
        train_dataset=Dataset.from_dict(SCORED), loss=losses.BinaryCrossEntropyLoss(model),
    )  # fmt: skip


def sparse_encoder(wrap, folder, **arguments):
    st = sentence_transformers()
    losses = importlib.import_module("sentence_transformers.sparse_encoder.losses")
    model = st.SparseEncoder(saved(hf.BertForMaskedLM, folder / "bert"), device="cpu")
    inner = losses.SparseMultipleNegativesRankingLoss(model)
    torch.manual_seed(0)
    return wrap(st.SparseEncoderTrainer)(
        model, st.SparseEncoderTrainingArguments(**ARGUMENTS | {"output_dir": str(folder)} | arguments),
        train_dataset=Dataset.from_dict(PAIRS),
        loss=losses.SpladeLoss(model, inner, document_regularizer_weight=1e-3, query_regularizer_weight=1e-3),
    )  # fmt: skip


BUILDERS = [bi_encoder, bi_encoder_with_rates, cross_encoder, sparse_encoder]
