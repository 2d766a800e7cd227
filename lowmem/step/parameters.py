"""The parameters of one optimizer, with their groups, placement and states: shared by all parts of a step."""

import logging
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lowmem.errors import ConfigError, StepError, UnsupportedError, did_you_mean
from lowmem.options import FusedConfig
from lowmem.placements import Placement
from lowmem.placements.base import Shard
from lowmem.rules import UpdateRule
from lowmem.step.hooks import is_hooked
from lowmem.step.record import AddedGroup, Group, ParamRecord
from lowmem.tiles.quantized import tensors_of

logger = logging.getLogger(__name__)


class States(defaultdict[Tensor, dict[str, Any]]):
    """States by parameter. `bool()` is always True, because for an optimizer whose `state` is False,
    `torch.distributed.checkpoint.state_dict` runs a step with zero gradients. Our `state_dict` does not need this step.
    """

    def __bool__(self) -> bool:
        return True


@dataclass(frozen=True, eq=False)
class Parameters:
    """The parameters of one optimizer. The containers change during the lifetime of the optimizer.

    Attributes:
        config: the options of the optimizer.
        placement: the placement of all parameters.
        model: the module that owns them, if the user passed it.
        param_groups: the list that users and schedulers edit.
        groups: the groups as they were added.
        records: a record per parameter. Norms are summed in this order.
        states: the optimizer states of each parameter, created before its first update.
        frozen: the names of the model's parameters that have been frozen since the optimizer was created.
    """

    config: FusedConfig
    placement: Placement
    model: nn.Module | None
    param_groups: list[Group] = field(default_factory=list)
    groups: list[AddedGroup] = field(default_factory=list)
    records: dict[Tensor, ParamRecord] = field(default_factory=dict)
    states: States = field(default_factory=lambda: States(dict))
    frozen: dict[Tensor, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        named = () if self.model is None else self.model.named_parameters()
        self.frozen.update({param: name for name, param in named if not param.requires_grad})

    @property
    def shard(self) -> Shard:
        """Reads and writes this rank's shard of a parameter."""
        return self.placement.shard

    @property
    def device(self) -> torch.device:
        """The device of the first parameter, on which norms and the loss scale are computed."""
        return next((param.device for param in self.records), torch.device("cpu"))

    def same_rule(self, rule: UpdateRule, where: str) -> UpdateRule:
        """Returns the rule of an earlier group with this name, or `rule`. Raises `ConfigError` if they differ."""
        same = next((group.rule for group in self.groups if group.rule.name == rule.name), rule)
        if not rule.equals(same):
            raise ConfigError(
                f"{where}its rule has the same name as an earlier group's rule ({rule.name!r}), and saved states are "
                "keyed by rule name. Rename one of the rules, or make their difference a hyperparameter (`defaults`)"
            )
        return same

    def new_records(self, group: AddedGroup) -> dict[Tensor, ParamRecord]:
        """Creates records for the parameters of a new group."""
        names = {record.name for record in self.records.values()}
        records: dict[Tensor, ParamRecord] = {}
        for name, param in zip(group.live["param_names"], group.live["params"], strict=True):
            if name in names or param in records:
                raise ConfigError(f"parameter {name!r} is given twice; each parameter and each name may occur once")
            names.add(name)
            self.shard.admit(name, param)
            records[param] = ParamRecord(name, param, self.shard.span(param), group)
        return records

    def _require_own_memory(self) -> None:
        """Raises `UnsupportedError` if an update of one parameter would change the memory of another one."""
        ranges = defaultdict[int, list[tuple[int, int, ParamRecord]]](list)  # by storage
        for record in () if self.shard.sharded else self.records.values():
            for tensor in tensors_of(record.param) if record.param.layout == torch.strided else ():
                steps = zip(tensor.shape, tensor.stride(), strict=True)
                length = 1 + sum((size - 1) * stride for size, stride in steps)
                if length == tensor.numel() > 0:  # otherwise another parameter may be in the gaps
                    start = int(tensor.storage_offset())
                    ranges[tensor.untyped_storage()._cdata].append((start, start + length, record))
        for in_storage in ranges.values():
            in_storage.sort(key=lambda item: item[:2])
            for (_, stop, one), (start, _, other) in pairwise(in_storage):
                if start < stop and (one.param.requires_grad or other.param.requires_grad):
                    raise UnsupportedError(
                        f"parameters {one.name!r} and {other.name!r} are two parameters with the same memory, so an "
                        "update of one in the middle of backward would change the other. Use one parameter in both "
                        "places, as in head.weight = embedding.weight, or copy it: param.data = param.data.clone()"
                    )

    def complete(self) -> None:
        """Called when groups have been added: orders the records as in the model and checks options of all groups.

        Raises:
            ConfigError: an option names a parameter that does not exist, or a storage has no state to store.
            UnsupportedError: two parameters have the same memory.
        """
        self._require_own_memory()
        for param in () if self.model is None else self.model.parameters():
            if param in self.records:
                self.records[param] = self.records.pop(param)
        names = [record.name for record in self.records.values()]
        for group in self.groups if names else ():
            for name in set(group.rule.names(group.live)) - set(names):
                raise ConfigError(
                    f"rule {group.rule.name!r}: no parameter is called {name!r}.{did_you_mean(name, names)}"
                )
        claimed = [record for record in self.records.values() if record.claimed]
        claimed = [record for record in claimed if len(record.span.shape) > 1] or claimed
        for storage in {record.group.live["state_storage"] for record in claimed} - {"auto", "float32"}:
            affected = [record for record in claimed if record.group.live["state_storage"] == storage]
            if not any(record.program.state_storage for record in affected):
                rules = " and ".join(sorted({repr(record.rule.name) for record in affected}))
                raise ConfigError(
                    f"state_storage={storage!r} has no effect: rule {rules} has no elementwise state whose storage can "
                    "be chosen. Omit it, or use a rule such as 'adamw' or 'lion'"
                )

    def clear_states(self) -> None:
        """Removes everything that updates have stored except the weights."""
        self.states.clear()
        for group in self.groups:
            group.memory.clear()
        for record in self.records.values():
            record.extra = {}

    def check_edits(self) -> None:
        """Raises `StepError` if `param_groups` was edited in a way that would have no effect.

        A hyperparameter may change as long as the spec of each parameter stays the same.
        """
        groups, edits = self.param_groups, list[str]()
        if len(groups) != len(self.groups):
            edits.append("the number of parameter groups")
        for number, (added, group) in enumerate(zip(self.groups, groups, strict=False)):
            edits += added.edits(number, group)
        by_name = {group for group in self.groups if group.is_by_name}
        claimed = [record for record in self.records.values() if record.claimed]
        for record in {(r if r.group in by_name else r.program): r for r in claimed}.values():
            if record.program.spec != record.rule.spec(record.name, record.span.shape, record.group.live):
                edits.append(f"a hyperparameter that decides the form of the update of {record.name!r}")
        if edits:
            raise StepError(
                f"{edits[0]} was changed, but the optimizer would continue with the original value. Restore it. Set "
                "hyperparameters as in opt.param_groups[0]['lr'] = 1e-4, freeze parameters with requires_grad_(False), "
                "add parameters with opt.add_param_group(), and create another FusedOptimizer for another rule or "
                "storage"
            )

    @property
    def norm_option(self) -> str | None:
        """The option that needs the norm over all gradients, with its value; None if there is none."""
        if self.config.clip_norm is not None:
            return f"clip_norm={self.config.clip_norm!r}"
        options = (group.rule.needs_norm(group.live) for group in self.groups)
        return next((option for option in options if option is not None), None)

    def check_unfrozen(self) -> None:
        """Raises `StepError` if clipping by norm would ignore a parameter of the model that was unfrozen. Otherwise,
        warns once about such parameters, which a torch optimizer may update.
        """
        unfrozen = {param: name for param, name in self.frozen.items() if param.requires_grad}
        if missing := [name for param, name in unfrozen.items() if not is_hooked(param)]:
            name, option = missing[0], self.norm_option
            effect = f"the norm for {option} would not include its gradient" if option else "it is not updated"
            more = f", and so on for {len(missing) - 1} more" if len(missing) > 1 else ""
            message = (
                f"parameter {name!r} was frozen when the optimizer was created without it, and is trained now, so "
                f"{effect}. Pass frozen parameters to the optimizer too, or write "
                f"opt.add_param_group({{'params': [({name!r}, model.get_parameter({name!r}))]}}){more}"
            )
            if option is not None:
                raise StepError(message)
            logger.warning("%s. If another optimizer updates it, ignore this", message)
        for param in unfrozen:
            del self.frozen[param]

    def settings(self) -> dict[str, Any]:
        """Returns the settings that must be the same on all ranks."""
        others = ("rule", "lr", "hyper", "groups")  # they are in the groups
        settings = {name: value for name, value in vars(self.config).items() if name not in others}
        for number, group in enumerate(self.groups):
            for key in group.live.keys() - {"params", "param_names"}:
                settings[f"{key} of parameter group {number}"] = group.live[key]
        return {**settings, "number of trained parameters": sum(param.requires_grad for param in self.records)}
