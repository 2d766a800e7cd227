"""Stacks: small parameters that are updated as one."""

from dataclasses import dataclass, field

from torch import Tensor

from lowmem.step.program import Program
from lowmem.step.record import ParamRecord


@dataclass
class Stack:
    """Parameters of one program, whose gradients wait until the stack is full.

    Attributes:
        full: number of parameters that are updated as one.
        records, grads: the waiting parameters and their gradients.
    """

    program: Program
    full: int
    records: list[ParamRecord] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)

    def empty(self) -> tuple[list[ParamRecord], list[Tensor]]:
        """Removes and returns the waiting parameters and gradients."""
        waiting = self.records, self.grads
        self.records, self.grads = [], []
        return waiting
