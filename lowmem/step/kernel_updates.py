"""Updates parameters by kernels, with one launch per pass for all that have the same kernels."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowmem.kernels import Batch, Kernels
from lowmem.placements.base import Shard
from lowmem.step.changes import Changes
from lowmem.step.clipping import Decision
from lowmem.step.compiled import BoundUpdate, Compilation, is_observed, member_of, update_key
from lowmem.step.cycle import StepCycle
from lowmem.step.inputs import StepInputs
from lowmem.step.program import Result
from lowmem.step.record import ParamRecord, store
from lowmem.tiles.quantized import tensors_of
from lowmem.tiles.storage import StoredTensor


class PendingUpdate(NamedTuple):
    """An update that kernels run."""

    record: ParamRecord
    grad: Tensor
    shard: Tensor  # this rank's shard of the parameter
    parts: tuple[Tensor, ...]  # the stored tensors of the shard
    states: dict[str, Any]
    numbers: tuple[str, ...]  # names of its group's numbers
    offsets: tuple[int, int]  # indices in `StepValues` of the first of these numbers and of its noise key

    @property
    def weight(self) -> StoredTensor:
        """The weight with its storage."""
        return StoredTensor(self.record.program.weight, self.parts)


# Batches of parameters that the same launches update, each with the positions of its parameters in a flush.
Batches = Sequence[tuple[Sequence[int], Batch]]

# Updates and batches of a flush, by the form of its decision and its parameters.
Flushes = dict[tuple[Any, tuple[ParamRecord, ...]], tuple[Sequence[BoundUpdate], Batches]]


class KernelUpdates:
    """Runs updates by kernels. Later steps reuse the batches of a flush until something changes.

    Args:
        shard, cycle, inputs, compilation, changes: of the optimizer.
    """

    def __init__(
        self, shard: Shard, cycle: StepCycle, inputs: StepInputs, compilation: Compilation, changes: Changes
    ) -> None:
        self._shard, self._cycle, self._inputs = shard, cycle, inputs
        self._compilation, self._changes = compilation, changes
        self._flushes: Flushes = {}  # flushes of this step
        self._earlier: Flushes = {}  # flushes of the last step

    def begin(self) -> None:
        """Begins a step."""
        self._earlier, self._flushes = self._flushes, {}

    def prepare(
        self, record: ParamRecord, grad: Tensor, states: dict[str, Any], extra: dict[str, Tensor]
    ) -> PendingUpdate:
        """Returns the update of a parameter. extra: the other tensors of its weight's storage."""
        values, group, shard = self._inputs.on(grad.device), record.group, self._shard.read(record.param)
        offsets = values.offsets[group], values.key_indices.get(record, 0)
        parts = (*tensors_of(shard), *extra.values())
        return PendingUpdate(record, grad, shard, parts, states, values.names[group], offsets)

    def update(self, pending: Sequence[PendingUpdate], decision: Decision | None) -> Sequence[PendingUpdate]:
        """Updates parameters. Returns those that kernels cannot update. If sharded, every rank calls it."""
        key = None if decision is None else decision.form, tuple([each.record for each in pending])
        batches = self._known_batches(key, pending) or self._new_batches(key, pending, decision)
        for members, batch in batches:
            self._run([pending[n] for n in members], batch, decision)
        updated = {n for members, _ in batches for n in members}
        return [each for n, each in enumerate(pending) if n not in updated]

    def _known_batches(self, key: Any, pending: Sequence[PendingUpdate]) -> Batches | None:
        """Returns the batches of an earlier flush of these parameters, or None if their updates must be bound again."""
        known = self._flushes.get(key) or self._earlier.get(key)
        if known is None or is_observed():
            return None
        bounds, batches = known
        for (record, grad, _, parts, states, numbers, offsets), bound in zip(pending, bounds, strict=True):
            now = update_key(record, grad, parts, states, numbers, offsets)
            if not self._compilation.is_current(record, bound, now):
                return None
        self._flushes[key] = known
        return batches

    def _new_batches(self, key: Any, pending: Sequence[PendingUpdate], decision: Decision | None) -> Batches:
        """Binds updates, and groups those that the same launches can run. Updates without kernels are in no batch."""
        bounds, alike = list[BoundUpdate](), defaultdict[Any, list[int]](list)
        tiles = [self._inputs.tiles([each.record], each.weight, each.grad, decision) for each in pending]
        for n, each in enumerate(pending):
            if (bound := self._compilation.bind(each.record, tiles[n], each.states, each.offsets)) is not None:
                bounds.append(bound)
                clipped_group = each.record.group if decision is not None and decision.own_clips else None
                alike[bound.update, each.grad.dtype, each.record.program.ranks, clipped_group].append(n)
        batches = list[tuple[Sequence[int], Batch]]()
        for (kernels, _, ranks, _), members in alike.items():
            assert isinstance(kernels, Kernels)
            tensors = [member_of(pending[n].record, tiles[n], pending[n].states, pending[n].offsets) for n in members]
            batches.append((members, Batch(kernels, tensors, ranks)))
        if len(bounds) == len(pending):
            self._flushes[key] = bounds, batches
        return batches

    def _run(self, members: Sequence[PendingUpdate], batch: Batch, decision: Decision | None) -> None:
        """Launches the kernels, and stores the results in the records."""
        watched = members if self._changes.is_due else ()
        counts = [self._changes.watch([each.record], each.weight, each.grad) for each in watched]
        records, grads = [each.record for each in members], [each.grad for each in members]
        values = self._inputs.on(grads[0].device)
        reading = self._inputs.reading(records, grads[0], decision)
        self._cycle.moved = True
        store(records, Result.of(batch.run(grads, values.numbers, values.keys, reading), reading))
        for count_changes in filter(None, counts):
            count_changes()
        shards = [each.shard for each in members]
        torch.autograd.graph.increment_version(shards)  # torch does not see the kernels' writes
        for record, shard in zip(records, shards, strict=True):
            record.written(self._shard, shard)
