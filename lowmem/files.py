"""Files that are complete or do not exist, safetensors files written tensor by tensor, and versions of this machine."""

import contextlib
import errno
import json
import platform
import re
import struct
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lowmem.errors import CheckpointError, LowmemError

# Bytes that are copied to the host at a time while a tensor is written.
_CHUNK_BYTES = 1 << 26
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def cpu() -> str:
    """The name of the processor."""
    info = Path("/proc/cpuinfo")
    name = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return name[1] if name else platform.processor() or platform.machine()


def version(package: str) -> str | None:
    """The installed version of a package as pip names it, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def begin_safetensors(file: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, int]:
    """Writes the header of a safetensors file for tensors of these shapes and dtypes, which may be on `meta`.

    safetensors 0.8 (torch.py, save_file) writes tensors only all at once.

    Returns:
        The offset in the file of each tensor, for `write_tensor`.
    """
    import safetensors.torch

    # safetensors orders tensors and names dtypes; without elements, their shapes and offsets are to be filled in
    empty = {name: torch.empty(0, dtype=tensor.dtype) for name, tensor in tensors.items()}
    header = json.loads(safetensors.torch.save(empty, metadata=dict(metadata))[8:])
    offsets: dict[str, int] = {}
    end = 0
    for name, entry in header.items():
        if name in tensors:
            offsets[name], end = end, end + tensors[name].nbytes
            entry |= {"shape": list(tensors[name].shape), "data_offsets": [offsets[name], end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    return {name: 8 + len(text) + offset for name, offset in offsets.items()}


def write_tensor(file: BinaryIO, offset: int, tensor: Tensor) -> None:
    """Writes the elements of a tensor at an offset that `begin_safetensors` returned."""
    file.seek(offset)
    rows = tensor if tensor.ndim else tensor[None]
    for chunk in rows.split(max(1, _CHUNK_BYTES * len(rows) // max(1, tensor.nbytes))):
        file.write(chunk.contiguous().view(-1).view(torch.uint8).cpu().numpy())


def check_safetensors(path: Path) -> None:
    """Raises `CheckpointError` unless the file exists and has the length that its header implies."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        text = file.read(length) if length < size else b""
    try:
        header = json.loads(text)
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{path} is damaged: its header cannot be read") from None
    if size != 8 + length + end:
        raise CheckpointError(f"{path} is cut short: {size} bytes of {8 + length + end}")


def write_file(path: Path, content: bytes) -> None:
    """Writes a complete file or none. Raises `LowmemError`, which names the file and the reason."""
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path):
        try:
            temporary.write_bytes(content)
            temporary.replace(path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Converts an `OSError` that is raised while `path` is written into a `LowmemError` with advice."""
    try:
        yield
    except OSError as error:
        advice = " Free some space there, or set run_dir to another disk." if error.errno in _DISK_FULL else ""
        reason = (error.strerror or str(error)).lower()
        raise LowmemError(f"{path}: can't be written: {reason}.{advice}") from error


def read_json(path: Path) -> Any:
    """Reads a JSON file of a checkpoint. Raises `CheckpointError` if it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
