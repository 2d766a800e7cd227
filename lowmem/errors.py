"""Exceptions for users. Each message says what is wrong, where, and the way out."""

from collections.abc import Iterable
from difflib import get_close_matches


class LowmemError(ValueError):
    """Base of every error this package raises on purpose; the command line prints it and exits with 2."""


class ConfigError(LowmemError):
    """A key, value or hyperparameter that the configuration does not allow."""


class ConfigTypeError(ConfigError, TypeError):
    """A value of the wrong type."""


class DataError(LowmemError):
    """A file, record or sample that cannot be trained on."""


class UnsupportedError(LowmemError):
    """A combination that cannot be honoured exactly; the message names the alternative."""


class StepError(LowmemError):
    """The step life cycle was broken: a second backward, a hook that fired twice, a torn step."""


class CheckpointError(LowmemError):
    """A checkpoint that is missing, damaged, or belongs to something else."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the closest of `known`, or an empty string."""
    close = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""
