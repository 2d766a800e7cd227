"""The chat task: SmolLM2-135M-Instruct learns to answer in as few words as possible.

Questions are generated at random, and their answers can be checked: arithmetic, formats, and lookups in a text.
"""

import calendar
import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import TensorDataset

from studies import packages
from studies.text import paragraphs
from studies.training import Task

TRAINED = 2400  # number of chats
HELD_OUT = 180
WORDS = "open file read write close parse split merge sort find count store load move copy print check start stop"
NAMES = "Anna Ben Clara David Emma Felix Grace Henry Ida Jonas Karla Leo Mona Nils Olga Paul Rosa Simon Tara Uwe"
MONTHS = list(calendar.month_name)[1:]
IGNORED = -100  # the label of a token that is not trained


class Question(NamedTuple):
    text: str
    answer: str


def question(draw: random.Random) -> Question:
    kind = draw.randrange(6)
    if kind < 2:  # arithmetic
        a = draw.randint(10, 999)
        b = draw.randint(10, 99)
        text, value = (f"{a} + {b}", a + b) if kind else (f"{a + b} - {b}", a)
        draw.choice(range(4))  # for the same random numbers as in the recorded runs, which also drew a wrong answer
        return Question(f"What is {text}?", str(value))
    if kind == 2:
        year = draw.randint(1950, 2030)
        month = draw.randint(1, 12)
        day = draw.randint(1, 28)
        words = f"{MONTHS[month - 1]} {day}, {year}"
        return Question(f"Write {words} as YYYY-MM-DD.", f"{year}-{month:02}-{day:02}")
    if kind == 3:
        words = draw.sample(WORDS.split(), 3)
        return Question(f'Write the name "{" ".join(words)}" in snake case.', "_".join(words))
    people = draw.sample(NAMES.split(), 4)
    rooms = draw.sample(range(100, 1000), 4)
    facts = " ".join(f"{name} works in room {room}." for name, room in zip(people, rooms, strict=True))
    right, _ = draw.sample(range(4), 2)
    if kind == 4:
        return Question(f"{facts} In which room does {people[right]} work?", str(rooms[right]))
    return Question(f"{facts} Who works in room {rooms[right]}?", people[right])


@functools.cache
def questions() -> list[Question]:
    """Returns distinct questions. The first `HELD_OUT` are held out."""
    draw = random.Random(0)
    by_text = dict[str, Question]()
    while len(by_text) < HELD_OUT + TRAINED:
        new = question(draw)
        by_text[new.text] = new
    return list(by_text.values())


Chats = tuple[Tensor, ...]  # token ids, and labels (the next token or `IGNORED`), each [chats, tokens]


@functools.cache
def chats() -> TensorDataset:
    """Returns `Chats` of every question with its answer. Ids after the end are zero."""
    tokenizer = packages.chat_tokenizer()
    ids = []
    labels = []
    for each in questions():
        asked = tokenizer(f"<|im_start|>user\n{each.text}<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
        answer = tokenizer(f"{each.answer}<|im_end|>")["input_ids"]
        ids.append(torch.tensor(asked + answer))
        labels.append(torch.tensor([IGNORED] * (len(asked) - 1) + answer + [IGNORED]))
    return TensorDataset(pad_sequence(ids, True), pad_sequence(labels, True, IGNORED))


@functools.cache
def prose() -> Chats:
    """Returns rows of the language reference, which measure forgetting."""
    tokenizer = packages.chat_tokenizer()
    ids = torch.tensor([token for pair in paragraphs() for token in tokenizer(" ".join(pair))["input_ids"]])
    ids = ids[: 24 * 97].view(24, 97)
    return ids[:, :-1], ids[:, 1:]


def logits(model: Any, chats: Chats) -> Tensor:
    """Returns the logits of every token with a label, [tokens, vocabulary]."""
    longest = int((chats[1] != IGNORED).any(0).nonzero().max()) + 1
    ids, labels = (tensor[:, :longest] for tensor in chats)
    states = model.model(input_ids=ids, attention_mask=(ids != 0).long()).last_hidden_state
    return model.lm_head(states[labels != IGNORED]).float()


def losses(model: Any, chats: Chats) -> Tensor:
    """Returns the loss of every token with a label, [tokens]."""
    return cross_entropy(logits(model, chats), chats[1][chats[1] != IGNORED], reduction="none")


def in_parts(chats: Chats) -> Iterator[Chats]:
    return zip(*(tensor.split(30) for tensor in chats), strict=True)


@dataclass(frozen=True)
class Chat(Task):
    """Trains on the answers."""

    updates: int = 100
    batch: int = 8

    def model(self) -> Any:
        return packages.chat_model()

    def rows(self) -> Any:
        return TensorDataset(*chats()[HELD_OUT:])

    def loss(self, model: Any, batch: Any) -> Tensor:
        return losses(model, batch).mean()

    def scores(self, model: Any) -> dict[str, float]:
        """Returns `loss`: nats per token of held-out answers; `exact`: the share of answers in which every token is the
        most likely token, as in greedy generation; and `old`: the loss of prose.
        """
        lost = []
        right = 0.0
        for ids, labels in in_parts(chats()[:HELD_OUT]):
            answers = labels != IGNORED
            of_tokens = logits(model, (ids, labels))
            lost.append(cross_entropy(of_tokens, labels[answers], reduction="none"))
            hits = torch.ones_like(answers).masked_scatter(answers, of_tokens.argmax(1) == labels[answers])
            right += hits.all(1).sum().item()
        old = torch.cat([losses(model, part) for part in in_parts(prose())])
        return {"loss": torch.cat(lost).mean().item(), "exact": right / HELD_OUT, "old": old.mean().item()}
