"""The code search task: a sentence encoder learns to find the function of a docstring in the standard library."""

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

QUESTION = 24  # maximum number of tokens in a question
ANSWER = 48  # maximum number of tokens in an answer
HELD_OUT = 500  # number of pairs; at most one module has both held-out and training pairs
SCALE = 20.0  # factor of cosine similarities, as in the encoder's pretraining


def _pairs(texts: list[tuple[str, str]]) -> TensorDataset:
    """Returns the token ids of questions and of answers, both of shape [pairs, tokens] and padded with 0."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(packages.encoder_folder())
    options = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
    columns = zip(zip(*texts, strict=True), (QUESTION, ANSWER), strict=True)
    ids = [tokenizer(list(column), max_length=length, **options)["input_ids"] for column, length in columns]
    return TensorDataset(*ids)


@functools.cache
def functions() -> TensorDataset:
    """Returns pairs of docstrings and functions, ordered by module. The first `HELD_OUT` pairs are held out."""
    by_module: dict[str, list[tuple[str, str]]] = {}
    for module, docstring, code in documented_functions():
        by_module.setdefault(module, []).append((docstring, code))
    names = sorted(by_module)
    random.Random(0).shuffle(names)
    return _pairs([pair for name in names for pair in by_module[name]])


@functools.cache
def sentences() -> TensorDataset:
    """Returns pairs of the first sentence and the remaining text of paragraphs in the Python language reference."""
    return _pairs(list(paragraphs()))


def embedded(model: Any, ids: Tensor) -> Tensor:
    """Returns the normalized mean hidden state of each row, of shape [rows, hidden size]."""
    ids = ids[:, : int((ids != 0).sum(1).max())]
    mask = (ids != 0).long()
    states = model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
    return normalize((states * mask.unsqueeze(-1)).sum(1), dim=1)


def similarities(model: Any, pairs: tuple[Tensor, ...]) -> Tensor:
    """Returns the scaled cosine similarities of all questions and answers, of shape [questions, answers]."""
    questions, answers = (torch.cat([embedded(model, ids) for ids in texts.split(64)]) for texts in pairs)
    return SCALE * questions @ answers.T


@dataclass(frozen=True)
class Search(Task):
    """Trains the encoder to select the function of each docstring among all functions in the batch."""

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
        and `old mrr`: mean reciprocal rank for `sentences`, which measures forgetting.
        """
        new = similarities(model, functions()[:HELD_OUT])
        old = similarities(model, sentences()[:])
        loss = cross_entropy(new, torch.arange(len(new))).item()
        return {"loss": loss, "mrr": _mean_reciprocal_rank(new), "old mrr": _mean_reciprocal_rank(old)}


def _mean_reciprocal_rank(similarities: Tensor) -> float:
    ranks = (similarities >= similarities.diagonal().unsqueeze(1)).sum(1)
    return ranks.double().reciprocal().mean().item()
