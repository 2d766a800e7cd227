"""Checksums of the files in a directory, in `checksums.txt`, which has the format of `xxh128sum`."""

import re
from collections.abc import Collection
from pathlib import Path, PurePosixPath

from lowmem.errors import CheckpointError
from lowmem.files import checksum

FILE = "checksums.txt"

_LINE = re.compile(r"([0-9a-f]{32})  (.+)")


def write(folder: Path) -> None:
    """Writes the checksums of all files in a directory, in the format of `xxh128sum -c checksums.txt`."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    lines = [f"{checksum(folder / name)}  {name}\n" for name in names if name != FILE]
    (folder / FILE).write_text("".join(lines), encoding="utf-8")


def check(folder: Path, unread: Collection[str] = ()) -> None:
    """Checks every file that `checksums.txt` lists, except those in `unread`. Raises `CheckpointError` if a file, or
    `checksums.txt` itself, is missing or damaged.
    """
    for name, expected in read(folder).items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        if name not in unread and checksum(file) != expected:
            raise CheckpointError(
                f"{file} is damaged: its checksum differs from the one in {FILE}. If you changed the file on "
                f"purpose, remove its line from {FILE}"
            )


def read(folder: Path) -> dict[str, str]:
    """Reads `checksums.txt`: file name → checksum. Raises `CheckpointError` if it is missing or damaged."""
    path = folder / FILE
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing: {folder} is incomplete or was written by another program. You can load it as a model, "
            "but training cannot resume from it"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if not lines:
        raise CheckpointError(f"{path} is damaged: it is empty")
    listed = {}
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise CheckpointError(f"{path} is damaged: line {number} is not a checksum and a name")
        expected, name = match.groups()
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise CheckpointError(f"{path}: line {number} names {name[:100]!r}, which is outside the checkpoint")
        listed[name] = expected
    return listed
