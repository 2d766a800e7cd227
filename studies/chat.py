"""The chat task: SmolLM2-135M-Instruct learns to answer in as few words as possible.

Randomly generated questions ask for arithmetic, formats and facts in a text, so each has exactly one correct answer.
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

TRAINED = 2400  # number of training chats
HELD_OUT = 180  # number of held-out chats
WORDS = "open file read write close parse split merge sort find count store load move copy print check start stop"
NAMES = "Anna Ben Clara David Emma Felix Grace Henry Ida Jonas Karla Leo Mona Nils Olga Paul Rosa Simon Tara Uwe"
MONTHS = list(calendar.month_name)[1:]
IGNORED = -100  # label of tokens without a loss


class Question(NamedTuple):
    text: str
    answer: str


def random_question(draw: random.Random) -> Question:
    kind = draw.randrange(6)
    if kind < 2:  # arithmetic
        a = draw.randint(10, 999)
        b = draw.randint(10, 99)
        text, value = (f"{a} + {b}", a + b) if kind else (f"{a + b} - {b}", a)
        draw.choice(range(4))  # unused: the recorded runs drew it, and the following random numbers must not change
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
    person, _ = draw.sample(range(4), 2)
    if kind == 4:
        return Question(f"{facts} In which room does {people[person]} work?", str(rooms[person]))
    return Question(f"{facts} Who works in room {rooms[person]}?", people[person])


@functools.cache
def questions() -> list[Question]:
    """Returns distinct questions, of which the first `HELD_OUT` are held out."""
    draw = random.Random(0)
    by_text = dict[str, Question]()
    while len(by_text) < HELD_OUT + TRAINED:
        question = random_question(draw)
        by_text[question.text] = question
    return list(by_text.values())


Chats = tuple[Tensor, ...]  # token ids and labels (next token or `IGNORED`), both of shape [chats, tokens]


@functools.cache
def chats() -> TensorDataset:
    """Returns the `Chats` of all questions and answers, padded with the token id 0."""
    tokenizer = packages.chat_tokenizer()
    ids = []
    labels = []
    for question in questions():
        prompt = tokenizer(f"<|im_start|>user\n{question.text}<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
        answer = tokenizer(f"{question.answer}<|im_end|>")["input_ids"]
        ids.append(torch.tensor(prompt + answer))
        labels.append(torch.tensor([IGNORED] * (len(prompt) - 1) + answer + [IGNORED]))
    return TensorDataset(pad_sequence(ids, True), pad_sequence(labels, True, IGNORED))


@functools.cache
def prose() -> Chats:
    """Returns `Chats` with text of the Python language reference, whose loss measures forgetting."""
    tokenizer = packages.chat_tokenizer()
    ids = torch.tensor([token for pair in paragraphs() for token in tokenizer(" ".join(pair))["input_ids"]])
    ids = ids[: 24 * 97].view(24, 97)
    return ids[:, :-1], ids[:, 1:]


def logits(model: Any, chats: Chats) -> Tensor:
    """Returns the logits of all tokens with a label, of shape [tokens, vocabulary]."""
    longest = int((chats[1] != IGNORED).any(0).nonzero().max()) + 1
    ids, labels = (tensor[:, :longest] for tensor in chats)
    states = model.model(input_ids=ids, attention_mask=(ids != 0).long()).last_hidden_state
    return model.lm_head(states[labels != IGNORED]).float()


def losses(model: Any, chats: Chats) -> Tensor:
    """Returns the losses of all tokens with a label, of shape [tokens]."""
    return cross_entropy(logits(model, chats), chats[1][chats[1] != IGNORED], reduction="none")


def in_batches(chats: Chats) -> Iterator[Chats]:
    return zip(*(tensor.split(30) for tensor in chats), strict=True)


@dataclass(frozen=True)
class Chat(Task):
    """Trains a chat model on the answers, and measures its accuracy and forgetting."""

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
        most likely one, as in greedy generation; and `old`: nats per token of `prose`.
        """
        token_losses = []
        correct_answers = 0
        for ids, labels in in_batches(chats()[:HELD_OUT]):
            answers = labels != IGNORED
            token_logits = logits(model, (ids, labels))
            token_losses.append(cross_entropy(token_logits, labels[answers], reduction="none"))
            correct = torch.ones_like(answers).masked_scatter(answers, token_logits.argmax(1) == labels[answers])
            correct_answers += int(correct.all(1).sum())
        loss = torch.cat(token_losses).mean().item()
        old = torch.cat([losses(model, batch) for batch in in_batches(prose())]).mean().item()
        return {"loss": loss, "exact": correct_answers / HELD_OUT, "old": old}
