"""The task of searching code: a sentence encoder finds the function of the standard library for its docstring."""

import functools
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import TensorDataset

from studies import packages
from studies.text import documented_functions, paragraphs
from studies.training import Task

QUESTION, ANSWER = 24, 48  # tokens that are read
HELD_OUT = 500  # pairs; all but one of their modules are held out
SCALE = 20.0  # of cosines, as in the training of the encoder


def _pairs(texts: list[tuple[str, str]]) -> TensorDataset:
    """Token ids [pairs, tokens] of questions and of their answers, zero after the end."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(packages.encoder_folder())
    options = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
    columns = zip(zip(*texts, strict=True), (QUESTION, ANSWER), strict=True)
    ids = [tokenizer(list(column), max_length=length, **options)["input_ids"] for column, length in columns]
    return TensorDataset(*ids)


@functools.cache
def functions() -> TensorDataset:
    """Docstrings and code; the first pairs are held out."""
    by_module: dict[str, list[tuple[str, str]]] = {}
    for module, docstring, code in documented_functions():
        by_module.setdefault(module, []).append((docstring, code))
    names = sorted(by_module)
    random.Random(0).shuffle(names)
    return _pairs([pair for name in names for pair in by_module[name]])


@functools.cache
def sentences() -> TensorDataset:
    """First sentences of paragraphs and what follows them, in the language reference: what the encoder could before."""
    return _pairs(list(paragraphs()))


def embedded(model: Any, ids: Tensor) -> Tensor:
    """The mean of the hidden states of each row's tokens, of norm 1."""
    ids = ids[:, : int((ids != 0).sum(1).max())]
    mask = (ids != 0).long()
    states = model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
    return normalize((states * mask.unsqueeze(-1)).sum(1), dim=1)


def similarities(model: Any, pairs: tuple[Tensor, ...]) -> Tensor:
    """Of each question with each answer."""
    questions, answers = (torch.cat([embedded(model, ids) for ids in texts.split(64)]) for texts in pairs)
    return SCALE * questions @ answers.T


@dataclass(frozen=True)
class Search(Task):
    """The encoder is trained on batches of docstrings and functions, of which each function answers one docstring."""

    updates: int = 300
    batch: int = 16
    compiled: bool = True

    def model(self) -> Any:
        return packages.encoder()

    def rows(self) -> TensorDataset:
        return TensorDataset(*functions()[HELD_OUT:])

    def loss(self, model: Any, batch: tuple[Tensor, ...]) -> Tensor:
        return cross_entropy(similarities(model, batch), torch.arange(len(batch[0])))

    def scores(self, model: Any) -> dict[str, float]:
        """`loss`: cross-entropy over all held-out functions. `mrr`: mean reciprocal rank of the right one. `old mrr`:
        the same for sentences of English, which measures forgetting.
        """
        new, old = similarities(model, functions()[:HELD_OUT]), similarities(model, sentences()[:])
        loss = cross_entropy(new, torch.arange(len(new))).item()
        return {"loss": loss, "mrr": _mean_reciprocal_rank(new), "old mrr": _mean_reciprocal_rank(old)}


def _mean_reciprocal_rank(similarities: Tensor) -> float:
    ranks = (similarities >= similarities.diagonal().unsqueeze(1)).sum(1)
    return ranks.double().reciprocal().mean().item()
