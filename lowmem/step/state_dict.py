"""What an optimizer saves and continues from: states by parameter name, exact, never cast."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowmem.errors import CheckpointError
from lowmem.placements.record import ParamRecord
from lowmem.rules import ForeignRule
from lowmem.step.clipping import Clipping
from lowmem.step.updates import RESIDUAL, Updates

# What a group's own clipping by norm keeps is saved beside the parameters' states, under this and the group's number.
_GROUP = "_group"


class Stored(NamedTuple):
    """A tensor that is in a file: of what shape and dtype, and how to have it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


class Entry(NamedTuple):
    """One thing that is kept.

    of: the name of its parameter, or of its group.  value: a number or the like, or a tensor, of which `shape` is the
    logical shape, and `whole` gives all where ranks hold a piece each: every rank calls it.
    """

    of: str
    name: str
    value: Any
    shape: tuple[int, ...]
    whole: Callable[[], Any]


def entries(records: Iterable[ParamRecord], updates: Updates, clipping: Clipping) -> Iterator[Entry]:
    """Everything that is kept for each parameter that has had an update, and for each group."""
    for record in records:
        kept = dict(updates.state.get(record.param, {}))
        if record.residual is not None:
            kept[RESIDUAL] = record.residual
        for name, value in kept.items():
            if isinstance(value, Tensor) and updates.is_cut(name, record):
                whole = functools.partial(updates.placement.gather, value, record.span)
                yield Entry(record.name, name, value, record.span.shape, whole)
            else:
                yield _small(record.name, name, value)
    for n, of_group in clipping.group_states.items():
        for name, value in of_group.items():
            yield _small(f"{_GROUP}{n}", name, value)


def _small(of: str, name: str, value: Any) -> Entry:
    """What every rank has."""
    return Entry(of, name, value, tuple(value.shape) if isinstance(value, Tensor) else (), lambda: value)


def refuse_others(saved: Mapping[str, Any], own: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raises `CheckpointError` if what was saved is of another rule or rounding, or of other parameters or groups."""
    for key, value in own.items():
        if saved.get(key) != value:
            raise CheckpointError(f"the saved optimizer has {key} {saved.get(key)!r}, this one {value!r}")
    names = [group["param_names"] for group in groups]
    if [group["params"] for group in saved["param_groups"]] != names:
        theirs, ours = {n for g in saved["param_groups"] for n in g["params"]}, {n for g in names for n in g}
        odd = sorted(theirs ^ ours)
        raise CheckpointError(
            f"the saved optimizer has {len(saved['param_groups'])} group(s) of {len(theirs)} parameters, this one "
            f"{len(names)} of {len(ours)}; " + (f"they differ in {odd[:5]}" if odd else "in another order")
        )


def restore(saved: Mapping[str, Any], records: Iterable[ParamRecord], updates: Updates, clipping: Clipping) -> None:
    """Copies saved states to their parameters' devices; everything is checked before anything is replaced.

    Raises:
        CheckpointError: a state is not what this optimizer keeps.
    """
    by_name = {record.name: record for record in records}
    group_of = {name: group for group in saved["param_groups"] for name in group["params"]}
    of_params = {name: kept for name, kept in saved["state"].items() if name in by_name}
    of_groups = {name: kept for name, kept in saved["state"].items() if name not in by_name}
    for name, kept in of_params.items():
        _check_param(by_name[name], kept, group_of[name], updates)
    for name, kept in of_groups.items():
        _check_group(name, kept, saved["param_groups"], updates)
    updates.state.clear()
    for record in by_name.values():
        record.residual = None
    for name, kept in of_params.items():
        record = by_name[name]
        copied = {key: _own_copy(key, value, record, updates) for key, value in kept.items()}
        record.residual = copied.pop(RESIDUAL, None)
        updates.state[record.param] = copied
    device = next(iter(by_name.values())).param.device if by_name else None
    clipping.group_states = {
        int(name.removeprefix(_GROUP)): {key: _had(value).detach().to(device, copy=True) for key, value in kept.items()}
        for name, kept in of_groups.items()
    }


def _check_param(
    record: ParamRecord, kept: Mapping[str, Any], saved_group: Mapping[str, Any], updates: Updates
) -> None:
    have = {name: (tuple(t.shape), t.dtype) for name, t in kept.items() if isinstance(t, Tensor | Stored)}
    if isinstance(updates.rule, ForeignRule):  # only the class knows what else it keeps
        have = {name: kind for name, kind in have.items() if name == RESIDUAL}
    plan = updates.rule.plan(record.name, record.span.shape, {**record.group, **saved_group})
    want = updates.kept(plan, record)
    if want != have:
        raise CheckpointError(
            f"the saved state of {record.name!r} has {_listing(have)}, this optimizer's {_listing(want)}"
        )


def _check_group(name: str, kept: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], updates: Updates) -> None:
    number = name.removeprefix(_GROUP)
    if not (name.startswith(_GROUP) and number.isdecimal() and int(number) < len(groups)):
        raise CheckpointError(f"the saved optimizer has a state of {name!r}, which is no parameter of this one")
    have = {key: tuple(t.shape) for key, t in kept.items()}
    want = dict(updates.rule.group_kept(groups[int(number)]))
    if have != want:
        raise CheckpointError(f"the saved state of group {number} has {have}, this optimizer's {want}")


def _had(value: Any) -> Any:
    return value.read() if isinstance(value, Stored) else value


def _own_copy(key: str, value: Any, record: ParamRecord, updates: Updates) -> Any:
    """What this rank keeps of a saved value, where it keeps it."""
    value = _had(value)
    if not isinstance(value, Tensor):
        return value
    if updates.is_cut(key, record):
        value = updates.placement.cut(value, record.span)
    # torch.optim keeps its step counts on the host unless they take part in a kernel
    counts = isinstance(updates.rule, ForeignRule) and key.rpartition(".")[2] == "step"
    on_host = counts and not (record.group.get("capturable") or record.group.get("fused"))
    return value.detach().to("cpu" if on_host else record.param.device, copy=True)


def _listing(states: Mapping[str, tuple[tuple[int, ...], Any]]) -> str:
    parts = [f"{name} {list(shape)} {str(dtype).removeprefix('torch.')}" for name, (shape, dtype) in states.items()]
    return ", ".join(parts) or "none"
