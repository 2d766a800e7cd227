"""The finished runs of a study, and searches for the best learning rate among them."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

Run = dict[str, Any]  # what is run, by the keys of the study; and its results

PER_DECADE = 4  # learning rates on the grid: 1, 1.8, 3.2, 5.6, 10; a search takes every other one at first
EXTENSIONS = 4  # how often the grid of a search may be extended by one learning rate
TIE = 0.005  # nats; paired differences between runs vary by more


def at(run: Run, *lrs: float) -> Iterator[Run]:
    return ({**run, "lr": lr} for lr in lrs)


def on_grid(lr: float, steps: int = 0) -> float:
    """The learning rate of the grid that is next to `lr`, or so many places above it."""
    place = round(math.log10(lr) * PER_DECADE) + steps
    return float(f"{10 ** (place / PER_DECADE):.2g}")


class Done:
    """The runs that are finished.

    Args:
        keys: what distinguishes two runs, with "lr" among them. By "loss" learning rates are compared.
    """

    def __init__(self, rows: Sequence[Run], keys: Sequence[str]) -> None:
        self.keys = keys
        self.rows = pd.DataFrame(rows, columns=None if rows else [*keys, "loss"])

    def series(self, run: Run) -> pd.DataFrame:
        """The runs that differ from a run in the learning rate alone, sorted by it."""
        found = self.rows
        for key in self.keys:
            found = found if key == "lr" else found[found[key] == run[key]]
        return found.sort_values("lr").set_index("lr")

    def losses(self, run: Run) -> pd.Series:
        return self.series(run).loss

    def best(self, run: Run) -> float | None:
        """The best learning rate: the least of those within `TIE` of it, which forgets least."""
        losses = self.losses(run)
        return None if losses.empty else float(losses.index[losses <= losses.min() + TIE][0])

    def best_run(self, run: Run) -> pd.Series | None:
        """The one at the best learning rate."""
        best, runs = self.best(run), self.series(run).reset_index()
        return None if best is None else runs[runs.lr == best].iloc[0]

    def seeds(self, run: Run) -> pd.DataFrame:
        """The runs that differ from a run in the seed, at the best learning rate of seed 0."""
        found = self.rows[self.rows.lr == self.best({**run, "seed": 0})]
        for key in self.keys:
            found = found if key in ("lr", "seed") else found[found[key] == run[key]]
        return found.set_index("seed").sort_index()

    def search(self, run: Run, lr: float, *, fine: bool = False, wide: bool = True) -> Iterator[Run]:
        """Yields the next runs of a search for the best learning rate.

        Args:
            lr: in the middle of the grid.
            fine: go on with the places of the grid next to the best one.
            wide: extend a grid whose best learning rate is on its edge.
        """
        known, lrs = self.losses(run), {on_grid(lr, steps) for steps in (-2, 0, 2)}
        while not (missing := sorted(lrs - set(known.index))):
            top = float(known[sorted(lrs)].idxmin())
            if not wide or min(lrs) < top < max(lrs) or len(lrs) == 3 + EXTENSIONS:
                if fine:
                    yield from at(run, on_grid(top, -1), on_grid(top, 1))
                return
            lrs.add(on_grid(top, 2 if top == max(lrs) else -2))
        yield from at(run, *missing)

    def again(self, run: Run) -> Iterator[Run]:
        """Yields a run with every seed at its best learning rate."""
        if (top := self.best(run)) is not None:
            yield from ({**run, "seed": seed, "lr": top} for seed in range(3))
