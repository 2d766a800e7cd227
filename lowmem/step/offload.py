"""The gradient store, in which policy `deferred` stores gradients until all gradients of the step are known."""

import functools
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowmem.placements.base import ParamEntry
from lowmem.step.record import ParamRecord
from lowmem.step.room import HEADROOM, free_memory
from lowmem.tiles.stored import flat, separate

logger = logging.getLogger(__name__)

# Devices whose copies block the host. In a plan, the tensors of a GPU are on "meta".
_WITHOUT_STREAMS = ("cpu", "meta")

# Maximum number of copies in flight per direction: while one runs, the next one is launched.
_IN_FLIGHT = 2

# Makes the current stream and the stream that launched a copy wait for the copy. The host does not wait.
Wait = Callable[[], None]


class OffloadedGradient(NamedTuple):
    """A gradient on the host: its bytes in several pieces, and functions that wait for their copy and that allocate a
    tensor like it on its device.
    """

    pieces: Sequence[Tensor]
    written: Wait
    empty_like: Callable[[], Tensor]


class GradientStore:
    """Stores one gradient per parameter until all gradients of the step are known: on its device while the budget
    lasts, then on the host.

    Without a budget, the store measures the free memory when the first gradient of a backward arrives, and leaves a
    reserve. In the last micro-batch, it measures again when the limit is reached, because backward has freed
    activations by then. Earlier micro-batches leave room for the activations of the next one. Ranks may decide
    differently, because the order of updates does not depend on where gradients are stored. If an allocation of the
    store fails, all gradients are offloaded from then on.

    Separate streams copy gradients to the host and back while the device computes, at most two at a time in each
    direction. Gradients on the host are in pinned memory. torch rounds the sizes of pinned memory up to powers of two,
    so each gradient is divided into a few pieces of such sizes.

    Args:
        budget: maximum bytes of gradients on each device: 0 offloads all gradients; None uses the free memory.
    """

    def __init__(self, budget: float | None) -> None:
        self._budget = budget
        self._limits: dict[torch.device, float] = {}  # budget of each device in this backward
        self._least: dict[torch.device, float] = {}  # the smallest budget of all backwards
        self._bytes = Counter[torch.device]()  # bytes of gradients
        self._buffers: dict[ParamEntry, Sequence[Tensor]] = {}  # memory on the host, reused in the next step
        self._here: dict[ParamEntry, Tensor] = {}  # gradients on their devices
        self._offloaded: dict[ParamEntry, OffloadedGradient] = {}
        self._streams: dict[tuple[torch.device, bool], Any] = {}
        self._outgoing: deque[tuple[Tensor, Wait]] = deque()  # gradients whose copies may be in flight
        self._incoming: dict[ParamEntry, tuple[Tensor, Wait]] = {}  # prefetched
        self._following: dict[ParamEntry | None, ParamEntry] = {}  # the next one in the last backward
        self._latest: ParamEntry | None = None  # in this backward
        self._last, self._width = True, 0

    def __del__(self) -> None:
        self._wait()  # the memory must not be reused while a copy reads it

    def begin(self, *, last: bool = True, width: int = 0) -> None:
        """Called before a backward.

        Args:
            last: whether its gradients complete the step.
            width: the minimum number of bytes per element, if wider gradients will follow.
        """
        self._wait()
        self._limits.clear()
        self._latest, self._last, self._width = None, last, width

    def __contains__(self, record: ParamEntry) -> bool:
        return record in self._here or record in self._offloaded

    def get(self, record: ParamEntry, *, wide: bool = False) -> Tensor:
        """Returns a stored gradient on its device. If it is changed in place, store it again. wide: whether to convert
        it to float32, unless its dtype is wider.
        """
        if record in self._here:
            grad = self._here[record]
        else:
            grad, wait = self._incoming.pop(record) if record in self._incoming else self._fetch(record)
            wait()
        return self._allocate(lambda: grad.to(torch.promote_types(grad.dtype, torch.float32))) if wide else grad

    def keep(self, record: ParamEntry, grad: Tensor) -> None:
        """Stores a gradient, and replaces an earlier one. The caller must not use the gradient afterwards."""
        self._remove(record)
        if self._fits(grad.device, grad.nbytes):
            self._here[record] = self._allocate(lambda: separate(grad))
            self._bytes[grad.device] += grad.nbytes
        else:
            self._offload(record, grad)
        self._following[self._latest], self._latest = record, record
        for _ in range(_IN_FLIGHT):
            following = self._following.get(record)
            if following is None:
                break
            record = following
            if record in self._offloaded and record not in self._incoming and len(self._incoming) < _IN_FLIGHT:
                self._incoming[record] = self._fetch(record)

    def drain(self, records: Iterable[ParamRecord]) -> Iterator[tuple[ParamRecord, Tensor]]:
        """Yields the stored gradients in the order of `records`, and removes each from the store."""
        self._wait()
        waiting = [record for record in records if record in self]
        offloaded = filter(self._offloaded.__contains__, waiting)
        try:
            for record in waiting:
                for following in islice(offloaded, _IN_FLIGHT - len(self._incoming)):
                    self._incoming[following] = self._fetch(following)
                grad = self.get(record)
                self._remove(record)
                yield record, grad
                del grad  # frees its memory for the next one
        finally:
            self._wait()  # copies that are no longer needed may still be writing

    def clear(self) -> None:
        """Removes all gradients."""
        self._here.clear()
        self._offloaded.clear()
        self._bytes.clear()
        self._wait()

    def _remove(self, record: ParamEntry) -> None:
        self._offloaded.pop(record, None)
        if (grad := self._here.pop(record, None)) is not None:
            self._bytes[grad.device] -= grad.nbytes
        if record in self._incoming:  # it is not needed, but its copy still reads the memory
            self._incoming[record][1]()
            del self._incoming[record]

    # -- where a gradient is ---------------------------------------------------------------------------------------

    def _fits(self, device: torch.device, size: int) -> bool:
        """Returns whether a gradient stays on its device."""
        if not size:
            return True
        needed = self._bytes[device] + size
        if self._budget is not None:
            return needed <= self._budget
        if device not in self._limits:
            free = self._free(device)
            self._least[device] = min(self._least.get(device, free), free)
            self._limits[device] = free if self._last else self._least[device]
        elif needed > self._limits[device] and self._last:
            self._limits[device] = self._free(device)
        return needed <= self._limits[device]

    def _free(self, device: torch.device) -> float:
        """Returns the number of bytes of gradients that currently fit on the device."""
        if device.type in _WITHOUT_STREAMS:
            return math.inf if device.type == "cpu" else 0
        free, total = free_memory(device)
        room = max(0, self._bytes[device] + free - int(total * HEADROOM))
        if device not in self._least:
            logger.info(
                'store="auto": %.1f GiB are free on %s when the first gradient is ready. Up to %.1f GiB will hold '
                "gradients, and %.1f GiB stay free. Other gradients are offloaded to the host",
                free / 2**30, device, room / 2**30, total * HEADROOM / 2**30,
            )  # fmt: skip
        return room

    def _allocate(self, make: Callable[[], Tensor]) -> Tensor:
        """Calls a function that allocates device memory. If memory runs out, offloads all gradients and calls again."""
        try:
            return make()
        except torch.OutOfMemoryError:
            if not (self._here or self._incoming):
                raise
            logger.warning("the device is out of memory, so all gradients are offloaded to the host from now on")
        self._budget = 0
        self._bytes.clear()
        while self._here:
            self._offload(*self._here.popitem())
        self._wait()
        return make()

    # -- copies ----------------------------------------------------------------------------------------------------

    def _offload(self, record: ParamEntry, grad: Tensor) -> None:
        """Copies a gradient to the host."""
        while len(self._outgoing) >= _IN_FLIGHT:
            self._outgoing[0][1]()
            self._outgoing.popleft()  # no longer read
        pieces = self._pieces(record, grad)
        written = self._copy(grad, pieces, outward=True)
        empty_like = functools.partial(
            torch.empty_strided, grad.shape, grad.stride(), dtype=grad.dtype, device=grad.device
        )
        self._offloaded[record] = OffloadedGradient(pieces, written, empty_like)
        self._outgoing.append((grad, written))

    def _fetch(self, record: ParamEntry) -> tuple[Tensor, Wait]:
        """Copies a gradient to its device."""
        stored = self._offloaded[record]
        stored.written()  # another stream may have launched the copy
        grad = self._allocate(stored.empty_like)
        return grad, self._copy(grad, stored.pieces, outward=False)

    def _pieces(self, record: ParamEntry, grad: Tensor) -> Sequence[Tensor]:
        """Returns host memory for a gradient, in pieces."""
        size = grad.numel() * max(grad.element_size(), self._width)
        if sum(map(len, self._buffers.get(record, ()))) < size:  # a new parameter, or a wider dtype
            self._buffers.pop(record, None)
            pinned = grad.device.type not in _WITHOUT_STREAMS
            sizes = powers_of_two(size) if pinned else [size]
            self._buffers[record] = [torch.empty(n, dtype=torch.uint8, device="cpu", pin_memory=pinned) for n in sizes]
        return self._buffers[record]

    def _wait(self) -> None:
        """Waits for the copies in flight, and frees their gradients on the device."""
        for _, wait in (*self._outgoing, *self._incoming.values()):
            wait()
        self._outgoing.clear()
        self._incoming.clear()

    def _copy(self, grad: Tensor, pieces: Sequence[Tensor], *, outward: bool) -> Wait:
        """Copies a gradient to the host, or if not `outward`, from the host, while the device computes."""
        device, parts = grad.device, _parts(grad, pieces)
        pairs = parts if outward else ((part, piece) for piece, part in parts)
        if device.type in _WITHOUT_STREAMS:
            for into, source in pairs:
                into.copy_(source)
            return lambda: None
        module = torch.get_device_module(device)
        if (device, outward) not in self._streams:
            self._streams[device, outward] = module.Stream(device)
        launching, copying = module.current_stream(device), self._streams[device, outward]
        copying.wait_stream(launching)
        with module.stream(copying):
            for into, source in pairs:
                into.copy_(source, non_blocking=True)
            end = copying.record_event()

        def wait() -> None:
            for stream in (launching, module.current_stream(device)):  # FSDP2 runs hooks on its own stream
                stream.wait_event(end)

        return wait


def _parts(grad: Tensor, pieces: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields each piece of memory with the bytes of `grad` that it stores."""
    data = flat(grad).view(torch.uint8)
    for piece in pieces:
        yield piece[: len(data)], data[: len(piece)]
        data = data[len(piece) :]


def powers_of_two(size: int) -> list[int]:
    """Returns at most eight powers of two in descending order. Their sum is `size`, or up to 1 % more."""
    unit = 1 << max(0, size.bit_length() - 8)
    units = -(-size // unit)
    return [unit << bit for bit in reversed(range(units.bit_length())) if units >> bit & 1]
