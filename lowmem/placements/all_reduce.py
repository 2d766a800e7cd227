"""Averages of gradients over ranks on which different parameters may get one.

In each backward, every rank launches the same collectives in the same order:

    expected    one number per parameter: may its gradient arrive on any rank?     at the first gradient
    averages    one all-reduce per parameter for which that is so                  as gradients arrive
    arrived     one number per parameter: has its gradient arrived on any rank?    at the end

The averages are in the order in which gradients arrived in the last backward, on one rank after the other. A rank knows
from the graph which gradients it will get. It sends zeros in place of the others when their turn comes, so no gradient
waits for one that never arrives.
"""

import functools
import itertools
from collections import deque
from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lowmem.errors import StepError
from lowmem.placements.base import MicroBatch, Reduced, Reducer
from lowmem.placements.placed import Placed
from lowmem.tiles.gradients import Gradient
from lowmem.tiles.stored import flat
from lowmem.tiles.transfers import Readback, to_device

# All-reduces that may be in flight while the backward goes on.
MAX_IN_FLIGHT = 1

# States of a gradient in a backward on one rank. Ranks exchange the maximum.
_ABSENT = 0  # the graph does not reach the parameter
_SILENT = 1  # the graph has reached it without producing a gradient
_USED = 2  # absent here, and the average was applied because another rank expected a gradient
_HIDDEN = 3  # the graph does not reach it, but reentrant checkpointing may
_POSSIBLE = 4  # the graph reaches it, which has not always produced a gradient
_EXPECTED = 5
_ARRIVED = 6  # the nth gradient to arrive has _ARRIVED + n


class AllReduce(Reducer):
    """Averages the sum over micro-batches of each gradient over the default process group.

    An all-reduce is launched when its gradient is complete, and waited for when the next one is, so that it overlaps
    with the backward: two gradients exist at a time. A parameter that gets a gradient on some ranks only counts as zero
    on the others. One that gets none on any rank is not updated, as on one device.

    Gradients wait for one another in the first backward, which has no order yet, and under reentrant activation
    checkpointing, where the graph does not show which gradients will arrive.
    """

    takes_computed = False

    def __init__(self) -> None:
        self._records: dict[str, Placed] = {}  # in the order of the averages
        self._backwards = 0  # of these parameters
        self._hides = False  # a gradient has arrived that the graph did not show
        self._silent: set[str] = set()  # parameters that a graph has reached without producing a gradient
        self._arrived: _Maximum | None = None  # of the last backward
        self.drop()

    def drop(self) -> None:
        self._turns = deque(self._records)  # averages that are not launched yet
        self._here: dict[str, int] = {}  # the state of each gradient on this rank
        self._arrivals = itertools.count(_ARRIVED + 1)
        self._expected: _Maximum | None = None
        self._out_of_order: dict[str, Tensor] = {}  # gradients whose turn has not come
        self._in_flight: deque[tuple[Placed, Tensor, dist.Work]] = deque()
        self._undecided: dict[str, Tensor] = {}  # averages that are applied if a gradient arrived on some rank

    def begin(self, records: Collection[Placed], micro_batch: MicroBatch) -> None:
        super().begin(records, micro_batch)
        if not micro_batch.last:
            return
        # a parameter that is frozen on this rank may be trained on another one
        claimed = {record.name: record for record in records if record.claimed}
        order = list(self._records)
        if claimed.keys() != self._records.keys():
            order = list(reversed(claimed))
            self._backwards, self._hides, self._arrived = 0, False, None
            self._silent.clear()
        elif self._arrived is not None:
            order = _by_arrival(self._arrived.states, order)
        self._records = {name: claimed[name] for name in order}
        self.drop()

    def reduce(self, record: Placed, grad: Gradient) -> Reduced:
        total = self._micro_batch.add(record, grad)
        del grad
        if total is None:
            return
        assert isinstance(total, Tensor)
        self._exchange_expected()
        name = record.name
        if self._here[name] >= _ARRIVED:
            raise StepError(
                f"parameter {name!r} got its gradient in two parts within one backward, and the first part is already "
                "being reduced. Use checkpoint(..., use_reentrant=False)"
            )
        if self._here[name] <= _USED:
            raise StepError(
                f"parameter {name!r} got a gradient, although the graph of this backward does not reach it, and zeros "
                "have already been sent to the other ranks. Reentrant activation checkpointing that starts in a later "
                "step causes this. Use checkpoint(..., use_reentrant=False)"
            )
        self._hides |= self._here[name] == _HIDDEN
        self._here[name] = next(self._arrivals)
        self._out_of_order[name] = total
        del total
        yield from self._launch()

    def skip(self, record: Placed) -> Reduced:
        if self._micro_batch.last:
            self._exchange_expected()
            self._here[record.name] = _SILENT
            yield from self._launch()

    def flush(self) -> Reduced:
        if not self._records or not self._micro_batch.last:
            return
        self._exchange_expected()
        ended = {_HIDDEN: _ABSENT, _POSSIBLE: _SILENT, _EXPECTED: _SILENT}
        self._here = {name: ended.get(state, state) for name, state in self._here.items()}
        yield from self._launch()
        yield from self._wait(0)
        yield from self._exchange_arrived()

    def _exchange_expected(self) -> None:
        """Tells the other ranks which gradients this one expects, once per backward."""
        if self._expected is not None:
            return
        unreached = _ABSENT if self._backwards and not self._hides else _HIDDEN
        for name, record in self._records.items():
            reached = _EXPECTED if self._backwards and name not in self._silent else _POSSIBLE
            self._here[name] = reached if record.reached else unreached
        self._expected = _Maximum(self._here | dict.fromkeys(self._micro_batch.earlier, _EXPECTED), self._device)

    def _launch(self) -> Reduced:
        """Launches the all-reduces whose turn it is."""
        assert self._expected is not None
        while self._turns:
            name = self._turns[0]
            grad = self._out_of_order.pop(name, None)
            if grad is None and self._here[name] > _USED:
                return
            self._turns.popleft()
            if grad is None:
                if self._expected.states[name] == _ABSENT:
                    continue
                yield from self._wait(0)  # a gradient may be waiting behind this one
                grad = self._stand_in(name)
            if self._micro_batch.wide:
                grad = grad.to(torch.promote_types(grad.dtype, torch.float32))
            grad = grad.div_(dist.get_world_size())  # before the sum: float16 would overflow
            self._in_flight.append((self._records[name], grad, dist.all_reduce(flat(grad), async_op=True)))
            del grad
            yield from self._wait(MAX_IN_FLIGHT)

    def _stand_in(self, name: str) -> Tensor:
        """Returns the tensor to reduce if no gradient arrives: the sum of the earlier micro-batches, or zeros."""
        if name not in self._micro_batch.earlier:
            return torch.zeros_like(self._records[name].param)
        self._here[name] = next(self._arrivals)
        total = self._micro_batch.earlier[name]()
        assert isinstance(total, Tensor)
        return total

    def _wait(self, in_flight: int) -> Reduced:
        """Yields averages until at most `in_flight` all-reduces are in flight."""
        assert self._expected is not None
        while len(self._in_flight) > in_flight:
            record, grad, work = self._in_flight.popleft()
            work.wait()
            name = record.name
            if self._here[name] >= _ARRIVED:
                yield record, grad
            elif self._here[name] == _ABSENT and self._expected.states[name] == _EXPECTED:
                self._here[name] = _USED
                yield record, grad
            else:
                self._undecided[name] = grad
            del grad, work

    def _exchange_arrived(self) -> Reduced:
        """Tells the other ranks which gradients arrived on this one. Yields undecided averages."""
        self._silent |= {name for name, state in self._here.items() if state == _SILENT}
        if self._backwards % dist.get_world_size() != dist.get_rank():  # the order is learned from another rank
            self._here = {name: min(state, _ARRIVED) for name, state in self._here.items()}
        self._backwards += 1
        self._arrived = _Maximum(self._here, self._device)
        if not self._undecided and _USED not in self._here.values():
            return
        for name, state in self._arrived.states.items():
            if state == _USED:
                raise StepError(
                    f"on one rank the graph reaches parameter {name!r} without producing a gradient, and on another "
                    "rank the graph does not reach it, so zeros were used. Return zeros instead of None from the "
                    "autograd function"
                )
            if state >= _ARRIVED and name in self._undecided:
                yield self._records[name], self._undecided.pop(name)

    @property
    def _device(self) -> torch.device:
        return next(iter(self._records.values())).param.device


class _Maximum:
    """The maximum over ranks of the states of each gradient. Every rank makes one."""

    def __init__(self, states: Mapping[str, int], device: torch.device) -> None:
        self._names = list(states)
        numbers = to_device([*states.values()], torch.int32, device)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        self._copy = Readback(numbers)

    @functools.cached_property
    def states(self) -> Mapping[str, float]:
        """The states by name. Waits until they are on the host. In a dry run, every gradient is possible."""
        values = self._copy.values() or [_POSSIBLE] * len(self._names)
        return dict(zip(self._names, values, strict=True))


def _by_arrival(states: Mapping[str, float], order: Sequence[str]) -> list[str]:
    """Sorts the names in `order` by arrival. A name that did not arrive stays behind the one that it was behind."""
    places, place = dict[str, float](), 0.0
    for name in order:
        if states[name] > _ARRIVED:
            place = states[name]
        places[name] = place
    return sorted(order, key=places.__getitem__)
