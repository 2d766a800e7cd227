"""Data parallel without a wrapper: every rank holds every parameter, and gradients are averaged in the hooks."""

from collections import deque
from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowmem.errors import StepError, UnsupportedError
from lowmem.placements.agreement import refuse_different
from lowmem.placements.base import Placement, Reduced, Reducer, Shard
from lowmem.placements.record import ParamRecord
from lowmem.tiles.sweep import flat

# All-reduces that may be in flight while the backward goes on.
MAX_IN_FLIGHT = 1

_WRAPPED = (
    "the model is inside DistributedDataParallel, which averages gradients in buckets of its own, so they would be "
    "averaged twice. Remove the wrapper: ranks average in the hooks of this optimizer"
)


class _AllReduce(Reducer):
    """Averages each gradient over the default process group.

    An all-reduce is launched as soon as its gradient is complete, and waited for when the next one is, so that it
    overlaps with the backward: two gradients exist at a time. Ranks launch in one order, that of rank 0's first
    backward, whatever order their own gradients arrive in. A parameter that gets a gradient on some ranks only counts
    as zero on the others; one that gets none on any rank is left out, as on one device.
    """

    def __init__(self) -> None:
        self._order: list[str] = []  # in which all-reduces are launched
        self._learned = False  # it is the order in which gradients arrive
        self._records: dict[str, ParamRecord] = {}
        self._arrived: dict[str, None] = {}  # names in this backward, in the order of their gradients
        self._launched = 0
        self._out_of_order: dict[str, Tensor] = {}  # gradients whose turn has not come
        self._in_flight: deque[tuple[ParamRecord, Tensor, dist.Work]] = deque()

    def begin(self, records: Collection[ParamRecord]) -> None:
        self.drop()
        self._records = {record.name: record for record in records if record.trained}
        if set(self._order) != self._records.keys():
            self._order, self._learned = list(reversed(self._records)), False

    def reduce(self, record: ParamRecord, grad: Tensor) -> Reduced:
        if record.name in self._arrived:
            raise StepError(
                f"parameter {record.name!r} got its gradient in two parts within one backward, and the first part is "
                "being reduced already. Use checkpoint(..., use_reentrant=False)"
            )
        self._arrived[record.name] = None
        self._out_of_order[record.name] = grad
        while self._launched < len(self._order) and self._order[self._launched] in self._out_of_order:
            self._launch(self._order[self._launched])
            yield from self._wait(MAX_IN_FLIGHT)

    def flush(self) -> Reduced:
        absent: dict[str, Tensor] = {}
        for name in self._order[self._launched :]:
            if name not in self._arrived:
                self._out_of_order[name] = torch.zeros_like(self._records[name].param)
            self._launch(name)
            yield from self._split(self._wait(MAX_IN_FLIGHT), absent)
        yield from self._split(self._wait(0), absent)
        anywhere = self._arrived_anywhere()
        for name, grad in absent.items():
            if name in anywhere:
                yield self._records[name], grad
        self._learn()

    def drop(self) -> None:
        self._arrived.clear()
        self._out_of_order.clear()
        self._in_flight.clear()
        self._launched = 0

    def _launch(self, name: str) -> None:
        """Launches the all-reduce of the gradient whose turn it is."""
        grad = self._out_of_order.pop(name).div_(dist.get_world_size())  # before the sum: float16 would overflow
        self._launched += 1
        work = dist.all_reduce(flat(grad), async_op=True)
        assert work is not None
        self._in_flight.append((self._records[name], grad, work))

    def _wait(self, in_flight: int) -> Reduced:
        """Yields averaged gradients until so many are in flight."""
        while len(self._in_flight) > in_flight:
            record, grad, work = self._in_flight.popleft()
            work.wait()
            yield record, grad

    def _split(self, reduced: Reduced, absent: dict[str, Tensor]) -> Reduced:
        """Collects the averages of gradients that this rank does not have: no rank may have them."""
        for record, grad in reduced:
            if record.name in self._arrived:
                yield record, grad
            else:
                absent[record.name] = grad

    def _arrived_anywhere(self) -> set[str]:
        """The parameters that got a gradient on some rank."""
        if not self._order:
            return set()
        device = self._records[self._order[0]].param.device
        here = torch.tensor([name in self._arrived for name in self._order], dtype=torch.int32)
        flags = here.to(device, non_blocking=True)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        if len(self._arrived) == len(self._order):  # only a rank that misses a gradient has to wait for the answer
            return set(self._order)
        return {name for name, flag in zip(self._order, flags.tolist(), strict=True) if flag}

    def _learn(self) -> None:
        """From the second backward on, all-reduces are launched in the order in which gradients arrived on rank 0."""
        if self._learned:
            return
        absent = [name for name in self._order if name not in self._arrived]
        order = [[*self._arrived, *absent]]
        dist.broadcast_object_list(order, src=0)
        self._order, self._learned = order[0], True


class Replicated(Placement):
    """The same parameters on every rank of the default process group, each rank with data of its own.

    Buffers are not synchronized, as on a single device.

    Args:
        broadcasts: the weights of rank 0 are broadcast first; otherwise all ranks have to hold the same ones already.

    Raises:
        UnsupportedError: ranks hold other parameters, or the model is in a `DistributedDataParallel` wrapper, which
            would average once more.
    """

    name = "replicated"

    def __init__(self, *, broadcasts: bool) -> None:
        super().__init__(Shard(), _AllReduce())
        self._broadcasts = broadcasts

    def adopt(self, records: Collection[ParamRecord], model: nn.Module | None) -> None:
        wrapper = torch.nn.parallel.DistributedDataParallel
        if model is not None and any(isinstance(module, wrapper) for module in model.modules()):
            raise UnsupportedError(_WRAPPED)
        super().adopt(records, model)
        if not self._broadcasts:
            refuse_different(records)
            return
        with torch.no_grad():
            for record in records:
                dist.broadcast(record.param.detach(), src=0)

    def settle(self, records: Collection[ParamRecord]) -> None:
        """A wrapper around the model writes its own averages into `.grad` when backward ends."""
        if any(record.param.grad is not None for record in records if record.trained):
            raise UnsupportedError(_WRAPPED)
