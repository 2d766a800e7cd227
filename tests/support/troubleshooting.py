"""docs/how-to/troubleshooting.md: a test that provokes an entry of the page carries its heading as a mark.

The mark has the first words: `@pytest.mark.troubleshooting("step ... is torn")`. If the heading quotes a message, the
test has to see it.
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
    """A row of a parametrized test that carries a heading, by its first words."""
    return pytest.param(*values, marks=pytest.mark.troubleshooting(words))


def heading(words: str) -> str:
    """The one heading that begins with these words."""
    (match,) = (each for each in HEADINGS if each.strip("`").startswith(words))
    return match


def quotes(words: str, message: str) -> bool:
    """Whether the heading that begins with these words quotes the message; `...` stands for names and numbers."""
    parts = map(re.escape, heading(words).strip("`").split("..."))
    return re.search(".*".join(parts), message) is not None


@contextmanager
def heard() -> Iterator[list[str]]:
    """The messages of all errors of the package that are made inside, and of all warnings."""
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
