"""The finished runs, and the best learning rate among them."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

Run = dict[str, Any]  # what is run, by `KEYS`, and its results

KEYS = {"task": str, "method": str, "format": str, "lr": float, "seed": int}
TIE = 0.005  # nats; paired differences between runs vary by more


def like(task: str, method: str, form: str = "float32", seed: int = 0, lr: float = 0.0) -> Run:
    return {"task": task, "method": method, "format": form, "lr": lr, "seed": seed}


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
