"""Checks that all ranks of a trainer were started alike: differences are named before the first step.

Ranks that differ would train on other data than asked for, or wait for one another until the timeout.
"""

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
from lowmem.placements.agreement import refuse_other_settings

# Arguments that decide which steps a run takes, and when it evaluates and saves.
_ARGUMENTS = (
    "max_steps", "num_train_epochs", "per_device_train_batch_size", "per_device_eval_batch_size",
    "gradient_accumulation_steps", "learning_rate", "weight_decay", "lr_scheduler_type", "warmup_steps",
    "max_grad_norm", "bf16", "fp16", "seed", "data_seed", "eval_strategy", "eval_steps", "save_strategy", "save_steps",
    "save_only_model", "load_best_model_at_end", "logging_strategy", "logging_steps", "dataloader_drop_last",
    "average_tokens_across_devices", "gradient_checkpointing",
)  # fmt: skip


def check(
    args: TrainingArguments, config: FusedConfig, layers: LayersConfig, dataset: Any, resume_from: str | None
) -> None:
    """Raises `ConfigError` on every rank of the process group, if there is one, unless all were started alike."""
    if not in_group():
        return
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "lowmem": lowmem.__version__}
    facts: dict[str, Any] = {f"the version of {name}": version for name, version in versions.items()}
    facts["the number of training samples"] = len(dataset) if has_length(dataset) else "unknown"
    facts["the checkpoint"] = resume_from and Path(resume_from).name
    if resume_from is not None and (state := Path(resume_from) / TRAINER_STATE_FILE).is_file():
        facts["the step of the checkpoint"] = read_json(state)["global_step"]
    facts |= {name: getattr(args, name) for name in _ARGUMENTS if hasattr(args, name)}
    facts |= {f"fused.{option.name}": getattr(config, option.name) for option in fields(config)}
    facts |= {f"layers.{name}": value for name, value in vars(layers).items()}
    refuse_other_settings(facts)


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
            "output_dir: the machines do not share this directory. Every rank resumes from the files that rank 0 "
            "writes there. Set output_dir to a directory on a disk that all machines share, or save_strategy='no'"
        )


def set_timeout(args: TrainingArguments) -> None:
    """Lets collectives wait as long as `ddp_timeout` says.

    Accelerate 1.15 (state.py) passes it on, except that transformers 5.23 (training_args.py) does not give it to
    Accelerate where `use_cpu` is set.
    """
    default = type(args).__dataclass_fields__["ddp_timeout"].default
    if in_group() and args.ddp_timeout != default:
        ranks.set_timeout(args.ddp_timeout_delta)
