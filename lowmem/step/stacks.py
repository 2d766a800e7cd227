"""Small parameters that are updated as one: which gradients wait for one another."""

from dataclasses import dataclass, field

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
