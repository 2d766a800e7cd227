"""Checkpoints: a Hugging Face model directory beside `optimizer.safetensors`, whole or not there at all.

States are kept by parameter name in logical shapes and their own dtype. Weights and states are read tensor by tensor,
so that resuming needs no more memory than training.
"""

import json
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lowmem.errors import CheckpointError
from lowmem.optimizer import FusedOptimizer

OPTIMIZER_FILE = "optimizer.safetensors"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TRAINER_STATE_FILE = "trainer_state.json"
SCHEDULER_FILE = "scheduler.pt"

_FOLDER = re.compile(r"checkpoint-(\d+)")


def save_optimizer(optimizer: FusedOptimizer, path: Path) -> None:
    """Writes what `FusedOptimizer.state_dict` gives as one safetensors file: tensors as `parameter/state`, the rest as
    JSON in its metadata.

    Raises:
        CheckpointError: a state or a group holds something that is neither a tensor nor JSON.
        StepError: the step is torn.
    """
    from safetensors.torch import save_file

    whole = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for name, kept in whole.pop("state").items():
        values[name] = {key: value for key, value in kept.items() if not isinstance(value, Tensor)}
        tensors |= {f"{name}/{key}": t.contiguous() for key, t in kept.items() if isinstance(t, Tensor)}
    _unshare(tensors)
    try:
        metadata = json.dumps({**whole, "values": values})
    except TypeError as error:
        raise CheckpointError(
            f"the optimizer cannot be saved: {error}. Give hyperparameters as numbers, strings and lists."
        ) from error
    save_file(tensors, path, metadata={"format": "pt", "lowmem": metadata})


def _unshare(tensors: dict[str, Tensor]) -> None:
    """Copies tensors that lie in the memory of another, as one table that bitsandbytes keeps for all parameters."""
    met: set[int] = set()
    for key, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        if memory in met:
            tensors[key] = tensor.clone()
        met.add(memory)


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
            state[name][kept] = file.get_tensor(key)
    try:
        optimizer.load_state_dict({**whole, "state": state})
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def load_weights(model: nn.Module, folder: Path) -> None:
    """Copies the weights of a checkpoint into a model, one tensor at a time.

    Expert models are laid out differently in files than in memory: those are read through transformers, which holds
    them once on the host, in float32.

    Raises:
        CheckpointError: the weights are missing or cut short, or their names or shapes are not this model's.
    """
    own = dict(model.state_dict(keep_vars=True))
    files = _weight_files(folder)
    for path in files:
        check_safetensors(path)
    strange = [name for path in files for name in _names(path) if name not in own]
    if strange and isinstance(from_pretrained := getattr(model, "from_pretrained", None), MethodType):
        # float32 holds every half-precision weight exactly, whatever dtypes the file mixes
        saved = iter(from_pretrained(folder, dtype=torch.float32).state_dict().items())
    elif strange:
        raise CheckpointError(f"{folder}: the model has no weight {strange[0]!r}; the checkpoint is of another model")
    else:
        saved = (pair for path in files for pair in _tensors(path))
    unseen = {id(tensor): name for name, tensor in own.items()}
    with torch.no_grad():
        for name, tensor in saved:
            if own[name].shape != tensor.shape:
                raise CheckpointError(
                    f"{folder}: weight {name!r} has shape {list(tensor.shape)} in the checkpoint and "
                    f"{list(own[name].shape)} in the model; the checkpoint is of another model"
                )
            own[name].copy_(tensor)
            unseen.pop(id(own[name]), None)
    if unseen:
        raise CheckpointError(f"{folder}: {len(unseen)} weights are missing, such as {next(iter(unseen.values()))!r}")


def _names(path: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (no mapping)
            yield name, file.get_tensor(name)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if not index.exists():
        return [folder / WEIGHTS_FILE]
    return [folder / name for name in sorted(set(_read_json(index)["weight_map"].values()))]


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


def check_model(folder: Path) -> None:
    """Raises `CheckpointError` unless `folder` holds weights that are whole."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no checkpoint: there is no such folder")
    for path in _weight_files(folder):
        check_safetensors(path)


def check_resumable(folder: Path) -> None:
    """Raises `CheckpointError` unless training can be resumed from `folder`: every part is there and whole."""
    check_model(folder)
    if not (folder / OPTIMIZER_FILE).exists():
        raise CheckpointError(f"{folder} has no {OPTIMIZER_FILE}: it holds weights only and cannot be resumed from")
    check_safetensors(folder / OPTIMIZER_FILE)
    _read_json(folder / TRAINER_STATE_FILE)
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


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
