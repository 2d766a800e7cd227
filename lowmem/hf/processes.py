"""Checks that the processes of a run have the same settings and share a disk, and explains failures of other ranks.
Processes that differ would train on the wrong data, or wait for one another until the timeout.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch.distributed as dist

import lowmem
from lowmem.errors import ConfigError, RankError
from lowmem.hf import version
from lowmem.options import FusedConfig, LayersConfig
from lowmem.placements import in_group, ranks
from lowmem.placements.agreement import require_equal_settings

# Arguments that determine which steps a run takes, and when it evaluates and saves.
_ARGUMENTS = (
    "max_steps", "num_train_epochs", "per_device_train_batch_size", "per_device_eval_batch_size",
    "gradient_accumulation_steps", "learning_rate", "weight_decay", "lr_scheduler_type", "warmup_steps",
    "max_grad_norm", "bf16", "fp16", "seed", "data_seed", "eval_strategy", "eval_steps", "save_strategy", "save_steps",
    "save_only_model", "load_best_model_at_end", "logging_strategy", "logging_steps", "dataloader_drop_last",
    "average_tokens_across_devices", "gradient_checkpointing",
)  # fmt: skip

_GLOO = re.compile("/gloo/|caused pair closure")
_TOO_SLOW = re.compile(r"tim(?:ed|e)[ -]?out", re.IGNORECASE)


def require_alike(
    args: Any, config: FusedConfig, layers: LayersConfig, samples: int | None, data: str | None,
    resumed: Path | None,
) -> None:  # fmt: skip
    """Raises `ConfigError` on every rank of the process group unless all ranks have the same settings.

    Args:
        args: the trainer's arguments.
        samples: the number of training samples, if it is known.
        data: a fingerprint of the tokenized training data, if it is known.
        resumed: the checkpoint that the run resumes from.
    """
    if not in_group():
        return
    facts: dict[str, Any] = {f"the version of {name}": version(name) for name in ("torch", "transformers")}
    facts |= {"the version of lowmem": lowmem.__version__, "the number of training samples": samples}
    facts |= {"the fingerprint of the tokenized training data": data, "the checkpoint": resumed and resumed.name}
    facts |= {name: getattr(args, name) for name in _ARGUMENTS if hasattr(args, name)}
    facts |= {f"fused.{option.name}": getattr(config, option.name) for option in fields(config)}
    facts |= {f"layers.{name}": value for name, value in vars(layers).items()}
    require_equal_settings(facts)


def require_shared_disk(folder: Path) -> None:
    """Raises `ConfigError` unless every rank sees the files that other ranks write to `folder`."""
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


def set_timeout(args: Any) -> None:
    """Sets the timeout of collectives to `ddp_timeout`. Accelerate 1.15 (state.py) sets it, but transformers 5.23
    (training_args.py) does not pass it if `use_cpu` is set.
    """
    default = type(args).__dataclass_fields__["ddp_timeout"].default
    if in_group() and args.ddp_timeout != default:
        ranks.set_timeout(args.ddp_timeout_delta)


@contextmanager
def explained() -> Iterator[None]:
    """A context that replaces errors of collectives, and errors caused by them, by `RankError`."""
    try:
        yield
    except Exception as error:
        collective = _of_collective(error) if in_group() and not isinstance(error, RankError) else None
        if collective is None:
            raise
        if _TOO_SLOW.search(collective):
            reason = "another rank did not answer in time (ddp_timeout of a trainer): it died, hangs, or is too slow"
        else:
            reason = (
                "another rank failed or exited. See the first error that the launcher shows. A rank without an error "
                "message was killed (out of memory?) or crashed"
            )
        raise RankError(f"{reason}. Fix the cause, and continue from the last checkpoint") from error


def _of_collective(error: BaseException | None) -> str | None:
    """Returns the message of the first error of a collective in a chain of causes, or None."""
    while error is not None:
        message = str(error)
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and _GLOO.search(message)):
            return message
        error = error.__cause__ or error.__context__
    return None
