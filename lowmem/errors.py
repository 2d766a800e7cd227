"""Exceptions for users. Each message states the problem, its location, and what to write instead."""

import importlib.util
from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class LowmemError(ValueError):
    """Base class of the errors in this package. The command line prints them and exits with status 2."""


class ConfigError(LowmemError):
    """A key, value or hyperparameter that is not allowed."""


class DataError(LowmemError):
    """A file, record or sample that cannot be used for training."""


class UnsupportedError(LowmemError):
    """A model, option or combination that lowmem does not support. The message names an alternative."""


class StepError(LowmemError):
    """A step that cannot run or continue: a second backward, a torn step, changed parameters, non-finite gradients."""


class CheckpointError(LowmemError):
    """A checkpoint that is missing, damaged, or belongs to another run."""


class RankError(LowmemError):
    """Another rank of the process group failed, exited, or did not respond in time."""


class MissingPackageError(LowmemError, ImportError):
    """A required package other than torch is not installed."""


def require_packages(feature: str, *packages: str) -> None:
    """Raises `MissingPackageError`, with the command that installs them, unless all packages are installed."""
    if missing := " ".join(package for package in packages if importlib.util.find_spec(package) is None):
        raise MissingPackageError(f"{feature} needs packages that are not installed. Run: pip install {missing}")


def require_known(option: str, name: object, known: Sequence[str]) -> None:
    """Raises `ConfigError` unless the value of an option is one of the known names."""
    if name not in known:
        raise ConfigError(
            f"{option} {name!r} is unknown.{did_you_mean(str(name), known)} Choose from {', '.join(known)}"
        )


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns ` Did you mean 'x'?` with the closest known word, or an empty string."""
    close = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""
