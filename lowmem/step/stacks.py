"""Small parameters that are updated as one: which gradients wait for one another, and where the states lie."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from lowmem.step.program import Program
from lowmem.step.record import ParamRecord


@dataclass
class Stack:
    """Parameters of one program, whose gradients wait until the stack is full.

    Attributes:
        full: how many of them are updated as one.
        records, grads: of those that wait.
    """

    program: Program
    full: int
    records: list[ParamRecord] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)

    def empty(self) -> tuple[list[ParamRecord], list[Tensor]]:
        """Returns the parameters and gradients that wait, and forgets them."""
        waiting = self.records, self.grads
        self.records, self.grads = [], []
        return waiting


@dataclass(frozen=True)
class Arena:
    """Tensors that are kept for small parameters, side by side in the order of a stack. The one of each parameter is a
    view, so that stacking them copies nothing.

    Attributes:
        records: of the parameters, in this order.
        stacked: the tensors by name, [parameters, ...].
        addresses: of the views, by name.
    """

    records: list[ParamRecord]
    stacked: dict[str, Tensor]
    addresses: dict[str, list[int]]

    def holds(self, records: Sequence[ParamRecord], states: Sequence[dict[str, Any]]) -> bool:
        """Returns whether the states are its views, in its order: loaded or replaced ones are not."""
        return self.records == records and self.addresses == _addresses(_columns(records, states))


class Arenas:
    """The arenas of all stacks. An arena is made by the first update of its parameters: backward mostly reaches them in
    the same order each time. Stacks of another order or of other parameters are gathered and scattered.
    """

    def __init__(self) -> None:
        self._of: dict[ParamRecord, Arena] = {}

    def clear(self) -> None:
        """Forgets all of them. Tensors that are views of one stay so until their next update."""
        self._of.clear()

    def find(self, records: list[ParamRecord], states: Sequence[dict[str, Any]]) -> Arena | None:
        """The arena that has the states of these parameters, and the other tensors of their storage, in this order. It
        is made where that leaves no other parameter behind, whose state would go on holding the memory of all.
        """
        arena = self._of.get(records[0])
        if arena is not None and arena.holds(records, states):
            return arena
        left = {id(arena): arena for record in records if (arena := self._of.get(record)) is not None}
        together = set(records)
        if is_fake(records[0].param) or not all(together.issuperset(arena.records) for arena in left.values()):
            return None
        stacked = gather(records, states)
        views = {name: list(tensor.unbind()) for name, tensor in stacked.items()}
        for i, (record, state) in enumerate(zip(records, states, strict=True)):
            state.update({name: views[name][i] for name in state})
            record.extra = tuple(views[name][i] for name in record.program.extra_names)
        arena = Arena(records, stacked, _addresses(views))
        self._of.update(dict.fromkeys(records, arena))
        return arena


def gather(records: Sequence[ParamRecord], states: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Copies of the states of parameters, and of the other tensors of their storage, stacked."""
    return {name: torch.stack(tensors) for name, tensors in _columns(records, states).items()}


def scatter(stacked: Mapping[str, Tensor], records: Sequence[ParamRecord], states: Sequence[dict[str, Any]]) -> None:
    """Copies what `gather` returned, and has changed since, to where it was."""
    for name, tensors in _columns(records, states).items():
        torch._foreach_copy_(tensors, stacked[name].unbind())


def _columns(records: Sequence[ParamRecord], states: Sequence[dict[str, Any]]) -> dict[str, list[Tensor]]:
    columns = {name: [state[name] for state in states] for name in states[0]}
    for i, name in enumerate(records[0].program.extra_names):
        columns[name] = [record.extra[i] for record in records]
    return columns


def _addresses(columns: Mapping[str, list[Tensor]]) -> dict[str, list[int]]:
    return {name: [tensor.data_ptr() for tensor in tensors] for name, tensors in columns.items()}
