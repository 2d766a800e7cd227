"""Shards of gradients that wait for one another, so that one collective tells ranks which of them are finite."""

from collections import deque
from dataclasses import replace

import torch
from torch import Tensor

from lowmem.step.clipping import Decision
from lowmem.step.record import ParamRecord
from lowmem.step.updates import SMALL, Updates
from lowmem.tiles.gradients import Gradient

# Elements of shards that wait, at most: on a large model those of a layer or two.
MOST = 1 << 25


class Shards:
    """Passes gradients on to updates. A rule whose update is elementwise has nothing to sum over ranks, but all of them
    have to know whether a gradient is finite before the first one writes. Such shards wait until they take as much
    memory as one full gradient, and are measured together.
    """

    def __init__(self, updates: Updates) -> None:
        self._updates = updates
        self.drop()

    def drop(self) -> None:
        """Forgets the gradients that wait."""
        self._waiting: deque[tuple[ParamRecord, Tensor]] = deque()

    def put(self, record: ParamRecord, grad: Gradient, decision: Decision | None) -> None:
        """Updates a parameter, or lets its gradient wait."""
        program = record.program
        if program.ranks is None or not program.rule.elementwise or program.span.numel <= SMALL:  # see `Stack`
            self._updates.put(record, grad, decision)
            return
        assert isinstance(grad, Tensor)  # what is reduced is one
        self._waiting.append((record, grad))
        spans = [each.span for each, _ in self._waiting]
        if sum(span.size for span in spans) >= min(MOST, max(span.numel for span in spans)):  # the same on every rank
            del grad
            self.flush(decision)

    def flush(self, decision: Decision | None) -> None:
        """Updates the parameters whose gradients wait."""
        if not self._waiting:
            return
        records = [record for record, _ in self._waiting]
        ranks = records[0].program.ranks
        assert ranks is not None
        (sums,) = ranks.all_reduce([torch.stack([self._updates.measure(*each) for each in self._waiting])])
        for record, square_sum in zip(records, sums.unbind(), strict=True):
            record.square_sum = square_sum
        measured = self._updates.clipping.review(records)
        if decision is not None:
            updated = torch.stack([decision.each[name][1] for name in measured.names])
            measured = replace(decision, names=measured.names, norms=measured.norms, updated=updated)
        measured = replace(measured, measured=True)
        while self._waiting:
            self._updates.put(*self._waiting.popleft(), measured)
