"""Skips by name what an older version of another package lacks: it is asked for, never for a number."""

from dataclasses import fields
from importlib import import_module

import pytest


def missing(module: str, name: str) -> str | None:
    """Says that a module does not have a name, or is not there itself; None if it has it."""
    try:
        there = hasattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if not module.startswith(str(error.name)):  # which is another one that it imports
            raise
        there = False
    return None if there else f"this version of {module.partition('.')[0]} has no {name}"


def needs(module: str, name: str) -> pytest.MarkDecorator:
    """A mark for tests of something that a module may lack."""
    reason = missing(module, name)
    return pytest.mark.skipif(reason is not None, reason=reason or "")


def require(module: str, name: str) -> None:
    """Skips the test that runs if a module lacks a name."""
    if reason := missing(module, name):
        pytest.skip(reason)


def require_arguments(config: type, arguments: dict[str, object]) -> None:
    """Skips the test that runs if a class of arguments lacks some of these."""
    if unknown := arguments.keys() - {field.name for field in fields(config)}:
        pytest.skip(f"this version of {config.__module__.partition('.')[0]} has no {min(unknown)} in {config.__name__}")
