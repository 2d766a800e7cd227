"""Homes, where streamed tensors are stored: host memory, or memory-mapped files."""

import ctypes
import mmap
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from lowmem.errors import ConfigError, UnsupportedError

# Devices that compute in host memory.
WITHOUT_STREAMS = ("cpu", "meta")

# Tensors up to this size stay on the device, because small weights are updated in stacks after their unit is evicted.
RESIDENT = 1 << 14


class Home:
    """Host memory. For a GPU it is pinned. A CPU uses the tensors in place."""

    def __init__(self, device: torch.device) -> None:
        self._pins = device.type not in WITHOUT_STREAMS

    def __str__(self) -> str:
        return "host memory"

    def keep(self, tensor: Tensor) -> Tensor:
        """Copies a tensor into the home."""
        if not self._pins and tensor.device.type == "cpu":
            return tensor.detach()
        return torch.empty_like(tensor, device="cpu", pin_memory=self._pins).copy_(tensor)

    def prefetch(self) -> None:
        """Called before a device that computes in host memory uses the tensors."""

    def release(self) -> None:
        """Called after a device that computes in host memory has used the tensors."""


class FileHome(Home):
    """A file in a folder, in which each tensor starts a page. A CPU uses the tensors in place.

    The file does not have a name, so that nothing else uses it and it is deleted when the process ends.

    Raises:
        ConfigError: the disk does not have enough space.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._end = 0  # of the last tensor in the file
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (is open as long as the home)
        self._maps: list[mmap.mmap] = []
        # glibc returns the memory of freed tensors only on request
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)

    def __str__(self) -> str:
        return str(self._folder)

    def keep(self, tensor: Tensor) -> Tensor:
        try:
            os.posix_fallocate(self._file.fileno(), self._end, tensor.nbytes)
        except OSError as error:
            raise ConfigError(f"home={str(self)!r}: a file cannot grow by {tensor.nbytes:,} bytes: {error}") from error
        mapped = mmap.mmap(self._file.fileno(), tensor.nbytes, offset=self._end)
        self._maps.append(mapped)
        self._end += -(-tensor.nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        strides = torch.empty_like(tensor, device="meta").stride()
        home = torch.frombuffer(mapped, dtype=tensor.dtype).as_strided(tensor.shape, strides).copy_(tensor)
        mapped.madvise(mmap.MADV_DONTNEED)
        return home

    def prefetch(self) -> None:
        for mapped in self._maps:
            mapped.madvise(mmap.MADV_WILLNEED)  # the kernel reads ahead

    def release(self) -> None:
        for mapped in self._maps:
            mapped.madvise(mmap.MADV_DONTNEED)  # modified pages are still written to the file
        self._trim(0)


def require_room(folder: Path, nbytes: int) -> None:
    """Creates a folder for `nbytes` bytes of files, and lets the process open as many files as the system allows.

    Raises:
        ConfigError: its disk does not have enough space.
        UnsupportedError: the operating system is not Linux.
    """
    if sys.platform != "linux":
        raise UnsupportedError(f"home={str(folder)!r}: files need Linux. Use home='host'")
    import resource

    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))  # each layer has two open files
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise ConfigError(
            f"home={str(folder)!r}: the disk has {free:,} bytes left, but the weights of the layers need {nbytes:,}"
        )
