"""Averages of gradients over ranks that may have different ones: all ranks all-reduce the same parameters in one order.

The order is that in which one rank's gradients arrived. Ranks may take other branches of a model, so that a gradient
whose turn it is may arrive late or never. What a backward will bring is known from its graph, at its first gradient:
a rank sends zeros for the others at their turn, and holds back nothing. In each backward the collectives are, on every
rank: what each rank expects, one average for each parameter, and what each rank got.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lowmem.errors import StepError
from lowmem.placements.base import NO_SUMS, Reduced, Reducer, Sums
from lowmem.placements.readback import Readback
from lowmem.placements.record import ParamRecord
from lowmem.tiles.gradients import Gradient
from lowmem.tiles.sweep import flat

# All-reduces that may be in flight while the backward goes on.
MAX_IN_FLIGHT = 1

# What a rank expects of a parameter when its first gradient arrives.
_ABSENT, _UNKNOWN, _EXPECTED = range(3)

# What a rank made of it: nothing; it used the average of ranks that expected a gradient; or it had one itself.
_UNUSED, _USED, _ARRIVED = range(3)


class AllReduce(Reducer):
    """Averages each gradient over the default process group.

    An all-reduce is launched as soon as its gradient is complete, and waited for when the next one is, so that it
    overlaps with the backward: two gradients exist at a time. A parameter that gets a gradient on some ranks only
    counts as zero on the others; one that gets none on any rank is left out, as on one device.

    Gradients wait for one another in the first backward, in which the order is learned, and where reentrant activation
    checkpointing, whose parameters the graph does not show, leaves one out.
    """

    takes_computed = False

    def __init__(self) -> None:
        self._order: list[str] = []  # in which all-reduces are launched
        self._records: dict[str, ParamRecord] = {}
        # learned from the backwards so far
        self._backwards = 0  # with these parameters
        self._hides = False  # gradients arrived that their graph did not show
        self._silent: set[str] = set()  # a graph reached these, and they got no gradient
        self._arrivals: list[str] = []  # in the last backward
        self._last: Readback | None = None  # what all ranks got in it, and how many gradients waited
        self._next_learning = self._interval = 1  # the order is not learned again before so many backwards
        self.drop()

    def drop(self) -> None:
        self._sums = NO_SUMS
        self._launched = 0  # so many of the order are launched
        self._waited = 0  # so many gradients waited for their turn at once
        self._arrived: dict[str, None] = {}
        self._reached: set[str] = set()  # by the graph
        self._missing: set[str] = set()  # no gradient of these will arrive
        self._here: dict[str, int] = {}  # what this rank expects
        self._everywhere: Tensor | None = None  # the largest of all ranks' expectations
        self._expected: Readback | None = None  # a copy of it
        self._anywhere: dict[str, float] = {}  # and what it says
        self._expecting: dist.Work | None = None
        self._out_of_order: dict[str, Tensor] = {}  # gradients whose turn has not come
        self._in_flight: deque[tuple[str, Tensor, dist.Work]] = deque()
        self._kept: dict[str, Tensor] = {}  # averages that are used if some rank got a gradient
        self._used: set[str] = set()  # averages that are used, but are not of this rank

    # -- one backward ----------------------------------------------------------------------------------------------

    def begin(self, records: Collection[ParamRecord], sums: Sums = NO_SUMS) -> None:
        self.drop()
        self._sums = sums
        # one that is frozen meanwhile keeps its turn: other ranks may train it
        self._records = {record.name: record for record in records if record.claimed}
        if set(self._order) == self._records.keys():
            self._learn()
            return
        self._order = list(reversed(self._records))
        self._backwards, self._next_learning, self._interval = 0, 1, 1
        self._hides, self._last = False, None
        self._silent.clear()

    def reduce(self, record: ParamRecord, grad: Gradient) -> Reduced:
        assert isinstance(grad, Tensor)
        name = record.name
        if name in self._arrived:
            raise StepError(
                f"parameter {name!r} got its gradient in two parts within one backward, and the first part is being "
                "reduced already. Use checkpoint(..., use_reentrant=False)"
            )
        self._expect()
        hooked = torch._C._current_autograd_node() is not None  # else it is a sum of earlier micro-batches
        if hooked and name in self._missing:
            raise StepError(
                f"parameter {name!r} got a gradient that the graph of this backward does not show, and zeros were sent "
                "to the other ranks already. Reentrant activation checkpointing that begins in a later step does this. "
                "Use checkpoint(..., use_reentrant=False)"
            )
        self._hides |= hooked and name not in self._reached
        self._arrived[name] = None
        self._out_of_order[name] = grad
        del grad
        yield from self._advance(ended=False)
        self._waited = max(self._waited, len(self._out_of_order))

    def skip(self, record: ParamRecord) -> Reduced:
        self._expect()
        self._missing.add(record.name)
        yield from self._advance(ended=False)

    def flush(self) -> Reduced:
        if not self._order:
            return
        self._expect()
        yield from self._advance(ended=True)
        yield from self._wait(0)
        yield from self._close()

    def _expect(self) -> None:
        """Starts to tell the other ranks which gradients this one expects in the backward that runs."""
        if self._here:
            return
        running = torch._C._current_autograd_node() is not None
        self._reached = {name for name in self._order if running and self._records[name].reached}
        if not running or (self._backwards and not self._hides):
            self._missing = self._records.keys() - self._reached
        for name in self._order:
            certain = name in self._reached and self._backwards and name not in self._silent
            if name in self._sums.read or certain:
                self._here[name] = _EXPECTED
            else:
                self._here[name] = _ABSENT if name in self._missing else _UNKNOWN
        self._everywhere = self._flags(self._here[name] for name in self._order)
        self._expecting = dist.all_reduce(self._everywhere, op=dist.ReduceOp.MAX, async_op=True)

    def _flags(self, values: Iterable[int]) -> Tensor:
        device = self._records[self._order[0]].param.device
        return torch.tensor(list(values), dtype=torch.int32).to(device, non_blocking=True)

    def _advance(self, *, ended: bool) -> Reduced:
        """Launches the all-reduces whose turn it is; with `ended` all of them, because no more gradients arrive."""
        while self._launched < len(self._order):
            name = self._order[self._launched]
            if name in self._out_of_order:
                grad = self._out_of_order.pop(name)
            elif name in self._missing and self._expected_anywhere(name) == _ABSENT:
                self._launched += 1
                continue
            elif name in self._missing or ended:
                yield from self._wait(0)  # a gradient may be waiting behind this one
                grad = self._stand_in(name)
            else:
                return
            self._launch(name, grad)
            del grad
            yield from self._wait(MAX_IN_FLIGHT)

    def _stand_in(self, name: str) -> Tensor:
        """What to reduce for a parameter without a gradient: the sum of earlier micro-batches, or zeros."""
        if name not in self._sums.read:
            return torch.zeros_like(self._records[name].param)
        self._arrived[name] = None
        total = self._sums.read[name]()
        assert isinstance(total, Tensor)
        return total

    def _launch(self, name: str, grad: Tensor) -> None:
        if self._sums.wide:
            grad = grad.to(torch.promote_types(grad.dtype, torch.float32))
        grad = grad.div_(dist.get_world_size())  # before the sum: float16 would overflow
        self._launched += 1
        work = dist.all_reduce(flat(grad), async_op=True)
        assert work is not None
        self._in_flight.append((name, grad, work))

    def _wait(self, in_flight: int) -> Reduced:
        """Yields averaged gradients until so many are in flight."""
        while len(self._in_flight) > in_flight:
            self._read_expected()
            name, grad, work = self._in_flight.popleft()
            work.wait()
            if name in self._arrived or self._is_used(name):
                yield self._records[name], grad
            elif self._expected_anywhere(name) != _ABSENT:
                self._kept[name] = grad
            del grad, work

    def _read_expected(self) -> Readback:
        """Starts to copy what all ranks expect to the host."""
        if self._expected is None:
            assert self._expecting is not None and self._everywhere is not None
            self._expecting.wait()
            self._expected = Readback(self._everywhere)
        return self._expected

    def _expected_anywhere(self, name: str) -> float:
        if not self._anywhere:
            values = self._read_expected().values() or [_UNKNOWN] * len(self._order)  # none in a dry run
            self._anywhere = dict(zip(self._order, values, strict=True))
        return self._anywhere[name]

    def _is_used(self, name: str) -> bool:
        """Whether to use an average that this rank has no part in: another one expects a gradient."""
        used = self._here[name] != _EXPECTED and self._expected_anywhere(name) == _EXPECTED
        if used:
            self._used.add(name)
        return used

    def _close(self) -> Reduced:
        """Yields the averages that turn out to be of some rank: all ranks tell which gradients they got."""
        flags = [
            _ARRIVED if name in self._arrived else _USED if name in self._used else _UNUSED for name in self._order
        ]
        world_size = dist.get_world_size()
        most = self._waited * world_size + world_size - 1 - dist.get_rank()
        arrived = self._flags([*flags, most])
        dist.all_reduce(arrived, op=dist.ReduceOp.MAX)
        self._last = Readback(arrived)
        self._backwards += 1
        self._silent |= self._reached - self._arrived.keys()
        self._arrivals = list(self._arrived)
        values = self._last.values() if self._kept or self._used else None
        for name, anywhere in zip(self._order, values or (), strict=False):
            if anywhere == _USED:
                raise StepError(
                    f"the graph of a rank reaches parameter {name!r}, which got no gradient there, and that of another "
                    "rank does not: zeros were used for it. Its autograd function returns None; let it return zeros"
                )
            if anywhere == _ARRIVED and name in self._kept:
                yield self._records[name], self._kept.pop(name)

    # -- the order -------------------------------------------------------------------------------------------------

    def _learn(self) -> None:
        """Takes over the order in which the gradients of one rank arrived in the last backward.

        After the first backward that is rank 0. Later it is the rank on which most gradients had to wait, at twice the
        interval each time: ranks that take the same layers in different orders cannot agree.
        """
        values = None if self._last is None else self._last.values()
        self._last = None
        if values is None or self._backwards < self._next_learning:
            return
        waited, rank = divmod(int(values[-1]), dist.get_world_size())
        source = dist.get_world_size() - 1 - rank
        if self._backwards == 1:
            source = 0
        elif not waited:
            return
        learned = [self._arrivals]
        dist.broadcast_object_list(learned, src=source)
        self._order = _inserted(learned[0], self._order)
        self._next_learning = self._backwards + self._interval
        self._interval *= 2


def _inserted(arrivals: Sequence[str], order: Sequence[str]) -> list[str]:
    """`arrivals`, and the other names of `order`, each behind the one that it is behind in `order`."""
    behind: dict[str | None, list[str]] = defaultdict(list)
    known, before = set(arrivals), None
    for name in order:
        if name in known:
            before = name
        else:
            behind[before].append(name)
    return [*behind[None], *(name for arrival in arrivals for name in (arrival, *behind[arrival]))]
