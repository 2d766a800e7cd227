"""Checkpoints: a Hugging Face model directory with `optimizer.safetensors`, which is complete or does not exist.

`publish` writes checksums of all files, waits for the disk, and gives the directory its name. `check_resumable` finds
what has been damaged since. Optimizer states are saved by parameter name, in logical shapes and their own dtype. They
are written and read one at a time, as weights are, so that saving and resuming need no more memory than training.
"""

import functools
import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from lowmem.errors import CheckpointError
from lowmem.files import begin_safetensors, check_safetensors, flush, flush_tree, write_tensor
from lowmem.hf import integrity
from lowmem.hf.integrity import CHECKSUMS_FILE, Progress
from lowmem.hf.weights import weight_files
from lowmem.optimizer import FusedOptimizer
from lowmem.step.saving import TensorSource

OPTIMIZER_FILE = "optimizer.safetensors"
TRAINER_STATE_FILE = "trainer_state.json"
SCHEDULER_FILE = "scheduler.pt"
PROGRESS_FILE = "progress.json"

# Directories in a run directory: a checkpoint that is being written, one that another of its name is replacing, and
# one that is being removed. A run that is killed leaves them behind.
STAGING = ".saving"
_REPLACED = ".replaced"
_REMOVED = ".removed"

_DIRECTORY = re.compile(r"checkpoint-(\d+)")

# Of how many damaged checkpoints a message gives the reason.
_REASONS = 3


def save_optimizer(optimizer: FusedOptimizer, path: Path, *, write: bool = True) -> None:
    """Writes what `FusedOptimizer.named_state_dict` returns as one safetensors file: tensors as `parameter/state`,
    everything else as JSON in its metadata.

    Gathers one state at a time. Where parameters are sharded, every rank calls it; only ranks that `write` touch the
    file.

    Raises:
        CheckpointError: a state or a group has a value that is neither a tensor nor JSON.
        StepError: the step is torn.
    """
    saved = optimizer.named_state_dict(lazy=True)
    values: dict[str, dict[str, Any]] = {}
    sources: dict[str, TensorSource] = {}
    for owner, state in saved.pop("state").items():
        values[owner] = {name: value for name, value in state.items() if not isinstance(value, TensorSource)}
        sources |= {f"{owner}/{name}": value for name, value in state.items() if isinstance(value, TensorSource)}
    try:
        text = json.dumps({**saved, "values": values})
    except TypeError as error:
        raise CheckpointError(
            f"the optimizer cannot be saved: {error}. Give hyperparameters as numbers, strings and lists."
        ) from error
    tensors = {key: torch.empty(source.shape, dtype=source.dtype, device="meta") for key, source in sources.items()}
    with path.open("wb") if write else nullcontext() as file:
        offsets = begin_safetensors(file, tensors, {"format": "pt", "lowmem": text}) if file is not None else {}
        for key, source in sources.items():
            tensor = source.read()
            if file is not None:
                write_tensor(file, offsets[key], tensor)


def load_optimizer(optimizer: FusedOptimizer, path: Path) -> None:
    """Loads what `save_optimizer` wrote.

    Raises:
        CheckpointError: the file is missing, cut short, or belongs to another optimizer or model.
    """
    saved = _metadata(path)
    with safe_open(path, framework="pt") as file:
        state: dict[str, dict[str, Any]] = saved.pop("values")
        for key in file.keys():  # noqa: SIM118 (not a mapping)
            param, _, name = key.rpartition("/")
            tensor = file.get_tensor(key)
            read = functools.partial(file.get_tensor, key)
            state[param][name] = TensorSource(tuple(tensor.shape), tensor.dtype, read)
        try:
            optimizer.load_named_state_dict({**saved, "state": state})
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None


def _metadata(path: Path) -> dict[str, Any]:
    """The contents of an optimizer file that are not tensors.

    Raises:
        CheckpointError: the file is missing, cut short, or was not written by `save_optimizer`.
    """
    check_safetensors(path)
    with safe_open(path, framework="pt") as file:
        text = (file.metadata() or {}).get("lowmem")
        names = list(file.keys())
    if text is None:
        raise CheckpointError(f"{path} was not written by lowmem, so it cannot be resumed from")
    try:
        saved = json.loads(text)
        owners = {name for name, values in saved["values"].items() if isinstance(values, dict)}
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        raise CheckpointError(f"{path} is damaged: its metadata is not that of an optimizer") from None
    if odd := {name.rpartition("/")[0] for name in names} - owners:
        raise CheckpointError(f"{path} is damaged: its metadata does not list {min(odd)[:100]!r}")
    return dict(saved)


def load_scheduler(scheduler: Any, path: Path) -> None:
    """Loads the state of a learning rate schedule.

    Raises:
        CheckpointError: the file is missing, damaged, or of another schedule.
    """
    saved, own = integrity.read_torch(path), scheduler.state_dict()
    odd = saved.keys() ^ own.keys() or {name for name in own if not _alike(saved[name], own[name])}
    if odd:
        raise CheckpointError(f"{path} is damaged or of another schedule: see {min(map(str, odd))[:100]!r}")
    try:
        scheduler.load_state_dict(saved)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged or of another schedule: {error}") from error


def _alike(saved: Any, own: Any) -> bool:
    """Returns whether both are numbers, or lists of as many; nothing else of a schedule is computed with."""
    if isinstance(own, list | tuple):
        return isinstance(saved, list | tuple) and len(saved) == len(own) and all(map(_alike, saved, own))
    return not isinstance(own, int | float) or isinstance(saved, int | float)


def check_model(folder: Path) -> None:
    """Raises `CheckpointError` unless `folder` has complete weights, and its files their checksums if it has those."""
    _check_weights(folder)
    if (folder / CHECKSUMS_FILE).exists():
        integrity.check_checksums(folder)


def _check_weights(folder: Path) -> None:
    if not folder.is_dir():
        raise CheckpointError(f"Can't find a valid checkpoint at {folder}: there is no such directory")
    for path in weight_files(folder):
        check_safetensors(path)


def check_resumable(folder: Path) -> None:
    """Raises `CheckpointError` unless training can be resumed from `folder`: each file is there, as it was written."""
    _check_weights(folder)
    if not (folder / OPTIMIZER_FILE).exists():
        raise CheckpointError(f"{folder} has no {OPTIMIZER_FILE}: it has only weights and cannot be resumed from")
    _metadata(folder / OPTIMIZER_FILE)
    named = _DIRECTORY.fullmatch(folder.name)
    integrity.check_trainer_state(folder / TRAINER_STATE_FILE, int(named[1]) if named else None)
    integrity.read_torch(folder / SCHEDULER_FILE)
    ranks = len(Progress.read(folder / PROGRESS_FILE).loss_sums)
    for name in ["rng_state.pth"] if ranks == 1 else [f"rng_state_{rank}.pth" for rank in range(ranks)]:
        integrity.read_torch(folder / name)
    integrity.check_links(folder)
    integrity.check_checksums(folder)


def publish(staged: Path, folder: Path) -> None:
    """Gives a checkpoint that is written its name, once the disk has all of it.

    A checkpoint that has the name already stays complete until the new one has it, and `find_last` finds it.
    """
    integrity.write_checksums(staged)
    flush_tree(staged)
    replaced = folder.parent / _REPLACED / folder.name
    replaces = os.path.lexists(folder)
    if replaces:  # saved by the run that was resumed from an earlier step
        if replaced.parent.is_symlink():
            remove(replaced.parent)
        remove(replaced)
        replaced.parent.mkdir(exist_ok=True)
        folder.rename(replaced)
    try:
        staged.rename(folder)
    except OSError:
        if replaces:
            replaced.rename(folder)
        raise
    flush(folder.parent)
    remove(replaced.parent)


def rotate(run_dir: Path, step: int, limit: int | None, best: str | None) -> None:
    """Removes the oldest checkpoints but `limit`, never that of this step nor the best one.

    Those of later steps are older: the run was resumed from before them.
    """
    removed = run_dir / _REMOVED
    remove(removed)  # of a run that was killed here
    if limit is None or limit <= 0:
        return
    folders = by_number(run_dir)
    kept = {Path(path).resolve() for path in (run_dir / f"checkpoint-{step}", best) if path}
    later = [folder for folder in folders if _number(folder) > step]
    oldest = [folder for folder in later + folders[: len(folders) - len(later)] if folder.resolve() not in kept]
    for folder in oldest[: max(0, len(folders) - max(limit, len(folders) - len(oldest)))]:
        removed.mkdir(exist_ok=True)
        folder.rename(removed / folder.name)  # at once, so that no half of it looks like a checkpoint
        remove(removed)


def tidy(run_dir: Path) -> None:
    """Removes what a killed run has left of checkpoints that it was writing or removing."""
    for name in (STAGING, _REMOVED):
        remove(run_dir / name)


def remove(folder: Path) -> None:
    """Removes a directory, or a symbolic link and nothing of where it leads, as far as that is possible."""
    if folder.is_symlink():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def candidates(run_dir: Path) -> list[Path]:
    """The checkpoints in a run directory, complete or not, the newest first. One that was being replaced when the run
    was killed is among them.
    """
    found = {path.name: path for home in (run_dir / _REPLACED, run_dir) for path in by_number(home)}
    return sorted(found.values(), key=_number, reverse=True)


def _number(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def by_number(run_dir: Path) -> list[Path]:
    """The checkpoints in a run directory, complete or not, the oldest first."""
    return sorted((path for path in run_dir.glob("checkpoint-*") if _DIRECTORY.fullmatch(path.name)), key=_number)


def find_last(run_dir: Path, check: Callable[[Path], None] = check_resumable) -> tuple[Path, list[str]]:
    """Returns the checkpoint of the highest step that passes `check`, and why those after it did not pass.

    Raises:
        CheckpointError: none passes.
    """
    damaged = []
    for folder in candidates(run_dir):
        try:
            check(folder)
        except CheckpointError as error:
            damaged.append(str(error))
            continue
        return folder, damaged
    more = [f"and {len(damaged) - _REASONS} more"] if len(damaged) > _REASONS else []
    reasons = f": {'; '.join(damaged[:_REASONS] + more)}" if damaged else ""
    raise CheckpointError(f"No valid checkpoint found in output directory ({run_dir}){reasons}")
