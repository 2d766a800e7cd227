"""Prints to the terminal. Only rank 0 prints, except that any rank reports its own failure (`cli.main`)."""

import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partialmethod
from types import SimpleNamespace
from unittest.mock import patch

from rich.console import Console
from tqdm import tqdm  # type: ignore[import-untyped]

from lowmem import __version__
from lowmem.hf import TESTED, version

# Files of a run: its arguments, and the log history with one JSON object per line.
CONFIG, METRICS = "config.yaml", "metrics.jsonl"

# Columns per line if the output is not a terminal.
_IN_A_FILE = 200

# Paths and data are printed as they are: [bold] in them is not markup.
out = Console(highlight=False, markup=False, emoji=False)
if not out.is_terminal:
    out.width = _IN_A_FILE
err = Console(highlight=False, markup=False, emoji=False, stderr=True)


def versions() -> dict[str, str | None]:
    """Returns the versions of lowmem, Python, the packages that it uses (None: not installed), and the system."""
    packages = {name: version(name) for name in (*TESTED, "peft")}
    return {"lowmem": __version__, "python": platform.python_version(), **packages, "system": platform.platform()}


def rank() -> int:
    """Returns the rank that the launcher assigned to this process."""
    return int(os.environ.get("RANK", 0))


def stage(activity: str) -> None:
    """Prints the activity that begins. Progress bars of libraries follow."""
    out.print(f"{activity} ...")


@contextmanager
def progress_in_lines(seconds: float = 60) -> Iterator[None]:
    """A context in which libraries' progress bars are lines on stderr, at most one line per bar every `seconds`."""

    def printer(_: object) -> Callable[[str], None]:
        last = time.monotonic()

        def show(bar: str) -> None:
            nonlocal last
            if bar and time.monotonic() - last >= seconds:
                last = time.monotonic()
                err.print(bar, soft_wrap=True)

        return show

    # discards cursor movements. It has no isatty(), because huggingface_hub hides its bars if isatty() is False
    begin = partialmethod(tqdm.__init__, file=SimpleNamespace(write=len))
    with patch.object(tqdm, "__init__", begin), patch.object(tqdm, "status_printer", staticmethod(printer)):
        yield


def size(nbytes: float) -> str:
    """Returns an amount of memory as text, such as 1.50 GiB."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.2f} MiB"


def print_topics(topics: dict[str, str]) -> None:
    for topic, text in topics.items():
        out.print(f"{topic:10} {text}", soft_wrap=True)


def warn(message: str) -> None:
    err.print(message, style="yellow", soft_wrap=True)
