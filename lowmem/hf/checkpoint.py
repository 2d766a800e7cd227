"""Checkpoints: a Hugging Face model directory with `optimizer.safetensors`, which is complete or does not exist.

Optimizer states are saved by parameter name, in logical shapes and their own dtype. They are written and read one at a
time, as weights are, so that saving and resuming need no more memory than training.
"""

import functools
import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowmem.errors import CheckpointError
from lowmem.files import begin_safetensors, check_safetensors, read_json, write_tensor
from lowmem.hf.weights import weight_files
from lowmem.optimizer import FusedOptimizer
from lowmem.step.state_dict import Stored

OPTIMIZER_FILE = "optimizer.safetensors"
TRAINER_STATE_FILE = "trainer_state.json"
SCHEDULER_FILE = "scheduler.pt"

_DIRECTORY = re.compile(r"checkpoint-(\d+)")


def save_optimizer(optimizer: FusedOptimizer, path: Path, *, write: bool = True) -> None:
    """Writes what `FusedOptimizer.state_dict` returns as one safetensors file: tensors as `parameter/state`, everything
    else as JSON in its metadata.

    Gathers one state at a time. Where parameters are sharded, every rank calls it; only ranks that `write` touch the
    file.

    Raises:
        CheckpointError: a state or a group has a value that is neither a tensor nor JSON.
        StepError: the step is torn.
    """
    metadata, entries = optimizer._saving.metadata(), list(optimizer._saving.entries())
    values: dict[str, dict[str, Any]] = {}
    tensors: dict[str, Tensor] = {}
    for entry in entries:
        plain = values.setdefault(entry.owner, {})
        if isinstance(entry.value, Tensor):
            tensors[f"{entry.owner}/{entry.name}"] = torch.empty(entry.shape, dtype=entry.value.dtype, device="meta")
        else:
            plain[entry.name] = entry.value
    try:
        text = json.dumps({**metadata, "values": values})
    except TypeError as error:
        raise CheckpointError(
            f"the optimizer cannot be saved: {error}. Give hyperparameters as numbers, strings and lists."
        ) from error
    with path.open("wb") if write else nullcontext() as file:
        offsets = begin_safetensors(file, tensors, {"format": "pt", "lowmem": text}) if file is not None else {}
        for entry in entries:
            if isinstance(entry.value, Tensor):
                tensor = entry.gather()
                if file is not None:
                    write_tensor(file, offsets[f"{entry.owner}/{entry.name}"], tensor)


def load_optimizer(optimizer: FusedOptimizer, path: Path) -> None:
    """Loads what `save_optimizer` wrote.

    Raises:
        CheckpointError: the file is missing, cut short, or belongs to another optimizer or model.
    """
    from safetensors import safe_open

    check_safetensors(path)
    with safe_open(path, framework="pt") as file:
        text = (file.metadata() or {}).get("lowmem")
        if text is None:
            raise CheckpointError(f"{path} was not written by lowmem, so it cannot be resumed from")
        saved = json.loads(text)
        state: dict[str, dict[str, Any]] = saved.pop("values")
        for key in file.keys():  # noqa: SIM118 (not a mapping)
            param, _, name = key.rpartition("/")
            tensor = file.get_tensor(key)
            state[param][name] = Stored(tuple(tensor.shape), tensor.dtype, functools.partial(file.get_tensor, key))
        try:
            optimizer.load_state_dict({**saved, "state": state})
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None


def check_model(folder: Path) -> None:
    """Raises `CheckpointError` unless `folder` has complete weights."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a checkpoint: there is no such directory")
    for path in weight_files(folder):
        check_safetensors(path)


def check_resumable(folder: Path) -> None:
    """Raises `CheckpointError` unless training can be resumed from `folder`: every file is there and complete."""
    check_model(folder)
    if not (folder / OPTIMIZER_FILE).exists():
        raise CheckpointError(f"{folder} has no {OPTIMIZER_FILE}: it has only weights and cannot be resumed from")
    check_safetensors(folder / OPTIMIZER_FILE)
    read_json(folder / TRAINER_STATE_FILE)
    if not (folder / SCHEDULER_FILE).is_file():
        raise CheckpointError(f"{folder / SCHEDULER_FILE} is missing")


def by_number(run_dir: Path) -> list[Path]:
    """The checkpoints in a run directory, complete or not, the oldest first."""
    folders = {int(m[1]): p for p in run_dir.glob("checkpoint-*") if (m := _DIRECTORY.fullmatch(p.name))}
    return [folders[number] for number in sorted(folders)]


def find_last(run_dir: Path, check: Callable[[Path], None] = check_resumable) -> tuple[Path, list[str]]:
    """Returns the checkpoint of the highest step that passes `check`, and why those after it did not pass.

    Raises:
        CheckpointError: none passes.
    """
    damaged = []
    for folder in reversed(by_number(run_dir)):
        try:
            check(folder)
        except CheckpointError as error:
            damaged.append(str(error))
            continue
        return folder, damaged
    reasons = f": {'; '.join(damaged)}" if damaged else ""
    raise CheckpointError(f"there is no complete checkpoint in {run_dir}{reasons}")
