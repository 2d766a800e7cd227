"""The report of `gpu_check`: measurements and goals by part, and a time budget."""

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.device import clear


class Report:
    """Measurements by part, written to `out` after each one. budget: seconds from now.

    Attributes:
        failed: whether a part raised an error other than `torch.OutOfMemoryError`.
    """

    def __init__(self, out: Path, budget: float) -> None:
        self.parts: dict[str, Any] = {}
        self.failed = False
        self._out = out
        self._began = time.perf_counter()
        self._end = self._began + budget
        self._rows: list[dict[str, Any]] = []

    def row(self, label: str, measured: Any, goal: float | None = None, **more: Any) -> None:
        """Adds a measurement that should be at most `goal`. measured: None if this machine cannot measure it."""
        met = None if goal is None or measured is None else measured <= goal
        text = None if goal is None else f"<= {goal:g}"
        self._add({"what": label, "measured": measured, "goal": text, "met": met, **more})

    @contextmanager
    def trial(self, label: str) -> Iterator[None]:
        """Adds a row with the error if the block raises one, and continues."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.failed |= not isinstance(error, torch.OutOfMemoryError)
            self._add({"what": label, "error": f"{type(error).__name__}: {error}"})
        clear()

    def part(self, measure: Callable[["Report", bool], None], needs: float, small: bool) -> None:
        """Runs a part, or reports it as skipped. needs: maximum number of seconds of the part."""
        name = measure.__name__
        began = time.perf_counter()
        self._rows = []
        self.parts[name] = part = {"rows": self._rows}
        if (left := self._end - began) < needs:
            self._add({"what": name, "skipped": f"needs up to {needs:g} s, but {left:.0f} s of the budget remain"})
        else:
            with self.trial(name):
                measure(self, small)
        part["seconds"] = round(time.perf_counter() - began, 1)
        self._write()
        print(f"{name}: {part['seconds']} s", file=sys.stderr, flush=True)

    def goals(self) -> Iterator[dict[str, Any]]:
        """Yields the rows that have a goal."""
        return (row for part in self.parts.values() for row in part["rows"] if row.get("goal"))

    def _add(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        self._write()

    def _write(self) -> None:
        seconds = round(time.perf_counter() - self._began, 1)
        self._out.write_text(json.dumps({"seconds": seconds, **self.parts}, indent=2) + "\n")
