"""What an optimizer saves and continues from: states by parameter name, exact, never cast."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowmem.errors import CheckpointError
from lowmem.placements.base import Shard
from lowmem.placements.record import ParamRecord
from lowmem.rules import ForeignRule
from lowmem.step.clipping import Clipping
from lowmem.step.updates import grouped_span, settle, tensors_of

# The memory of a group's own clipping by norm is saved like a state, under this and the number of the group.
_GROUP = "_group"

States = dict[Tensor, dict[str, Any]]


class Stored(NamedTuple):
    """A tensor in a file: its shape and dtype, and how to read it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


class Entry(NamedTuple):
    """One thing that is saved.

    owner: the name of its parameter, or of its group.  value: a number or the like, or this rank's tensor.  shape: the
    logical shape of a tensor.  gather: returns the full value; every rank calls it.
    """

    owner: str
    name: str
    value: Any
    shape: tuple[int, ...]
    gather: Callable[[], Any]


def entries(records: Iterable[ParamRecord], states: States, shard: Shard, clipping: Clipping) -> Iterator[Entry]:
    """Everything that is kept for each parameter that has had an update, and for each group."""
    for record in records:
        if record.param not in states:
            continue
        extra = dict(zip(record.extra_names, record.extra, strict=True))
        for name, value in {**states[record.param], **extra}.items():
            group = _group_of(record, name)
            if isinstance(value, Tensor) and group:
                span = grouped_span(record.span, group)
                yield Entry(record.name, name, value, span.shape, functools.partial(shard.gather, value, span))
            else:
                yield _replicated(record.name, name, value)
    for n, memory in clipping.memory.items():
        for name, value in memory.items():
            yield _replicated(group_owner(n), name, value)


def group_owner(n: int) -> str:
    """The name under which the memory of a group is saved."""
    return f"{_GROUP}{n}"


def _replicated(owner: str, name: str, value: Any) -> Entry:
    """What every rank has."""
    return Entry(owner, name, value, tuple(value.shape) if isinstance(value, Tensor) else (), lambda: value)


def _group_of(record: ParamRecord, name: str) -> int:
    """Of how many elements of the parameter a tensor has one value, if it is sharded as the parameter is, else 0."""
    kept = tensors_of(record).get(name)
    return kept.group if kept is not None else int(record.rule.is_full(name))


def refuse_others(saved: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raises `CheckpointError` if what was saved is of other rules, storages, parameters or groups."""
    names = [group["param_names"] for group in groups]
    if [group["params"] for group in saved["param_groups"]] != names:
        theirs, ours = {n for g in saved["param_groups"] for n in g["params"]}, {n for g in names for n in g}
        odd = sorted(theirs ^ ours)
        raise CheckpointError(
            f"the saved optimizer has {len(saved['param_groups'])} group(s) of {len(theirs)} parameters, this one "
            f"{len(names)} of {len(ours)}; " + (f"they differ in {odd[:5]}" if odd else "in another order")
        )
    for n, (group, other) in enumerate(zip(groups, saved["param_groups"], strict=True)):
        where = f" in group {n}" if len(groups) > 1 else ""
        for key in ("rule", "rounding", "state_storage"):
            pair = other.get(key), group[key]
            if pair[0] != pair[1] and pair != ("nearest", "auto"):  # "nearest" was the default, and loads as it is
                raise CheckpointError(f"the saved optimizer has {key} {pair[0]!r}{where}, this one {pair[1]!r}")


def restore(
    saved: Mapping[str, Any],
    records: Iterable[ParamRecord],
    groups: Sequence[Mapping[str, Any]],
    states: States,
    shard: Shard,
    clipping: Clipping,
) -> None:
    """Copies saved states to their parameters' devices; everything is checked before anything is replaced.

    Raises:
        CheckpointError: a state is not what this optimizer keeps.
    """
    by_name = {record.name: record for record in records}
    saved_groups = {name: group for group in saved["param_groups"] for name in group["params"]}
    of_params = {name: state for name, state in saved["state"].items() if name in by_name}
    of_groups = {name: state for name, state in saved["state"].items() if name not in by_name}
    settled = {name: _settled(by_name[name], saved_groups[name], shard) for name in of_params}
    for name, state in of_params.items():
        _check_param(settled[name], state)
    for name, state in of_groups.items():
        _check_group(name, state, saved["param_groups"], groups, by_name.values())
    states.clear()
    for record in by_name.values():
        record.extra = ()
    for name, state in of_params.items():
        copied = {key: _copy(key, value, settled[name], shard) for key, value in state.items()}
        by_name[name].extra = tuple(copied.pop(key) for key in settled[name].extra_names)
        states[by_name[name].param] = copied
    device = next(iter(by_name.values())).param.device if by_name else None
    clipping.memory = {
        int(name.removeprefix(_GROUP)): {k: _read(value).detach().to(device, copy=True) for k, value in state.items()}
        for name, state in of_groups.items()
    }


def _settled(record: ParamRecord, saved_group: Mapping[str, Any], shard: Shard) -> ParamRecord:
    """The record of a parameter as the saved hyperparameters have it; its own one stays as it is."""
    trial = ParamRecord(record.name, record.param, {**record.group, **saved_group}, record.rule, record.span)
    settle(trial, shard)
    return trial


def _check_param(record: ParamRecord, state: Mapping[str, Any]) -> None:
    want = {name: (kept.shape, kept.dtype) for name, kept in tensors_of(record).items()}
    have = {name: (tuple(t.shape), t.dtype) for name, t in state.items() if isinstance(t, Tensor | Stored)}
    if isinstance(record.rule, ForeignRule):  # only the class knows what else it keeps
        have = {name: kind for name, kind in have.items() if name in want}
    if want != have:
        raise CheckpointError(
            f"the saved state of {record.name!r} has {_listing(have)}, this optimizer's {_listing(want)}"
        )


def _check_group(
    name: str,
    state: Mapping[str, Any],
    saved_groups: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    records: Iterable[ParamRecord],
) -> None:
    number = name.removeprefix(_GROUP)
    if not (name.startswith(_GROUP) and number.isdecimal() and int(number) < len(saved_groups)):
        raise CheckpointError(f"the saved optimizer has a state of {name!r}, which is not a parameter of this one")
    group = groups[int(number)]
    rule = next(record.rule for record in records if record.group is group)
    have = {key: tuple(t.shape) for key, t in state.items()}
    want = {key: tuple(t.shape) for key, t in rule.group_memory(saved_groups[int(number)]).items()}
    if have != want:
        raise CheckpointError(f"the saved state of group {number} has {have}, this optimizer's {want}")


def _read(value: Any) -> Any:
    return value.read() if isinstance(value, Stored) else value


def _copy(key: str, value: Any, record: ParamRecord, shard: Shard) -> Any:
    """What this rank keeps of a saved value, on the device where it is kept."""
    value = _read(value)
    if not isinstance(value, Tensor):
        return value
    if group := _group_of(record, key):
        value = shard.cut(value, grouped_span(record.span, group))
    # torch.optim keeps its step counts on the host unless they take part in a kernel
    counts = isinstance(record.rule, ForeignRule) and key.rpartition(".")[2] == "step"
    on_host = counts and not (record.group.get("capturable") or record.group.get("fused"))
    return value.detach().to("cpu" if on_host else record.param.device, copy=True)


def _listing(states: Mapping[str, tuple[tuple[int, ...], Any]]) -> str:
    parts = [f"{name} {list(shape)} {str(dtype).removeprefix('torch.')}" for name, (shape, dtype) in states.items()]
    return ", ".join(parts) or "none"
