"""Files that appear whole or not at all, and what the system says while they are written."""

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


def cpu() -> str:
    """The processor, as it calls itself."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def version(package: str) -> str | None:
    """Of a package as pip names it; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


_AT_ONCE = 1 << 26  # bytes on their way to a file


def begin(file: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, int]:
    """Begins a file with tensors of these shapes and dtypes, whatever is in them (`meta` ones will do).

    Returns:
        Where each goes in the file, for `put`.
    """
    import safetensors.torch

    # Names of dtypes and the order of tensors are those that safetensors gives to tensors without elements.
    empty = {name: torch.empty(0, dtype=tensor.dtype) for name, tensor in tensors.items()}
    described = json.loads(safetensors.torch.save(empty, metadata=dict(metadata))[8:])
    offsets: dict[str, int] = {}
    end = 0
    for name, entry in described.items():
        if name in tensors:
            offsets[name], end = end, end + tensors[name].nbytes
            entry |= {"shape": list(tensors[name].shape), "data_offsets": [offsets[name], end]}
    text = json.dumps(described, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    return {name: 8 + len(text) + offset for name, offset in offsets.items()}


def put(file: BinaryIO, start: int, tensor: Tensor) -> None:
    """Writes a tensor where it goes."""
    file.seek(start)
    rows = tensor if tensor.ndim else tensor[None]
    for part in rows.split(max(1, _AT_ONCE * len(rows) // max(1, tensor.nbytes))):
        file.write(part.contiguous().view(-1).view(torch.uint8).cpu().numpy())


def check_safetensors(path: Path) -> None:
    """Raises `CheckpointError` unless the file is there and as long as its own header says."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        header = file.read(length) if length < size else b""
    try:
        described = json.loads(header)
        end = max((entry["data_offsets"][1] for name, entry in described.items() if name != "__metadata__"), default=0)
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{path} is damaged: its header cannot be read") from None
    if size != 8 + length + end:
        raise CheckpointError(f"{path} is cut short: {size} bytes of {8 + length + end}")


_FULL = (errno.ENOSPC, errno.EDQUOT)


def write_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; a failure comes out as a `LowmemError` that names the file and the reason."""
    aside = path.with_name(f".{path.name}.tmp")
    with writing(path):
        try:
            aside.write_bytes(content)
            aside.replace(path)
        finally:
            with contextlib.suppress(OSError):
                aside.unlink()


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the system says while `path` is written into a `LowmemError` with the way out."""
    try:
        yield
    except OSError as error:
        way_out = " Free some space there, or set run_dir to another disk." if error.errno in _FULL else ""
        reason = (error.strerror or str(error)).lower()
        raise LowmemError(f"{path}: can't be written: {reason}.{way_out}") from error


def read_json(path: Path) -> Any:
    """What a JSON file of a checkpoint holds; raises `CheckpointError` if it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
