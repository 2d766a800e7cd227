"""The finished runs, and searches for the best learning rate among them."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

Run = dict[str, Any]  # what is run, by `KEYS`, and its results

KEYS = ("task", "method", "format", "lr", "seed")
SEEDS = 3
PER_DECADE = 4  # learning rates on the grid: 1, 1.8, 3.2, 5.6, 10; a search takes every other one at first
EXTENSIONS = 4  # how often the grid of a search may be extended by one learning rate
TIE = 0.005  # nats; paired differences between runs vary by more


def like(task: str, method: str, form: str = "float32", seed: int = 0, lr: float = 0.0) -> Run:
    return {"task": task, "method": method, "format": form, "lr": lr, "seed": seed}


def at(run: Run, *lrs: float) -> Iterator[Run]:
    return ({**run, "lr": lr} for lr in lrs)


def on_grid(lr: float, steps: int = 0) -> float:
    """The learning rate of the grid that is next to `lr`, or so many places above it."""
    place = round(math.log10(lr) * PER_DECADE) + steps
    return float(f"{10 ** (place / PER_DECADE):.2g}")


class Done:
    """The runs that are finished.

    Attributes:
        rows: a line for each run. By "loss" learning rates are compared.
    """

    def __init__(self, rows: Sequence[Run]) -> None:
        self.rows = pd.DataFrame(rows, columns=None if rows else [*KEYS, "loss"])

    def along(self, key: str, run: Run) -> pd.DataFrame:
        """The runs that differ from a run in one key alone, by this key."""
        rows = self.rows
        for other in KEYS:
            rows = rows if other == key else rows[rows[other] == run[other]]
        return rows.set_index(key).sort_index()

    def losses(self, run: Run) -> pd.Series:
        """The losses by learning rate."""
        return self.along("lr", run).loss

    def best(self, run: Run) -> Run | None:
        """A run with the best learning rate of the first seed: the least of those within `TIE` of it, which forgets
        least.
        """
        losses = self.losses({**run, "seed": 0})
        return None if losses.empty else {**run, "lr": float(losses.index[losses <= losses.min() + TIE][0])}

    def search(self, run: Run, lr: float, *, fine: bool = False) -> Iterator[Run]:
        """Yields the next runs of a search for the best learning rate.

        Args:
            lr: in the middle of the grid, which is extended while the best learning rate is on its edge.
            fine: go on with the places of the grid next to the best one.
        """
        losses, lrs = self.losses(run), {on_grid(lr, steps) for steps in (-2, 0, 2)}
        while not (missing := sorted(lrs - set(losses.index))):
            top = float(losses[sorted(lrs)].idxmin())
            if min(lrs) < top < max(lrs) or len(lrs) == 3 + EXTENSIONS:
                if fine:
                    yield from at(run, on_grid(top, -1), on_grid(top, 1))
                return
            lrs.add(on_grid(top, 2 if top == max(lrs) else -2))
        yield from at(run, *missing)
