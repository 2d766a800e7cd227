"""Batches of parameters that kernels update with one launch per pass."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from lowmem.kernels import Batch, Kernels, Member
from lowmem.step.clipping import Decision
from lowmem.step.compiled import BoundUpdate, Compilation, member_of
from lowmem.step.inputs import StepInputs
from lowmem.step.record import Operands

# Batches of parameters that the same launches update, each with the positions of its parameters in a flush.
Batches = Sequence[tuple[Sequence[int], Batch]]


class Flush(NamedTuple):
    """The batches of a flush, with what they were made for."""

    keys: Sequence[Any]  # `Operands.key` of each parameter
    bounds: Sequence[BoundUpdate]
    batches: Batches


# By the version of its `StepValues`, the form of its decision, and its parameters.
Flushes = dict[Any, Flush]


class KernelBatches:
    """The batches of each flush. Later steps reuse them until something changes.

    Args:
        inputs, compilation: the optimizer's step inputs and compilation.
    """

    def __init__(self, inputs: StepInputs, compilation: Compilation) -> None:
        self._inputs, self._compilation = inputs, compilation
        self._flushes: Flushes = {}  # flushes of this step
        self._earlier: Flushes = {}  # flushes of the last step

    def begin(self) -> None:
        """Begins a micro-batch."""
        if self._flushes:  # micro-batches without updates reuse the batches of the last step
            self._earlier, self._flushes = self._flushes, {}

    def of(self, operands: Sequence[Operands], decision: Decision | None) -> Batches:
        """Returns the batches of a flush. Updates without kernels are in no batch. If sharded, every rank calls it."""
        version, form = self._inputs.on(operands[0].grad.device).version, None if decision is None else decision.form
        key = version, form, tuple([each.records[0] for each in operands])
        known = self._flushes.get(key) or self._earlier.get(key)
        keys = [each.key for each in operands]
        if known is not None and keys == known.keys and self._compilation.are_bound(key[-1], known.bounds):
            self._flushes[key] = known
            return known.batches
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
            self._flushes[key] = Flush(keys, bounds, batches)
        return batches

    def _member(self, operands: Operands) -> Member:
        (record,), values = operands.records, self._inputs.on(operands.grad.device)
        return member_of(operands, values.offsets[record.group], values.key_indices.get(record, 0))
