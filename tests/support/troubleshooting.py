"""Checks messages that headings of docs/how-to/troubleshooting.md quote.

A test of a heading is marked with its first words: `@pytest.mark.troubleshooting("step ... is torn")`. If the heading
quotes a message, the test must produce the message.
"""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lowmem.errors import LowmemError

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "troubleshooting.md").read_text()
HEADINGS = re.findall(r"^### (.+)$", PAGE, re.MULTILINE)


def explained(words: str, *values: Any) -> Any:
    """Returns a parameter set with the mark of a heading. words: the first words of the heading."""
    return pytest.param(*values, marks=pytest.mark.troubleshooting(words))


def heading(words: str) -> str:
    """Returns the only heading that begins with these words."""
    (match,) = (heading for heading in HEADINGS if heading.strip("`").startswith(words))
    return match


def quotes(words: str, message: str) -> bool:
    """Returns whether a heading quotes the message. In headings, `...` represents names and numbers."""
    parts = map(re.escape, heading(words).strip("`").split("..."))
    return re.search(".*".join(parts), message) is not None


@contextmanager
def heard() -> Iterator[list[str]]:
    """Yields a list to which the messages of all created `LowmemError`s and warnings are appended."""
    messages: list[str] = []
    warn = warnings.warn

    def warned(message: object, *args: object, **options: object) -> None:
        messages.append(str(message))
        warn(message, *args, **options)  # type: ignore[call-overload]

    def initialize(self: LowmemError, *args: object) -> None:
        messages.extend(map(str, args))

    with mock.patch.object(LowmemError, "__init__", initialize), mock.patch.object(warnings, "warn", warned):
        yield messages


def check(words: str, messages: list[str]) -> None:
    if heading(words).startswith("`"):
        assert any(quotes(words, message) for message in messages), f"no {heading(words)} among {messages}"
