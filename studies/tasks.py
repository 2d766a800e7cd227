"""Tables of the tasks and methods, and a function that trains one run."""

from dataclasses import replace
from typing import Any, NamedTuple

from studies import training
from studies.chat import Chat
from studies.formats import format_of
from studies.grid import Run
from studies.llamas import LlamaTask
from studies.search import Search
from studies.training import Task


class Method(NamedTuple):
    """A rule with its options.

    Attributes:
        states: number of states with the shape of the weight.
    """

    rule: str
    options: dict[str, Any] = {}  # noqa: RUF012
    states: int = 0


NO_DECAY = {"weight_decay": 0.0}
CLIPPED = {"clip_norm": 1.0, "store": "device"}
SMALL_MATRICES = {"min_dim_size_to_factor": 32}
MOMENTUM = "adafactor, momentum"  # an 8-bit momentum takes one byte per weight
METHODS = {
    "adalomo": Method("adalomo"),
    "adamw": Method("adamw", NO_DECAY, states=2),
    "adafactor": Method("adafactor", SMALL_MATRICES),
    "adafactor_t2t": Method("adafactor_t2t"),
    "lion": Method("lion", NO_DECAY, states=1),
    "lomo": Method("lomo", CLIPPED),
    "lans": Method("lans", states=2),
    "scaled_adam": Method("scaled_adam", states=2),
    MOMENTUM: Method("adafactor", {**SMALL_MATRICES, "beta1": 0.9}, states=1),
}

LLAMA = LlamaTask()
TASKS: dict[str, Task] = {
    "search": Search(),
    "search, batch 32": Search(updates=100, batch=32),
    "chats": Chat(),
    "docstrings": LLAMA,
    "docstrings, 5M": replace(LLAMA, size="5M", compiled=True),
    "docstrings, 20M": replace(LLAMA, size="20M", compiled=True),
    **{f"docstrings, batch {size}": replace(LLAMA, batch=size, updates=600 // size) for size in (1, 16, 64)},
}


def train(run: Run) -> Run:
    """Trains a run and returns its results."""
    method, task = METHODS[run["method"]], TASKS[run["task"]]
    form = format_of(run["format"])
    return training.train(task, task.model(), method.rule, run["lr"], method.options, form, run["seed"])
