"""Saves and loads everything that the next step depends on except the weights, exactly and without casts.

There are two forms. Files use the form by name, which has the states of parameters that have been updated.
`torch.optim.Optimizer.state_dict` returns the form by number, which also has states before the first update, because
`torch.distributed.checkpoint.load` loads only into tensors that exist.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowmem.errors import CheckpointError, LowmemError
from lowmem.placements.base import Shard
from lowmem.rules import ENGINE_KEYS, adamw
from lowmem.step.loop import StepLoop
from lowmem.step.parameters import Parameters
from lowmem.step.program import Program, rounding_of, weight_storage
from lowmem.step.record import AddedGroup, Group, ParamRecord
from lowmem.step.updates import initial_tensors
from lowmem.tiles.layout import Span
from lowmem.tiles.storage import Storage, Uniform, part_name, state_storages

Form = tuple[tuple[int, ...], Any]  # shape and dtype of a tensor, or the type of another value

# The tensors that a group's rule needs for clipping are saved like states, under this name and the group's index.
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
        """Returns where a state without a `StateSpec` is stored; None for other states."""
        return None if name in self.program.tensor_specs else self.record.rule.unspecified_state(name, self.settings)

    def span(self, name: str) -> Span | None:
        """Returns this rank's part of a tensor that is sharded like its parameter; None if it is not sharded."""
        tensor = self.program.tensor_specs.get(name)
        group = int(self.unspecified(name) == "full") if tensor is None else tensor.group
        return self.program.span.grouped(group) if group else None


def named(loop: StepLoop, *, lazy: bool) -> dict[str, Any]:
    """Returns the form by name, with full tensors, or if `lazy`, with `TensorSource`s. Every rank calls it."""
    parameters, shard = loop.parameters, loop.parameters.shard
    loop.drop_failed()
    loop.report.settle()
    parameters.shard.settle()
    loop.cycle.require_idle("save")
    loop.claim_changed()  # raises if states no longer fit their parameter
    states, records = parameters.states, list(loop.records.values())
    groups = [
        {key: _plain(value) for key, value in added.live.items() if key not in ("params", "param_names")}
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
        "state": {owner: s if lazy else _read_all(s) for owner, s in sources.items() if s},
    }


def _plain(value: Any) -> Any:
    """Returns a hyperparameter that a loop has set to a NumPy number or a tensor as a Python number."""
    elements = value.numel() if isinstance(value, Tensor) else getattr(value, "size", 0)  # of NumPy
    return value.item() if elements == 1 else value


def numbered(loop: StepLoop) -> dict[str, Any]:
    """Returns the form by number, as `torch.optim.Optimizer.state_dict` does. Every rank calls it."""
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
    """Returns the storage of the states of a group, or its option "auto" if there is not exactly one storage."""
    names = {record.program.state_storage for record in records if record.group is group and record.claimed} - {None}
    return str(names.pop() if len(names) == 1 else group.live["state_storage"])


def _initial(parameters: Parameters, record: ParamRecord) -> dict[str, Any]:
    """Returns the states that a parameter would have before its first update."""
    if parameters.states.get(record.param) or not record.span.numel:
        return {}
    shard = parameters.shard
    owner = Owner(record, record.group.live, record.program_of(record.group.live, shard))
    weight = shard.read(record.param)
    if owner.program.extra_names:
        weight = weight.clone()  # creating the other tensors of its storage rounds it
    tensors = initial_tensors(owner.program, owner.program.created, weight)
    return _read_all(_sources(shard, owner, tensors))


def _sources(shard: Shard, owner: Owner, state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sources of a parameter's states, and of the other tensors of its weight's storage, by name."""
    extra = owner.record.extra
    if (quantized := shard.quantized(owner.record.param)) is not None:
        extra = dict(zip(owner.program.extra_names, quantized.parts, strict=True))
    return {name: _source(shard, owner, name, value) for name, value in {**state, **extra}.items()}


def _source(shard: Shard, owner: Owner | None, name: str, value: Any) -> Any:
    """Returns the source of a full tensor of a parameter, or of a group if `owner` is None."""
    if not isinstance(value, Tensor):
        return value
    if owner is None or (span := owner.span(name)) is None:
        return TensorSource(tuple(value.shape), value.dtype, lambda: value)
    return TensorSource(span.shape, value.dtype, partial(shard.gather, owner.record.param, value, span))


def _read_all(sources: Mapping[str, Any]) -> dict[str, Any]:
    """Reads all sources. A view of a stack is copied, because `torch.save` would save the whole stack."""
    values = {name: source.read() if isinstance(source, TensorSource) else source for name, source in sources.items()}
    views = {n: t for n, t in values.items() if isinstance(t, Tensor) and t.untyped_storage().nbytes() > t.nbytes}
    return {**values, **{name: view.clone() for name, view in views.items()}}


def load(loop: StepLoop, saved: Mapping[str, Any], *, numbered: bool) -> None:
    """Loads the result of `named`, or if `numbered`, the result of `numbered` or of `torch.optim.AdamW.state_dict`.

    Everything is checked and read once before anything changes. It is read again after the current states have been
    freed, so that old and new states are never in memory at the same time.
    """
    parameters = loop.parameters
    try:
        if numbered:
            saved = _by_name(saved, parameters.param_groups, loop.cycle.seed)
        if parameters.config.convert_states:
            saved = _converted(parameters, saved)
        owners = _check(loop, saved)
        for value in chain.from_iterable(state.values() for state in saved["state"].values()):
            if isinstance(value, TensorSource):
                value.read()
    except CheckpointError:
        raise
    except LowmemError as error:
        raise CheckpointError(f"the saved optimizer cannot be loaded: {error}") from error
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"the saved optimizer is damaged: {type(error).__name__}: {error}") from error
    loop.cycle.tear("its state was only partly loaded")  # undone when everything is loaded
    for added, saved_group in zip(parameters.groups, saved["param_groups"], strict=True):
        added.live.update({key: value for key, value in saved_group.items() if key != "params"})
        added.settings["state_storage"] = added.live["state_storage"]
    parameters.clear_states()
    for owner in owners.values():
        owner.record.choose_program(parameters.shard)
    for name, state in saved["state"].items():
        copies = {key: _copy(parameters, owners.get(name), key, value) for key, value in state.items()}
        if name in owners:
            record = owners[name].record
            copies = parameters.shard.keep(record.param, copies)
            record.put_extra({name: copies.pop(name) for name in record.program.extra_names}, parameters.shard)
            parameters.states[record.param] = copies
        else:
            parameters.groups[int(name.removeprefix(GROUP))].memory.update(copies)
    loop.clipping.scaler.load_state_dict(saved.get("loss_scale"))
    loop.report.load_state_dict(saved.get("nonfinite"))
    loop.cycle.step, loop.cycle.seed = saved["step"], saved["seed"]
    loop.cycle.accept_torn()


def _check(loop: StepLoop, saved: Mapping[str, Any]) -> dict[str, Owner]:
    """Checks the saved values. Returns the parameters that have a saved state or are trained, by name."""
    _require_same_groups(loop.parameters.param_groups, saved["param_groups"])
    step, seed, counts = saved["step"], saved["seed"], saved.get("nonfinite") or {}
    if {*map(type, (step, seed, *counts.values()))} != {int} or step < 0:
        raise CheckpointError(f"the saved optimizer has {step=}, {seed=} and nonfinite={counts}: not all are counts")
    loop.clipping.scaler.check_saved(saved.get("loss_scale"))
    by_name = {record.name: record for record in loop.records.values()}
    owners: dict[str, Owner] = {}
    want: dict[str, dict[str, Form]] = {}
    for n, (added, group) in enumerate(zip(loop.parameters.groups, saved["param_groups"], strict=True)):
        added.rule.check(group)
        want[f"{GROUP}{n}"] = _forms(added.rule.group_memory(group))
        for record in map(by_name.__getitem__, group["params"]):
            if record.claimed or record.name in saved["state"]:
                settings = {**record.group.live, **group}
                owners[record.name] = Owner(record, settings, record.program_of(settings, loop.parameters.shard))
    for name, owner in owners.items():
        tensors = owner.program.tensor_specs.items()
        want[name] = {key: (owner.program.shape_of(tensor), tensor.dtype) for key, tensor in tensors}
    for name, have in ((name, _forms(state)) for name, state in saved["state"].items()):
        if name not in want:
            raise CheckpointError(f"the saved optimizer has a state of {name!r}, which is not a parameter of this one")
        if name in owners:
            _require_same_weight(owners[name], have, (saved.get("weights") or {}).get(name))
            have = {key: form for key, form in have.items() if not owners[name].unspecified(key)}
        if have != want[name]:
            where = repr(name) if name in owners else name.replace(GROUP, "group ")
            raise CheckpointError(
                f"the saved state of {where} has {_listing(have)}, but this optimizer has {_listing(want[name])}"
            )
    return owners


def _require_same_groups(groups: Sequence[Group], saved_groups: Sequence[Mapping[str, Any]]) -> None:
    """Raises `CheckpointError` if the saved groups have different rules, storages or parameters."""
    names = [group["param_names"] for group in groups]
    if [group["params"] for group in saved_groups] != names:
        theirs, ours = {n for g in saved_groups for n in g["params"]}, {n for g in names for n in g}
        odd = sorted(theirs ^ ours)
        raise CheckpointError(
            f"the saved optimizer has {len(saved_groups)} group(s) of {len(theirs)} parameters, but this one has "
            f"{len(names)} of {len(ours)}; " + (f"they differ in {odd[:5]}" if odd else "they are in another order")
        )
    for n, (group, other) in enumerate(zip(groups, saved_groups, strict=True)):
        where = f" in group {n}" if len(groups) > 1 else ""
        adopted = state_storages() if group["state_storage"] == "auto" else ()
        for key in ENGINE_KEYS:
            if other.get(key) != group[key] and not (key == "state_storage" and other.get(key) in adopted):
                raise CheckpointError(
                    f"the saved optimizer has {key} {other.get(key)!r}{where}, but this one has {group[key]!r}"
                    + (". convert_states=True converts it" if key == "state_storage" else "")
                )


def _copy(parameters: Parameters, owner: Owner | None, name: str, value: Any) -> Any:
    """Copies this rank's part of a saved value to the device of its parameter or group."""
    value = value.read() if isinstance(value, TensorSource) else value
    if not isinstance(value, Tensor):
        return value
    device = parameters.device
    if owner is not None:
        device = torch.device("cpu") if owner.unspecified(name) == "host" else owner.record.param.device
        if (span := owner.span(name)) is not None:
            value = parameters.shard.cut(value, span)
    return value.detach().to(device, copy=True)


def _require_same_weight(owner: Owner, have: Mapping[str, Form], was: str | None) -> None:
    """Raises `CheckpointError` if the weight had a different dtype and some of its states depend on the dtype.

    These are a residual, a master copy, and states without a `StateSpec` that have the weight's dtype and dimensions.
    """
    record, now = owner.record, owner.record.param.dtype
    then = now if was is None else getattr(torch, was.removeprefix("torch."))
    before, storage = (weight_storage(rounding_of(record.rule, owner.settings, dtype), dtype) for dtype in (then, now))
    stepped, steps = (each.parts[0].dtype if each.is_cast else torch.float32 for each in (before, storage))
    for name, (shape, dtype) in have.items() if then != now else ():
        like = dtype is stepped is not steps and len(shape) == len(owner.program.span.shape) > 0
        if name in [part.name for part in before.parts[1:]] or (like and name not in owner.program.tensor_specs):
            raise CheckpointError(
                f"the saved state {name!r} belongs to the weight {record.name!r} in {was}, but in this model the "
                f"weight is {now}. Convert the model before you create its optimizer: model.to({was})"
            )


def _forms(state: Mapping[str, Any]) -> dict[str, Form]:
    return {name: (tuple(getattr(t, "shape", ())), getattr(t, "dtype", type(t))) for name, t in state.items()}


def _listing(forms: Mapping[str, Form]) -> str:
    parts = [f"{name} {list(shape)} {str(dtype).removeprefix('torch.')}" for name, (shape, dtype) in forms.items()]
    return ", ".join(parts) or "none"


def _converted(parameters: Parameters, saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the saved optimizer with states converted to the storages of this optimizer."""
    by_name = {record.name: record for record in parameters.records.values()}
    groups, states = [], dict(saved["state"])
    for group, other in zip(parameters.param_groups, saved["param_groups"], strict=False):
        groups.append({**other, "state_storage": group["state_storage"]})
        for name in other["params"] if other.get("state_storage") in ("auto", *state_storages()) else ():
            if name in by_name and name in states:
                settings = ({**group, **saved_group} for saved_group in (other, groups[-1]))
                then, now = (by_name[name].program_of(each, parameters.shard) for each in settings)
                states[name] = _in_storages(states[name], then, now)
    return {**saved, "param_groups": groups, "state": states}


def _in_storages(state: Mapping[str, Any], then: Program, now: Program) -> dict[str, Any]:
    """Converts the saved states of a parameter between the storages of two programs."""
    converted = dict(state)
    for name in then.states:
        old, new = then.states[name], now.states[name]
        if old == new:
            continue
        sources = [converted.pop(part_name(name, part.name)) for part in old.parts]

        def read(n: int, sources: Sequence[Any] = sources, old: Storage = old, new: Storage = new) -> Tensor:
            value = old.decode(tuple(each.read() if isinstance(each, TensorSource) else each for each in sources))
            return new.encode(value, Uniform.half(value))[n].to(new.parts[n].dtype)

        for n, part in enumerate(new.parts):
            shape = now.shape_of(now.tensor_specs[part_name(name, part.name)])
            converted[part_name(name, part.name)] = TensorSource(shape, part.dtype, partial(read, n))
    return converted


def _by_name(saved: Mapping[str, Any], own: Sequence[Mapping[str, Any]], seed: int) -> dict[str, Any]:
    """Converts the form by number, from lowmem or `torch.optim.AdamW`, to the form by name.

    own: the groups of this optimizer. torch.distributed.checkpoint replaces numbers by names in the order of `own`.
    """
    groups, states = [dict(group) for group in saved["param_groups"]], saved["state"]
    keys, names = [group["params"] for group in groups], [group["param_names"] for group in own]
    rest = next((group.pop(REST) for group in groups if REST in group), None)
    if rest is not None and all(isinstance(key, int) for key in chain(*keys)):
        names = [group["param_names"] for group in groups]
    elif list(map(len, keys)) != list(map(len, names)):
        raise CheckpointError(
            f"the saved optimizer has groups of {list(map(len, keys))} parameters, but this one has groups of "
            f"{list(map(len, names))}"
        )
    if rest is None and all("amsgrad" in group for group in groups):
        groups, states = adamw.of_torch(groups, states, own)
        step = max((int(state["step"]) for state in states.values()), default=0)
        rest = {"step": step, "seed": seed, "states": [len(states.get(key, ())) for key in chain(*keys)]}
    if rest is None:
        raise CheckpointError(
            "the saved optimizer has no step, seed and loss scale, because flatten_optimizer_state_dict=True drops "
            "them. Save it without this option, or save opt.state_dict(). Load the result of opt.named_state_dict() "
            "with opt.load_named_state_dict(...)"
        )
    counts = dict(zip(chain(*keys), zip(chain(*names), rest["states"], strict=True), strict=True))
    params = chain.from_iterable(zip(group["param_names"], group["params"], strict=True) for group in own)
    frozen = {name for name, param in params if not param.requires_grad}
    by_name = dict(rest.get("state", {}))  # states of groups. torch.distributed.checkpoint drops empty dicts
    for key, state in {**{key: {} for key in counts}, **states}.items():
        name, count = counts[key]
        if count not in (0, len(state)):
            reason = (
                "torch.distributed.checkpoint does not load states of frozen parameters. Freeze it after loading"
                if name in frozen
                else "An optimizer class creates its states in its first step, so torch.distributed.checkpoint cannot "
                "load them into an optimizer that has not stepped. Load with opt.load_state_dict(...), or use a rule "
                "of lowmem"
            )
            raise CheckpointError(
                f"{count} states of {name!r} were saved, but this optimizer has {len(state)}. {reason}"
            )
        if count:
            by_name[name] = state
    groups = [{**group, "params": group_names} for group, group_names in zip(groups, names, strict=True)]
    return {**rest, "state": by_name, "param_groups": groups}
