"""Averages of gradients over ranks that may have different ones: all ranks all-reduce the same parameters in one order.

The order is that in which gradients arrived in the last backward, on one rank after the other. Ranks may take other
branches of a model, so that a gradient whose turn it is may arrive late or never. What a backward will bring is known
from its graph, at its first gradient: a rank sends zeros for the others at their turn, and holds back nothing. In each
backward the collectives are, on every rank: what each rank expects, one average for each parameter, and what each rank
got.
"""

import functools
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lowmem.errors import StepError
from lowmem.placements.base import NO_EARLIER, Earlier, Reduced, Reducer
from lowmem.placements.placed import Placed
from lowmem.tiles.gradients import Gradient
from lowmem.tiles.stored import flat
from lowmem.tiles.transfers import Readback, to_device

# All-reduces that may be in flight while the backward goes on.
MAX_IN_FLIGHT = 1

# What a rank expects of a parameter when its first gradient arrives.
_ABSENT, _UNKNOWN, _EXPECTED = range(3)

# What a rank made of it: nothing; it used the average of ranks that expected a gradient; or it had one itself. The rank
# whose order is learned adds how many had arrived by then.
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
        self._records: dict[str, Placed] = {}
        # learned from the backwards so far
        self._backwards = 0  # with these parameters
        self._hides = False  # gradients arrived that their graph did not show
        self._silent: set[str] = set()  # a graph reached these, and they got no gradient
        self._outcome: _Largest | None = None  # of the last one
        self.drop()

    def drop(self) -> None:
        self._earlier = NO_EARLIER
        self._launched = 0  # so many of the order are launched
        self._arrived: dict[str, None] = {}
        self._reached: set[str] = set()  # by the graph
        self._missing: set[str] = set()  # no gradient of these will arrive
        self._expected: _Largest | None = None
        self._out_of_order: dict[str, Tensor] = {}  # gradients whose turn has not come
        self._in_flight: deque[tuple[str, Tensor, dist.Work]] = deque()
        self._undecided: dict[str, Tensor] = {}  # averages that are used if some rank got a gradient

    def begin(self, records: Collection[Placed], earlier: Earlier = NO_EARLIER) -> None:
        self.drop()
        self._earlier = earlier
        # one that is frozen meanwhile keeps its turn: other ranks may train it
        self._records = {record.name: record for record in records if record.claimed}
        if set(self._order) != self._records.keys():
            self._order = list(reversed(self._records))
            self._backwards, self._hides, self._outcome = 0, False, None
            self._silent.clear()
        elif self._outcome is not None and (outcome := self._outcome.numbers) is not None:
            arrived = [name for name in self._order if outcome[name] > _ARRIVED]
            self._order = _inserted(sorted(arrived, key=outcome.__getitem__), self._order)

    def reduce(self, record: Placed, grad: Gradient) -> Reduced:
        assert isinstance(grad, Tensor)
        name = record.name
        if name in self._arrived:
            raise StepError(
                f"parameter {name!r} got its gradient in two parts within one backward, and the first part is already "
                "being reduced. Use checkpoint(..., use_reentrant=False)"
            )
        self._expect()
        hooked = torch._C._current_autograd_node() is not None  # else it is a sum of earlier micro-batches
        if hooked and name in self._missing:
            raise StepError(
                f"parameter {name!r} got a gradient, although the graph of this backward does not reach it, and zeros "
                "have already been sent to the other ranks. Reentrant activation checkpointing that starts in a later "
                "step causes this. Use checkpoint(..., use_reentrant=False)"
            )
        self._hides |= hooked and name not in self._reached
        self._arrived[name] = None
        self._out_of_order[name] = grad
        del grad
        yield from self._advance()

    def skip(self, record: Placed) -> Reduced:
        self._expect()
        self._missing.add(record.name)
        yield from self._advance()

    def flush(self) -> Reduced:
        if not self._order:
            return
        self._expect()
        self._missing |= self._records.keys() - self._arrived.keys()
        yield from self._advance()
        yield from self._wait(0)
        yield from self._close()

    def _expect(self) -> None:
        """Starts to tell the other ranks which gradients this one expects in the backward that runs."""
        if self._expected is not None:
            return
        running = torch._C._current_autograd_node() is not None
        self._reached = {name for name in self._order if running and self._records[name].reached}
        if not running or (self._backwards and not self._hides):
            self._missing = self._records.keys() - self._reached
        certain = self._reached - self._silent if self._backwards else set()
        expected = dict.fromkeys(self._records.keys() - self._missing, _UNKNOWN)
        expected |= dict.fromkeys([*certain, *self._earlier.read], _EXPECTED)
        self._expected = self._largest(expected)

    def _largest(self, numbers: Mapping[str, int]) -> "_Largest":
        """The largest number of any rank for each parameter, 0 where none is given. Every rank calls it."""
        device = self._records[self._order[0]].param.device
        return _Largest({name: numbers.get(name, 0) for name in self._order}, device)

    def _anywhere(self, name: str) -> float:
        """The most that any rank expects of a parameter."""
        assert self._expected is not None
        expected = self._expected.numbers
        return _UNKNOWN if expected is None else expected[name]

    def _advance(self) -> Reduced:
        """Launches the all-reduces whose turn it is."""
        while self._launched < len(self._order):
            name = self._order[self._launched]
            if name in self._out_of_order:
                grad = self._out_of_order.pop(name)
            elif name not in self._missing:
                return
            elif self._anywhere(name) == _ABSENT:
                self._launched += 1
                continue
            else:
                yield from self._wait(0)  # a gradient may be waiting behind this one
                grad = self._stand_in(name)
            if self._earlier.wide:
                grad = grad.to(torch.promote_types(grad.dtype, torch.float32))
            grad = grad.div_(dist.get_world_size())  # before the sum: float16 would overflow
            self._launched += 1
            self._in_flight.append((name, grad, dist.all_reduce(flat(grad), async_op=True)))
            del grad
            yield from self._wait(MAX_IN_FLIGHT)

    def _stand_in(self, name: str) -> Tensor:
        """The tensor to reduce for a parameter without a gradient: the sum of earlier micro-batches, or zeros."""
        if name not in self._earlier.read:
            return torch.zeros_like(self._records[name].param)
        self._arrived[name] = None
        total = self._earlier.read[name]()
        assert isinstance(total, Tensor)
        return total

    def _wait(self, in_flight: int) -> Reduced:
        """Yields averaged gradients until so many are in flight."""
        assert self._expected is not None
        while len(self._in_flight) > in_flight:
            self._expected.fetch()
            name, grad, work = self._in_flight.popleft()
            work.wait()
            if name in self._arrived or self._uses(name):
                yield self._records[name], grad
            elif self._anywhere(name) != _ABSENT:
                self._undecided[name] = grad
            del grad, work

    def _uses(self, name: str) -> bool:
        """Returns whether to use an average at once that this rank has no part in: another one expects a gradient."""
        return name not in self._reached and self._anywhere(name) == _EXPECTED

    def _close(self) -> Reduced:
        """Yields the averages that turn out to be of some rank: all ranks tell which gradients they got."""
        learned = self._backwards % dist.get_world_size() == dist.get_rank()
        flags = {name: _ARRIVED + learned * n for n, name in enumerate(self._arrived, start=1)}
        used = {name: _USED for name in self._order if name not in flags and self._uses(name)}
        self._outcome = self._largest(flags | used)
        self._outcome.fetch()
        self._backwards += 1
        self._silent |= self._reached - self._arrived.keys()
        outcome = self._outcome.numbers if self._undecided or used else None
        for name, anywhere in (outcome or {}).items():
            if anywhere == _USED:
                raise StepError(
                    f"on one rank the graph reaches parameter {name!r} without producing a gradient, and on another "
                    "rank the graph does not reach it, so zeros were used. Return zeros instead of None from the "
                    "autograd function"
                )
            if anywhere >= _ARRIVED and name in self._undecided:
                yield self._records[name], self._undecided.pop(name)


class _Largest:
    """The largest of all ranks' numbers, by name. Made on every rank."""

    def __init__(self, numbers: Mapping[str, int], device: torch.device) -> None:
        self._names = list(numbers)
        self._tensor = to_device([*numbers.values()], torch.int32, device)
        self._work = dist.all_reduce(self._tensor, op=dist.ReduceOp.MAX, async_op=True)
        self._copy: Readback | None = None

    def fetch(self) -> Readback:
        """Starts to copy them to the host."""
        if self._copy is None:
            assert self._work is not None
            self._work.wait()
            self._copy = Readback(self._tensor)
        return self._copy

    @functools.cached_property
    def numbers(self) -> dict[str, float] | None:
        """Waits for that copy; None in a dry run."""
        values = self.fetch().values()
        return None if values is None else dict(zip(self._names, values, strict=True))


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
