"""Where gradients wait until their step is decided: the gradient store of policy `deferred`."""

import functools
import os
import tempfile
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowmem.errors import ConfigError
from lowmem.placements.record import ParamRecord

STORES = ("host", "device", "disk")
ACCUMULATION_DTYPES = ("float32", "gradient")

# Gradients whose copy to the host may still be under way; the one before them is waited for.
_UNDER_WAY = 1

# Lets what computes next on the stream that asked for a copy wait for its end; the host goes on.
Wait = Callable[[], object]

# Bytes that each gradient in a file begins at a multiple of: a page, so that no two share one.
_PAGE = 4096


class GradientStore(ABC):
    """Keeps a gradient a parameter between the backwards of a step, and hands each back once."""

    @abstractmethod
    def get(self, record: ParamRecord) -> Tensor | None:
        """What is kept of a parameter, where the parameter is; None if nothing is."""

    @abstractmethod
    def keep(self, record: ParamRecord, grad: Tensor) -> None:
        """Keeps `grad`, in place of what was kept. The store owns it from here on."""

    @abstractmethod
    def drain(self, records: Iterable[ParamRecord]) -> Iterator[tuple[ParamRecord, Tensor]]:
        """Hands back what is kept, in the order of `records`, and forgets it as it goes."""

    @abstractmethod
    def clear(self) -> None:
        """Forgets everything that is kept."""


class Resident(GradientStore):
    """Gradients stay where their parameters are: nothing is copied."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def get(self, record: ParamRecord) -> Tensor | None:
        return self._kept.get(record.name)

    def keep(self, record: ParamRecord, grad: Tensor) -> None:
        self._kept[record.name] = grad

    def drain(self, records: Iterable[ParamRecord]) -> Iterator[tuple[ParamRecord, Tensor]]:
        for record in records:
            if record.name in self._kept:
                yield record, self._kept.pop(record.name)

    def clear(self) -> None:
        self._kept.clear()


class Host(GradientStore):
    """Gradients wait in page-locked memory of the host. A stream of its own copies them while the device computes, and
    copies the next one back while one is applied: at most two are on the device.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}  # stay for the next step
        self._kept: set[str] = set()
        self._streams: dict[torch.device, Any] = {}
        self._leaving: deque[tuple[Tensor, Wait]] = deque()

    def get(self, record: ParamRecord) -> Tensor | None:
        if record.name not in self._kept:
            return None
        grad, wait = self._fetch(record)
        wait()
        return grad

    def keep(self, record: ParamRecord, grad: Tensor) -> None:
        buffer = self._buffers.get(record.name)
        if buffer is None or (buffer.dtype, buffer.stride()) != (grad.dtype, grad.stride()):
            buffer = torch.empty_like(grad, device="cpu", pin_memory=grad.device.type != "cpu")
            self._buffers[record.name] = buffer
        self._kept.add(record.name)
        self._leaving.append((grad, self._copy(buffer, grad)))
        self._let_go(_UNDER_WAY)

    def drain(self, records: Iterable[ParamRecord]) -> Iterator[tuple[ParamRecord, Tensor]]:
        self._let_go(0)
        waiting = [record for record in records if record.name in self._kept]
        coming = self._fetch(waiting[0]) if waiting else None
        try:
            for n, record in enumerate(waiting):
                assert coming is not None
                grad, wait = coming
                coming = self._fetch(waiting[n + 1]) if n + 1 < len(waiting) else None
                wait()
                self._kept.discard(record.name)
                yield record, grad
        finally:
            if coming is not None:  # nobody wants it any more, but it is still being written
                coming[1]()

    def clear(self) -> None:
        self._kept.clear()
        self._let_go(0)

    def _let_go(self, under_way: int) -> None:
        """Frees gradients on the device, but for so many, once they have been copied."""
        while len(self._leaving) > under_way:
            _, wait = self._leaving.popleft()
            wait()

    def _fetch(self, record: ParamRecord) -> tuple[Tensor, Wait]:
        grad = torch.empty_like(self._buffers[record.name], device=record.param.device, pin_memory=False)
        return grad, self._copy(grad, self._buffers[record.name])

    def _copy(self, into: Tensor, source: Tensor) -> Wait:
        """Copies beside what the device computes."""
        device = into.device if source.device.type == "cpu" else source.device
        if device.type in ("cpu", "meta"):  # no streams: it has ended
            into.copy_(source)
            return lambda: None
        module = torch.get_device_module(device)
        if device not in self._streams:
            self._streams[device] = module.Stream(device)
        beside, asking = self._streams[device], module.current_stream(device)
        beside.wait_stream(asking)
        with module.stream(beside):
            into.copy_(source, non_blocking=True)
            return functools.partial(asking.wait_event, beside.record_event())


class Disk(GradientStore):
    """Gradients wait in a memory-mapped file, which has no name any more once it is open and so never outlives the run.

    Args:
        folder: where the file is made; None for the system's folder of temporary files.
        records: every parameter that may come.
        sums: the dtype in which micro-batches are summed; None for the gradient's own.

    Raises:
        ConfigError: the folder is not there, or has no room.
    """

    def __init__(self, folder: str | None, records: Mapping[Tensor, ParamRecord], sums: torch.dtype | None) -> None:
        self._folder = folder
        self._room: dict[str, Tensor] = {}  # bytes of the file
        self._kept: dict[str, Tensor] = {}
        wide = 0 if sums is None else sums.itemsize
        self._make_room({s.name: s.span.held * max(s.param.element_size(), wide) for s in records.values()})

    def _make_room(self, needed: Mapping[str, int]) -> None:
        """Makes a file with so many bytes for each."""
        sizes = {name: -(-size // _PAGE) * _PAGE for name, size in needed.items()}
        total = sum(sizes.values())
        try:
            with tempfile.NamedTemporaryFile(dir=self._folder, prefix="gradients-") as file:
                os.posix_fallocate(file.fileno(), 0, max(total, _PAGE))
                mapped = torch.from_file(file.name, shared=True, size=max(total, _PAGE), dtype=torch.uint8)
        except OSError as error:
            raise ConfigError(
                f"store='disk' needs {total:,} bytes in {Path(self._folder or tempfile.gettempdir())}: "
                f"{error.strerror}. Set store_dir to a folder with room."
            ) from error
        self._room |= dict(zip(sizes, mapped[:total].split(list(sizes.values())), strict=True))

    def get(self, record: ParamRecord) -> Tensor | None:
        kept = self._kept.get(record.name)
        return None if kept is None else kept.to(record.param.device)

    def keep(self, record: ParamRecord, grad: Tensor) -> None:
        kept = self._kept.get(record.name)
        if kept is None or kept.dtype != grad.dtype:
            if record.name not in self._room or self._room[record.name].numel() < grad.nbytes:  # added later, or wider
                self._make_room({record.name: grad.nbytes})
            raw = self._room[record.name][: grad.nbytes].view(grad.dtype)
            kept = self._kept[record.name] = raw.as_strided(grad.shape, grad.stride())
        if kept.data_ptr() != grad.data_ptr():
            kept.copy_(grad)

    def drain(self, records: Iterable[ParamRecord]) -> Iterator[tuple[ParamRecord, Tensor]]:
        for record in records:
            if record.name in self._kept:
                yield record, self._kept.pop(record.name).to(record.param.device)

    def clear(self) -> None:
        self._kept.clear()


def make(
    kind: str, folder: str | None, records: Mapping[Tensor, ParamRecord], sums: torch.dtype | None
) -> GradientStore:
    """The store asked for. On a CPU `host` and `device` are the same memory, and nothing is copied."""
    if kind == "disk":
        return Disk(folder, records, sums)
    on_cpu = all(record.param.device.type == "cpu" for record in records.values())
    return Resident() if kind == "device" or on_cpu else Host()
