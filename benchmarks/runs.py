"""Runs of `lowmem sft` that are planned: their arguments and their plan."""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from lowmem.run.plan import StepMemory, plan
from lowmem.run.recipe import Recipe, parse


class Configuration(NamedTuple):
    """A model with random weights, and arguments by their names on the command line."""

    model: Mapping[str, Any]
    arguments: Mapping[str, Any]


def configuration(
    model: Mapping[str, Any], tokens: int, *, dtype: str = "bfloat16", layers: Mapping[str, Any] | None = None,
    offload: bool = False, **others: Any,
) -> Configuration:  # fmt: skip
    """A run of AdaLomo with one sequence per step and activation checkpointing.

    Args:
        layers: options of `LayersConfig`.
        offload: checkpointed layers move their inputs to the host.
        others: further arguments, or other values.
    """
    arguments = {
        "dtype": dtype, "max_length": tokens, "learning_rate": 1e-4, "max_grad_norm": 0, "max_steps": 1,
        "per_device_train_batch_size": 1, "loss_type": "nll", "bf16": False, "report_to": "none",
        "fused.rule": "adalomo", "fused.rounding": "nearest" if dtype == "float32" else "stochastic",
        **{f"layers.{name}": value for name, value in (layers or {}).items()},
    }  # fmt: skip
    if offload:
        arguments["activation_checkpointing_kwargs"] = {"offload": True}
    return Configuration(model, {**arguments, **others})


@contextmanager
def parsed(config: Configuration, device: str) -> Iterator[Recipe]:
    """The arguments of `lowmem sft` in a temporary folder with the model's config.json."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config.model))
        values = {"output_dir": folder, "model_name_or_path": folder, **config.arguments}
        texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
        yield parse("sft", [word for name, text in texts.items() for word in (f"--{name}", text)], device=device)


def planned(config: Configuration, device: str) -> StepMemory:
    """The memory of a step by its plan."""
    with parsed(config, device) as arguments:
        return plan(arguments).step
