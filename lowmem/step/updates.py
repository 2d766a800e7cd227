"""Updates parameters one by one, in stacks, or by kernels in batches. Measures shards of elementwise rules first."""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowmem.kernels import Batch
from lowmem.step.batches import KernelBatches
from lowmem.step.changes import Changes
from lowmem.step.clipping import Clipping, Decision
from lowmem.step.compiled import Compilation, is_traceable
from lowmem.step.cycle import StepCycle
from lowmem.step.inputs import StepInputs
from lowmem.step.parameters import Parameters
from lowmem.step.program import Program
from lowmem.step.record import Operands, ParamRecord
from lowmem.step.results import Result, Results
from lowmem.step.room import peak_memory, unused_memory
from lowmem.tiles.storage import Float, RoundedCopy, StoredTensor
from lowmem.tiles.stored import StoredTiles, begin_storage, separate
from lowmem.tiles.sweep import Sweep

# Maximum elements of a small parameter, for which launching an update takes longer than the update itself. If small
# parameters are stacked, they are not compiled: eager torch sums so few elements in a fixed order, so a parameter gets
# the same bits alone and in a stack.
SMALL = 1 << 14

# Elements per tile in a plan for a GPU, where the temporaries of compiled code are negligible.
PLANNED_TILE = 1 << 16

# Maximum elements per stack, and of small gradients that wait for kernels: more than the norms of a model with 8B
# parameters have. They count towards the memory of "one gradient".
STACK = 1 << 19

# Maximum elements of shards that wait to be measured. In a large model, these are the shards of one or two layers.
SHARDS = 1 << 25


class Queue:
    """Gradients that wait to be updated together.

    Attributes:
        gradients: pairs of a parameter's record and its gradient.
        elements: the number of elements of their full parameters.
    """

    def __init__(self) -> None:
        self.gradients: deque[tuple[ParamRecord, Tensor]] = deque()
        self.elements = 0

    def add(self, record: ParamRecord, grad: Tensor) -> None:
        """Adds a gradient at the end."""
        self.gradients.append((record, grad))
        self.elements += record.program.span.numel

    def take(self) -> deque[tuple[ParamRecord, Tensor]]:
        """Removes and returns all gradients."""
        taken, self.gradients, self.elements = self.gradients, deque(), 0
        return taken


class Observer:
    """Observes the gradients and the updates of a step. A plan uses it to measure their memory."""

    def gradient(self, grad: Tensor) -> None:
        """Called when a gradient is taken from its parameter."""

    def update(self, program: Program, tiles: StoredTiles, state: dict[str, Any]) -> Result:
        """Runs a program tile by tile."""
        return program.run(tiles, state)


class Updates:
    """Updates parameters whose gradients are reduced.

    parameters                                    when they are updated
    updated by kernels, at most SMALL elements    together, once the queue has STACK elements
    updated by kernels, larger                    at once, or together if memory is free (`_free_elements`)
    large shards of elementwise rules             together, after they have been measured
    other small ones with the same program        together as a stack
    all others                                    at once

    Args:
        parameters, cycle, clipping: the parameters, life cycle and clipping of the optimizer.

    Attributes:
        results: the results of the updates of this step.
        changes: counts the weights that updates change.
        compilation: runs the updates of large parameters as compiled code.
        observer: runs updates that are not compiled.
    """

    observer = Observer()

    def __init__(self, parameters: Parameters, cycle: StepCycle, clipping: Clipping) -> None:
        self._parameters, self.cycle, self.clipping = parameters, cycle, clipping
        self._shard, self._states, self._batching = parameters.shard, parameters.states, parameters.config.batching
        self.results = Results()
        self.changes = Changes(parameters.records, parameters.device)
        self.compilation = Compilation(parameters)
        self._inputs = StepInputs(parameters, cycle, clipping)
        self._batches = KernelBatches(self._inputs, self.compilation)
        self._large, self._small = Queue(), Queue()  # wait for kernels
        self._shards = Queue()  # wait to be measured
        self._stacks: dict[tuple[Program, torch.dtype], Queue] = defaultdict(Queue)  # wait for a full stack
        self._per_stack: dict[Program, int] = {}  # number of its parameters per stack
        self._free: dict[torch.device, int] = {}  # elements for which memory is free on a device in this step
        self._peaks: dict[torch.device, int] = {}  # the largest peak of tensors in earlier steps
        self._steps = 0  # number of steps that have ended in this process

    @property
    def compiled(self) -> bool:
        """True if some updates of large parameters are compiled."""
        rules = (group.rule for group in self._parameters.groups)
        return self.compilation.active and any(map(is_traceable, rules))

    @property
    def largest(self) -> int:
        """The number of elements of the largest parameter."""
        records = self._parameters.records.values()
        return max((record.program.span.numel for record in records if record.claimed), default=0)

    def begin(self, step: int) -> None:
        """Begins a micro-batch: every rule computes the numbers of its groups, or raises."""
        self._inputs.begin(step)
        self.compilation.begin(step)
        self._batches.begin()
        self._free.clear()
        self.results.clear()

    def put(self, record: ParamRecord, grad: Tensor, decision: Decision | None, may_wait: int = 0) -> None:
        """Updates a parameter, or stores its gradient until others can be updated with it.

        may_wait: the number of elements of large gradients that may wait for kernels, although they need not.

        An elementwise rule does not need sums over ranks, but all ranks must know whether a gradient is finite before
        any of them writes. So shards wait until together they have as many elements as the largest full gradient among
        them, or SHARDS elements, and are then measured in one collective.
        """
        program = record.program
        large_shard = program.ranks is not None and program.span.numel > SMALL
        if self.compilation.by_kernels(record):
            self._put_for_kernels(record, grad, decision, may_wait)
        elif large_shard and program.rule.elementwise and decision is None:
            self._shards.add(record, grad)
            spans = [each.span for each, _ in self._shards.gradients]
            if sum(span.size for span in spans) >= min(SHARDS, max(span.numel for span in spans)):  # on every rank
                self._update_shards()
        else:
            self._update(record, grad, decision)

    def _put_for_kernels(self, record: ParamRecord, grad: Tensor, decision: Decision | None, may_wait: int) -> None:
        """Stores a gradient until as many elements wait as may, and then updates their parameters."""
        if self._shard.moves:  # gradients cannot wait for states that leave the device
            self._update_one(record, grad, decision)
            return
        size = record.program.span.numel
        if size <= SMALL:
            queue, most = self._small, STACK
        else:
            queue, most = self._large, may_wait or self._free_elements(record, grad)
        if queue.gradients and queue.elements + size > most:
            self._update_queue(queue, decision)
        queue.add(record, separate(grad) if size <= SMALL else grad)
        if queue.elements >= most:
            self._update_queue(queue, decision)

    def _free_elements(self, record: ParamRecord, grad: Tensor) -> int:
        """Returns how many elements may wait: as many as the largest gradient has, if earlier steps always left memory
        for that many. Returns 0 otherwise, and for shards, because ranks would have to agree.
        """
        if record.program.ranks is not None:
            return 0
        if grad.device not in self._free:
            largest = self.largest if self._steps else 0
            unused = unused_memory(grad.device, self._peaks.get(grad.device, 0))
            fits = unused >= largest * grad.element_size()
            self._free[grad.device] = largest if fits else 0
        return self._free[grad.device]

    def _update(self, record: ParamRecord, grad: Tensor, decision: Decision | None) -> None:
        """Updates a parameter alone, or puts it into a stack and updates the stack if it is full."""
        program = record.program
        if (count := self._per_stack.get(program)) is None:
            count = self._per_stack[program] = self._stack_size(program)
        if count == 1:
            self._update_one(record, grad, decision)
            return
        stack = self._stacks[program, grad.dtype]
        stack.add(record, separate(grad))
        if len(stack.gradients) >= count:
            self._update_stack(stack, decision)

    def _stack_size(self, program: Program) -> int:
        """Returns the number of parameters of a program per stack, or 1 if each is updated alone."""
        size = program.span.numel
        if size > SMALL or not self._batching or program.rule.materializes:
            return 1
        if program.weight.is_quantized:  # quantized tensors are not copied
            return 1
        if program.ranks is not None and not program.layout.one_line:  # stacked shards are one tile on every rank
            return 1
        return min(STACK // max(1, size), program.spec.together or STACK)

    def put_zeros(self, records: Iterable[ParamRecord], decision: Decision | None) -> None:
        """Updates parameters without a gradient as if it were zero, if their rule requires it."""
        for record in records:
            if record.rule.every_parameter and record.trained and not self.cycle.has_fired(record.name):
                shard = self._shard.read(record.param)
                zero = torch.zeros((), dtype=shard.dtype, device=shard.device)
                self.put(record, zero.expand(shard.shape), decision)

    def flush(self, decision: Decision | None) -> None:
        """Updates all parameters whose gradients are waiting. Called after the last gradient of a step."""
        for queue in (self._large, self._small):
            self._update_queue(queue, decision)
        if self._shards.gradients:
            self._update_shards()
        for stack in self._stacks.values():
            if stack.gradients:
                self._update_stack(stack, decision)
        for device in self._free:
            self._peaks[device] = max(self._peaks.get(device, 0), peak_memory(device))
        self._steps += 1

    def drop(self) -> None:
        """Discards the waiting gradients after a failed backward."""
        for queue in (self._large, self._small, self._shards, *self._stacks.values()):
            queue.take()

    def begin_state(self, record: ParamRecord) -> None:
        """Creates missing states of a parameter: before its first update, or after a reset or an edit of the weight."""
        program, state = record.program, self._states[record.param]
        edited = record.extra and record.version not in (None, self._shard.version(record.param))
        if edited and not isinstance(program.weight, RoundedCopy):  # `RoundedCopy` follows edits. A residual does not
            record.extra = {}
        if missing := [name for name in program.created if name not in state and name not in record.extra]:
            new = self._shard.keep(record.param, initial_tensors(program, missing, self._shard.read(record.param)))
            state.update({name: tensor for name, tensor in new.items() if name not in program.extra_names})
            record.extra.update({name: new[name] for name in program.extra_names if name in new})
            record.version = self._shard.version(record.param) if record.extra else None

    def _update_one(self, record: ParamRecord, grad: Tensor, decision: Decision | None) -> None:
        self.begin_state(record)
        lend, param = self._shard.lend, record.param
        with lend(param, self._states[param]) as states, lend(param, record.extra) as extra:
            operands = Operands([record], self._shard.read(param), extra, grad, states)
            if self.compilation.by_kernels(record):
                self._run_kernels([operands], decision)
            else:
                self._run(operands, decision)

    def _update_queue(self, queue: Queue, decision: Decision | None) -> None:
        """Updates the parameters in a queue by kernels."""
        operands = list[Operands]()
        for record, grad in queue.take():
            self.begin_state(record)
            param = record.param
            operands.append(Operands([record], self._shard.read(param), record.extra, grad, self._states[param]))
        self._run_kernels(operands, decision)

    def _run_kernels(self, operands: Sequence[Operands], decision: Decision | None) -> None:
        """Updates parameters by kernels, and those that kernels cannot update one by one."""
        remaining = dict(enumerate(operands))
        for members, batch in self._batches.of(operands, decision) if operands else ():
            self._launch([remaining.pop(n) for n in members], batch, decision)
        for each in remaining.values():
            self._run(each, decision)

    def _launch(self, members: Sequence[Operands], batch: Batch, decision: Decision | None) -> None:
        """Updates parameters by the kernels of a batch."""
        self.cycle.moved = True
        counts = [self.changes.watch(each) for each in members] if self.changes.is_due else []
        records, grads = [each.records[0] for each in members], [each.grad for each in members]
        values, reading = self._inputs.on(batch.device), self._inputs.reading(records, grads[0], decision)
        results = batch.run(grads, values.numbers, values.keys, reading)
        self.results.add(records, Result.of(results, reading))
        for count_changes in filter(None, counts):
            count_changes()
        shards = [each.shard for each in members]
        torch.autograd.graph.increment_version(shards)  # torch does not see the kernels' writes
        for record, shard in zip(records, shards, strict=True):
            record.written(self._shard, shard)

    def _update_shards(self) -> None:
        """Measures the waiting shards in one collective, and updates their parameters."""
        shards = self._shards.take()
        records = [record for record, _ in shards]
        ranks = records[0].program.ranks
        assert ranks is not None
        (sums,) = ranks.all_reduce([torch.cat([self._measure(*each) for each in shards])])
        measured = self.clipping.review(records, sums)
        while shards:  # frees each gradient after its update
            self._update(*shards.popleft(), measured)

    def _measure(self, record: ParamRecord, grad: Tensor) -> Tensor:
        """Returns the sum of squares of this rank's shard of an unscaled gradient, float64 [1]."""
        reading, shard = self._inputs.on(grad.device).reading, StoredTensor(Float(grad.dtype), (grad,))
        return Sweep(StoredTiles(record.program.layout, shard, grad, reading)).square_sums

    def _update_stack(self, stack: Queue, decision: Decision | None) -> None:
        """Updates parameters as one stack: stacks their tensors, and copies the results back."""
        records, grads = zip(*stack.take(), strict=True)
        if len(records) == 1:
            self._update_one(records[0], grads[0], decision)
            return
        for record in records:
            self.begin_state(record)
        program = records[0].program
        names = [name for name in program.created if name not in program.extra_names]  # users may add other values
        is_full = program.ranks is None  # full parameters are stacked without reading them one by one
        shards = [record.param if is_full else self._shard.read(record.param) for record in records]
        extra = {name: [record.extra[name] for record in records] for name in records[0].extra}
        states = {name: [self._states[record.param][name] for record in records] for name in names}
        operands = Operands(records, torch.stack(shards), _stacked(extra), torch.stack(grads), _stacked(states))
        self._run(operands, decision)
        columns = shards, *extra.values(), *states.values()
        stacked = operands.shard, *operands.extra.values(), *operands.states.values()
        for column, changed in zip(columns, stacked, strict=True):
            torch._foreach_copy_(column, changed.unbind())
        for record, shard in zip(records, shards, strict=True):
            record.written(self._shard, shard)

    def _run(self, operands: Operands, decision: Decision | None) -> None:
        """Runs the program of a parameter or a stack on its tensors."""
        self.cycle.moved = True
        first, result = operands.records[0], None
        count_changes = self.changes.watch(operands)
        is_small = first.program.span.numel <= SMALL
        # compiled code on a GPU does not allocate temporaries of the size of a tile
        planned = self.compilation.active and not is_small and operands.grad.device.type == "meta"
        tiles = self._inputs.tiles(operands, decision, tile=PLANNED_TILE if planned else None)
        eager = self._batching and is_small
        if self.compilation.active and not (eager or self.compilation.by_kernels(first)):
            result = self.compilation.run(operands, tiles)
        if result is None:
            result = self.observer.update(operands.program, tiles, operands.states)
        self.results.add(operands.records, result)
        if count_changes is not None:
            count_changes()
        if len(operands.records) == 1:
            first.written(self._shard, operands.shard)


def _stacked(columns: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack(column) for name, column in columns.items()}


def initial_tensors(program: Program, names: Iterable[str], shard: Tensor) -> dict[str, Tensor]:
    """Creates the tensors of a parameter with these names before its first update. shard: the shard of its weight."""
    new = {}
    for name in names:
        spec = program.tensor_specs[name]
        new[name] = torch.zeros(program.shape_of(spec, shard.shape), dtype=spec.dtype, device=shard.device)
    if extra := tuple(new[name] for name in program.extra_names if name in new):
        begin_storage(program.layout, StoredTensor(program.weight, (shard, *extra)))
    return new
