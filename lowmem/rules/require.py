"""Defaults and checks of a rule's hyperparameters, and checks of options.

A check raises a `ConfigError` that names the option, its value and the allowed values.
"""

import operator
import sys
from collections.abc import Callable
from typing import Any

import torch

from lowmem.errors import ConfigError, require_known
from lowmem.tiles.storage import STATE_DTYPES

Check = Callable[[str, Any], object]
_COMPARISONS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}


def hyperparameters(**options: tuple[Any, Check]) -> tuple[dict[str, Any], dict[str, Check]]:
    """Returns the `defaults` and `checks` of a rule from name=(default, check) arguments."""
    defaults = {name: default for name, (default, _) in options.items()}
    checks = {name: check for name, (_, check) in options.items()}
    return defaults, checks


def that(condition: bool, option: str, value: object, allowed: str) -> None:
    """Raises `ConfigError` unless `condition` is True. allowed: a description of the allowed values."""
    if not condition:
        raise ConfigError(f"{option}={value!r} is not valid. Expected {allowed}")


def check(valid: Callable[[Any], bool], allowed: str) -> Check:
    """Allows the values for which `valid` returns True. allowed: a description of them."""
    return lambda option, value: that(valid(value), option, value, allowed)


def is_number(value: Any) -> bool:
    """Returns whether `value` is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def number(*bounds: str, optional: bool = False, whole: bool = False) -> Check:
    """Allows finite numbers within bounds such as ">= 0" and "< 1", and None if `optional`."""
    limits = [(_COMPARISONS[sign], float(bound)) for sign, bound in map(str.split, bounds)]
    allowed = "a whole number" if whole else "a number"
    if bounds:
        allowed += " " + " and ".join(bounds)
    if optional:
        allowed += ", or None"

    def valid(value: Any) -> bool:
        if value is None:
            return optional
        if not is_number(value) or (whole and not isinstance(value, int)):
            return False
        return all(compare(value, bound) for compare, bound in limits)

    return check(valid, allowed)


def one_of(*names: str, optional: bool = False) -> Check:
    """Allows these names, and None if `optional`."""

    def known(option: str, value: Any) -> None:
        if value is not None or not optional:
            require_known(option, value, names)

    return known


def pair(allowed: str, first: Check, second: Check) -> Check:
    """Allows a tuple or list of two values."""

    def each(option: str, value: Any) -> None:
        that(isinstance(value, tuple | list) and len(value) == 2, option, value, allowed)
        first(f"{option}[0]", value[0])
        second(f"{option}[1]", value[1])

    return each


flag = check(lambda value: isinstance(value, bool), "True or False")
flag_or_auto = check(lambda value: value == "auto" or isinstance(value, bool), "True, False or 'auto'")
anything = check(lambda value: True, "")  # for hyperparameters that the rule checks itself
rate = number(">= 0", "< 1")
betas = pair("two numbers >= 0 and < 1", rate, rate)


def dtype_of(value: Any) -> torch.dtype | None:
    """Returns the dtype of a state, given a name or a dtype. Returns None for any other value."""
    return next((dtype for name, dtype in STATE_DTYPES.items() if value in (name, dtype)), None)


def dtype(*, none: str) -> Check:
    """Allows "float32", "bfloat16", "float16" and None. none: a description of what None means."""
    allowed = f"{', '.join(STATE_DTYPES)}, or None for {none}"
    return check(lambda value: dtype_of(value) is not None or value is None, allowed)
