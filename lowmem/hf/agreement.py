"""Checks that all ranks of a trainer were started alike: differences are named before the first step.

Ranks that differ would train on other data than asked for, or wait for one another until the timeout.
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import TrainingArguments
from transformers.trainer_utils import has_length

import lowmem
from lowmem.errors import ConfigError
from lowmem.files import read_json
from lowmem.hf.checkpoint import TRAINER_STATE_FILE
from lowmem.layers.config import LayersConfig
from lowmem.options import FusedConfig
from lowmem.placements import in_group, ranks
from lowmem.placements.agreement import differences

# Arguments that decide which steps a run takes, and when it evaluates and saves.
_ARGUMENTS = (
    "max_steps", "num_train_epochs", "per_device_train_batch_size", "per_device_eval_batch_size",
    "gradient_accumulation_steps", "learning_rate", "weight_decay", "lr_scheduler_type", "warmup_steps",
    "max_grad_norm", "bf16", "fp16", "seed", "data_seed", "eval_strategy", "eval_steps", "save_strategy", "save_steps",
    "save_only_model", "load_best_model_at_end", "logging_strategy", "logging_steps", "dataloader_drop_last",
    "average_tokens_across_devices", "activation_checkpointing",
)  # fmt: skip

# Options that may differ: each node has directories of its own.
_OWN = {"store_dir", "activation_dir"}

# So many differences are named.
_SHOWN = 3


def facts(
    args: TrainingArguments, config: FusedConfig, layers: LayersConfig, dataset: Any, resume_from: str | None
) -> dict[str, str]:
    """The facts that all ranks must have in common, as text: the name of each fact → its value.

    Args:
        config: the options of the optimizer.
        layers: those of layers.
        dataset: the training data, which may have no length.
        resume_from: the checkpoint that is resumed from.
    """
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "lowmem": lowmem.__version__}
    found: dict[str, Any] = {f"version of {name}": version for name, version in versions.items()}
    found["number of training samples"] = len(dataset) if has_length(dataset) else "unknown"
    found["checkpoint"] = "none" if resume_from is None else Path(resume_from).name
    if resume_from is not None and (state := Path(resume_from) / TRAINER_STATE_FILE).is_file():
        found["step of the checkpoint"] = read_json(state)["global_step"]
    found |= {name: getattr(args, name) for name in _ARGUMENTS if hasattr(args, name)}
    options = [option.name for option in fields(config) if option.name not in _OWN]
    found |= {f"optimizer.{name}": getattr(config, name) for name in options}
    found |= {f"layers.{name}": value for name, value in vars(layers).items() if name not in _OWN}
    return {name: _text(value) for name, value in found.items()}


def check(mine: Mapping[str, str]) -> None:
    """Raises `ConfigError` on every rank unless `mine`, as `facts` returns it, is the same on all of them.

    Every rank of the default process group calls it; without one it does nothing.
    """
    if not in_group() or not (found := differences(mine)):
        return
    shown = "; ".join(
        f"{name} is {(other or 'nothing')[:80]} on rank {rank} and {(first or 'nothing')[:80]} on rank 0"
        for name, rank, first, other in found[:_SHOWN]
    )
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    raise ConfigError(
        f"the ranks were not started alike: {shown}{more}. Start every rank with the same command, packages and files"
    )


def check_shared(folder: Path) -> None:
    """Raises `ConfigError` unless every rank sees what the others write in the directory of checkpoints."""
    if not in_group():
        return
    folder.mkdir(parents=True, exist_ok=True)
    marks = [folder / f".rank-{rank}" for rank in range(dist.get_world_size())]
    marks[dist.get_rank()].touch()
    dist.barrier()
    shared = all(mark.exists() for mark in marks)
    dist.barrier()
    marks[dist.get_rank()].unlink()
    if not shared:
        raise ConfigError(
            "output_dir: the machines do not share this directory. Every rank resumes from what rank 0 writes there: "
            "set output_dir to a directory on a disk that they share, or save_strategy='no'"
        )


def set_timeout(args: TrainingArguments) -> None:
    """Lets collectives wait as long as `ddp_timeout` says.

    Accelerate 1.15 (state.py) passes it on, except that transformers 5.23 (training_args.py) does not give it to
    Accelerate where `use_cpu` is set.
    """
    default = type(args).__dataclass_fields__["ddp_timeout"].default
    if in_group() and args.ddp_timeout != default:
        ranks.set_timeout(args.ddp_timeout_delta)


def _text(value: Any) -> str:
    """A value as text that is the same in every process: without addresses."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_text(value[key])}" for key in sorted(value, key=str)) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_text, value)) + "]"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if value is None or isinstance(value, bool | int | float | str):
        return str(value)
    return _text(type(value))
