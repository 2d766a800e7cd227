"""Runs the updates of parameters: large ones one by one, small ones in stacks, shards after they are measured."""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
from lowmem.tiles.sweep import Reading, Scalars, Sweep
from lowmem.tiles.transfers import to_device

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


Waiting = deque[tuple[ParamRecord, Tensor]]


class Sent(NamedTuple):
    """Values of a step on a device. scalars: the numbers of rules.  reading: how gradients are read if the step is not
    decided before its updates.  keys: of the random bits of parameters, int32 scalars.
    """

    scalars: Mapping[AddedGroup, Scalars]
    reading: Reading
    keys: Mapping[ParamRecord, Tensor]


class Observer:
    """Sees the gradients and the updates of a step. A plan measures their memory."""

    def gradient(self, grad: Tensor) -> None:
        """Called when a gradient is taken from its parameter."""

    def update(self, program: Program, tiles: StoredTiles, state: dict[str, Any]) -> Result:
        """Runs a program by tiles."""
        return program.run(tiles, state)


class Updates:
    """Updates parameters whose gradients are reduced.

    Args:
        parameters, cycle, clipping: of the optimizer.

    Attributes:
        changes: counts the weights that updates change.
        compilation: runs the updates of large parameters as compiled code.
        observer: runs what is not compiled.
    """

    observer = Observer()

    def __init__(self, parameters: Parameters, cycle: StepCycle, clipping: Clipping) -> None:
        self._parameters, self._shard, self.cycle, self.clipping = parameters, parameters.shard, cycle, clipping
        self._states, self.changes = parameters.states, Changes(parameters.records, parameters.device)
        self.compilation = Compilation(parameters)
        self._batching = parameters.config.batching
        self._numbers: dict[AddedGroup, Mapping[str, float]] = {}  # of this step
        self._sent: dict[torch.device, Sent] = {}  # in this step
        self._together: dict[Program, int] = {}  # number of its parameters that are updated as one
        # gradients that wait until such a stack is full, by their dtype too; and those of shards, to be measured
        self._stacks: dict[tuple[Program, torch.dtype], Waiting] = defaultdict(deque)
        self._shards: Waiting = deque()

    @property
    def compiled(self) -> bool:
        """True if some updates of large parameters are compiled."""
        rules = (group.rule for group in self._parameters.groups)
        return self.compilation.active and any(map(is_traceable, rules))

    def begin(self, step: int) -> None:
        """Begins a step: every rule computes the numbers of its groups, or raises."""
        self._numbers = {group: group.rule.scalars(group.live, step) for group in self._parameters.groups}
        self._sent.clear()
        self.compilation.begin(step)
        for record in self._parameters.records.values():
            record.size = None

    def _sent_to(self, device: torch.device) -> Sent:
        """Sends what updates of this step read to a device, all at once."""
        if device not in self._sent:
            drawing = [each for each in self._parameters.records.values() if each.claimed and each.program.draws]
            keys = [noise_key(self.cycle.seed, self.cycle.step, each.name) for each in drawing]
            self._sent[device] = Sent(
                {group: Scalars.of(numbers, device) for group, numbers in self._numbers.items()},
                Reading(*self.clipping.factors(device)),
                dict(zip(drawing, to_device(keys, torch.int32, device).unbind(), strict=True)),
            )
        return self._sent[device]

    def _measure(self, record: ParamRecord, grad: Tensor) -> Tensor:
        """Returns the sum of squares of this rank's shard of an unscaled gradient, float64 [1]."""
        reading, held = self._sent_to(grad.device).reading, Held(Float(grad.dtype), (grad,))
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
        if (count := self._together.get(program)) is None:
            # stacked shards have to be one tile on every rank, and quantized tensors are not copied
            alone = program.ranks is not None and not program.layout.one_line
            alone |= program.weight.is_quantized
            alone |= program.span.numel > SMALL or not self._batching or program.rule.materializes
            count = 1 if alone else min(STACK // max(1, program.span.numel), program.spec.together or STACK)
            self._together[program] = count
        if count == 1:
            self._update_one(record, grad, decision)
            return
        stack = self._stacks[program, grad.dtype]
        # a gradient of FSDP2 is a view of its module's gradients, which would stay in memory while it waits
        stack.append((record, grad.clone() if grad.untyped_storage().nbytes() > grad.nbytes else grad))
        if len(stack) >= count:
            self._update_stack(stack, decision)

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
        for stack in filter(None, self._stacks.values()):
            self._update_stack(stack, decision)

    def drop(self) -> None:
        """Discards the gradients that wait, after their backward has failed."""
        self._shards.clear()
        self._stacks.clear()

    def begin_state(self, record: ParamRecord) -> None:
        """Creates the missing states of a parameter, before its first update, after a reset, or after an edit of it."""
        program, state = record.program, self._states[record.param]
        edited = record.extra and record.version not in (None, self._shard.version(record.param))
        if edited and not isinstance(program.weight, Shown):  # which follows edits. A residual belongs to one weight
            record.extra = {}
        if missing := [name for name in program.created if name not in state and name not in record.extra]:
            new = self._shard.keep(record.param, initial_tensors(program, missing, self._shard.read(record.param)))
            state.update({name: tensor for name, tensor in new.items() if name not in program.extra_names})
            record.extra.update({name: new[name] for name in program.extra_names if name in new})
            record.version = self._shard.version(record.param) if record.extra else None

    def _update_one(self, record: ParamRecord, grad: Tensor, decision: Decision | None) -> None:
        self.begin_state(record)
        param, shard = record.param, self._shard.read(record.param)
        with self._shard.lend(param, self._states[param]) as state, self._shard.lend(param, record.extra) as extra:
            held = Held(record.program.weight, (*tensors_of(shard), *extra.values()))
            self._run([record], held, grad, state, decision)
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

    def _update_stack(self, stack: Waiting, decision: Decision | None) -> None:
        """Updates parameters as one: stacks their tensors, and copies the results back."""
        records, grads = zip(*stack, strict=True)
        stack.clear()
        if len(records) == 1:
            self._update_one(records[0], grads[0], decision)
            return
        for record in records:
            self.begin_state(record)
        program, first = records[0].program, self._states[records[0].param]
        in_place = program.ranks is None  # complete parameters are stacked without reading them one by one
        shards = [record.param if in_place else self._shard.read(record.param) for record in records]
        columns = [shards, *([record.extra[name] for record in records] for name in records[0].extra)]
        columns += [[self._states[record.param][name] for record in records] for name in first]
        stacked, parts = [torch.stack(column) for column in columns], len(program.weight.parts)
        state = dict(zip(first, stacked[parts:], strict=True))
        self._run(records, Held(program.weight, tuple(stacked[:parts])), torch.stack(grads), state, decision)
        for column, changed in zip(columns, stacked, strict=True):
            torch._foreach_copy_(column, changed.unbind())
        for record, shard in zip(records, shards, strict=True):
            if not in_place:
                self._shard.write(record.param, shard)
            if record.extra:
                record.version = self._shard.version(record.param)

    def _run(
        self, records: Sequence[ParamRecord], held: Held, grad: Tensor, state: dict[str, Any], decision: Decision | None
    ) -> None:
        """Runs the program of parameters on their tensors, and notes the results in their records."""
        first, count, sent = records[0], len(records), self._sent_to(grad.device)
        program = first.program if count == 1 else first.program.stacked(count)
        keys = None
        if program.draws:
            keys = sent.keys[first] if count == 1 else torch.stack([sent.keys[each] for each in records])[:, None]
        self.cycle.moved = True
        count_changes = self.changes.watch(records, held, grad)
        compiles = self.compilation.active and not (self._batching and first.program.span.numel <= SMALL)
        planned = compiles and grad.device.type == "meta"  # a GPU's compiled code has no temporaries of a tile
        tiles = StoredTiles(
            program.layout,
            held,
            grad,
            sent.reading if decision is None else self.clipping.reading(records, grad, decision),
            sent.scalars[first.group],
            members=count,
            keys=keys,
            across=program.ranks,
            tile=PLANNED_TILE if planned else None,
        )
        result = self.compilation.run(first, tiles, state) if compiles else None
        if result is None:
            result = self.observer.update(program, tiles, state)
        sizes = [None] * count if result.sizes is None else _each(result.sizes)
        for record, square_sum, size in zip(records, _each(result.square_sums), sizes, strict=True):
            record.square_sum, record.size = square_sum, size
        if count_changes is not None:
            count_changes()


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
