"""Files that appear whole or not at all, and what the system says while they are written."""

import contextlib
import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lowmem.errors import CheckpointError, LowmemError

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
