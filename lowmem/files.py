"""Files that are complete or do not exist, and safetensors files written tensor by tensor."""

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

# Bytes to copy to the host at a time when writing a tensor, and to read from a file before mapping it again.
_CHUNK_BYTES = 1 << 26
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# Errors of file systems that cannot fsync directories.
_NO_FLUSH = (errno.EINVAL, errno.ENOTSUP)


def write_safetensors(
    files: Mapping[Path, Mapping[str, Tensor]], tensors: Iterable[tuple[str, Tensor]], metadata: Mapping[str, str]
) -> None:
    """Writes safetensors files one tensor at a time. safetensors 0.8 (torch.py, save_file) needs all of them at once.

    Args:
        files: for each file, its tensors by name, which may be on `meta`: only shapes and dtypes are read. A process
            that does not write passes none, and takes part in the collectives that `tensors` needs.
        tensors: the name and the values of each tensor, in any order.
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
            del tensor  # before the next one is gathered


def _write_header(file: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, int]:
    """Writes the header of a safetensors file. Returns the offset of each tensor."""
    # safetensors orders tensors and names dtypes; without elements, their shapes and offsets are to be filled in
    empty = {name: torch.empty(0, dtype=tensor.dtype) for name, tensor in tensors.items()}
    header = json.loads(safetensors.torch.save(empty, metadata=dict(metadata))[8:])
    offsets: dict[str, int] = {}
    end = 0
    for name, entry in header.items():
        if name in tensors:
            offsets[name], end = end, end + tensors[name].nbytes
            entry |= {"shape": list(tensors[name].shape), "data_offsets": [offsets[name], end]}
    header["__metadata__"] = dict(metadata)  # safetensors 0.8 writes it in an order that changes from call to call
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
    """An open safetensors file with the methods of `safetensors.safe_open`, whose tensors are views of the mapped file.

    Pages that are read stay resident while a file is mapped, so it is mapped again after every `_CHUNK_BYTES`.

    Raises:
        CheckpointError: the file is missing, or does not have the length that its header implies.
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
    """The checksum of a file that `xxh128sum` prints."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def write_file(path: Path, content: bytes) -> None:
    """Writes a file atomically, even if the machine crashes. Raises `LowmemError` with the file and the reason."""
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
    windows = sys.platform == "win32"  # flushes no directories, and only files that are open for writing
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
    """Flushes a directory and everything in it to disk."""
    for path in (*folder.rglob("*"), folder):
        flush(path)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Converts an `OSError` that is raised while `path` is written into a `LowmemError` with advice."""
    try:
        yield
    except OSError as error:
        advice = " Free some space there, or set output_dir to another disk." if error.errno in _DISK_FULL else ""
        reason = (error.strerror or str(error)).lower()
        raise LowmemError(f"{path}: cannot be written: {reason}.{advice}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON file of a checkpoint. Raises `CheckpointError` if it is missing, damaged, or not a mapping."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {str(error)[:100]}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged: it is not a mapping")
    return content
