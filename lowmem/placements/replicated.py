"""Data parallel without a wrapper: every rank holds the whole parameter, and gradients are averaged as they come."""

import gc
from collections import deque
from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor

from lowmem.errors import StepError, UnsupportedError
from lowmem.placements.local import Local, Reduced
from lowmem.placements.record import ParamRecord
from lowmem.tiles.sweep import flat

# Averages that may be under way while the backward goes on.
_UNDER_WAY = 1


class Replicated(Local):
    """The same parameters on every rank of the default process group, each rank with data of its own.

    An average is begun as soon as its gradient is there and waited for when the next one has come, so that it travels
    while the backward computes: two gradients exist at a time. Ranks begin averages in one order, that of rank 0's
    first backward, whatever order their own gradients come in. A parameter that gets a gradient on some ranks alone
    counts as zero on the others; one that gets none anywhere is left out, as on one device.

    Weights are those of rank 0 from the beginning. Buffers are nobody's concern, as on one device.

    Raises:
        UnsupportedError: the model is in a `DistributedDataParallel` wrapper, which would average once more.
    """

    name = "replicated"

    def __init__(self) -> None:
        self._order: list[str] = []  # in which averages begin
        self._learned = False  # it is the order in which gradients come
        self._records: dict[str, ParamRecord] = {}
        self._came: dict[str, None] = {}  # names in this backward, in the order of their gradients
        self._begun = 0
        self._early: dict[str, Tensor] = {}  # gradients whose turn has not come
        self._flying: deque[tuple[ParamRecord, Tensor, dist.Work]] = deque()

    def adopt(self, records: Collection[ParamRecord]) -> None:
        with torch.no_grad():
            for record in records:
                dist.broadcast(record.param.detach(), src=0)

    def begin(self, records: Collection[ParamRecord]) -> None:
        self.drop()
        self._records = {record.name: record for record in records if record.handle is not None}
        if set(self._order) != self._records.keys():
            self._order, self._learned = list(reversed(self._records)), False
            _refuse_wrapper(records)  # one that came later than the optimizer

    def reduce(self, record: ParamRecord, grad: Tensor) -> Reduced:
        if record.name in self._came:
            raise StepError(
                f"parameter {record.name!r} got its gradient in two parts within one backward, and the first part is "
                "on its way to the other ranks. Use checkpoint(..., use_reentrant=False)"
            )
        self._came[record.name] = None
        self._early[record.name] = grad
        while self._begun < len(self._order) and self._order[self._begun] in self._early:
            self._fly(self._order[self._begun])
            yield from self._land(_UNDER_WAY)

    def flush(self) -> Reduced:
        found: dict[str, Tensor] = {}
        for name in self._order[self._begun :]:
            if name not in self._came:
                self._early[name] = torch.zeros_like(self._records[name].param)
            self._fly(name)
            yield from self._apart(self._land(_UNDER_WAY), found)
        yield from self._apart(self._land(0), found)
        anywhere = self._came_anywhere()
        for name, grad in found.items():
            if name in anywhere:
                yield self._records[name], grad
        self._learn()

    def drop(self) -> None:
        self._came.clear()
        self._early.clear()
        self._flying.clear()
        self._begun = 0

    def _fly(self, name: str) -> None:
        """Begins the average of the gradient whose turn it is."""
        grad = self._early.pop(name).div_(dist.get_world_size())  # before it is summed: float16 would overflow
        self._begun += 1
        work = dist.all_reduce(flat(grad), async_op=True)
        assert work is not None
        self._flying.append((self._records[name], grad, work))

    def _land(self, under_way: int) -> Reduced:
        """Gives finished averages until so many are left."""
        while len(self._flying) > under_way:
            record, grad, work = self._flying.popleft()
            work.wait()
            yield record, grad

    def _apart(self, landed: Reduced, absent: dict[str, Tensor]) -> Reduced:
        """Keeps back the averages of gradients that this rank has not: they may be nobody's."""
        for record, grad in landed:
            if record.name in self._came:
                yield record, grad
            else:
                absent[record.name] = grad

    def _came_anywhere(self) -> set[str]:
        """The parameters of which some rank has had a gradient."""
        if not self._order:
            return set()
        device = self._records[self._order[0]].param.device
        here = torch.tensor([name in self._came for name in self._order], dtype=torch.int32)
        flags = here.to(device, non_blocking=True)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        if len(self._came) == len(self._order):  # only a rank that misses a gradient has to wait for the answer
            return set(self._order)
        return {name for name, flag in zip(self._order, flags.tolist(), strict=True) if flag}

    def _learn(self) -> None:
        """From the first backward on averages begin in the order in which gradients come on rank 0."""
        if self._learned:
            return
        absent = [name for name in self._order if name not in self._came]
        order = [[*self._came, *absent]]
        dist.broadcast_object_list(order, src=0)
        self._order, self._learned = order[0], True


def _refuse_wrapper(records: Collection[ParamRecord]) -> None:
    own = {record.param for record in records}
    for found in gc.get_objects():
        if type(found) is torch.nn.parallel.DistributedDataParallel and not own.isdisjoint(found.parameters()):
            raise UnsupportedError(
                "the model is inside DistributedDataParallel, whose gradients wait in buckets of their own and would "
                "be averaged twice. Take the wrapper away: ranks average in the hooks of this optimizer"
            )
        if type(found).__name__ == "FSDPParam" and getattr(found, "_unsharded_param", None) in own:
            raise UnsupportedError(
                "the model is sharded by FSDP2, and was still gathered by a forward without a backward when the "
                "optimizer was made. Call reshard() on every FSDPModule in it first"
            )
