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

import lowmem
from lowmem.errors import StepError
from studies.formats import Format

WORK = Path("data/studies")  # models and finished runs
WARMUP = 0.05  # of the updates; then the learning rate decays linearly to zero
DIVERGED = 1.0  # nats above the first held-out loss: the run ends


@dataclass(frozen=True)
class Task(ABC):
    """What is trained, on what, and how it is scored.

    Attributes:
        updates: of a run, with `batch` rows each.
        looks: shares of the updates after which the scores are taken.
        compiled: whether updates are compiled in any case, and the model, too, for at least 1,000 updates.
        packages: requirements of pip.
    """

    updates: int = 150
    batch: int = 4
    looks: tuple[float, ...] = (0.5, 1.0)
    compiled: bool = False
    packages: tuple[str, ...] = ()

    @abstractmethod
    def model(self, seed: int) -> Any:
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


def distance(ours: Tensor, theirs: Tensor) -> float:
    """The norm of the difference over the norm of `theirs`."""
    return ((ours - theirs).norm() / theirs.norm()).item()


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
        `curve`: (share of the updates, the scores).
        `moved`: share of the elements of matrices that an update changes, just after the warmup.
        `step`: norm of an update over the norm of the weights, there.
        `change`: norm of all changes over the norm of the first weights, at the end.
    """
    if form.matrices != "float32":
        for param in model.parameters():  # and no buffer, such as the frequencies of positions
            param.data = param.data.bfloat16()
    first = matrices(model)
    settings = {"lr": lr, "seed": seed, **({"compile": True} if task.compiled else {}), **form.options, **options}
    optimizer = lowmem.FusedOptimizer(form.parameters(model), rule, **settings)
    torch.compiler.reset()  # there is a limit to how often a model of a class is compiled
    trained = torch.compile(model) if task.compiled and task.updates >= 1000 else model  # but not for its scores
    updates, rates = task.updates, schedule(optimizer, task.updates)
    watched = {min(warmup(updates) + more, updates) for more in (1, 3, 5)}
    shown = {max(1, round(updates * share)) for share in task.looks}
    scores = scored(task, model)
    curve, moved, steps = [(0.0, *scores.values())], [], []
    with suppress(StepError):  # gradients that are not finite
        for update, some in zip(range(1, updates + 1), batches(task.rows(), task.batch, seed), strict=False):
            before = matrices(model) if update in watched else None
            with autocast():
                loss = task.loss(trained, some)
            optimizer.backward(loss)
            rates.step()
            if before is not None:
                after = matrices(model)
                moved.append((after != before).float().mean().item())
                steps.append(distance(after, before))
            if update in shown:
                scores = scored(task, model)
                curve.append((update / updates, *scores.values()))
                if not curve[-1][1] < curve[0][1] + DIVERGED:
                    break
    optimizer.remove()
    if curve[-1][0] != 1.0 or not curve[-1][1] < curve[0][1] + DIVERGED:
        scores = dict.fromkeys(scores, math.inf)
    means = {"moved": sum(moved) / max(1, len(moved)), "step": sum(steps) / max(1, len(steps))}
    return {**scores, "curve": curve, **means, "change": distance(matrices(model), first)}
