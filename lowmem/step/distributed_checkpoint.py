"""The forms in which torch has the state of an optimizer, with parameters by number.

`torch.distributed.checkpoint.state_dict` replaces numbers of parameters by names, drops everything but states and
groups, and wants states of every parameter that is trained, also before the first step: `dcp.load` loads what is there.
"""

import sys
import traceback
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lowmem.errors import CheckpointError, UnsupportedError
from lowmem.placements.record import ParamRecord
from lowmem.rules import ForeignRule

# Entry of the first group: everything that is neither a state nor a hyperparameter.
_REST = "lowmem"


def asks_for_states() -> bool:
    """Whether it calls `state_dict`: optimizers are not told who does."""
    return _runs("_get_optim_state_dict")


def wants_initial_states() -> bool:
    """Whether it calls `step`, with gradients of zero, so that an optimizer makes its states."""
    return _runs("_init_optim_state")


def _runs(function: str) -> bool:
    module = "torch.distributed.checkpoint.state_dict"
    if module not in sys.modules:
        return False
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe()))
    return any(frame.f_code.co_name == function and frame.f_globals.get("__name__") == module for frame in frames)


def refuse_unknown_states(record: ParamRecord, steps: int) -> None:
    """Raises `UnsupportedError` if nobody knows yet which states a parameter has: there would be nothing to load."""
    if isinstance(record.rule, ForeignRule) and not steps:
        raise UnsupportedError(
            f"{record.rule.name} makes its states in its first step, so torch.distributed.checkpoint cannot load them "
            "into an optimizer that has not stepped. Load with opt.load_state_dict(...), or use a rule of lowmem"
        )


def numbered(saved: Mapping[str, Any], updated: Collection[str]) -> dict[str, Any]:
    """What `FusedOptimizer.state_dict` returns, with parameters by number, in the order of the groups.

    Args:
        updated: parameters that have had an update; the states of others are those before the first one.
    """
    numbers: dict[str, int] = {}
    for group in saved["param_groups"]:
        for name in group["params"]:
            numbers[name] = len(numbers)
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in saved["param_groups"]]
    groups[0][_REST] = {
        **{key: value for key, value in saved.items() if key not in ("state", "param_groups")},
        "state": {owner: state for owner, state in saved["state"].items() if owner not in numbers},
        "updated": "".join("1" if name in updated else "0" for name in numbers),
    }
    state = {number: saved["state"].get(name, {}) for name, number in numbers.items()}
    return {"state": state, "param_groups": groups}


def named(saved: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], seed: int) -> Mapping[str, Any]:
    """What `numbered`, or a `torch.optim.AdamW`, returned, by the names of `groups`, which has the same parameters in
    the same order.

    Anything else is returned as it is.

    Raises:
        CheckpointError: a part is missing, or there are other groups or parameters.
    """
    if "step" in saved:
        return saved
    ours, theirs = [group["param_names"] for group in groups], [group["params"] for group in saved["param_groups"]]
    if list(map(len, ours)) != list(map(len, theirs)):
        raise CheckpointError(
            f"the saved optimizer has groups of {list(map(len, theirs))} parameters, this one {list(map(len, ours))}"
        )
    saved_groups = [dict(group) for group in saved["param_groups"]]
    rests = [dict(group.pop(_REST)) for group in saved_groups if _REST in group]
    if not rests and all("amsgrad" in group for group in saved_groups):
        return named(_of_adamw(saved, groups, seed), groups, seed)
    if not rests:
        raise CheckpointError(
            "the saved optimizer has no step, seed and loss scale, which flatten_optimizer_state_dict=True loses. "
            "Save it without this option, or save what opt.state_dict() returns"
        )
    (rest,) = rests
    names = {
        key: name
        for group, saved_group in zip(ours, theirs, strict=True)
        for name, key in zip(group, saved_group, strict=True)
    }
    updated = {name for name, flag in zip(names.values(), rest.pop("updated"), strict=True) if flag == "1"}
    state = {names[key]: state for key, state in saved.get("state", {}).items() if names[key] in updated}
    return {
        **rest,
        "state": {**state, **rest.get("state", {})},  # an empty dict may be lost on the way
        "param_groups": [
            {**group, "params": group_names} for group, group_names in zip(saved_groups, ours, strict=True)
        ],
    }


def _of_adamw(saved: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], seed: int) -> Mapping[str, Any]:
    """The state of a `torch.optim.AdamW` as `numbered` returns that of rule "adamw", whose mathematics is the same.

    Raises:
        CheckpointError: it was trained with an option that the rule does not have, or its parameters have other names.
    """
    # a weight of 16 bits has states of 16 bits there
    state = {number: {key: value.float() for key, value in kept.items()} for number, kept in saved["state"].items()}
    for kept in state.values():
        kept["step"] = kept["step"].long()
    converted = []
    for n, (group, own) in enumerate(zip(saved["param_groups"], groups, strict=True)):
        coupled = group["weight_decay"] != 0 and not group.get("decoupled_weight_decay", True)
        options = {"amsgrad": group["amsgrad"], "maximize": group.get("maximize"), "coupled weight_decay": coupled}
        if used := [option for option, value in options.items() if value]:
            raise CheckpointError(f"group {n} of the saved torch optimizer has {used[0]}, and rule 'adamw' has not")
        if group.get("param_names", own["param_names"]) != own["param_names"]:
            raise CheckpointError(f"group {n} of the saved torch optimizer has other parameters, or another order")
        hyper = {key: group[key] for key in own.keys() & group.keys()}
        converted.append({**own, **hyper, "lr": float(group["lr"]), "rule": "adamw"})
    converted[0][_REST] = {
        "step": max((int(kept["step"]) for kept in state.values()), default=0),
        "seed": seed,
        "updated": "".join("1" if number in state else "0" for group in converted for number in group["params"]),
    }
    return {"state": state, "param_groups": converted}
