"""Runs the updates of parameters: large ones one by one, small ones in stacks, shards after they are measured."""

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from lowmem.step.changes import Changes
from lowmem.step.clipping import Clipping, Decision
from lowmem.step.compiled import Compilation, is_traceable
from lowmem.step.cycle import StepCycle
from lowmem.step.parameters import Parameters
from lowmem.step.program import Program, Result
from lowmem.step.record import AddedGroup, ParamRecord
from lowmem.tiles.quantized import tensors_of
from lowmem.tiles.rounding import noise_key
from lowmem.tiles.storage import Float, Held, Shown
from lowmem.tiles.stored import StoredTiles, begin_storage
from lowmem.tiles.sweep import Scalars, Sweep
from lowmem.tiles.transfers import to_device

logger = logging.getLogger(__name__)

# Elements up to which a parameter is small: launching its update takes longer than the update. With stacks, small
# parameters are never compiled: eager torch sums so few elements in one order, so a parameter gets the same bits
# alone and in a stack.
SMALL = 1 << 14

# Elements per tile in a plan for a GPU, where the temporaries of compiled code are negligible.
PLANNED_TILE = 1 << 16

# Maximum elements per stack. Waiting gradients count towards the memory of "one gradient".
STACK = 1 << 18

# Maximum elements of shards that wait to be measured: on a large model, the shards of a layer or two.
SHARDS = 1 << 25


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


class Observer(Protocol):
    """Measures the memory of a step."""

    def gradient(self, grad: Tensor) -> None:
        """Called when a gradient is taken from its parameter."""

    def update(self, program: Program, tiles: StoredTiles, state: dict[str, Any]) -> Result:
        """Called to run a program by tiles."""


class Updates:
    """Updates parameters whose gradients are reduced.

    Args:
        parameters, cycle, clipping: of the optimizer.

    Attributes:
        changes: counts the weights that updates change.
        compilation: runs the updates of large parameters as compiled code.
        observer: sees gradients and updates; None in training.
    """

    observer: Observer | None = None

    def __init__(self, parameters: Parameters, cycle: StepCycle, clipping: Clipping) -> None:
        self._parameters, self._shard, self.cycle, self.clipping = parameters, parameters.shard, cycle, clipping
        self._states, self.changes = parameters.states, Changes(parameters.records, parameters.device)
        self.compilation = Compilation(parameters)
        self._batching = parameters.config.batching
        self._warns = parameters.config.compile is True  # of updates that are not compiled, once
        self._numbers: dict[AddedGroup, Mapping[str, float]] = {}  # of this step
        self._scalars: dict[tuple[AddedGroup, torch.device], Scalars] = {}  # the same, by device too
        self._keys: dict[torch.device, dict[ParamRecord, Tensor]] = {}  # of this step's random bits
        self._stacks: dict[tuple[Program, torch.dtype], Stack | None] = {}  # by the dtype of gradients
        self._shards: deque[tuple[ParamRecord, Tensor]] = deque()  # that wait to be measured

    @property
    def compiled(self) -> bool:
        """True if some updates of large parameters are compiled."""
        rules = (group.rule for group in self._parameters.groups)
        return self.compilation.active and any(map(is_traceable, rules))

    def begin(self, step: int) -> None:
        """Begins a step: every rule computes the numbers of its groups, or raises."""
        self._numbers = {group: group.rule.scalars(group.live, step) for group in self._parameters.groups}
        self._scalars.clear()
        self._keys.clear()
        self.compilation.begin(step)
        for record in self._parameters.records.values():
            record.size = None

    def _scalars_of(self, record: ParamRecord) -> Scalars:
        where = record.group, record.param.device
        if where not in self._scalars:
            self._scalars[where] = Scalars.of(self._numbers[where[0]], where[1])
        return self._scalars[where]

    def _keys_of(self, records: Sequence[ParamRecord]) -> Tensor:
        """Returns the keys of the random bits of parameters: int32 [members, 1], or a scalar for one parameter."""
        device = records[0].param.device
        if device not in self._keys:  # all keys of a step are sent to a device together
            drawing = [each for each in self._parameters.records.values() if each.claimed and each.program.draws]
            keys = [noise_key(self.cycle.seed, self.cycle.step, each.name) for each in drawing]
            self._keys[device] = dict(zip(drawing, to_device(keys, torch.int32, device).unbind(), strict=True))
        keys_of = self._keys[device]
        return keys_of[records[0]] if len(records) == 1 else torch.stack([keys_of[each] for each in records])[:, None]

    def _measure(self, record: ParamRecord, grad: Tensor) -> Tensor:
        """Returns the sum of squares of this rank's shard of an unscaled gradient, float64 [1]."""
        reading, held = self.clipping.reading([record], grad, None), Held(Float(grad.dtype), (grad,))
        return Sweep(StoredTiles(record.program.layout, held, grad, reading)).square_sums

    def put(self, record: ParamRecord, grad: Tensor, decision: Decision | None) -> None:
        """Updates a parameter, or stores its gradient until a stack is full, or until shards are measured.

        An elementwise rule has no sums over ranks, but all ranks must know whether a gradient is finite before the
        first one writes. So shards wait until they take as much memory as one full gradient, and are measured together.
        """
        program = record.program
        large_shard = program.ranks is not None and program.span.numel > SMALL
        if large_shard and program.rule.elementwise and decision is None:
            self._shards.append((record, grad))
            spans = [each.span for each, _ in self._shards]
            if sum(span.size for span in spans) >= min(SHARDS, max(span.numel for span in spans)):  # on every rank
                del grad
                self._update_shards()
        else:
            self._update(record, grad, decision)

    def _update(self, record: ParamRecord, grad: Tensor, decision: Decision | None) -> None:
        """Updates a parameter alone, or puts it into a stack and updates the stack if it is full."""
        program = record.program
        stack = self._stack_of(program, grad.dtype)
        if stack is None:
            self._update_one(record, grad, decision)
            return
        stack.records.append(record)
        # a gradient of FSDP2 is a view of its module's gradients, which would stay in memory while it waits
        stack.grads.append(grad.clone() if grad.untyped_storage().nbytes() > grad.nbytes else grad)
        if len(stack.records) >= stack.full:
            self._update_stack(stack, decision)

    def _stack_of(self, program: Program, dtype: torch.dtype) -> Stack | None:
        """Returns the stack for a program and a dtype of gradients, or None to update each parameter alone."""
        like = program, dtype
        if like not in self._stacks:
            # stacked shards have to be one tile on every rank, and quantized tensors are not copied
            alone = program.ranks is not None and not program.layout.one_line
            alone |= program.weight.is_quantized
            alone |= program.span.numel > SMALL or not self._batching or program.rule.materializes
            full = min(STACK // max(1, program.span.numel), program.spec.together or STACK)
            self._stacks[like] = None if alone else Stack(program, full)
        return self._stacks[like]

    def put_zeros(self, records: Iterable[ParamRecord], decision: Decision | None) -> None:
        """Updates parameters without a gradient as if it were zero, if their rule asks for it."""
        for record in records:
            if record.rule.every_parameter and record.trained and not self.cycle.has_fired(record.name):
                shard = self._shard.read(record.param)
                zero = torch.zeros((), dtype=shard.dtype, device=shard.device)
                self.put(record, zero.expand(shard.shape), decision)

    def flush(self, decision: Decision | None) -> None:
        """Updates the parameters whose gradients wait, after the last gradient of a step."""
        if self._shards:
            self._update_shards()
        for stack in self._stacks.values():
            if stack is not None and stack.records:
                self._update_stack(stack, decision)

    def drop(self) -> None:
        """Discards the gradients that wait, after their backward has failed."""
        self._shards.clear()
        for stack in filter(None, self._stacks.values()):
            stack.empty()

    def begin_state(self, record: ParamRecord) -> None:
        """Creates the missing states of a parameter, before its first update, after a reset, or after an edit of it."""
        program, state = record.program, self._states[record.param]
        edited = record.extra and record.version not in (None, self._shard.version(record.param))
        if edited and not isinstance(program.weight, Shown):  # which follows edits. A residual belongs to one weight
            record.extra = ()
        there = {*state, *(program.extra_names if record.extra else ())}
        if not (missing := [name for name in program.created if name not in there]):
            return
        new = self._shard.keep(record.param, initial_tensors(program, missing, self._shard.read(record.param)))
        if extra := tuple(new.pop(name) for name in program.extra_names if name in missing):
            record.extra, record.version = extra, self._shard.version(record.param)
        state.update(new)

    def _update_one(self, record: ParamRecord, grad: Tensor, decision: Decision | None) -> None:
        self.begin_state(record)
        param, extra = record.param, dict(enumerate(record.extra))
        shard = self._shard.read(param)
        with self._shard.lend(param, self._states[param]) as state, self._shard.lend(param, extra) as extra:
            self._run(record.program, [record], (*tensors_of(shard), *extra.values()), grad, state, decision)
        self._shard.write(param, shard)
        record.version = self._shard.version(param) if record.extra else None

    def _update_shards(self) -> None:
        """Measures the waiting shards in one collective, and updates their parameters."""
        records = [record for record, _ in self._shards]
        ranks = records[0].program.ranks
        assert ranks is not None
        (sums,) = ranks.all_reduce([torch.cat([self._measure(*each) for each in self._shards])])
        for record, square_sum in zip(records, sums.split(1), strict=True):
            record.square_sum = square_sum
        measured = replace(self.clipping.review(records), measured=True)
        while self._shards:
            self._update(*self._shards.popleft(), measured)

    def _update_stack(self, stack: Stack, decision: Decision | None) -> None:
        """Updates parameters as one: stacks their tensors, and copies the results back."""
        records, grads = stack.empty()
        if len(records) == 1:
            self._update_one(records[0], grads[0], decision)
            return
        for record in records:
            self.begin_state(record)
        program = stack.program.stacked(len(records))
        states = [self._states[record.param] for record in records]
        params = [record.param for record in records]
        in_place = program.ranks is None  # complete parameters are stacked without reading them one by one
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
        for record in records if records[0].extra else ():
            record.version = self._shard.version(record.param)

    def _run(
        self,
        program: Program,
        records: Sequence[ParamRecord],
        weight: tuple[Tensor, ...],
        grad: Tensor,
        state: dict[str, Any],
        decision: Decision | None,
    ) -> None:
        """Runs a program on the tensors of its parameters, and notes the results in their records."""
        reading = self.clipping.reading(records, grad, decision)
        self.cycle.moved = True
        held = Held(program.weight, weight)
        count_changes = self.changes.watch(records, held, grad)
        small = program.members > 1 or (self._batching and program.span.numel <= SMALL)
        compiles = self.compilation.active and not small
        planned = compiles and weight[0].device.type == "meta"  # a GPU's compiled code has no temporaries of a tile

        tiles = StoredTiles(
            program.layout,
            held,
            grad,
            reading,
            self._scalars_of(records[0]),
            members=program.members,
            keys=self._keys_of(records) if program.draws else None,
            across=program.ranks,
            tile=PLANNED_TILE if planned else None,
        )
        result = None
        if compiles:
            result = self.compilation.run(records[0], tiles, state)
            if result is None and not (self.compilation.waits or _get_current_dispatch_mode()):
                self._warn_of_uncompiled(records[0])
        if result is None:
            result = self.observer.update(program, tiles, state) if self.observer else program.run(tiles, state)
        for record, square_sum in zip(records, _each(result.square_sums), strict=True):
            record.square_sum = square_sum
        if result.sizes is not None:
            for record, size in zip(records, _each(result.sizes), strict=True):
                record.size = size
        if count_changes is not None:
            count_changes()

    def _warn_of_uncompiled(self, record: ParamRecord) -> None:
        """Warns once of an update that is not compiled although compile=True. A failure of the compiler raises."""
        if self._warns and self.compilation.failure is None:
            self._warns = False
            cause = "the shape or strides of the parameter do not allow it"
            if not is_traceable(record.rule):
                cause = "the rule is a third-party optimizer" if record.rule.materializes else "it cannot be traced"
            logger.warning(
                "compile=True, but the update of parameter %r by rule %r is not compiled: %s. There may be more such "
                "parameters. They are updated by slower code with the same result", record.name, record.rule.name,
                cause,
            )  # fmt: skip


def initial_tensors(program: Program, names: Iterable[str], shard: Tensor) -> dict[str, Tensor]:
    """Returns new tensors of a parameter with these names, before its first update. shard: of the weight."""
    new = {}
    for name in names:
        kept = program.kept[name]
        new[name] = torch.zeros(program.shape_of(kept, shard.shape), dtype=kept.dtype, device=shard.device)
    if extra := tuple(new[name] for name in program.extra_names if name in new):
        begin_storage(program.layout, Held(program.weight, (shard, *extra)))
    return new


def _each(values: Tensor) -> Sequence[Tensor]:
    """Returns the elements as tensors of one element."""
    return [values] if values.numel() == 1 else values.view(-1).split(1)
