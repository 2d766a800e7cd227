"""The tasks, the methods that train them, and one run."""

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
        relative: whether the learning rate is relative to the size of the weights.
        states: number of full-size states.
    """

    rule: str
    options: dict[str, Any] = {}  # noqa: RUF012
    relative: bool = False
    states: int = 0


NO_DECAY = {"weight_decay": 0.0}
CLIPPED = {"clip_norm": 1.0, "store": "device"}
SMALL_MATRICES = {"min_dim_size_to_factor": 32}
MOMENTUM = "adafactor, momentum"  # one byte per weight in 8 bits
METHODS = {
    "adalomo": Method("adalomo", relative=True),
    "adamw": Method("adamw", NO_DECAY, states=2),
    "adafactor": Method("adafactor", SMALL_MATRICES, relative=True),
    "adafactor_t2t": Method("adafactor_t2t", relative=True),
    "lion": Method("lion", NO_DECAY, states=1),
    "lomo": Method("lomo", CLIPPED),
    "lans": Method("lans", relative=True, states=2),
    "scaled_adam": Method("scaled_adam", relative=True, states=2),
    MOMENTUM: Method("adafactor", {**SMALL_MATRICES, "beta1": 0.9}, relative=True, states=1),
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
# The usual learning rate of AdamW, and the root mean square of the weights
USUAL = {"search": (2e-5, 0.058), "docstrings": (2e-5, 0.099), "chats": (2e-5, 0.18)}


def usual(task: str, method: str) -> float:
    """Returns the learning rate that corresponds to AdamW's usual learning rate."""
    adamw, rms = USUAL[task]
    return float(f"{adamw / (rms if METHODS[method].relative else 1.0):.2g}")


def train(run: Run) -> Run:
    """Trains a run and returns its results."""
    method, task = METHODS[run["method"]], TASKS[run["task"]]
    form = format_of(run["format"])
    return training.train(task, task.model(), method.rule, run["lr"], method.options, form, run["seed"])
