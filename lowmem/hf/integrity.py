"""Detects damaged checkpoints before anything is loaded: checksums of all files, and the values that training computes
with. Nothing is unpickled but tensors and plain values.
"""

import os
import re
from dataclasses import fields
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError
from transformers import TrainerState
from transformers.trainer_pt_utils import safe_globals

from lowmem.errors import CheckpointError
from lowmem.files import checksum, read_json

CHECKSUMS_FILE = "checksums.txt"

_LINE = re.compile(r"([0-9a-f]{32})  (.+)")


def write_checksums(folder: Path) -> None:
    """Writes the checksum of each file in a directory, in the form that `xxh128sum -c checksums.txt` checks."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    lines = [f"{checksum(folder / name)}  {name}\n" for name in names if name != CHECKSUMS_FILE]
    (folder / CHECKSUMS_FILE).write_text("".join(lines), encoding="utf-8")


def check_checksums(folder: Path) -> None:
    """Raises `CheckpointError` unless every file that `checksums.txt` lists is there and has its checksum."""
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
        if checksum(file) != expected:
            raise CheckpointError(
                f"{file} is damaged: its checksum is not that in {CHECKSUMS_FILE}. If you changed the file on purpose, "
                f"remove its line from {CHECKSUMS_FILE}"
            )


def check_links(folder: Path) -> None:
    """Raises `CheckpointError` if a symbolic link leads out of the directory, or to nothing."""
    home = folder.resolve()
    for path in folder.rglob("*"):
        inside = Path(os.path.realpath(path)).is_relative_to(home) and path.exists()
        if path.is_symlink() and not inside:
            raise CheckpointError(f"{path} is a link out of the checkpoint, or to nothing; put the file itself there")


def read_torch(path: Path) -> dict[str, Any]:
    """Reads a file of `torch.save` with tensors and plain values. Raises `CheckpointError` if it is anything else."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    try:
        with safe_globals():  # of NumPy, for the state of its generator
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # whatever the bytes lead the unpickler to
        raise CheckpointError(f"{path} is damaged: it is not a file of tensors and plain values") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged: it is not a mapping")
    return content


class Checked(BaseModel):
    """A JSON file whose values have the declared types."""

    model_config = ConfigDict(strict=True, frozen=True)

    @classmethod
    def read(cls, path: Path) -> Any:
        """Raises `CheckpointError` if the file is missing or damaged, or a value has another type."""
        try:
            return cls.model_validate(read_json(path))
        except ValidationError as error:
            problem = error.errors()[0]
            name = ".".join(map(str, problem["loc"]))
            raise CheckpointError(f"{path} is damaged: {name[:100]}: {problem['msg'].lower()[:100]}") from None


class _State(Checked):
    """The values of transformers' `TrainerState` that training computes with."""

    model_config = ConfigDict(extra="allow")

    global_step: NonNegativeInt
    log_history: list[dict[str, Any]]
    stateful_callbacks: dict[str, Any]
    epoch: float = 0
    train_batch_size: int | None = None
    num_input_tokens_seen: int = 0
    total_flos: float = 0
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None


def check_trainer_state(path: Path, step: int | None) -> None:
    """Raises `CheckpointError` unless the file is the state of a trainer, after so many steps if that is known."""
    state = _State.read(path)
    if unknown := read_json(path).keys() - {field.name for field in fields(TrainerState)}:
        raise CheckpointError(f"{path} is damaged: transformers has no {min(unknown)[:100]!r} in a trainer's state")
    if step is not None and state.global_step != step:
        raise CheckpointError(f"{path} is of step {state.global_step}, and its folder is named after step {step}")


class Progress(Checked):
    """Sums of losses that a trainer has not logged yet, which transformers does not save."""

    loss_sums: Annotated[list[float], Field(min_length=1)]
    """Of each rank, since the last step that was logged."""
    total_loss: float
    """Of all steps that were logged."""
    logged_step: NonNegativeInt
