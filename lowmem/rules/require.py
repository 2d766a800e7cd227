"""What hyperparameters may be: each check raises `ConfigError` naming the option, its value and what is allowed."""

import math

import torch

from lowmem.errors import ConfigError
from lowmem.tiles.storage import STORED_DTYPES


def that(condition: bool, option: str, value: object, allowed: str) -> None:
    """Raises `ConfigError` naming the hyperparameter, its value and what is allowed, unless `condition` holds."""
    if not condition:
        raise ConfigError(f"{option}={value!r} is out of range; allowed: {allowed}")


def number(
    option: str,
    value: object,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
    optional: bool = False,
) -> None:
    """`that` for a finite number within bounds: `above` <, `least` <=, < `below`, <= `most`; or None."""
    if optional and value is None:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    bounds = ((">", above), (">=", least), ("<", below), ("<=", most))
    allowed = "a number" + " and".join(f" {sign} {bound:g}" for sign, bound in bounds if bound is not None)
    allowed += ", or None" if optional else ""
    that(is_number, option, value, allowed)
    assert isinstance(value, int | float)
    inside = (above is None or value > above) and (least is None or value >= least)
    that(inside and (below is None or value < below) and (most is None or value <= most), option, value, allowed)


def count(option: str, value: object, *, least: int, most: int | None = None) -> None:
    """`that` for a whole number within bounds."""
    allowed = f"a whole number >= {least}" + (f" and <= {most}" if most is not None else "")
    that(isinstance(value, int) and not isinstance(value, bool), option, value, allowed)
    assert isinstance(value, int)
    that(value >= least and (most is None or value <= most), option, value, allowed)


def flag(option: str, value: object) -> None:
    """`that` for True or False."""
    that(isinstance(value, bool), option, value, "True or False")


def betas(option: str, value: object) -> None:
    """`that` for two decay rates in [0, 1)."""
    that(isinstance(value, tuple | list) and len(value) == 2, option, value, "two numbers >= 0 and < 1")
    assert isinstance(value, tuple | list)
    for i, beta in enumerate(value):
        number(f"{option}[{i}]", beta, least=0, below=1)


def dtype(option: str, value: object, *, optional: bool = True) -> torch.dtype | None:
    """The dtype that a state is to be kept in: "float32", "bfloat16" or "float16"; if `optional`, None: the weight's.

    Raises:
        ConfigError: it is another.
    """
    known = {str(dtype).removeprefix("torch."): dtype for dtype in STORED_DTYPES}
    name = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
    allowed = ", ".join(known) + (", or None for the weight's own" if optional else "")
    that(name in known or (optional and value is None), option, value, allowed)
    return None if value is None else known[str(name)]
