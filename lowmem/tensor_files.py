"""Safetensors files, written one tensor at a time, so that not all of them have to be there at once."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from lowmem.errors import CheckpointError

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
