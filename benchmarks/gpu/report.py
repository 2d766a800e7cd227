"""The report of the check: rows by part, written to a file after every row, and the time budget."""

import json
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

# "<=" or ">=", and the number.
Goal = tuple[str, float]


class Report:
    """A report that is written to `out`; `budget` is in seconds from now.

    Attributes:
        failed: something raised an error other than out-of-memory.
    """

    def __init__(self, out: Path, budget: float) -> None:
        self.parts: dict[str, Any] = {}
        self.failed = False
        self._out, self._budget, self._began = out, budget, time.perf_counter()
        self._rows: list[dict[str, Any]] = []

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def row(self, what: str, measured: Any, goal: Goal | None = None, **more: Any) -> None:
        """Adds a measurement; `measured` is None where this machine cannot measure it."""
        met = None
        if goal is not None and measured is not None:
            met = measured <= goal[1] if goal[0] == "<=" else measured >= goal[1]
        text = None if goal is None else f"{goal[0]} {goal[1]:g}"
        self._add({"what": what, "measured": measured, "goal": text, "met": met, **more})

    def affords(self, what: str, seconds: float) -> bool:
        """Whether `seconds` are left of the budget; if not, adds a row that says so."""
        left = self._budget - self.seconds
        if left < seconds:
            self._add({"what": what, "skipped": f"needs about {seconds:g} s, {left:.0f} s are left of the budget"})
        return left >= seconds

    @contextmanager
    def trial(self, what: str) -> Iterator[None]:
        """Adds a row for an error that is raised inside, and goes on."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.failed |= not isinstance(error, torch.OutOfMemoryError)
            self._add({"what": what, "error": f"{type(error).__name__}: {error}"})

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Rows that are added inside belong to the part `name`."""
        began, self._rows = self.seconds, []
        part = self.parts[name] = {"rows": self._rows}
        with self.trial(name):
            yield
        part["seconds"] = round(self.seconds - began, 1)
        self._write()
        print(f"{name}: {part['seconds']} s", file=sys.stderr)

    def goals(self) -> Iterator[dict[str, Any]]:
        """The rows that have a goal."""
        for part in self.parts.values():
            yield from (row for row in part["rows"] if row.get("goal"))

    def _add(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        self._write()

    def _write(self) -> None:
        self._out.write_text(json.dumps({"seconds": round(self.seconds, 1), **self.parts}, indent=2) + "\n")
