"""Updates parameters by kernels, with one launch per pass for all that have the same kernels."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from lowmem.kernels import Batch, Kernels, Member
from lowmem.placements.base import Shard
from lowmem.step.changes import Changes
from lowmem.step.clipping import Decision
from lowmem.step.compiled import BoundUpdate, Compilation, is_observed, member_of
from lowmem.step.cycle import StepCycle
from lowmem.step.inputs import StepInputs
from lowmem.step.program import Result
from lowmem.step.record import Operands, ParamRecord, store

# Batches of parameters that the same launches update, each with the positions of its parameters in a flush.
Batches = Sequence[tuple[Sequence[int], Batch]]

# Updates and batches of a flush, by the version of its `StepValues`, the form of its decision, and its parameters.
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

    def update(self, operands: Sequence[Operands], decision: Decision | None) -> Sequence[Operands]:
        """Updates parameters. Returns those that kernels cannot update. If sharded, every rank calls it."""
        version, form = self._inputs.on(operands[0].grad.device).version, None if decision is None else decision.form
        key = version, form, tuple([each.records[0] for each in operands])
        batches = self._known_batches(key, operands) or self._new_batches(key, operands, decision)
        for members, batch in batches:
            self._run([operands[n] for n in members], batch, decision)
        updated = {n for members, _ in batches for n in members}
        return [each for n, each in enumerate(operands) if n not in updated]

    def _known_batches(self, key: Any, operands: Sequence[Operands]) -> Batches | None:
        """Returns the batches of an earlier flush of these parameters, or None if their updates must be bound again."""
        known = self._flushes.get(key) or self._earlier.get(key)
        if known is None or is_observed():
            return None
        bounds, batches = known
        if not all(map(self._compilation.is_current, operands, bounds)):
            return None
        self._flushes[key] = known
        return batches

    def _new_batches(self, key: Any, operands: Sequence[Operands], decision: Decision | None) -> Batches:
        """Binds updates, and groups those that the same launches can run. Updates without kernels are in no batch."""
        bounds, alike = list[BoundUpdate](), defaultdict[Any, list[int]](list)
        for n, each in enumerate(operands):
            if (bound := self._compilation.bind(each, self._inputs.tiles(each, decision))) is not None:
                bounds.append(bound)
                clipped_group = each.records[0].group if decision is not None and decision.own_clips else None
                alike[bound.update, each.grad.dtype, each.program.ranks, clipped_group].append(n)
        batches = list[tuple[Sequence[int], Batch]]()
        for (kernels, _, ranks, _), members in alike.items():
            assert isinstance(kernels, Kernels)
            batches.append((members, Batch(kernels, [self._member(operands[n]) for n in members], ranks)))
        if len(bounds) == len(operands):
            self._flushes[key] = bounds, batches
        return batches

    def _member(self, operands: Operands) -> Member:
        (record,), values = operands.records, self._inputs.on(operands.grad.device)
        return member_of(operands, values.offsets[record.group], values.key_indices.get(record, 0))

    def _run(self, members: Sequence[Operands], batch: Batch, decision: Decision | None) -> None:
        """Launches the kernels, and stores the results in the records."""
        counts = [self._changes.watch(each) for each in members] if self._changes.is_due else []
        records, grads = [each.records[0] for each in members], [each.grad for each in members]
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
