"""Updates parameters by kernels, with one launch per pass for all that have the same kernels."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowmem.kernels import Batch, Kernels, Values
from lowmem.placements.base import Shard
from lowmem.step.changes import Changes
from lowmem.step.clipping import Decision
from lowmem.step.compiled import BoundUpdate, Compilation, is_observed, made_for, member_of
from lowmem.step.cycle import StepCycle
from lowmem.step.inputs import StepInputs
from lowmem.step.program import Result
from lowmem.step.record import ParamRecord, store
from lowmem.tiles.quantized import tensors_of
from lowmem.tiles.storage import StoredTensor

# A parameter's record, its gradient, its states, and the other tensors of its weight's storage.
Waiting = tuple[ParamRecord, Tensor, dict[str, Any], dict[str, Tensor]]


class PendingUpdate(NamedTuple):
    """An update that kernels run.

    shard: this rank's shard of the parameter.  parts: its stored tensors.  numbers: the names of its group's numbers.
    place: the indices in `StepValues` of the first of these numbers and of its noise key.
    """

    record: ParamRecord
    grad: Tensor
    shard: Tensor
    parts: tuple[Tensor, ...]
    states: dict[str, Any]
    numbers: tuple[str, ...]
    place: tuple[int, int]

    @property
    def weight(self) -> StoredTensor:
        """The weight with its storage."""
        return StoredTensor(self.record.program.weight, self.parts)


class Together(NamedTuple):
    """Updates that the same launches run. members: their positions among the updates of a flush."""

    members: Sequence[int]
    batch: Batch


# What the kernels of a flush depend on: the form of the decision, and the parameters.
Key = tuple[Any, tuple[ParamRecord, ...]]


class KernelUpdates:
    """Runs updates by kernels. What a flush needs is decided once, and again when something has changed.

    Args:
        shard, cycle, inputs, compilation, changes: of the optimizer.
    """

    def __init__(
        self, shard: Shard, cycle: StepCycle, inputs: StepInputs, compilation: Compilation, changes: Changes
    ) -> None:
        self._shard, self._cycle, self._inputs = shard, cycle, inputs
        self._compilation, self._changes = compilation, changes
        # flushes of this step, and of the last step
        self._flushes: dict[Key, tuple[Sequence[BoundUpdate], Sequence[Together]]] = {}
        self._earlier = self._flushes

    def begin(self) -> None:
        """Begins a step."""
        self._earlier, self._flushes = self._flushes, {}

    def update(self, waiting: Sequence[Waiting], decision: Decision | None) -> Sequence[PendingUpdate]:
        """Updates parameters. Returns those that kernels cannot update. If sharded, every rank calls it."""
        flush = [self._pending(*each) for each in waiting]
        key = None if decision is None else decision.form, tuple([each.record for each in flush])
        together = self._bound(key, flush) or self._bind(key, flush, decision)
        for members, batch in together:
            self._run([flush[n] for n in members], batch, decision)
        if sum([len(members) for members, _ in together]) == len(flush):
            return ()
        updated = {n for members, _ in together for n in members}
        return [pending for n, pending in enumerate(flush) if n not in updated]

    def _pending(
        self, record: ParamRecord, grad: Tensor, states: dict[str, Any], extra: dict[str, Tensor]
    ) -> PendingUpdate:
        values, group, shard = self._inputs.on(grad.device), record.group, self._shard.read(record.param)
        place = values.places[group], values.drawing.get(record, 0)
        parts = (*tensors_of(shard), *extra.values())
        return PendingUpdate(record, grad, shard, parts, states, values.names[group], place)

    def _bound(self, key: Key, flush: Sequence[PendingUpdate]) -> Sequence[Together] | None:
        """Returns how these parameters were updated in the last step, or None if their updates must be bound again."""
        found = self._flushes.get(key) or self._earlier.get(key)
        if found is None or is_observed():
            return None
        for (record, grad, _, parts, states, numbers, place), bound in zip(flush, found[0], strict=True):
            if not self._compilation.is_current(record, bound, made_for(record, grad, parts, states, numbers, place)):
                return None
        self._flushes[key] = found
        return found[1]

    def _bind(self, key: Key, flush: Sequence[PendingUpdate], decision: Decision | None) -> Sequence[Together]:
        """Binds updates, and groups those that the same launches can run. Updates without kernels are in no group."""
        bounds, alike = list[BoundUpdate](), defaultdict[Any, list[int]](list)
        tiles = [self._inputs.tiles([each.record], each.weight, each.grad, decision) for each in flush]
        for n, (each, of_each) in enumerate(zip(flush, tiles, strict=True)):
            if (bound := self._compilation.bind(each.record, of_each, each.states, each.place)) is not None:
                bounds.append(bound)
                clips = each.record.group if decision is not None and decision.own_clips else None
                alike[bound.update, each.grad.dtype, each.record.program.ranks, clips].append(n)
        together = list[Together]()
        for (kernels, _, ranks, _), members in alike.items():
            assert isinstance(kernels, Kernels)
            tensors = [member_of(flush[n].record, tiles[n], flush[n].states, flush[n].place) for n in members]
            together.append(Together(members, Batch(kernels, tensors, ranks)))
        if len(bounds) == len(flush):
            self._flushes[key] = bounds, together
        return together

    def _run(self, members: Sequence[PendingUpdate], batch: Batch, decision: Decision | None) -> None:
        """Launches the kernels, and stores the results in the records."""
        watched = members if self._changes.is_due else ()
        counts = [self._changes.watch([each.record], each.weight, each.grad) for each in watched]
        records, grads = [each.record for each in members], [each.grad for each in members]
        values = self._inputs.on(grads[0].device)
        reading = self._inputs.reading(records, grads[0], decision)
        self._cycle.moved = True
        results = batch.run(grads, Values(values.numbers, values.keys, reading))
        square_sums = results.square_sums if reading.square_sums is None else reading.square_sums
        assert square_sums is not None
        store(records, Result(square_sums, results.sizes))
        for count_changes in filter(None, counts):
            count_changes()
        shards = [each.shard for each in members]
        torch.autograd.graph.increment_version(shards)  # torch does not see the kernels' writes
        for record, shard in zip(records, shards, strict=True):
            record.written(self._shard, shard)
