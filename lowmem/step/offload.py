"""Gradient offload: where policy `deferred` stores gradients until their step is decided."""

import functools
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowmem.errors import ConfigError
from lowmem.options import FusedConfig
from lowmem.step.record import ParamRecord
from lowmem.tiles.gradients import Gradient

# Makes the stream that asked for a copy wait for its end; the host continues.
Wait = Callable[[], object]

# Gradients in a file start at multiples of this many bytes: a page, so that no two share one.
_PAGE = 4096


class GradientStore:
    """Stores one gradient per parameter between the backwards of a step, and returns each once: here on the device of
    the parameter, without a copy.

    Elsewhere a separate stream copies gradients while the device computes, and copies the next one back while one is
    applied: at most two are on the device. One that is computed as it is read is stored as it is.
    """

    def __init__(self) -> None:
        self._stored: dict[str, Gradient] = {}
        self._streams: dict[torch.device, Any] = {}
        self._leaving: tuple[Tensor, Wait] | None = None  # the gradient whose copy may be in flight

    def _buffer(self, name: str, grad: Tensor) -> Tensor:
        """Where a gradient is stored."""
        return grad

    def get(self, record: ParamRecord) -> Gradient | None:
        """Returns the stored gradient on the parameter's device, or None. What is added to it in place counts once it
        is stored again.
        """
        if record.name not in self._stored:
            return None
        grad, wait = self._fetch(record)
        wait()
        return grad

    def keep(self, record: ParamRecord, grad: Gradient) -> None:
        """Stores `grad` in place of what was stored. The caller must not use it afterwards."""
        if self._stored.get(record.name) is grad:
            return
        if not isinstance(grad, Tensor) or (buffer := self._buffer(record.name, grad)) is grad:
            self._stored[record.name] = grad
            return
        self._stored[record.name] = buffer
        wait = self._copy(buffer, grad)
        self._wait()
        if grad.device.type != "cpu":
            self._leaving = grad, wait

    def drain(self, records: Iterable[ParamRecord]) -> Iterator[tuple[ParamRecord, Gradient]]:
        """Yields what is stored, in the order of `records`, and forgets it on the way."""
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
        """Forgets everything."""
        self._stored.clear()
        self._wait()

    def _wait(self) -> None:
        """Frees the gradient whose copy is in flight, once that has ended."""
        if self._leaving is not None:
            self._leaving[1]()
            self._leaving = None

    def _fetch(self, record: ParamRecord) -> tuple[Gradient, Wait]:
        stored = self._stored[record.name]
        if not isinstance(stored, Tensor) or stored.device == record.param.device:
            return stored, lambda: None
        grad = torch.empty_like(stored, device=record.param.device, pin_memory=False)
        return grad, self._copy(grad, stored)

    def _copy(self, into: Tensor, source: Tensor) -> Wait:
        """Copies while the device computes."""
        device = into.device if source.device.type == "cpu" else source.device
        if device.type in ("cpu", "meta"):  # there are no streams, so the copy has ended
            into.copy_(source)
            return lambda: None
        module = torch.get_device_module(device)
        if device not in self._streams:
            self._streams[device] = module.Stream(device)
        copying, computing = self._streams[device], module.current_stream(device)
        copying.wait_stream(computing)
        with module.stream(copying):
            into.copy_(source, non_blocking=True)
            return functools.partial(computing.wait_event, copying.record_event())


class Host(GradientStore):
    """Gradients are in pinned memory of the host."""

    def __init__(self) -> None:
        super().__init__()
        self._room: dict[str, Tensor] = {}  # bytes, used again in the next step

    def _buffer(self, name: str, grad: Tensor) -> Tensor:
        if name not in self._room or self._room[name].numel() < grad.nbytes:  # added later, or wider
            self._make_room({name: grad.nbytes}, pinned=grad.device.type != "cpu")
        return self._room[name][: grad.nbytes].view(grad.dtype).as_strided(grad.shape, grad.stride())

    def _make_room(self, needed: Mapping[str, int], pinned: bool) -> None:
        """Finds so many bytes for each name."""
        self._room |= {name: torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for name, size in needed.items()}


class Disk(Host):
    """Gradients are in a memory-mapped file that has no name once it is open, and so never outlives the process.

    Args:
        folder: where the file is created; None for the system's directory of temporary files. `ConfigError` is raised
            if it does not exist, or has no room.
        records: every parameter that may get a gradient.
        in_float32: whether micro-batches are summed in float32, and not in the dtype of the gradient.
    """

    def __init__(self, folder: str | None, records: Mapping[Tensor, ParamRecord], in_float32: bool) -> None:
        super().__init__()
        self._folder, least = folder, 4 if in_float32 else 0
        self._make_room({r.name: r.span.held * max(r.param.element_size(), least) for r in records.values()}, False)

    def _make_room(self, needed: Mapping[str, int], pinned: bool) -> None:
        sizes = {name: -(-size // _PAGE) * _PAGE for name, size in needed.items()}
        total = sum(sizes.values())
        try:
            with tempfile.NamedTemporaryFile(dir=self._folder, prefix="gradients-") as file:
                os.posix_fallocate(file.fileno(), 0, max(total, _PAGE))
                mapped = torch.from_file(file.name, shared=True, size=max(total, _PAGE), dtype=torch.uint8)
        except OSError as error:
            raise ConfigError(
                f"store='disk' needs {total:,} bytes in {Path(self._folder or tempfile.gettempdir())}: "
                f"{error.strerror}. Set store_dir to a directory with room."
            ) from error
        self._room |= dict(zip(sizes, mapped[:total].split(list(sizes.values())), strict=True))


def make_store(config: FusedConfig, records: Mapping[Tensor, ParamRecord]) -> GradientStore:
    """The store that `config` asks for. On a CPU `host` and `device` are the same memory, and nothing is copied."""
    if config.store == "disk":
        return Disk(config.store_dir, records, config.accumulation_dtype == "float32")
    on_cpu = all(record.param.device.type == "cpu" for record in records.values())
    return GradientStore() if config.store == "device" or on_cpu else Host()
