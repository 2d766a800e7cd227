"""Saving and loading an optimizer: states by parameter name, exact, never cast, and what else its next step needs."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowmem.errors import CheckpointError
from lowmem.placements.base import Shard
from lowmem.placements.record import ParamRecord
from lowmem.rules import ForeignRule
from lowmem.step import distributed_checkpoint
from lowmem.step.report import Report
from lowmem.step.updates import Updates, rounding_of, settle
from lowmem.tiles.storage import Nearest, of_weight

# The memory of a group's own clipping by norm is saved like a state, under this and the number of the group.
_GROUP = "_group"


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


@dataclass(frozen=True)
class Saving:
    """Saves an optimizer and continues from what was saved. Its parts are those of the optimizer, live."""

    records: Mapping[Tensor, ParamRecord]
    groups: Sequence[dict[str, Any]]
    state: dict[Tensor, dict[str, Any]]
    shard: Shard
    updates: Updates
    report: Report

    def entries(self) -> Iterator[Entry]:
        """What is kept for each parameter that has had an update, and for each group, one at a time."""
        for record in self.records.values():
            if record.param not in self.state:
                continue
            extra = dict(zip(record.extra_names, record.extra, strict=True))
            for name, value in {**self.state[record.param], **extra}.items():
                group = _group_of(record, name)
                if isinstance(value, Tensor) and group:
                    span = record.span.grouped(group)
                    gather = functools.partial(self.shard.gather, value, span)
                    yield Entry(record.name, name, value, span.shape, gather)
                else:
                    yield _replicated(record.name, name, value)
        for n, memory in self.updates.clipping.memory.items():
            for name, value in memory.items():
                yield _replicated(f"{_GROUP}{n}", name, value)

    def gathered(self) -> dict[str, dict[str, Any]]:
        """The same, by the names of owners: full tensors. Every rank calls it."""
        gathered: dict[str, dict[str, Any]] = {}
        for entry in self.entries():
            gathered.setdefault(entry.owner, {})[entry.name] = _by_itself(entry.gather())
        return gathered

    def metadata(self) -> dict[str, Any]:
        """Everything else: numbers and strings.

        Raises:
            StepError: in the middle of a step, or after one that is torn.
        """
        self.updates.cycle.settle(*self.report.settle())
        self.updates.cycle.refuse_open("save")
        groups = [
            {**{k: v for k, v in group.items() if k not in ("params", "param_names")}, "params": group["param_names"]}
            for group in self.groups
        ]
        return {
            "seed": self.updates.seed,
            "step": self.updates.cycle.step,
            "loss_scale": self.updates.clipping.scaler.state_dict(),
            "nonfinite": self.report.state_dict(),
            "weights": {record.name: str(record.param.dtype) for record in self.records.values()},
            "param_groups": groups,
        }

    def numbered(self) -> dict[str, Any]:
        """All of it as torch.distributed.checkpoint wants it, with states that the next updates would make."""
        metadata = self.metadata()
        updated = [record.name for record in self.records.values() if record.param in self.state]
        begun: list[ParamRecord] = []
        try:
            for record in self.records.values():
                if record.trained and record.param not in self.state:
                    distributed_checkpoint.refuse_unknown_states(record, self.updates.cycle.step)
                    self.updates.begin_state(record)
                    begun.append(record)
            gathered = self.gathered()
        finally:
            for record in begun:
                del self.state[record.param]
                record.extra = ()
        for n, group in enumerate(self.groups):
            rule = next((record.rule for record in self.records.values() if record.group is group), None)
            if rule is not None and (memory := rule.group_memory(group)):
                clones = {name: tensor.clone() for name, tensor in memory.items()}
                gathered.setdefault(f"{_GROUP}{n}", clones)
        return distributed_checkpoint.numbered({**metadata, "state": gathered}, updated)

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continues from `metadata` and `gathered` together, from `numbered`, or from a `torch.optim.AdamW`.

        Raises:
            CheckpointError: it is of other rules or storages, its parameters or groups are not this optimizer's, or it
                is damaged.
        """
        clipping, cycle = self.updates.clipping, self.updates.cycle
        try:
            saved = distributed_checkpoint.named(saved, self.groups, self.updates.seed)
            settled = self._check(saved)
        except CheckpointError:
            raise
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(f"the saved optimizer is damaged: {type(error).__name__}: {error}") from error
        cycle.tear("its state was loaded only in part")  # until all of it is
        self._restore(saved["state"], settled)
        for group, saved_group in zip(self.groups, saved["param_groups"], strict=True):
            group.update({k: v for k, v in saved_group.items() if k != "params"})
        for record in self.records.values():
            if record.claimed or record.param in self.state:
                settle(record, self.shard)
                record.form = None
        self.updates.arenas.clear()
        clipping.scaler.load_state_dict(saved.get("loss_scale"))
        self.updates.seed = saved["seed"]
        self.report.load_state_dict(saved.get("nonfinite"))
        cycle.reset(saved["step"])

    def _check(self, saved: Mapping[str, Any]) -> dict[str, ParamRecord]:
        """Changes nothing. Returns records of what has a state or is trained, as the saved hyperparameters have them.

        Raises:
            CheckpointError: `load` cannot take it.
        """
        self._refuse_others(saved["param_groups"])
        step, seed, counts = saved["step"], saved["seed"], saved.get("nonfinite") or {}
        if {*map(type, (step, seed, *counts.values()))} != {int} or step < 0:
            raise CheckpointError(
                f"the saved optimizer has {step=}, {seed=} and nonfinite={counts}, not all of them counts"
            )
        self.updates.clipping.scaler.check_saved(saved.get("loss_scale"))
        by_name = {record.name: record for record in self.records.values()}
        settled: dict[str, ParamRecord] = {}
        for group in saved["param_groups"]:
            for record in map(by_name.__getitem__, group["params"]):
                record.rule.check(group)
                if record.claimed or record.name in saved["state"]:
                    trial = ParamRecord(record.name, record.param, {**record.group, **group}, record.rule, record.span)
                    settle(trial, self.shard)
                    settled[record.name] = trial
        for name, state in saved["state"].items():
            if name in by_name:
                _refuse_other_weight(settled[name], state, (saved.get("weights") or {}).get(name))
                _check_param(settled[name], state)
            else:
                self._check_group(name, state, saved["param_groups"])
        return settled

    def _refuse_others(self, saved_groups: Sequence[Mapping[str, Any]]) -> None:
        """Raises `CheckpointError` if what was saved is of other rules, storages, parameters or groups."""
        names = [group["param_names"] for group in self.groups]
        if [group["params"] for group in saved_groups] != names:
            theirs, ours = {n for g in saved_groups for n in g["params"]}, {n for g in names for n in g}
            odd = sorted(theirs ^ ours)
            raise CheckpointError(
                f"the saved optimizer has {len(saved_groups)} group(s) of {len(theirs)} parameters, this one "
                f"{len(names)} of {len(ours)}; " + (f"they differ in {odd[:5]}" if odd else "in another order")
            )
        for n, (group, other) in enumerate(zip(self.groups, saved_groups, strict=True)):
            where = f" in group {n}" if len(self.groups) > 1 else ""
            for key in ("rule", "rounding", "state_storage"):
                if other.get(key) != group[key]:
                    raise CheckpointError(
                        f"the saved optimizer has {key} {other.get(key)!r}{where}, this one {group[key]!r}"
                    )

    def _check_group(self, name: str, state: Mapping[str, Any], saved_groups: Sequence[Mapping[str, Any]]) -> None:
        number = name.removeprefix(_GROUP)
        if not (name.startswith(_GROUP) and number.isdecimal() and int(number) < len(saved_groups)):
            raise CheckpointError(f"the saved optimizer has a state of {name!r}, which is not a parameter of this one")
        group = self.groups[int(number)]
        rules = [record.rule for record in self.records.values() if record.group is group]
        have = {key: tuple(t.shape) for key, t in state.items()}
        want = {key: tuple(t.shape) for key, t in rules[0].group_memory(saved_groups[int(number)]).items()}
        if have != want:
            raise CheckpointError(f"the saved state of group {number} has {have}, this optimizer's {want}")

    def _restore(self, states: Mapping[str, Mapping[str, Any]], settled: Mapping[str, ParamRecord]) -> None:
        """Copies saved states to their parameters' devices."""
        self.state.clear()
        self.updates.clipping.memory.clear()
        device = next((record.param.device for record in self.records.values()), None)
        for record in self.records.values():
            record.extra = ()
            if record.name in states:
                trial = settled[record.name]
                copied = {key: _copy(key, value, trial, self.shard) for key, value in states[record.name].items()}
                record.extra = tuple(copied.pop(key) for key in trial.extra_names)
                self.state[record.param] = copied
        for name, state in states.items():
            if name not in settled:
                memory = {key: _read(value).detach().to(device, copy=True) for key, value in state.items()}
                self.updates.clipping.memory[int(name.removeprefix(_GROUP))] = memory


def _by_itself(value: Any) -> Any:
    """A copy of a tensor that is a view of other parameters' states too, all of which would be saved with it."""
    shares = isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.nbytes
    return value.clone() if shares else value


def _replicated(owner: str, name: str, value: Any) -> Entry:
    """What every rank has."""
    return Entry(owner, name, value, tuple(value.shape) if isinstance(value, Tensor) else (), lambda: value)


def _group_of(record: ParamRecord, name: str) -> int:
    """Of how many elements of the parameter a tensor has one value, if it is sharded as the parameter is, else 0."""
    kept = record.tensors.get(name)
    return kept.group if kept is not None else int(record.rule.is_full(name))


def _refuse_other_weight(record: ParamRecord, state: Mapping[str, Any], was: str | None) -> None:
    """Raises `CheckpointError` if states are of a weight in another dtype, and depend on it.

    So do a residual and a master copy, and tensors of a foreign class that have the dtype and dimensions of the weight.
    """
    now = record.param.dtype
    then = now if was is None else getattr(torch, was.removeprefix("torch."))
    before, storage = (of_weight(rounding_of(record.rule, record.group, dtype), dtype) for dtype in (then, now))
    stepped, steps = (each.dtype if isinstance(each, Nearest) else torch.float32 for each in (before, storage))
    for name, value in state.items() if then != now else ():
        like = getattr(value, "dtype", None) is stepped is not steps and len(value.shape) == len(record.span.shape) > 0
        if name in [part.name for part in before.parts[1:]] or (like and isinstance(record.rule, ForeignRule)):
            raise CheckpointError(
                f"the saved state {name!r} is of the weight {record.name!r} in {was}, which this model has in {now}. "
                f"Convert the model before its optimizer is made: model.to({was})"
            )


def _check_param(record: ParamRecord, state: Mapping[str, Any]) -> None:
    want = {name: (record.shape_of(kept), kept.dtype) for name, kept in record.tensors.items()}
    have = {name: (tuple(getattr(t, "shape", ())), getattr(t, "dtype", type(t))) for name, t in state.items()}
    if isinstance(record.rule, ForeignRule):  # only the class knows what else it keeps
        have = {name: kind for name, kind in have.items() if name in want}
    if want != have:
        raise CheckpointError(
            f"the saved state of {record.name!r} has {_listing(have)}, this optimizer's {_listing(want)}"
        )


def _read(value: Any) -> Any:
    return value.read() if isinstance(value, Stored) else value


def _copy(key: str, value: Any, record: ParamRecord, shard: Shard) -> Any:
    """What this rank keeps of a saved value, on the device where it is kept."""
    value = _read(value)
    if not isinstance(value, Tensor):
        return value
    if group := _group_of(record, key):
        value = shard.cut(value, record.span.grouped(group))
    # torch.optim keeps its step counts on the host unless they take part in a kernel
    counts = isinstance(record.rule, ForeignRule) and key.rpartition(".")[2] == "step"
    on_host = counts and not (record.group.get("capturable") or record.group.get("fused"))
    return value.detach().to("cpu" if on_host else record.param.device, copy=True)


def _listing(states: Mapping[str, tuple[tuple[int, ...], Any]]) -> str:
    parts = [f"{name} {list(shape)} {str(dtype).removeprefix('torch.')}" for name, (shape, dtype) in states.items()]
    return ", ".join(parts) or "none"
