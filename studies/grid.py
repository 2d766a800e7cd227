"""The finished runs, and their best learning rates."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

Run = dict[str, Any]  # the settings of a run, by `KEYS`, and its results

KEYS = {"task": str, "method": str, "format": str, "lr": float, "seed": int}
TIE = 0.005  # nats; less than paired differences between runs vary


def run_of(task: str, method: str, form: str = "float32", seed: int = 0, lr: float = 0.0) -> Run:
    return {"task": task, "method": method, "format": form, "lr": lr, "seed": seed}


class Done:
    """The finished runs.

    Attributes:
        rows: a line for each run. Learning rates are compared by "loss".
    """

    def __init__(self, rows: Sequence[Run]) -> None:
        self.rows = pd.DataFrame(rows, columns=None if rows else [*KEYS, "loss"])

    def along(self, key: str, run: Run) -> pd.DataFrame:
        """Returns the runs that differ from `run` only in one key, indexed by this key."""
        rows = self.rows
        for other in KEYS:
            rows = rows if other == key else rows[rows[other] == run[other]]
        return rows.set_index(key).sort_index()

    def losses(self, run: Run) -> pd.Series:
        """Returns the losses by learning rate."""
        return self.along("lr", run).loss

    def best(self, run: Run) -> Run | None:
        """Returns a run with the best learning rate for the first seed. Among learning rates with a loss within `TIE`
        of the best, the smallest is chosen, because it forgets least.
        """
        losses = self.losses({**run, "seed": 0})
        return None if losses.empty else {**run, "lr": float(losses.index[losses <= losses.min() + TIE][0])}
