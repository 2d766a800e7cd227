"""Checksums of the files of a checkpoint, which prove that they are as they were written."""

import re
from collections.abc import Collection
from pathlib import Path, PurePosixPath

from lowmem.errors import CheckpointError
from lowmem.files import checksum

CHECKSUMS_FILE = "checksums.txt"

_LINE = re.compile(r"([0-9a-f]{32})  (.+)")


def write_checksums(folder: Path) -> None:
    """Writes the checksum of each file in a directory, in the form that `xxh128sum -c checksums.txt` checks."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    lines = [f"{checksum(folder / name)}  {name}\n" for name in names if name != CHECKSUMS_FILE]
    (folder / CHECKSUMS_FILE).write_text("".join(lines), encoding="utf-8")


def check_checksums(folder: Path, unread: Collection[str] = ()) -> None:
    """Checks every file that `checksums.txt` lists, except those in `unread`.

    Raises:
        CheckpointError: a file is missing or has another checksum, or `checksums.txt` itself is missing or damaged.
    """
    path = folder / CHECKSUMS_FILE
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing: {folder} was not written completely, or by another program. Such a folder is a model "
            "to start from, not a checkpoint to resume from"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if not lines:
        raise CheckpointError(f"{path} is damaged: it is empty")
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise CheckpointError(f"{path} is damaged: line {number} is not a checksum and a name")
        expected, name = match.groups()
        file = folder / name
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise CheckpointError(f"{path}: line {number} names {name[:100]!r}, which is outside of the checkpoint")
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        if name not in unread and checksum(file) != expected:
            raise CheckpointError(
                f"{file} is damaged: its checksum is not that in {CHECKSUMS_FILE}. If you changed the file on purpose, "
                f"remove its line from {CHECKSUMS_FILE}"
            )
