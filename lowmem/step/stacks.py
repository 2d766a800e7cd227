"""Small parameters that are updated as one: which gradients wait for one another, and their states as one tensor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

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
