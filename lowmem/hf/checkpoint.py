"""Checkpoints: a Hugging Face model directory beside `optimizer.safetensors`, whole or not there at all.

States are kept by parameter name in logical shapes and their own dtype. They are written and read one by one, as
weights are, so that saving and resuming need no more memory than training.
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
from lowmem.files import begin, check_safetensors, put, read_json
from lowmem.hf.weights import weight_files
from lowmem.optimizer import FusedOptimizer
from lowmem.step.state_dict import Stored

OPTIMIZER_FILE = "optimizer.safetensors"
TRAINER_STATE_FILE = "trainer_state.json"
SCHEDULER_FILE = "scheduler.pt"

_FOLDER = re.compile(r"checkpoint-(\d+)")


def save_optimizer(optimizer: FusedOptimizer, path: Path, *, write: bool = True) -> None:
    """Writes what `FusedOptimizer.state_dict` gives as one safetensors file: tensors as `parameter/state`, the rest as
    JSON in its metadata.

    One state is whole at a time, so that saving needs no more memory than training. Where ranks share parameters every
    rank calls it, and those that are not to `write` touch no file.

    Raises:
        CheckpointError: a state or a group holds something that is neither a tensor nor JSON.
        StepError: the step is torn.
    """
    described, entries = optimizer.described(), list(optimizer.entries())
    values: dict[str, dict[str, Any]] = {}
    tensors: dict[str, Tensor] = {}
    for entry in entries:
        plain = values.setdefault(entry.of, {})
        if isinstance(entry.value, Tensor):
            tensors[f"{entry.of}/{entry.name}"] = torch.empty(entry.shape, dtype=entry.value.dtype, device="meta")
        else:
            plain[entry.name] = entry.value
    try:
        metadata = json.dumps({**described, "values": values})
    except TypeError as error:
        raise CheckpointError(
            f"the optimizer cannot be saved: {error}. Give hyperparameters as numbers, strings and lists."
        ) from error
    with path.open("wb") if write else nullcontext() as file:
        starts = begin(file, tensors, {"format": "pt", "lowmem": metadata}) if file is not None else {}
        for entry in entries:
            if isinstance(entry.value, Tensor):
                whole = entry.whole()
                if file is not None:
                    put(file, starts[f"{entry.of}/{entry.name}"], whole)


def load_optimizer(optimizer: FusedOptimizer, path: Path) -> None:
    """Continues from what `save_optimizer` wrote.

    Raises:
        CheckpointError: the file is missing, cut short, or of another optimizer or model.
    """
    from safetensors import safe_open

    check_safetensors(path)
    with safe_open(path, framework="pt") as file:
        described = (file.metadata() or {}).get("lowmem")
        if described is None:
            raise CheckpointError(f"{path} was not written by lowmem, so it cannot be resumed from")
        whole = json.loads(described)
        state: dict[str, dict[str, Any]] = whole.pop("values")
        for key in file.keys():  # noqa: SIM118 (no mapping)
            name, _, kept = key.rpartition("/")
            tensor = file.get_tensor(key)
            state[name][kept] = Stored(tuple(tensor.shape), tensor.dtype, functools.partial(file.get_tensor, key))
        try:
            optimizer.load_state_dict({**whole, "state": state})
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None


def check_model(folder: Path) -> None:
    """Raises `CheckpointError` unless `folder` holds weights that are whole."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no checkpoint: there is no such folder")
    for path in weight_files(folder):
        check_safetensors(path)


def check_resumable(folder: Path) -> None:
    """Raises `CheckpointError` unless training can be resumed from `folder`: every part is there and whole."""
    check_model(folder)
    if not (folder / OPTIMIZER_FILE).exists():
        raise CheckpointError(f"{folder} has no {OPTIMIZER_FILE}: it holds weights only and cannot be resumed from")
    check_safetensors(folder / OPTIMIZER_FILE)
    read_json(folder / TRAINER_STATE_FILE)
    if not (folder / SCHEDULER_FILE).is_file():
        raise CheckpointError(f"{folder / SCHEDULER_FILE} is missing")


def by_number(run_dir: Path) -> list[Path]:
    """The checkpoints in a run folder, the oldest first, whole or not."""
    folders = {int(m[1]): p for p in run_dir.glob("checkpoint-*") if (m := _FOLDER.fullmatch(p.name))}
    return [folders[number] for number in sorted(folders)]


def find_last(run_dir: Path, check: Callable[[Path], None] = check_resumable) -> tuple[Path, list[str]]:
    """The newest checkpoint, by number, that `check` lets pass, and what is wrong with those passed over.

    Raises:
        CheckpointError: there is none.
    """
    damaged = []
    for folder in reversed(by_number(run_dir)):
        try:
            check(folder)
        except CheckpointError as error:
            damaged.append(str(error))
            continue
        return folder, damaged
    found = f": {'; '.join(damaged)}" if damaged else ""
    raise CheckpointError(f"there is no whole checkpoint in {run_dir}{found}")
