"""Tests that provoke an entry of docs/how-to/troubleshooting.md are marked with its heading.

The mark has the first words: `@pytest.mark.troubleshooting("step ... is torn")`. If the heading quotes a message, the
test must produce that message.
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
    """Returns a row of a parametrized test that is marked with a heading, given by its first words."""
    return pytest.param(*values, marks=pytest.mark.troubleshooting(words))


def heading(words: str) -> str:
    """Returns the heading that begins with these words. There must be exactly one."""
    (match,) = (each for each in HEADINGS if each.strip("`").startswith(words))
    return match


def quotes(words: str, message: str) -> bool:
    """Returns whether this heading quotes the message. `...` stands for names and numbers."""
    parts = map(re.escape, heading(words).strip("`").split("..."))
    return re.search(".*".join(parts), message) is not None


@contextmanager
def heard() -> Iterator[list[str]]:
    """Yields the list of messages of all package errors and all warnings that are created in the context."""
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
