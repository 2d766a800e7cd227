"""From reduced gradients to sweeps: a large parameter by itself, small ones in stacks, shards that are measured."""

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from lowmem.step.changes import Changes
from lowmem.step.clipping import Clipping, Decision
from lowmem.step.compiled import run_compiled
from lowmem.step.cycle import StepCycle
from lowmem.step.parameters import Parameters
from lowmem.step.program import Program
from lowmem.step.record import ParamRecord
from lowmem.step.stacks import Stack
from lowmem.tiles.gradients import ComputedGradient, Gradient
from lowmem.tiles.graph import Compiler
from lowmem.tiles.rounding import noise_key
from lowmem.tiles.storage import Float, Held
from lowmem.tiles.stored import StoredTiles, begin_storage
from lowmem.tiles.sweep import Scalars, Sweep

logger = logging.getLogger(__name__)

# Elements up to which a parameter is small: launching its update takes longer than the update. Where small parameters
# are stacked they are not compiled, so that alone or in a stack they get the same bits, and torch sums so few elements
# in one order only.
SMALL = 1 << 14

# Elements per tile in a plan for a GPU, where there is next to nothing to keep in a tile of compiled code.
PLANNED_TILE = 1 << 16

# Elements in a stack: the gradients that wait for it are part of the memory of "one gradient".
STACK = 1 << 18

# Elements of shards that wait to be measured, at most: on a large model those of a layer or two.
SHARDS = 1 << 25


class Updates:
    """Runs the rules of parameters whose gradients are reduced.

    Args:
        parameters, cycle, clipping: of the optimizer.
        compiled: update large parameters by compiled code.

    Attributes:
        state: parameter → its states, made before its first update.
        changes: counts the weights that updates change.
    """

    def __init__(self, parameters: Parameters, cycle: StepCycle, clipping: Clipping, compiled: bool) -> None:
        self._parameters, self._shard, self.cycle, self.clipping = parameters, parameters.shard, cycle, clipping
        self.state, self.changes = parameters.states, Changes(parameters.records, parameters.device)
        self._compiled, self._batching = compiled, parameters.config.batching
        self._numbers: dict[int, Mapping[str, float]] = {}  # of this step, by the id of a group
        self._scalars: dict[tuple[int, torch.device], Scalars] = {}  # the same, by device too
        self._stacks: dict[tuple[Program, torch.dtype], Stack | None] = {}  # by the dtype of gradients
        self._shards: deque[tuple[ParamRecord, Tensor]] = deque()  # that wait to be measured

    def begin(self, step: int) -> None:
        """A step begins: every rule computes the numbers of its groups, or refuses them."""
        groups = self._parameters.groups
        self._numbers = {id(group.live): group.rule.scalars(group.live, step) for group in groups}
        self._scalars.clear()
        for record in self._parameters.records.values():
            record.size = None

    def _scalars_of(self, record: ParamRecord) -> Scalars:
        where = id(record.group), record.param.device
        if where not in self._scalars:
            self._scalars[where] = Scalars.of(self._numbers[where[0]], where[1])
        return self._scalars[where]

    def _measure(self, record: ParamRecord, grad: Tensor) -> Tensor:
        """The sum of squares of this rank's shard of an unscaled gradient, float64 scalar."""
        reading, held = self.clipping.reading([record], grad, None), Held(Float(grad.dtype), (grad,))
        return Sweep(StoredTiles(record.program.layout, held, grad, reading)).square_sums.view(())

    def put(self, record: ParamRecord, grad: Gradient, decision: Decision | None) -> None:
        """Updates a parameter, or lets its gradient wait until a stack of such parameters is full.

        A rule whose update is elementwise has nothing to sum over ranks, but all of them have to know whether a
        gradient is finite before the first one writes. Shards for such a rule wait until they take as much memory as
        one full gradient, and are measured together.
        """
        program = record.program
        large_shard = program.ranks is not None and program.span.numel > SMALL
        if large_shard and program.rule.elementwise and decision is None:
            assert isinstance(grad, Tensor)  # what is reduced is one
            self._shards.append((record, grad))
            spans = [each.span for each, _ in self._shards]
            if sum(span.size for span in spans) >= min(SHARDS, max(span.numel for span in spans)):  # on every rank
                del grad
                self._update_shards()
            return
        stack = None if isinstance(grad, ComputedGradient) else self._stack_of(program, grad.dtype)
        if stack is None:
            self._update_one(record, grad, decision)
            return
        assert isinstance(grad, Tensor)  # a small gradient is never computed as it is read
        stack.records.append(record)
        # one that waits holds no other memory: FSDP2's are views of those of a whole module
        stack.grads.append(grad.clone() if grad.untyped_storage().nbytes() > grad.nbytes else grad)
        if len(stack.records) >= stack.full:
            self._update_stack(stack, decision)

    def _stack_of(self, program: Program, dtype: torch.dtype) -> Stack | None:
        """The stack that parameters join with gradients of this dtype; None: each is updated by itself."""
        like = program, dtype
        if like not in self._stacks:
            # shards have to be one tile when they are stacked, on every rank
            alone = program.ranks is not None and not program.layout.one_line
            alone |= program.weight.is_quantized  # which stay where they are
            alone |= program.span.numel > SMALL or not self._batching or program.rule.materializes
            full = min(STACK // max(1, program.span.numel), program.spec.together or STACK)
            self._stacks[like] = None if alone else Stack(program, full)
        return self._stacks[like]

    def put_zeros(self, records: Iterable[ParamRecord], decision: Decision | None) -> None:
        """Updates parameters that got no gradient as if it were zero, where their rule asks for it."""
        for record in records:
            if record.rule.every_parameter and record.trained and not self.cycle.has_fired(record.name):
                shard = self._shard.read(record.param)
                zero = torch.zeros((), dtype=shard.dtype, device=shard.device)
                self.put(record, zero.expand(shard.shape), decision)

    def flush(self, decision: Decision | None) -> None:
        """Updates the parameters whose gradients wait: no other one will arrive in this step."""
        if self._shards:
            self._update_shards()
        for stack in self._stacks.values():
            if stack is not None and stack.records:
                self._update_stack(stack, decision)

    def drop(self) -> None:
        """Forgets the gradients that wait: their backward failed."""
        self._shards.clear()
        for stack in filter(None, self._stacks.values()):
            stack.empty()

    def begin_state(self, record: ParamRecord) -> None:
        """Makes those states of a parameter that it does not have: before its first update, or after a reset."""
        program, state = record.program, self.state[record.param]
        there = {*state, *(program.extra_names if record.extra or program.weight.is_quantized else ())}
        if not (missing := [name for name in program.kept if name not in there]):
            return
        new = initial_tensors(program, missing, self._shard.read(record.param))
        if extra := tuple(new.pop(name) for name in program.extra_names if name in missing):
            record.extra = extra
        state.update(new)

    def _update_one(self, record: ParamRecord, grad: Gradient, decision: Decision | None) -> None:
        self.begin_state(record)
        shard = self._shard.read(record.param)
        self._run(record.program, [record], record.weight(shard), grad, self.state[record.param], decision)
        self._shard.write(record.param, shard)

    def _update_shards(self) -> None:
        """Measures the shards that wait, in one collective, and updates their parameters."""
        records = [record for record, _ in self._shards]
        ranks = records[0].program.ranks
        assert ranks is not None
        (sums,) = ranks.all_reduce([torch.stack([self._measure(*each) for each in self._shards])])
        for record, square_sum in zip(records, sums.unbind(), strict=True):
            record.square_sum = square_sum
        measured = replace(self.clipping.review(records), measured=True)
        while self._shards:
            self.put(*self._shards.popleft(), measured)

    @torch.no_grad()
    def _update_stack(self, stack: Stack, decision: Decision | None) -> None:
        """Updates parameters as one: their tensors are stacked, and written back to where they were."""
        records, grads = stack.empty()
        if len(records) == 1:
            self._update_one(records[0], grads[0], decision)
            return
        for record in records:
            self.begin_state(record)
        program = stack.program.stacked(len(records))
        states = [self.state[record.param] for record in records]
        params = [record.param for record in records]
        in_place = program.ranks is None  # parameters that are complete, which need not be read one by one
        shards = params if in_place else [self._shard.read(param) for param in params]
        columns = [shards, *map(list, zip(*(record.extra for record in records), strict=True))]
        columns += [[state[name] for state in states] for name in states[0]]
        stacked, parts = [torch.stack(column) for column in columns], len(program.weight.parts)
        state = dict(zip(states[0], stacked[parts:], strict=True))
        self._run(program, records, tuple(stacked[:parts]), torch.stack(grads), state, decision)
        for column, changed in zip(columns, stacked, strict=True):
            torch._foreach_copy_(column, changed.unbind())
        for param, shard in () if in_place else zip(params, shards, strict=True):
            self._shard.write(param, shard)

    def _run(
        self,
        program: Program,
        records: Sequence[ParamRecord],
        weight: tuple[Tensor, ...],
        grad: Gradient,
        state: dict[str, Any],
        decision: Decision | None,
    ) -> None:
        """Runs a program on the tensors of its parameters."""
        reading = self.clipping.reading(records, grad, decision)
        self.cycle.moved = True
        held = Held(program.weight, weight)
        sample = self.changes.before(records, held, grad)
        small = program.members > 1 or (self._batching and program.span.numel <= SMALL)
        compiles = self._compiled and Compiler.failure is None and not small
        planned = compiles and weight[0].device.type == "meta"  # a GPU's compiled code has no temporaries of a tile

        tiles = StoredTiles(
            program.layout if isinstance(grad, Tensor) else grad.layout(program.spec.view),
            held,
            grad,
            reading,
            self._scalars_of(records[0]),
            members=program.members,
            keys=lambda: [noise_key(self.cycle.seed, self.cycle.step, record.name) for record in records],
            across=program.ranks,
            tile=PLANNED_TILE if planned else None,
        )
        result = None
        # a dispatch mode (fake tensors, a memory tracker) looks at each operation, and compiled code has none to show
        if compiles and not _get_current_dispatch_mode():
            result = run_compiled(program, tiles, state)
        if result is None:
            result = program.run(tiles, state)
        for record, square_sum in zip(records, _each(result.square_sums), strict=True):
            record.square_sum = square_sum
        if result.sizes is not None:
            for record, size in zip(records, _each(result.sizes), strict=True):
                record.size = size
        if sample is not None:
            self.changes.after(sample, held)


def initial_tensors(program: Program, names: Iterable[str], shard: Tensor) -> dict[str, Tensor]:
    """Returns tensors that are kept for a parameter as they are before its first update. shard: of the weight."""
    new = {}
    for name in names:
        kept = program.kept[name]
        new[name] = torch.zeros(program.shape_of(kept, shard.shape), dtype=kept.dtype, device=shard.device)
    if extra := tuple(new[name] for name in program.extra_names if name in new):
        begin_storage(program.layout, Held(program.weight, (shard, *extra)))
    return new


def _each(values: Tensor) -> Sequence[Tensor]:
    """The elements."""
    return [values.view(())] if values.numel() == 1 else values.view(-1).unbind()
