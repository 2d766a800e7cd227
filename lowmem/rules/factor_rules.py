"""Selects the factored dimensions of a parameter by regular expressions, logical axes and T5X's heuristic."""

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lowmem.errors import ConfigError, did_you_mean
from lowmem.rules import require
from lowmem.rules.rule import Hyper

ROLES = {"row": "ROW", "col": "COLUMN", "column": "COLUMN", "batch": "BATCH", "none": "NONE", "unfactorized": "NONE"}
HEURISTIC = ("HEURISTIC",)
FactorRule = tuple[str, ...] | None

_HEADS = ("heads", "kv", "joined_kv", "multiquery_heads", "kv_fused")
STANDARD_LOGICAL_FACTOR_RULES = {
    "embed": "ROW",
    **dict.fromkeys(("vocab", "mlp", "mlp_activations", "q_wi_fused", "o_wo_fused", *_HEADS), "COLUMN"),
    **dict.fromkeys(("layers", "stack"), "BATCH"),
    **dict.fromkeys(("relpos_buckets", "layer_norm_scale"), "NONE"),
}


class Dimensions(NamedTuple):
    """The dimensions of a parameter by role. Without ROW and COLUMN, the parameter is unfactored."""

    batch: tuple[int, ...] = ()
    none: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    cols: tuple[int, ...] = ()


def dimensions(name: str, shape: tuple[int, ...], hyper: Hyper) -> Dimensions:
    """Returns the dimensions by role, from `factored`, `factor_map`, `logical_factor_rules` and the heuristic.

    Raises:
        ConfigError: the options do not cover the parameter, or are incomplete for it.
    """
    every, where = tuple(range(len(shape))), f"parameter {name!r} of shape {list(shape)}"
    rule: FactorRule = HEURISTIC
    if hyper["logical_factor_rules"] is not None:
        rule = _logical_rule(name, where, hyper["logical_factor_rules"], hyper["param_logical_axes"])
    elif hyper["factor_map"] is not None:
        rule = roles_of("factor_map", first_match("factor_map", hyper["factor_map"], name, where))
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


def check_factor_rules(hyper: Hyper) -> None:
    """Raises `ConfigError` for factor rules that are invalid for every parameter."""
    factor_map, rules, axes = (hyper[key] for key in ("factor_map", "logical_factor_rules", "param_logical_axes"))
    for option, value in (("factor_map", factor_map), ("logical_factor_rules", rules)):
        require.that(value is None or hyper["factored"], option, value, "None where factored=False")
    for _, rule in () if factor_map is None else pairs_of("factor_map", factor_map):
        roles_of("factor_map", rule)
    if (rules is None) != (axes is None):
        raise ConfigError("logical_factor_rules and param_logical_axes have no effect without each other; set both")
    if rules is None:
        return
    known = isinstance(rules, dict) or rules == "standard"
    require.that(known, "logical_factor_rules", rules, "'standard', or axis name → role")
    require.that(isinstance(axes, dict), "param_logical_axes", axes, "parameter name → axis names")
    for name, listed in axes.items():
        names = isinstance(listed, tuple | list) and all(isinstance(axis, str) for axis in listed)
        require.that(names, f"param_logical_axes[{name!r}]", listed, "a list of axis names")
    if isinstance(rules, dict):
        roles_of("logical_factor_rules", list(rules.values()))


def _heuristic(shape: tuple[int, ...], least: int) -> Dimensions:
    """Assigns ROW to the smaller and COLUMN to the larger dimension; the first of three dimensions is a stack."""
    stack = (0,) if len(shape) == 3 else ()
    dims = tuple(range(len(stack), len(shape)))
    if len(dims) < 2 or min(shape[d] for d in dims) < least:
        return Dimensions(stack, dims)
    row, col = sorted(dims, key=lambda d: shape[d])
    return Dimensions(stack, (), (row,), (col,))


def _logical_rule(
    name: str, where: str, rules: str | Mapping[str, Any], axes_of: Mapping[str, Sequence[str]]
) -> FactorRule:
    known = STANDARD_LOGICAL_FACTOR_RULES if isinstance(rules, str) else rules
    if name not in axes_of:
        raise ConfigError(f"{where}: param_logical_axes has no axes for it.{did_you_mean(name, axes_of)}")
    axes = axes_of[name]
    for axis in axes:
        if axis not in known:
            raise ConfigError(f"{where}: logical_factor_rules has no axis {axis!r}.{did_you_mean(axis, known)}")
    roles = roles_of("logical_factor_rules", [known[axis] for axis in axes])
    assert roles is not None
    if {"ROW", "COLUMN", "NONE"} <= set(roles):
        reason = f"incomplete factor rule {list(roles)} for the axes {list(axes)}"
        raise ConfigError(f"{where}: {reason}: with ROW and COLUMN no other dimension may be NONE")
    if not {"ROW", "COLUMN"} <= set(roles):  # factoring needs both
        return tuple("BATCH" if role == "BATCH" else "NONE" for role in roles)
    return roles


def roles_of(option: str, rule: Any) -> FactorRule:
    """Converts a factor rule, as users write it, to the roles of dimensions."""
    if rule is None or rule == "HEURISTIC":
        return None if rule is None else HEURISTIC
    allowed = f"None, 'HEURISTIC', or for each dimension one of {', '.join(ROLES)}"
    require.that(isinstance(rule, tuple | list), option, rule, allowed)
    names = [str(role).lower() for role in rule]
    require.that(all(role in ROLES for role in names), option, rule, allowed)
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
