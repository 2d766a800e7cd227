"""Runs of `lowmem train` as benchmarks: their configuration, and the step of their trainer."""

import tempfile
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from datasets import Dataset

from lowmem.layers.config import LayersConfig
from lowmem.options import FusedConfig
from lowmem.run import build
from lowmem.run.config import DataConfig, ModelConfig, RunConfig
from lowmem.run.tokenizers import SMALLEST_VOCABULARY, train_tokenizer


def configuration(
    model: Mapping[str, Any],
    tokens: int,
    *,
    dtype: str = "bfloat16",
    layers: Mapping[str, Any] | None = None,
    offload: bool = False,
    compile: bool | Literal["auto"] = "auto",
) -> RunConfig:
    """A run of AdaLomo with one sequence per step and activation checkpointing.

    Args:
        model: of `model.config`.
        tokens: of the sequence.
        layers: options of `LayersConfig`.
        offload: checkpointed layers move their inputs to the host.
    """
    checkpointing = {"activation_checkpointing_kwargs": {"offload": True}} if offload else {}
    rounding = "nearest" if dtype == "float32" else "stochastic"
    return RunConfig(
        run_dir="runs/benchmark",
        model=ModelConfig(config=dict(model), tokenizer="none", dtype=dtype),
        data=DataConfig(path="none.jsonl", max_length=tokens, workers=1),
        optimizer=FusedConfig(rule="adalomo", lr=1e-4, rounding=rounding, compile=compile),
        layers=LayersConfig(**layers or {}),
        trainer={"per_device_train_batch_size": 1, "max_steps": 1, "loss_type": "nll", **checkpointing},
    )


def trainer_of(config: RunConfig, rows: list[list[int]]) -> Any:
    """A run's own trainer, with random weights and rows of tokens. Its run folder may be temporary."""
    dataset = Dataset.from_dict({"input_ids": rows, "labels": rows})
    samples = build.Samples(train_tokenizer(["a"], SMALLEST_VOCABULARY), dataset, dataset)
    args = build.arguments(config, samples)
    return build.trainer(config, samples, build.model(config, samples.tokenizer, args), args)


def step_of(config: RunConfig) -> Callable[[], None]:
    """The training step of a run's own trainer on the CPU, with random weights and random tokens."""
    with tempfile.TemporaryDirectory() as folder:  # a trainer creates its output folder
        config.run_dir, config.trainer = folder, {**config.trainer, "use_cpu": True}
        ids = torch.randint((config.model.config or {})["vocab_size"], (config.data.max_length,)).tolist()
        trainer = trainer_of(config, [ids])
    model = trainer.model
    model.activation_checkpointing_enable(trainer.args.activation_checkpointing_kwargs)
    model.train()
    optimizer = trainer.create_optimizer()
    batch = dict(trainer.data_collator([trainer.train_dataset[0]]))

    def step() -> None:
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(model, dict(batch))
        optimizer.backward(loss)

    return step
