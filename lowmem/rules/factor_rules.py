"""Selects the factored dimensions of a parameter by regular expressions and T5X's heuristic."""

import re
import warnings
from typing import Any, NamedTuple

from lowmem.errors import ConfigError
from lowmem.rules import require
from lowmem.rules.rule import Hyper

ROLES = {"row": "ROW", "col": "COLUMN", "column": "COLUMN", "batch": "BATCH", "none": "NONE", "unfactorized": "NONE"}
HEURISTIC = ("HEURISTIC",)
FactorRule = tuple[str, ...] | None


class Dimensions(NamedTuple):
    """The dimensions of a parameter by role. Without ROW and COLUMN, the parameter is unfactored."""

    batch: tuple[int, ...] = ()
    none: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    cols: tuple[int, ...] = ()


def dimensions(name: str, shape: tuple[int, ...], hyper: Hyper) -> Dimensions:
    """Returns the dimensions by role, from `factored`, `factor_map` and the heuristic.

    Raises:
        ConfigError: the options do not cover the parameter, or are incomplete for it.
    """
    every = tuple(range(len(shape)))
    where = f"parameter {name!r} of shape {list(shape)}"
    rule: FactorRule = HEURISTIC
    if hyper["factor_map"] is not None:
        rule = roles_of(first_match("factor_map", hyper["factor_map"], name, where))
    if rule is None or not hyper["factored"]:
        return Dimensions(none=every)
    if rule == HEURISTIC:
        if len(shape) > 3:
            raise ConfigError(
                f"{where}: rule HEURISTIC supports at most three dimensions; set a rule for it in factor_map, "
                "such as [BATCH, ROW, COLUMN, COLUMN], or None"
            )
        return _heuristic(shape, hyper["min_dim_size_to_factor"])
    if len(rule) != len(shape):
        raise ConfigError(f"{where}: its factor rule {list(rule)} has {len(rule)} roles for {len(shape)} dimensions")
    by_rule = Dimensions(*(tuple(d for d in every if rule[d] == role) for role in ("BATCH", "NONE", "ROW", "COLUMN")))
    if len(shape) > 2 or by_rule.batch:
        return by_rule
    by_heuristic = _heuristic(shape, hyper["min_dim_size_to_factor"])
    if by_rule != by_heuristic:
        reason = "with at most two dimensions and no BATCH, the heuristic is used instead of its factor rule"
        warnings.warn(f"{where}: {reason} {list(rule)}", stacklevel=2)
    return by_heuristic


def _heuristic(shape: tuple[int, ...], least: int) -> Dimensions:
    """Assigns ROW to the smaller and COLUMN to the larger dimension; the first of three dimensions is a stack."""
    stack = (0,) if len(shape) == 3 else ()
    dims = tuple(range(len(stack), len(shape)))
    if len(dims) < 2 or min(shape[d] for d in dims) < least:
        return Dimensions(stack, dims)
    row, col = sorted(dims, key=lambda d: shape[d])
    return Dimensions(stack, (), (row,), (col,))


def roles_of(rule: Any) -> FactorRule:
    """Converts a rule of `factor_map`, as users write it, to the roles of dimensions."""
    if rule is None:
        return None
    if rule == "HEURISTIC":
        return HEURISTIC
    allowed = f"None, 'HEURISTIC', or for each dimension one of {', '.join(ROLES)}"
    require.that(isinstance(rule, tuple | list), "factor_map", rule, allowed)
    names = [str(role).lower() for role in rule]
    require.that(all(role in ROLES for role in names), "factor_map", rule, allowed)
    return tuple(ROLES[role] for role in names)


def pairs_of(option: str, value: Any) -> list[tuple[str, Any]]:
    """Returns the (regular expression, value) pairs of a list or dict, in order."""
    pairs = list(value.items()) if isinstance(value, dict) else value
    require.that(isinstance(pairs, tuple | list), option, value, "a list of (regular expression, value)")
    for pair in pairs:
        require.that(isinstance(pair, tuple | list) and len(pair) == 2, option, pair, "(regular expression, value)")
        try:
            re.compile(pair[0])
        except (re.error, TypeError) as error:
            raise ConfigError(f"{option}: {pair[0]!r} is not a regular expression: {error}") from None
    return list(pairs)


def factor_map(option: str, value: Any) -> None:
    """Allows None, and a map from regular expressions to factor rules."""
    for _, rule in [] if value is None else pairs_of(option, value):
        roles_of(rule)


def flag_by_name(option: str, value: Any) -> None:
    """Allows True, False, and a map from regular expressions to them."""
    for _, each in [(None, value)] if isinstance(value, bool) else pairs_of(option, value):
        require.flag(option, each)


def first_match(option: str, pairs: Any, name: str, where: str) -> Any:
    """Returns the value of the first regular expression found in `name`. where: the parameter, for messages."""
    for pattern, value in pairs_of(option, pairs):
        if re.search(pattern, name):
            return value
    raise ConfigError(f"{where}: {option} has no rule for it; end the map with ('.*', ...) for all others")
