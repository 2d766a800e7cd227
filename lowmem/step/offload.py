"""Gradient offload: where policy `deferred` stores gradients until their step is decided."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowmem.placements.base import Placed
from lowmem.step.record import ParamRecord
from lowmem.tiles.stored import flat

# Makes the current stream, and the stream that launched a copy, wait for its end; the host continues.
Wait = Callable[[], None]

# Devices that copy while the host waits. A plan has a GPU's tensors on "meta".
_WITHOUT_STREAMS = ("cpu", "meta")


class Offloaded(NamedTuple):
    """A gradient on the host: its shape, its bytes in several pieces of memory, and the copy that writes them."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    pieces: Sequence[Tensor]
    written: Wait


class GradientStore:
    """Stores one gradient per parameter until its step is decided, on the device or on the host.

    Separate streams copy gradients to the host, and back again, while the device computes. With `host`, at most two
    gradients are on the device besides the one that backward computes: the next one is fetched while the previous one
    is applied or added to. Gradients on the host are in pinned memory. torch rounds its sizes up to powers of two, so
    each gradient is divided into a few pieces of such sizes.

    Args:
        host: store gradients on the host rather than on the device.
    """

    def __init__(self, *, host: bool) -> None:
        self.host = host
        self._room: dict[str, Sequence[Tensor]] = {}  # memory on the host, reused in the next step
        self._stored: dict[str, Tensor | Offloaded] = {}
        self._streams: dict[tuple[torch.device, bool], Any] = {}
        self._leaving: tuple[Tensor, Wait] | None = None  # the gradient whose copy may be in flight
        self._coming: tuple[str, Tensor, Wait] | None = None  # prefetched, as it came next in the last backward
        self._following: dict[str, Placed] = {}  # by name, the parameter whose gradient came next
        self._latest = ""
        self._least = 0

    def __del__(self) -> None:
        self._wait()  # the memory must not be reused while a copy reads it

    def _pieces(self, name: str, grad: Tensor) -> Sequence[Tensor]:
        """Returns memory on the host for a gradient."""
        size = grad.numel() * max(grad.element_size(), self._least)
        if sum(map(len, self._room.get(name, ()))) < size:  # a new parameter, or a wider dtype
            self._room.pop(name, None)
            pinned = grad.device.type not in _WITHOUT_STREAMS
            sizes = powers_of_two(size) if pinned else [size]
            self._room[name] = [torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned) for size in sizes]
        return self._room[name]

    def begin(self, least: int) -> None:
        """Called before a backward. least: the minimum number of bytes per element, if wider gradients will follow."""
        self._wait()
        self._latest, self._least = "", least

    def get(self, record: Placed) -> Tensor | None:
        """Returns the stored gradient on the parameter's device, or None. In-place changes have to be stored again."""
        if record.name not in self._stored:
            return None
        if self._coming is not None and self._coming[0] == record.name:
            (_, grad, wait), self._coming = self._coming, None
        else:
            grad, wait = self._fetch(record)
        wait()
        return grad

    def keep(self, record: Placed, grad: Tensor) -> None:
        """Stores a gradient in place of an earlier one. The caller must not use it afterwards."""
        if self._stored.get(record.name) is grad:
            return
        if not self.host or not grad.numel():
            self._stored[record.name] = grad
            return
        pieces = self._pieces(record.name, grad)
        if grad.device.type in _WITHOUT_STREAMS:
            stored = pieces[0][: grad.nbytes].view(grad.dtype).as_strided(grad.shape, grad.stride())
            self._stored[record.name] = stored.copy_(grad)
            return
        self._wait()  # also for a gradient that was prefetched from this memory and not used
        written = self._copy(_parts(grad, pieces), grad.device, outward=True)
        self._stored[record.name] = Offloaded(grad.shape, grad.stride(), grad.dtype, pieces, written)
        self._leaving = grad, written
        self._following[self._latest], self._latest = record, record.name
        following = self._following.get(record.name)
        if following is not None and following.name in self._stored:
            self._coming = following.name, *self._fetch(following)

    def drain(self, records: Iterable[ParamRecord]) -> Iterator[tuple[ParamRecord, Tensor]]:
        """Yields the stored gradients in the order of `records`, and removes each from the store."""
        self._wait()
        waiting = [record for record in records if record.name in self._stored]
        fetched = map(self._fetch, waiting)
        coming = next(fetched, None)
        try:
            for record in waiting:
                assert coming is not None
                grad, wait = coming  # the one before is free
                coming = next(fetched, None)
                wait()
                self._stored.pop(record.name, None)
                yield record, grad
        finally:
            if coming is not None:  # no longer needed, but it is still being written
                coming[1]()

    def clear(self) -> None:
        """Removes all gradients."""
        self._stored.clear()
        self._wait()

    def _wait(self) -> None:
        """Waits for the copies in flight, and frees their gradients on the device."""
        if self._leaving is not None:
            self._leaving[1]()
        if self._coming is not None:
            self._coming[2]()
        self._leaving = self._coming = None

    def _fetch(self, record: Placed) -> tuple[Tensor, Wait]:
        stored, device = self._stored[record.name], record.param.device
        if not isinstance(stored, Offloaded):
            return stored.to(device), lambda: None
        stored.written()  # perhaps launched by another stream
        grad = torch.empty_strided(stored.shape, stored.stride, dtype=stored.dtype, device=device)
        parts = ((part, piece) for piece, part in _parts(grad, stored.pieces))
        return grad, self._copy(parts, device, outward=False)

    def _copy(self, pairs: Iterable[tuple[Tensor, Tensor]], device: torch.device, *, outward: bool) -> Wait:
        """Copies the second tensor of each pair into the first while the device computes."""
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
    """Yields each piece of memory with the bytes of `grad` that belong there."""
    data = flat(grad).view(torch.uint8)
    for piece in pieces:
        yield piece[: len(data)], data[: len(piece)]
        data = data[len(piece) :]


def powers_of_two(size: int) -> list[int]:
    """Returns at most eight powers of two in descending order. Their sum is `size`, or up to 1 % more."""
    unit = 1 << max(0, size.bit_length() - 8)
    units = -(-size // unit)
    return [unit << bit for bit in reversed(range(units.bit_length())) if units >> bit & 1]
