"""Data parallelism without a wrapper: every rank has the full parameters, and gradients are averaged in the hooks.

Ranks may have gradients for different parameters. In a backward, all ranks launch the same collectives in one order:

    expected    one number per parameter: may its gradient arrive on any rank?     at the first gradient
    averages    one all-reduce per parameter whose gradient may arrive             as gradients arrive
    arrived     one number per parameter: has its gradient arrived on any rank?    at the end

The order of the averages is the order in which gradients arrived in the last backward on one rank (each rank in turn).
A rank knows from the graph which gradients it will get. For the others it sends zeros, so that no rank waits for them.
"""

import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowmem.errors import StepError, UnsupportedError
from lowmem.placements.agreement import drifted, require_equal_parameters
from lowmem.placements.base import MicroBatch, ParamEntry, Placement, ReadyGradients, Reducer, Shard
from lowmem.placements.wrappers import WRAPPED
from lowmem.tiles.quantized import tensors_of
from lowmem.tiles.stored import flat
from lowmem.tiles.transfers import Readback, to_device

# States of a gradient in a backward on one rank. Ranks exchange the maximum.
_ABSENT = 0  # will not arrive
_USED = 1  # absent on this rank, and the average of the other ranks has been applied
_POSSIBLE = 2  # may arrive
_EXPECTED = 3  # will arrive, according to the graph and earlier backwards
_ARRIVED = 4  # the state of the nth gradient to arrive is _ARRIVED + n
_OPEN = (_POSSIBLE, _EXPECTED)  # the gradient may still arrive


@dataclass(eq=False)
class _PendingGradient:
    """The gradient of one parameter in the running backward on this rank.

    Attributes:
        reached: whether the backward reaches the parameter.
        state: the state of the gradient.
        tensor: the gradient once it has arrived, then the average until it is applied.
    """

    record: ParamEntry
    reached: bool
    state: int
    tensor: Tensor | None = None

    def apply(self) -> tuple[ParamEntry, Tensor]:
        """Returns the average and marks it as applied."""
        assert self.tensor is not None
        average = self.tensor
        self.tensor = None
        return self.record, average


class AllReduce(Reducer):
    """Averages accumulated gradients over the default process group.

    An all-reduce is launched when its gradient is complete, and waited for when the next gradient is complete. So it
    overlaps with backward, and two gradients exist at a time. If a parameter gets a gradient on some ranks only, the
    other ranks contribute zeros. If no rank has a gradient, the parameter is not updated, as on one device.

    Gradients wait for one another in the first backward, before an order is known, and under reentrant activation
    checkpointing, where the graph does not show which gradients will arrive.
    """

    def __init__(self) -> None:
        self._order: list[ParamEntry] = []  # of the averages
        self._without_gradient: set[ParamEntry] = set()  # reached by a backward that did not produce their gradient
        self._backwards = 0  # number of backwards of these parameters
        self._graph_incomplete = False  # whether a gradient has arrived that the graph did not show
        self._arrived: _Maxima | None = None  # states at the end of the last backward
        self.drop()

    def drop(self) -> None:
        self._averages: Iterator[tuple[ParamEntry, Tensor] | None] = iter(())  # the averages of this backward
        self._arrivals = itertools.count(_ARRIVED + 1)
        self._pending: dict[ParamEntry, _PendingGradient] = {}  # of this backward, in the order of the averages

    def begin(self, records: Collection[ParamEntry], micro_batch: MicroBatch) -> None:
        super().begin(records, micro_batch)
        self.drop()
        # a parameter that is frozen on this rank may be trained on another one
        claimed = [record for record in records if record.claimed]
        if set(self._order) != set(claimed):
            self._order = claimed[::-1]
            self._without_gradient.clear()
            self._backwards = 0
            self._graph_incomplete = False
            self._arrived = None
        elif self._arrived is not None:
            self._order = _by_arrival(self._arrived(), self._order)
        if claimed and micro_batch.last:
            self._averages = self._average()

    def reduce(self, record: ParamEntry, grad: Tensor) -> ReadyGradients:
        total = self._micro_batch.add(record, grad)
        del grad
        if total is None:
            return
        yield from self._proceed()
        pending = self._pending[record]
        if pending.state not in _OPEN:
            detail = "in two parts within one backward, and the first part is already being reduced"
            if pending.state < _ARRIVED:
                detail = (
                    "although the graph of this backward does not reach it, and zeros have already been sent to the "
                    "other ranks. Reentrant activation checkpointing that starts in a later step causes this"
                )
            detail += ". Use checkpoint(..., use_reentrant=False)"
            raise StepError(f"parameter {record.name!r} got its gradient {detail}")
        self._graph_incomplete |= not pending.reached
        pending.state = next(self._arrivals)
        pending.tensor = total
        del total
        yield from self._proceed()

    def skip(self, record: ParamEntry) -> ReadyGradients:
        yield from self._proceed()
        pending = self._pending[record]
        if pending.state in _OPEN:
            pending.reached = True
            pending.state = _ABSENT
            yield from self._proceed()

    def flush(self) -> ReadyGradients:
        yield from self._proceed()
        for pending in self._pending.values():
            if pending.state in _OPEN:
                pending.state = _ABSENT
        yield from self._proceed()

    def _proceed(self) -> ReadyGradients:
        """Starts or continues the averages of this backward, until one must wait for its gradient."""
        return iter(lambda: next(self._averages, None), None)

    def _average(self) -> Iterator[tuple[ParamEntry, Tensor] | None]:
        """Launches the collectives of a backward. Yields averages, or None while the next gradient may still arrive."""
        for record in self._order:
            reached = record.reached
            self._pending[record] = _PendingGradient(record, reached, self._initial_state(record, reached))
        earlier = self._micro_batch.earlier
        expected = _maxima(
            {r: _EXPECTED if r.name in earlier else pending.state for r, pending in self._pending.items()}
        )
        in_flight: ReadyGradients = iter(())
        for record, pending in self._pending.items():
            while pending.state in _OPEN:
                yield None
            if pending.tensor is None:
                if expected()[record] == _ABSENT:
                    continue
                yield from in_flight  # another gradient may be waiting for this one
                pending.tensor = self._stand_in(pending)
            if self._micro_batch.wide:
                pending.tensor = pending.tensor.to(torch.promote_types(pending.tensor.dtype, torch.float32))
            pending.tensor.div_(dist.get_world_size())  # before the sum, which might overflow in float16
            work = dist.all_reduce(flat(pending.tensor), async_op=True)
            before, in_flight = in_flight, self._wait(pending, work, expected)
            del work
            yield from before
        yield from in_flight
        yield from self._end()

    def _initial_state(self, record: ParamEntry, reached: bool) -> int:
        """Returns the state of a gradient at the beginning of a backward, from the graph and earlier backwards."""
        if not self._backwards or (reached and record in self._without_gradient):
            return _POSSIBLE
        if reached:
            return _EXPECTED
        return _POSSIBLE if self._graph_incomplete else _ABSENT

    def _stand_in(self, pending: _PendingGradient) -> Tensor:
        """Returns the tensor to reduce if no gradient arrives: the sum of the earlier micro-batches, or zeros."""
        read_sum = self._micro_batch.earlier.get(pending.record.name)
        if read_sum is None:
            return torch.zeros_like(pending.record.param)
        pending.state = next(self._arrivals)
        return read_sum()

    def _wait(self, pending: _PendingGradient, work: dist.Work, expected: "_Maxima") -> ReadyGradients:
        """Waits for an all-reduce, and yields its average if a gradient is certain to arrive on some rank."""
        work.wait()
        del work
        if pending.state == _ABSENT and not pending.reached and expected()[pending.record] == _EXPECTED:
            pending.state = _USED
        if pending.state != _ABSENT:
            yield pending.apply()

    def _end(self) -> ReadyGradients:
        """Exchanges which gradients arrived on which rank, and yields the averages that were uncertain until now."""
        learned = self._backwards % dist.get_world_size() == dist.get_rank()  # each rank's order in turn
        self._backwards += 1
        states = {r: pending.state if learned else min(pending.state, _ARRIVED) for r, pending in self._pending.items()}
        self._arrived = _maxima(states)
        for record, pending in self._pending.items():
            if pending.reached and pending.state == _ABSENT:
                self._without_gradient.add(record)
            if pending.tensor is None and pending.state != _USED:
                continue
            if self._arrived()[record] == _USED:
                raise StepError(
                    f"on one rank the graph reaches parameter {record.name!r} without producing a gradient, and on "
                    "another rank the graph does not reach it, so zeros were used. Return zeros instead of None from "
                    "the autograd function"
                )
            if pending.tensor is not None and self._arrived()[record] >= _ARRIVED:
                yield pending.apply()


_Maxima = Callable[[], Mapping[ParamEntry, float]]


def _maxima(states: Mapping[ParamEntry, int]) -> _Maxima:
    """Launches an all-reduce of the maximum of each state. Returns a function that waits for the maxima and returns
    them. In a dry run, the state of every gradient is `_POSSIBLE`.
    """
    numbers = to_device([*states.values()], torch.int32, next(iter(states)).param.device)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    copy = Readback(numbers)
    return functools.cache(lambda: dict(zip(states, copy.values() or [_POSSIBLE] * len(states), strict=True)))


def _by_arrival(states: Mapping[ParamEntry, float], order: Sequence[ParamEntry]) -> list[ParamEntry]:
    """Sorts parameters by arrival. A parameter without a gradient keeps its place after its predecessor."""
    position = 0.0
    positions = dict[ParamEntry, float]()
    for each in order:
        if states[each] > _ARRIVED:
            position = states[each]
        positions[each] = position
    return sorted(order, key=positions.__getitem__)


class Replicated(Placement):
    """The same parameters on every rank of the default process group, with different data on each rank.

    Buffers are not synchronized, as on a single device.

    Args:
        broadcasts: broadcast the weights of rank 0. If False, `adopt` raises `UnsupportedError` if weights differ.
    """

    name = "replicated"

    def __init__(self, *, broadcasts: bool) -> None:
        super().__init__(Shard(), AllReduce())
        self.shard.process_groups = (None,)
        self._broadcasts = broadcasts

    def adopt(self, records: Collection[ParamEntry], model: nn.Module | None) -> None:
        super().adopt(records, model)
        if not self._broadcasts:
            require_equal_parameters({record.name: record.param for record in records})
            return
        with torch.no_grad():
            for record in records:
                for tensor in tensors_of(record.param.detach()):
                    dist.broadcast(tensor, src=0)

    def drifted(self, records: Collection[ParamEntry], step: int) -> list[str]:
        trained = {record.name: record.param for record in records if record.claimed}
        return drifted(trained, step) if trained else []

    def free_copies(self, records: Collection[ParamEntry], *, updated: bool) -> None:
        """Raises `UnsupportedError` if the model was wrapped after the first step and the wrapper wrote to `.grad`."""
        if any(record.param.grad is not None for record in records if record.trained):
            raise UnsupportedError(WRAPPED)
