"""The settings of runs, and selection of finished runs."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

Run = dict[str, Any]  # the settings of a run, whose names are `KEYS`, and its results

KEYS = {"task": str, "method": str, "format": str, "lr": float, "seed": int}
TIE = 0.005  # nats, less than the variation of paired differences; smaller learning rates forget less


def run_of(task: str, method: str, form: str = "float32", seed: int = 0, lr: float = 0.0) -> Run:
    return {"task": task, "method": method, "format": form, "lr": lr, "seed": seed}


class Results:
    """A table `rows` with the settings and results of finished runs. Learning rates are compared by "loss"."""

    def __init__(self, rows: Sequence[Run]) -> None:
        self.rows = pd.DataFrame(rows, columns=None if rows else [*KEYS, "loss"])

    def along(self, key: str, run: Run) -> pd.DataFrame:
        """Returns the runs that differ from `run` at most in the value of `key`, which is the index."""
        rows = self.rows
        for other in KEYS:
            rows = rows if other == key else rows[rows[other] == run[other]]
        return rows.set_index(key).sort_index()

    def losses(self, run: Run) -> pd.Series:
        """Returns the losses by learning rate."""
        return self.along("lr", run).loss

    def best(self, run: Run) -> Run | None:
        """Returns `run` with the smallest learning rate whose loss is within `TIE` of the first seed's best loss."""
        losses = self.losses({**run, "seed": 0})
        return None if losses.empty else {**run, "lr": float(losses.index[losses <= losses.min() + TIE][0])}
