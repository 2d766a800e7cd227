"""Trains a model on a task with one rule, and computes its scores before and after training."""

import math
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor, nn

from benchmarks.pages import ROOT
from lowmem.errors import StepError
from studies.formats import Format

WORK = ROOT / "data" / "studies"  # cache of models and packages
WARMUP = 0.05  # share of the updates, after which the learning rate decays linearly to zero
DIVERGED = 1.0  # nats above the initial held-out loss at which a run counts as diverged


@dataclass(frozen=True)
class Task(ABC):
    """A task provides a model, training data, a loss and scores.

    Attributes:
        updates: number of updates per run, with `batch` rows each.
        compiled: whether updates are always compiled.
    """

    updates: int = 150
    batch: int = 4
    compiled: bool = False

    @abstractmethod
    def model(self) -> Any:
        """Returns the model with the float32 weights from which every run starts."""

    @abstractmethod
    def rows(self) -> Any:
        """Returns the training data: a tensor or `TensorDataset`, which an integer tensor indexes to select a batch."""

    @abstractmethod
    def loss(self, model: Any, batch: Any) -> Tensor:
        """Returns the loss of one batch."""

    @abstractmethod
    def scores(self, model: Any) -> dict[str, float]:
        """Returns the scores of a model in evaluation mode on held-out text. The first score is `loss`."""


def with_bfloat16_states(embedding: nn.Module) -> None:
    """Casts the embedding's output to bfloat16, so that the dtype of hidden states does not depend on the weights."""
    embedding.register_forward_hook(lambda module, args, states: states.bfloat16())


def autocast() -> torch.autocast:
    """Returns bfloat16 autocast, so that all storage formats use the same dtype for matrix products."""
    return torch.autocast("cpu", torch.bfloat16)


def batches(rows: Any, batch: int, seed: int) -> Iterator[Any]:
    """Yields batches indefinitely, in a different order for each seed."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        for indices in torch.randperm(len(rows), generator=generator)[: len(rows) // batch * batch].split(batch):
            yield rows[indices]


def once(path: Path, make: Callable[[Path], object]) -> Path:
    """Creates a file or directory if it is missing, in one process at a time. `make` gets a temporary path for it."""
    with FileLock(WORK / f"{path.name}.lock"):
        if not path.exists():
            partial = path.with_name(f"{path.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            make(partial)
            partial.rename(path)
    return path


def warmup_updates(updates: int) -> int:
    return max(1, round(updates * WARMUP))


def schedule(optimizer: torch.optim.Optimizer, updates: int) -> Any:
    """Returns a scheduler with a linear warmup and a linear decay to zero."""
    steps = warmup_updates(updates)

    def factor(update: int) -> float:
        return min((update + 1) / steps, (updates - update) / max(1, updates - steps))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def matrices(model: Any) -> Tensor:
    """Returns the elements of all trained matrices in one float32 vector."""
    params = (param for param in model.parameters() if param.dim() > 1 and param.requires_grad)
    return torch.cat([param.detach().float().flatten() for param in params])


@torch.no_grad()
def scored(task: Task, model: Any) -> dict[str, float]:
    """Returns the scores of a model, which is in training mode afterwards."""
    with autocast():
        scores = task.scores(model.eval())
    model.train()
    return scores


def train(
    task: Task, model: Any, rule: str, lr: float, options: Mapping[str, Any], form: Format, seed: int = 0
) -> dict[str, Any]:
    """Trains the model of a task.

    Args:
        options: hyperparameters of the rule and other arguments of `FusedOptimizer`.
        form: storage format of weights and states.

    Returns:
        The scores after training by name (infinite if the run diverged), and:
        `curve`: (share of completed updates, scores) before and after training.
        `step`: norm of an update divided by the norm of the weights, averaged over updates after the warmup.
    """
    compiled = {"compile": True} if task.compiled else {}
    optimizer = form.optimizer(model, rule, lr=lr, seed=seed, **compiled, **options)
    updates = task.updates
    rates = schedule(optimizer, updates)
    measured = {min(warmup_updates(updates) + offset, updates) for offset in (1, 3, 5)}
    initial = scored(task, model)
    scores = None
    steps = list[float]()
    with suppress(StepError):  # non-finite gradients
        for update, batch in zip(range(1, updates + 1), batches(task.rows(), task.batch, seed), strict=False):
            before = matrices(model) if update in measured else None
            with autocast():
                loss = task.loss(model, batch)
            optimizer.backward(loss)
            rates.step()
            if before is not None:
                steps.append(((matrices(model) - before).norm() / before.norm()).item())
        scores = scored(task, model)
    optimizer.remove()
    if scores is None or not scores["loss"] < initial["loss"] + DIVERGED:
        scores = dict.fromkeys(initial, math.inf)
    curve = [(0.0, *initial.values()), (1.0, *scores.values())]
    return {**scores, "curve": curve, "step": sum(steps) / max(1, len(steps))}
