"""Gradients that wait on their device, so that one launch per pass updates many parameters."""

from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from lowmem.step.record import ParamRecord


class Arrival(NamedTuple):
    """A gradient of a step.

    size: its bytes, the same on every rank.  storage, offset: where it is in a storage that it shares with others, such
    as those of a module of FSDP2. A gradient that shares none has the storage 0.
    """

    record: ParamRecord
    size: int
    storage: int
    offset: int


class Waiting:
    """Gradients wait until they take as much memory as the largest one, which has to fit anyway. They are applied
    before one arrives that would not fit beside them: the order is that of the last step. In the first step, and after
    the order has changed, none waits.
    """

    def __init__(self) -> None:
        self._gradients: list[tuple[ParamRecord, Tensor]] = []
        self._order: list[Arrival] = []  # in this step
        self._last: list[ParamRecord] = []  # the order of the last step
        self._ends: set[ParamRecord] = set()  # after which they are applied

    def add(self, record: ParamRecord, grad: Tensor) -> bool:
        """Returns whether those that wait have to be applied now."""
        number, storage = len(self._order), grad.untyped_storage()
        shared = storage._cdata if storage.nbytes() > grad.nbytes else 0
        self._gradients.append((record, grad))
        self._order.append(
            Arrival(record, record.program.span.size * grad.itemsize, shared, int(grad.storage_offset()))
        )
        if self._last[number : number + 1] != [record]:
            self._last = []
        return not self._last or record in self._ends

    def take(self) -> list[tuple[ParamRecord, Tensor]]:
        """Returns those that wait, in the order in which they arrived, and keeps none."""
        taken, self._gradients = self._gradients, []
        return taken

    def end(self) -> None:
        """Called at the end of a step."""
        units = _units(self._order)
        sizes = [sum(each.size for each in unit) for unit in units]
        ends, taken, largest = [unit[-1].record for unit in units], 0, max(sizes, default=0)
        self._ends = {*ends[-1:]}
        for end, (size, following) in zip(ends, pairwise(sizes), strict=False):
            taken += size
            if taken + following > largest:
                self._ends.add(end)
                taken = 0
        self._last, self._order = [each.record for each in self._order], []

    def drop(self) -> None:
        """Discards them, after their backward has failed."""
        self._gradients, self._order, self._last = [], [], []


def _units(order: list[Arrival]) -> list[list[Arrival]]:
    """Divides gradients into those that are freed together."""
    units: list[list[Arrival]] = []
    for each in order:
        before = units[-1] if units else []
        same = each.storage and before and each.storage == before[-1].storage
        if same and all(each.offset != other.offset for other in before):
            before.append(each)
        else:
            units.append([each])
    return units
