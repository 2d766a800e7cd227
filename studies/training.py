"""One run of a study: a model is trained on a task by one rule, and scored along the way."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor, nn

from lowmem.errors import StepError
from studies.formats import Format

WORK = Path("data/studies")  # models and finished runs
WARMUP = 0.05  # of the updates; then the learning rate decays linearly to zero
DIVERGED = 1.0  # nats above the first held-out loss


@dataclass(frozen=True)
class Task(ABC):
    """What is trained, on what, and how it is scored.

    Attributes:
        updates: of a run, with `batch` rows each.
        compiled: whether updates are compiled in any case.
    """

    updates: int = 150
    batch: int = 4
    compiled: bool = False

    @abstractmethod
    def model(self) -> Any:
        """The model with the float32 weights from which every run starts."""

    @abstractmethod
    def rows(self) -> Any:
        """Everything to train on, a tensor or a `TensorDataset`; indexed by a tensor of integers it gives a batch."""

    @abstractmethod
    def loss(self, model: Any, batch: Any) -> Tensor:
        """The loss of one batch."""

    @abstractmethod
    def scores(self, model: Any) -> dict[str, float]:
        """Of held-out text, by a model in evaluation: first the `loss` that training lowers."""


def with_bfloat16_states(embedding: nn.Module) -> None:
    """Makes hidden states bfloat16 from the embedding on, so that they do not depend on the dtype of weights."""
    embedding.register_forward_hook(lambda module, args, states: states.bfloat16())


def autocast() -> torch.autocast:
    """Matrix products are bfloat16 in all runs, so that only the storage of weights between two updates differs."""
    return torch.autocast("cpu", torch.bfloat16)


def batches(rows: Any, batch: int, seed: int) -> Iterator[Any]:
    """Batches in another order for each seed, again and again."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        for some in torch.randperm(len(rows), generator=generator)[: len(rows) // batch * batch].split(batch):
            yield rows[some]


def once(path: Path, make: Callable[[], None]) -> Path:
    """Makes a file or a folder if it is not there, in one process at a time."""
    with FileLock(WORK / "lock"):
        if not path.exists():
            make()
    return path


def warmup(updates: int) -> int:
    return max(1, round(updates * WARMUP))


def schedule(optimizer: torch.optim.Optimizer, updates: int) -> Any:
    rising = warmup(updates)

    def factor(done: int) -> float:
        return min((done + 1) / rising, (updates - done) / max(1, updates - rising))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def matrices(model: Any) -> Tensor:
    """The elements of all matrices that are trained, in float32."""
    params = (param for param in model.parameters() if param.dim() > 1 and param.requires_grad)
    return torch.cat([param.detach().float().flatten() for param in params])


@torch.no_grad()
def scored(task: Task, model: Any) -> dict[str, float]:
    with autocast():
        scores = task.scores(model.eval())
    model.train()
    return scores


def train(
    task: Task, model: Any, rule: str, lr: float, options: Mapping[str, Any], form: Format, seed: int = 0
) -> dict[str, Any]:  # fmt: skip
    """Trains the model of a task.

    Args:
        options: hyperparameters and options of `FusedOptimizer`.
        form: of weights and states.

    Returns:
        The scores after the last update, infinite if the run diverged, by their names, and:
        `curve`: (share of the updates, the scores) before the first update and after the last one.
        `step`: norm of an update over the norm of the weights, just after the warmup.
    """
    compiled = {"compile": True} if task.compiled else {}
    optimizer = form.optimizer(model, rule, lr=lr, seed=seed, **compiled, **options)
    updates, rates = task.updates, schedule(optimizer, task.updates)
    watched = {min(warmup(updates) + more, updates) for more in (1, 3, 5)}
    first, scores, steps = scored(task, model), None, list[float]()
    with suppress(StepError):  # gradients that are not finite
        for update, some in zip(range(1, updates + 1), batches(task.rows(), task.batch, seed), strict=False):
            before = matrices(model) if update in watched else None
            with autocast():
                loss = task.loss(model, some)
            optimizer.backward(loss)
            rates.step()
            if before is not None:
                steps.append(((matrices(model) - before).norm() / before.norm()).item())
        scores = scored(task, model)
    optimizer.remove()
    if scores is None or not scores["loss"] < first["loss"] + DIVERGED:
        scores = dict.fromkeys(first, math.inf)
    curve = [(0.0, *first.values()), (1.0, *scores.values())]
    return {**scores, "curve": curve, "step": sum(steps) / max(1, len(steps))}
