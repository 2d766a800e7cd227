"""The task of searching code: a sentence encoder finds the function of the standard library for its docstring."""

import functools
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from studies import packages
from studies.text import documented_functions, paragraphs
from studies.training import Rows, Task, with_bfloat16_states

QUESTION, ANSWER = 24, 48  # tokens that are read
HELD_OUT = 500  # pairs, from modules of their own
SCALE = 20.0  # of cosines, as in the training of the encoder


@dataclass(frozen=True)
class Pairs(Rows):
    """Token ids [pairs, tokens] of questions and of their answers, zero after the end."""

    questions: Tensor
    answers: Tensor


def _pairs(texts: list[tuple[str, str]]) -> Pairs:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(packages.encoder_folder())
    options = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
    columns = zip(zip(*texts, strict=True), (QUESTION, ANSWER), strict=True)
    return Pairs(*(tokenizer(list(texts), max_length=length, **options)["input_ids"] for texts, length in columns))


@functools.cache
def functions() -> tuple[Pairs, Pairs]:
    """Docstrings and code, to train on and held out."""
    by_module: dict[str, list[tuple[str, str]]] = {}
    for module, docstring, code in documented_functions():
        by_module.setdefault(module, []).append((docstring, code))
    names = sorted(by_module)
    random.Random(0).shuffle(names)
    pairs = _pairs([pair for name in names for pair in by_module[name]])
    return pairs[HELD_OUT:], pairs[:HELD_OUT]


@functools.cache
def sentences() -> Pairs:
    """First sentences of paragraphs and what follows them, in the language reference: what the encoder could before."""
    return _pairs(list(paragraphs()))


def hidden(model: Any, ids: Tensor) -> Tensor:
    ids = ids[:, : int((ids != 0).sum(1).max())]
    return model(input_ids=ids, attention_mask=(ids != 0).long()).last_hidden_state


def embedded(model: Any, ids: Tensor) -> Tensor:
    """The mean of the hidden states of each row's tokens, of norm 1."""
    states = hidden(model, ids).float()
    mask = (ids[:, : states.shape[1]] != 0).unsqueeze(-1)
    return normalize((states * mask).sum(1), dim=1)


def similarities(model: Any, pairs: Pairs) -> Tensor:
    """Of each question with each answer."""
    columns = pairs.questions.split(64), pairs.answers.split(64)
    questions, answers = (torch.cat([embedded(model, ids) for ids in parts]) for parts in columns)
    return SCALE * questions @ answers.T


@dataclass(frozen=True)
class Search(Task):
    """The encoder is trained on batches of docstrings and functions, of which each function answers one docstring."""

    updates: int = 300
    batch: int = 16
    compiled: bool = True
    packages: tuple[str, ...] = (packages.ENCODER,)

    def model(self, seed: int) -> Any:
        model = packages.encoder()
        with_bfloat16_states(model.embeddings)
        return model

    def rows(self) -> Pairs:
        return functions()[0]

    def loss(self, model: Any, batch: Pairs) -> Tensor:
        return cross_entropy(similarities(model, batch), torch.arange(len(batch)))

    def scores(self, model: Any) -> dict[str, float]:
        """`loss`: cross-entropy over all held-out functions. `mrr`: mean reciprocal rank of the right one. `old mrr`:
        the same for sentences of English, which measures forgetting.
        """
        new, old = similarities(model, functions()[1]), similarities(model, sentences())
        loss = cross_entropy(new, torch.arange(len(new))).item()
        return {"loss": loss, "mrr": _mean_reciprocal_rank(new), "old mrr": _mean_reciprocal_rank(old)}


def _mean_reciprocal_rank(similarities: Tensor) -> float:
    ranks = (similarities >= similarities.diagonal().unsqueeze(1)).sum(1)
    return ranks.double().reciprocal().mean().item()
