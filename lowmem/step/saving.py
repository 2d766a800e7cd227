"""Saving an optimizer: everything except the weights that its next step depends on, exact, never cast.

There are two forms. The form by name is used in files. It has states of the parameters that have been updated. The form
by number is returned by `torch.optim.Optimizer.state_dict`. It also has states before the first update, because
`torch.distributed.checkpoint.load` loads only into tensors that exist.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowmem.placements.base import Shard
from lowmem.step.loop import StepLoop
from lowmem.step.parameters import Parameters
from lowmem.step.program import Program
from lowmem.step.record import AddedGroup, ParamRecord
from lowmem.step.updates import initial_tensors
from lowmem.tiles.layout import Span

# Tensors by which the rule of a group clips are saved like states, under this name with the index of the group.
GROUP = "_group"

# Key of the first group in the form by number: everything that is neither a state nor a hyperparameter, because
# torch.distributed.checkpoint saves only states and groups.
REST = "lowmem"


class TensorSource(NamedTuple):
    """A tensor that is gathered from all ranks, or read from a file, on demand."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


class Owner(NamedTuple):
    """A parameter whose states are saved or loaded, with its program under the saved settings of its group."""

    record: ParamRecord
    settings: Mapping[str, Any]
    program: Program

    def unspecified(self, name: str) -> str | None:
        """Where a state is held that only the rule knows; None for other states."""
        return None if name in self.program.kept else self.record.rule.unspecified_state(name, self.settings)

    def span(self, name: str) -> Span | None:
        """This rank's part of a tensor that is sharded like its parameter; None if every rank has all of it."""
        kept = self.program.kept.get(name)
        group = int(self.unspecified(name) == "full") if kept is None else kept.group
        return self.program.span.grouped(group) if group else None


def named(loop: StepLoop, *, lazy: bool) -> dict[str, Any]:
    """Returns everything by name, with full tensors, or a `TensorSource` of each if `lazy`. Every rank calls it."""
    parameters, shard = loop.parameters, loop.parameters.shard
    loop.drop_failed()
    loop.report.settle()
    loop.cycle.refuse_open("save")
    states, records = parameters.states, list(loop.records.values())
    groups = [
        {k: v for k, v in added.live.items() if k not in ("params", "param_names")}
        | {"params": added.live["param_names"], "state_storage": _state_storage(added, records)}
        for added in parameters.groups
    ]
    updated = [each for each in records if (each.param in states or each.extra) and "program" in vars(each)]
    for record in updated:
        loop.updates.begin_state(record)  # the loop may have reset some states
    sources = {
        record.name: _sources(shard, Owner(record, record.group.live, record.program), states[record.param])
        for record in updated
    }
    for n, added in enumerate(parameters.groups):
        sources[f"{GROUP}{n}"] = {name: _source(shard, None, name, tensor) for name, tensor in added.memory.items()}
    return {
        "seed": loop.cycle.seed,
        "step": loop.cycle.step,
        "loss_scale": loop.clipping.scaler.state_dict(),
        "nonfinite": loop.report.state_dict(),
        "weights": {record.name: str(record.param.dtype) for record in records},
        "param_groups": groups,
        "state": {owner: s if lazy else _kept(s) for owner, s in sources.items() if s},
    }


def numbered(loop: StepLoop) -> dict[str, Any]:
    """Returns everything in the form of `torch.optim.Optimizer.state_dict`. Every rank calls it."""
    rest = named(loop, lazy=False)
    groups, states = rest.pop("param_groups"), rest.pop("state")
    names = list(chain.from_iterable(group["params"] for group in groups))
    rest["states"] = [len(states.get(name, ())) for name in names]
    for record in loop.records.values():
        if record.param.requires_grad and record.name not in states:
            states[record.name] = _initial(loop.parameters, record)
    for n, added in enumerate(loop.parameters.groups):
        if memory := added.rule.group_memory(added.live):  # before the first step
            states.setdefault(f"{GROUP}{n}", {name: tensor.clone() for name, tensor in memory.items()})
    numbers = {name: number for number, name in enumerate(names)}
    for group in groups:
        group |= {"params": [numbers[name] for name in group["params"]], "param_names": group["params"]}
    state = {number: states.pop(name) for name, number in numbers.items() if name in states}
    groups[0][REST] = {**rest, "state": states}
    return {"state": state, "param_groups": groups}


def _state_storage(group: AddedGroup, records: Iterable[ParamRecord]) -> str:
    """The storage of the states of a group. "auto" stays if it has none, or several."""
    names = {record.program.state_storage for record in records if record.group is group and record.claimed} - {None}
    return str(names.pop() if len(names) == 1 else group.live["state_storage"])


def _initial(parameters: Parameters, record: ParamRecord) -> dict[str, Any]:
    """The states that a parameter would have before its first update."""
    if parameters.states.get(record.param) or not record.span.numel:
        return {}
    shard = parameters.shard
    owner = Owner(record, record.group.live, record.program_of(record.group.live, shard))
    tensors = initial_tensors(owner.program, owner.program.created, shard.read(record.param))
    return _kept(_sources(shard, owner, tensors))


def _sources(shard: Shard, owner: Owner, state: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a parameter by name: its states, and the remaining tensors of the storage of its weight."""
    quantized = shard.quantized(owner.record.param)
    extra = owner.record.extra if quantized is None else quantized.parts
    names = owner.program.extra_names if extra else ()
    tensors = {**state, **dict(zip(names, extra, strict=True))}
    return {name: _source(shard, owner, name, value) for name, value in tensors.items()}


def _source(shard: Shard, owner: Owner | None, name: str, value: Any) -> Any:
    """The source of a full tensor that belongs to a parameter, or to a group."""
    if not isinstance(value, Tensor):
        return value
    if owner is None or (span := owner.span(name)) is None:
        return TensorSource(tuple(value.shape), value.dtype, lambda: value)
    return TensorSource(span.shape, value.dtype, partial(shard.gather, owner.record.param, value, span))


def _kept(sources: Mapping[str, Any]) -> dict[str, Any]:
    """Reads values to keep. A view of a stack is copied, because `torch.save` would save the whole stack."""
    values = {name: source.read() if isinstance(source, TensorSource) else source for name, source in sources.items()}
    views = {n: t for n, t in values.items() if isinstance(t, Tensor) and t.untyped_storage().nbytes() > t.nbytes}
    return {**values, **{name: view.clone() for name, view in views.items()}}
