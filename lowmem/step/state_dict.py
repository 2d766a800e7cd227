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

# What a group's own clipping by norm keeps is saved beside the parameters' states, under this and the group's number.
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
        known = tensors_of(record) if record.spec is not None else {}
        beside = {} if record.storage is None else dict(zip(_extra_names(record), record.extra, strict=False))
        for name, value in {**states.get(record.param, {}), **beside}.items():
            group = _group_of(record, name, known)
            if isinstance(value, Tensor) and group:
                span = grouped_span(record.span, group)
                yield Entry(record.name, name, value, span.shape, functools.partial(shard.gather, value, span))
            else:
                yield _replicated(record.name, name, value)
    for n, memory in clipping.memory.items():
        for name, value in memory.items():
            yield _replicated(f"{_GROUP}{n}", name, value)


def _replicated(owner: str, name: str, value: Any) -> Entry:
    """What every rank has."""
    return Entry(owner, name, value, tuple(value.shape) if isinstance(value, Tensor) else (), lambda: value)


def _extra_names(record: ParamRecord) -> list[str]:
    """Names of the tensors that the storage of a weight holds beside the parameter."""
    assert record.storage is not None
    return [part.name for part in record.storage.parts[1:]]


def _group_of(record: ParamRecord, name: str, known: Mapping[str, tuple[Any, Any, int]]) -> int:
    """Of how many elements of the parameter a tensor holds one value, if it is sharded as the parameter is, else 0."""
    if name in known:
        return known[name][2]
    return int(record.rule.is_full(name, record.spec))


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
            if other.get(key) != group[key]:
                raise CheckpointError(
                    f"the saved optimizer has {key} {other.get(key)!r}{where}, this one {group[key]!r}"
                )


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
    known = {name: _check_param(by_name[name], state, saved_groups[name], shard) for name, state in of_params.items()}
    for name, state in of_groups.items():
        _check_group(name, state, saved["param_groups"], groups, by_name.values())
    states.clear()
    for record in by_name.values():
        record.extra = ()
    for name, state in of_params.items():
        record = by_name[name]
        copied = {key: _copy(key, value, record, known[name], shard) for key, value in state.items()}
        record.extra = tuple(copied.pop(key) for key in _extra_names(record) if key in copied)
        states[record.param] = copied
    device = next(iter(by_name.values())).param.device if by_name else None
    clipping.memory = {
        int(name.removeprefix(_GROUP)): {k: _read(value).detach().to(device, copy=True) for k, value in state.items()}
        for name, state in of_groups.items()
    }


def _check_param(
    record: ParamRecord, state: Mapping[str, Any], saved_group: Mapping[str, Any], shard: Shard
) -> dict[str, tuple[Any, Any, int]]:
    """The tensors of a parameter as the saved hyperparameters have them."""
    trial = ParamRecord(record.name, record.param, {**record.group, **saved_group}, record.rule, record.span)
    settle(trial, shard)
    record.storage = record.storage or trial.storage
    known = tensors_of(trial)
    have = {name: (tuple(t.shape), t.dtype) for name, t in state.items() if isinstance(t, Tensor | Stored)}
    if isinstance(record.rule, ForeignRule):  # only the class knows what else it keeps
        have = {name: kind for name, kind in have.items() if name in known}
    want = {name: (shape, dtype) for name, (shape, dtype, _) in known.items()}
    if want != have:
        raise CheckpointError(
            f"the saved state of {record.name!r} has {_listing(have)}, this optimizer's {_listing(want)}"
        )
    return known


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


def _copy(key: str, value: Any, record: ParamRecord, known: Mapping[str, tuple[Any, Any, int]], shard: Shard) -> Any:
    """What this rank keeps of a saved value, on the device where it is kept."""
    value = _read(value)
    if not isinstance(value, Tensor):
        return value
    if group := _group_of(record, key, known):
        value = shard.cut(value, grouped_span(record.span, group))
    # torch.optim keeps its step counts on the host unless they take part in a kernel
    counts = isinstance(record.rule, ForeignRule) and key.rpartition(".")[2] == "step"
    on_host = counts and not (record.group.get("capturable") or record.group.get("fused"))
    return value.detach().to("cpu" if on_host else record.param.device, copy=True)


def _listing(states: Mapping[str, tuple[tuple[int, ...], Any]]) -> str:
    parts = [f"{name} {list(shape)} {str(dtype).removeprefix('torch.')}" for name, (shape, dtype) in states.items()]
    return ", ".join(parts) or "none"
