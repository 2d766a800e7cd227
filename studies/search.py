"""The code search task: given a docstring, a sentence encoder finds its function in the standard library."""

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

QUESTION = 24  # maximum number of tokens
ANSWER = 48
HELD_OUT = 500  # number of pairs; all but one of their modules are held out
SCALE = 20.0  # factor of cosines, as in the training of the encoder


def _pairs(texts: list[tuple[str, str]]) -> TensorDataset:
    """Returns token ids [pairs, tokens] of questions and of their answers, zero after the end."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(packages.encoder_folder())
    options = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
    columns = zip(zip(*texts, strict=True), (QUESTION, ANSWER), strict=True)
    ids = [tokenizer(list(column), max_length=length, **options)["input_ids"] for column, length in columns]
    return TensorDataset(*ids)


@functools.cache
def functions() -> TensorDataset:
    """Returns pairs of docstring and code. The first `HELD_OUT` pairs are held out."""
    by_module: dict[str, list[tuple[str, str]]] = {}
    for module, docstring, code in documented_functions():
        by_module.setdefault(module, []).append((docstring, code))
    names = sorted(by_module)
    random.Random(0).shuffle(names)
    return _pairs([pair for name in names for pair in by_module[name]])


@functools.cache
def sentences() -> TensorDataset:
    """Returns pairs of a paragraph's first sentence and the rest, from the language reference, for `old mrr`."""
    return _pairs(list(paragraphs()))


def embedded(model: Any, ids: Tensor) -> Tensor:
    """Returns the mean hidden state of each row, normalized to norm 1."""
    ids = ids[:, : int((ids != 0).sum(1).max())]
    mask = (ids != 0).long()
    states = model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
    return normalize((states * mask.unsqueeze(-1)).sum(1), dim=1)


def similarities(model: Any, pairs: tuple[Tensor, ...]) -> Tensor:
    """Returns the similarity of each question to each answer."""
    questions, answers = (torch.cat([embedded(model, ids) for ids in texts.split(64)]) for texts in pairs)
    return SCALE * questions @ answers.T


@dataclass(frozen=True)
class Search(Task):
    """Trains the encoder on batches of docstrings and functions, in which each function answers one docstring."""

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
        """Returns `loss`: cross-entropy over all held-out functions; `mrr`: mean reciprocal rank of the correct one;
        and `old mrr`: `mrr` for English sentences, which measures forgetting.
        """
        new = similarities(model, functions()[:HELD_OUT])
        old = similarities(model, sentences()[:])
        loss = cross_entropy(new, torch.arange(len(new))).item()
        return {"loss": loss, "mrr": _mean_reciprocal_rank(new), "old mrr": _mean_reciprocal_rank(old)}


def _mean_reciprocal_rank(similarities: Tensor) -> float:
    ranks = (similarities >= similarities.diagonal().unsqueeze(1)).sum(1)
    return ranks.double().reciprocal().mean().item()
