"""Checkpoints: Hugging Face model directories with `optimizer.safetensors`. Each is complete or does not exist.

`saving` writes to a staging directory, adds checksums, flushes all files to the disk, and renames the directory.
`to_resume` verifies the checksums on rank 0; the functions that load a checkpoint do not verify them again. Optimizer
states are saved by parameter name, in logical shapes and dtypes. Like weights, they are written and read one at a time,
so that saving and resuming do not need more memory than training.
"""

import functools
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from safetensors import SafetensorError
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME

from lowmem.errors import CheckpointError
from lowmem.files import SafetensorsFile, flush, flush_tree, write_safetensors
from lowmem.hf import checksums
from lowmem.optimizer import FusedOptimizer
from lowmem.placements import in_group
from lowmem.step.saving import TensorSource

logger = logging.getLogger(__name__)

OPTIMIZER_FILE = "optimizer.safetensors"
TRAINER_STATE_FILE = "trainer_state.json"
SCHEDULER_FILE = "scheduler.pt"

# Directories of a run with the checkpoint that is being written or replaced. A killed run leaves them behind.
STAGING = ".saving"
_REPLACED = ".replaced"

# Keys of a configuration that describe its file rather than the model.
_VOLATILE = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}

_DIRECTORY = re.compile(r"checkpoint-(\d+)")
_WEIGHTS = re.compile(r"(model(-\d+-of-\d+)?|adapter_model)\.safetensors(\.index\.json)?")

# RuntimeErrors of torch.save about a file. Devices and other ranks also raise RuntimeError.
_FILE_ERROR = re.compile("inline_container|iostream|Parent|opened")


def save_optimizer(optimizer: FusedOptimizer, path: Path, *, write: bool = True) -> None:
    """Writes the `named_state_dict` to a safetensors file: tensors as `parameter/state`, the rest as JSON metadata.

    Gathers one state at a time. If parameters are sharded, every rank calls it, and only ranks with `write` write.

    Raises:
        TypeError: a state or a group has a value that is neither a tensor nor JSON.
        StepError: the step is torn.
    """
    saved = optimizer.named_state_dict(lazy=True)
    values: dict[str, dict[str, Any]] = {}
    sources: dict[str, TensorSource] = {}
    for owner, state in saved.pop("state").items():
        values[owner] = {name: value for name, value in state.items() if not isinstance(value, TensorSource)}
        sources |= {f"{owner}/{name}": value for name, value in state.items() if isinstance(value, TensorSource)}
    metadata = {"format": "pt", "lowmem": json.dumps({**saved, "values": values})}
    shapes = {key: torch.empty(source.shape, dtype=source.dtype, device="meta") for key, source in sources.items()}
    tensors = ((key, source.read()) for key, source in sources.items())
    write_safetensors({path: shapes} if write else {}, tensors, metadata)


def load_optimizer(optimizer: FusedOptimizer, path: Path) -> None:
    """Loads a file that `save_optimizer` wrote. Raises `CheckpointError` if it is missing, truncated, or from another
    model or optimizer.
    """
    file = SafetensorsFile(path)
    text = (file.metadata() or {}).get("lowmem")
    if text is None:
        raise CheckpointError(f"{path} was not written by lowmem, so training cannot resume from it")
    saved = json.loads(text)
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


def load_scheduler(scheduler: Any, path: Path) -> None:
    """Loads the state of a learning rate schedule. Raises `CheckpointError` if it belongs to another schedule."""
    saved = torch.load(path, map_location="cpu", weights_only=True)
    if odd := saved.keys() ^ scheduler.state_dict().keys():
        raise CheckpointError(f"{path} belongs to another schedule ({min(odd)!r} differs). Restore lr_scheduler_type")
    scheduler.load_state_dict(saved)


def check_configuration(model: Any, folder: Path) -> None:
    """Raises `CheckpointError` if the configurations of a model and of a checkpoint differ."""
    if not (folder / CONFIG_NAME).exists() or not hasattr(model, "config"):
        return
    # as JSON, which converts tuples to lists
    configs = (model.config, type(model.config).from_pretrained(folder))
    now, saved = (json.loads(config.to_json_string()) for config in configs)
    for name in sorted((now.keys() | saved.keys()) - _VOLATILE):
        if now.get(name) != saved.get(name):
            raise CheckpointError(
                f"{folder} belongs to another model: {name} is {saved.get(name)} in its {CONFIG_NAME} and "
                f"{now.get(name)} in this model. Restore it, or start a new run from these weights"
            )


def check_resumable(folder: Path) -> None:
    """Raises `CheckpointError` if `folder` does not contain optimizer states, or a checksum does not match."""
    if not folder.is_dir():
        raise CheckpointError(f"Can't find a valid checkpoint at {folder}: no such directory")
    if not (folder / OPTIMIZER_FILE).exists():
        raise CheckpointError(
            f"{folder} does not contain {OPTIMIZER_FILE}. It contains only weights, so training cannot resume from it"
        )
    checksums.check(folder)


def to_resume(requested: str | bool | None, run_dir: Path) -> Path | None:
    """Returns the checkpoint to resume from: the requested one or, for `True`, the last intact one in `run_dir`. Every
    rank calls it, and rank 0 verifies the checkpoint. If it is missing or damaged, all ranks raise `CheckpointError`.
    """
    verdict: list[str | None] = [None, None]
    if requested and not (in_group() and dist.get_rank()):
        try:
            if requested is True:
                folder, damaged = find_last(run_dir)
                for reason in damaged:
                    logger.warning("skipped a damaged checkpoint: %s", reason)
            else:
                check_resumable(folder := Path(requested))
            verdict[0] = str(folder)
        except (CheckpointError, OSError) as error:
            verdict[1] = str(error)
    if in_group():
        dist.broadcast_object_list(verdict)
    path, problem = verdict
    if problem is not None:
        raise CheckpointError(problem)
    return None if path is None else Path(path)


@contextmanager
def saving(run_dir: Path, name: str | None = None) -> Iterator[Path]:
    """A context in which every rank saves to the directory that it yields. At its end, rank 0 renames the directory to
    the checkpoint `name` in `run_dir`. Without a name, its files are the final model, and rank 0 moves them to
    `run_dir`. Raises `CheckpointError` if a file cannot be written. Earlier checkpoints stay complete.
    """
    state = PartialState()
    staged = run_dir / STAGING / (name or "model")
    try:
        if state.is_main_process:
            remove(staged.parent)
        state.wait_for_everyone()
        yield staged
        state.wait_for_everyone()
        if state.is_main_process and name is None:
            publish_model(staged, run_dir)
        elif state.is_main_process:
            _supersede(run_dir, _step(staged))
            publish(staged, run_dir / str(name))
    except (OSError, RuntimeError, SafetensorError) as error:
        if isinstance(error, RuntimeError) and not _FILE_ERROR.search(str(error)):
            raise
        unsaved = f"{run_dir}: the final model" if name is None else run_dir / name
        raise CheckpointError(
            f"{unsaved} could not be written: {error}. Free some space or set another output_dir, and resume the run"
        ) from error
    finally:
        if state.is_main_process:
            remove(staged.parent)


def publish(staged: Path, folder: Path) -> None:
    """Flushes a complete checkpoint to the disk and renames it to `folder`. If a checkpoint with this name exists,
    because the run was resumed from an earlier step, it stays complete and can be found until it has been replaced.
    """
    checksums.write(staged)
    flush_tree(staged)
    replaced = folder.parent / _REPLACED / folder.name
    if exists := os.path.lexists(folder):
        remove(replaced.parent)
        replaced.parent.mkdir()
        folder.rename(replaced)
    try:
        staged.rename(folder)
    except OSError:
        if exists:
            replaced.rename(folder)
        raise
    flush(folder.parent)
    remove(replaced.parent)


def publish_model(staged: Path, folder: Path) -> None:
    """Flushes a model to the disk and moves its files to a directory that may contain an earlier model. The old
    configuration is removed first and the new one is moved last, so a model with a configuration is complete. Other
    weights of the earlier model are removed.
    """
    flush_tree(staged)
    configurations = [name for name in (CONFIG_NAME, ADAPTER_CONFIG_NAME) if (staged / name).exists()]
    for name in configurations:
        (folder / name).unlink(missing_ok=True)
    for path in [*folder.iterdir()]:  # a loader may prefer weights of other names to the new ones
        if _WEIGHTS.fullmatch(path.name) and not (staged / path.name).exists():
            path.unlink()
    for path in sorted(staged.iterdir(), key=lambda path: path.name in configurations):
        if path.is_dir():
            remove(folder / path.name)
        path.replace(folder / path.name)
    flush(folder)


def remove(folder: Path) -> None:
    """Removes a directory as far as possible. A symbolic link is removed, but its target is not."""
    if folder.is_symlink():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def candidates(run_dir: Path) -> list[Path]:
    """Returns all checkpoints in a run directory, last step first, also incomplete ones and one being replaced."""
    paths = [path for home in (run_dir / _REPLACED, run_dir) for path in home.glob("checkpoint-*")]
    checkpoints = {path.name: path for path in paths if _DIRECTORY.fullmatch(path.name)}
    return sorted(checkpoints.values(), key=_step, reverse=True)


def _step(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def _supersede(run_dir: Path, step: int) -> None:
    """Renames checkpoints of later steps, which exist if a run was resumed from an earlier step."""
    for later in candidates(run_dir):
        if _step(later) > step:
            place = run_dir / f"superseded-{later.name}"
            remove(place)
            later.rename(place)
            logger.warning("renamed %s to %s, because the run was resumed from an earlier step", later, place.name)


def find_last(run_dir: Path, check: Callable[[Path], None] = check_resumable) -> tuple[Path, list[str]]:
    """Returns the last checkpoint that passes `check`, and the errors of the checkpoints that failed.
    Raises `CheckpointError` if no checkpoint passes.
    """
    damaged: list[str] = []
    for folder in candidates(run_dir):
        try:
            check(folder)
            return folder, damaged
        except CheckpointError as error:
            damaged.append(str(error))
    reasons = f": {'; '.join(damaged)}" if damaged else ""
    raise CheckpointError(f"No valid checkpoint found in output directory ({run_dir}){reasons}")
