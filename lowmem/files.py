"""Writes files atomically, and safetensors files one tensor at a time."""

import contextlib
import errno
import json
import os
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
import torch
import xxhash
from torch import Tensor

from lowmem.errors import CheckpointError, LowmemError

# Number of bytes to copy to the host at a time when writing a tensor, and to read from a file before remapping it.
_CHUNK_BYTES = 1 << 26
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# Errors from file systems that cannot fsync directories.
_NO_FLUSH = (errno.EINVAL, errno.ENOTSUP)


def write_safetensors(
    files: Mapping[Path, Mapping[str, Tensor]], tensors: Iterable[tuple[str, Tensor]], metadata: Mapping[str, str]
) -> None:
    """Writes safetensors files one tensor at a time. safetensors 0.8 (torch.py, save_file) needs all of them at once.

    Args:
        files: the tensors of each file, by name. Only shapes and dtypes are read, so they may be on `meta`. A process
            that does not write passes no files, but takes part in the collectives of `tensors`.
        tensors: (name, values) of each tensor, in any order.
        metadata: the metadata of each file.
    """
    with contextlib.ExitStack() as stack:
        places: dict[str, tuple[BinaryIO, int]] = {}
        for path, shapes in files.items():
            file = stack.enter_context(path.open("wb"))
            places |= {name: (file, offset) for name, offset in _write_header(file, shapes, metadata).items()}
        for name, tensor in tensors:
            if places:
                _write_tensor(*places[name], tensor)
            del tensor  # before the next tensor is gathered


def _write_header(file: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, int]:
    """Writes the header of a safetensors file, and returns the offset of each tensor."""
    # safetensors determines the order and the dtype names, given empty tensors; shapes and offsets are filled in below
    empty = {name: torch.empty(0, dtype=tensor.dtype) for name, tensor in tensors.items()}
    header = json.loads(safetensors.torch.save(empty, metadata=dict(metadata))[8:])
    offsets: dict[str, int] = {}
    end = 0
    for name, entry in header.items():
        if name in tensors:
            offsets[name], end = end, end + tensors[name].nbytes
            entry |= {"shape": list(tensors[name].shape), "data_offsets": [offsets[name], end]}
    header["__metadata__"] = dict(metadata)  # safetensors 0.8 writes it in a different order in each call
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    return {name: 8 + len(text) + offset for name, offset in offsets.items()}


def _write_tensor(file: BinaryIO, offset: int, tensor: Tensor) -> None:
    file.seek(offset)
    rows = tensor if tensor.ndim else tensor[None]
    for chunk in rows.split(max(1, _CHUNK_BYTES * len(rows) // max(1, tensor.nbytes))):
        file.write(chunk.contiguous().view(-1).view(torch.uint8).cpu().numpy())


class SafetensorsFile:
    """An open safetensors file, with the methods of `safetensors.safe_open`. Its tensors are views of the mapped file.

    Pages that are read stay resident while a file is mapped, so the file is remapped after every `_CHUNK_BYTES`.

    Raises:
        CheckpointError: the file is missing, or its length differs from the length in its header.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        self._path = path
        self._map()

    def _map(self) -> None:
        try:
            self._file, self._read = safetensors.safe_open(self._path, framework="pt"), 0
        except (OSError, safetensors.SafetensorError) as error:
            raise CheckpointError(f"{self._path} is damaged or truncated: {error}") from None

    def get_tensor(self, name: str) -> Tensor:
        if self._read > _CHUNK_BYTES:
            self._map()
        tensor: Tensor = self._file.get_tensor(name)
        self._read += tensor.nbytes
        return tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def checksum(path: Path) -> str:
    """Returns the checksum of a file as `xxh128sum` prints it."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def write_file(path: Path, content: bytes) -> None:
    """Writes a file atomically, even if the machine crashes. Raises `LowmemError` if the file cannot be written."""
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path):
        try:
            temporary.write_bytes(content)
            flush(temporary)
            temporary.replace(path)
            flush(path.parent)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()


def flush(path: Path) -> None:
    """Flushes a file or directory to disk."""
    windows = sys.platform == "win32"  # Windows can flush only files that are open for writing, and no directories
    if windows and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (path.is_dir() and error.errno in _NO_FLUSH):
            raise
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    """Flushes a directory and all of its contents to disk."""
    for path in (*folder.rglob("*"), folder):
        flush(path)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Converts an `OSError` that is raised while writing `path` to a `LowmemError` with advice."""
    try:
        yield
    except OSError as error:
        advice = " Free some space there, or set output_dir to another disk." if error.errno in _DISK_FULL else ""
        reason = (error.strerror or str(error)).lower()
        raise LowmemError(f"{path}: cannot be written: {reason}.{advice}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON file of a checkpoint. Raises `CheckpointError` if the file is missing, damaged or not a mapping."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {str(error)[:100]}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged: it is not a mapping")
    return content
