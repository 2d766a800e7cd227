"""Saving and loading an optimizer: states by parameter name, and what else its next step depends on."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lowmem.placements.base import Shard
from lowmem.placements.record import ParamRecord
from lowmem.step import distributed_checkpoint
from lowmem.step import state_dict as states
from lowmem.step.report import Report
from lowmem.step.updates import Updates, settle


@dataclass(frozen=True)
class Saving:
    """Saves an optimizer and continues from what was saved. Its parts are those of the optimizer, live."""

    records: Mapping[Tensor, ParamRecord]
    groups: Sequence[dict[str, Any]]
    state: dict[Tensor, dict[str, Any]]
    shard: Shard
    updates: Updates
    report: Report

    def entries(self) -> Iterator[states.Entry]:
        """What is kept for each parameter and group, one at a time."""
        return states.entries(self.records.values(), self.state, self.shard, self.updates.clipping)

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
        self.report.settle()
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
                gathered.setdefault(states.group_owner(n), clones)
        return distributed_checkpoint.numbered({**metadata, "state": gathered}, updated)

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continues from `metadata` and `gathered` together, or from `numbered`.

        Raises:
            CheckpointError: it is of other rules or storages, or its parameters or groups are not this optimizer's.
        """
        saved = distributed_checkpoint.named(saved, self.groups)
        clipping, cycle = self.updates.clipping, self.updates.cycle
        states.refuse_others(saved, self.groups)
        clipping.scaler.check_saved(saved.get("loss_scale"))
        states.restore(saved, self.records.values(), self.groups, self.state, self.shard, clipping)
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


def _by_itself(value: Any) -> Any:
    """A copy of a tensor that is a view of other parameters' states too, all of which would be saved with it."""
    shares = isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.nbytes
    return value.clone() if shares else value
