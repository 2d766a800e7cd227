"""Skips by name what an older version of another package lacks: it is asked for, never for a number."""

from dataclasses import fields
from importlib import import_module

import pytest


def missing(module: str, name: str) -> str | None:
    """Says why a name of a module cannot be used; None if it can."""
    package = f"this version of {module.partition('.')[0]}"
    try:
        there = hasattr(import_module(module), name)
    except (ImportError, RuntimeError) as error:  # lazy modules turn what fails to be imported into a RuntimeError
        return f"{package} cannot import {name} ({error.__cause__ or error})"
    return None if there else f"{package} has no {name}"


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
