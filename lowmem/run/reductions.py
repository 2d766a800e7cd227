"""Finds arguments that reduce the memory of a run, with their costs, and the first ones with which it fits."""

import json
import math
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any

import torch

from lowmem.errors import LowmemError
from lowmem.hf.arguments import offloading
from lowmem.options import FusedConfig
from lowmem.rules import AdaLomo
from lowmem.run.description import recomputed
from lowmem.run.fake import LONGEST, checkpointing
from lowmem.run.plan import plan
from lowmem.run.recipe import Recipe
from lowmem.step.program import rounding_of

_SMALL_STATES = ("lomo", "adalomo", "adafactor", "adafactor_t2t")  # rules with almost no states
_MOMENTUM = {"fused.rule": "adafactor", "fused.beta1": 0.9, "fused.state_storage": "8bit"}  # a byte of state per weight
_MLP_TILE = 4096  # the suggested value of layers.mlp_tile


@dataclass(frozen=True)
class Reduction:
    """Values of arguments that reduce the memory of a run, with their cost in time and quality."""

    values: dict[str, Any]
    cost: str
    ranks: int | None = None  # the number of processes, if the values require more than before

    @property
    def words(self) -> str:
        """The arguments on the command line."""
        texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in self.values.items()}
        words = " ".join(f"--{name} {shlex.quote(text)}" for name, text in texts.items())
        words = words.replace("--fsdp true", "--fsdp")  # it takes no value
        return words if self.ranks is None else f"{words} with {self.ranks} processes".lstrip()


def reductions(recipe: Recipe, ranks: int = 1) -> list[Reduction]:
    """Returns the reductions that are valid in a recipe. Reductions that change the training most come last."""
    valid = []
    kinds = (_of_weights(recipe), _of_activations(recipe), _of_ranks(recipe, ranks), _of_rows(recipe))
    for reduction in chain(*kinds):
        with suppress(LowmemError):  # values may conflict with other values of the recipe
            _ = recipe.with_values(**reduction.values).optimizer  # raises
            valid.append(reduction)
    return valid


def planned(recipe: Recipe, ranks: int, memory: int) -> Iterator[tuple[Reduction, Recipe, int]]:
    """Plans each reduction. If the run does not fit in `memory` with any of them, combines them until it fits. Yields a
    reduction, the recipe with its values, and the bytes that each device needs.
    """
    least, possible = math.inf, []
    for reduction in reductions(recipe, ranks):
        with suppress(LowmemError):  # the model may not support it
            changed = recipe.with_values(**reduction.values)
            needed = plan(changed, reduction.ranks or ranks).needed
            least = min(least, needed)
            if reduction.ranks is None:
                possible.append(reduction)
            yield reduction, changed, needed
    together = possible.pop(0) if possible else None
    for reduction in possible:
        if together is None or least <= memory:
            return
        with suppress(LowmemError):
            both = _combined(together, reduction)
            changed = recipe.with_values(**both.values)
            least, together = plan(changed, ranks).needed, both
            yield both, changed, least


def _combined(first: Reduction, second: Reduction) -> Reduction:
    """Combines two reductions. If the second one sets a rule, the hyperparameters of the first one's rule go."""
    values = first.values
    if "fused.rule" in second.values:
        options = {f"fused.{option.name}" for option in fields(FusedConfig)}
        values = {name: value for name, value in values.items() if not name.startswith("fused.") or name in options}
    return Reduction({**values, **second.values}, f"{first.cost}; {second.cost}")


def _of_weights(recipe: Recipe) -> Iterator[Reduction]:
    if recipe.model.use_peft:  # adapters have small states, and their base model may be quantized already
        return
    fused, args = recipe.optimizer, recipe.training
    groups = [fused.complete({k: v for k, v in group.items() if k != "match"}) for group in ({}, *fused.groups)]
    nearest = any(rounding_of(rule, group, torch.bfloat16) == "nearest" for rule, group in groups)
    if recipe.dtype == torch.float32 and not nearest:
        yield Reduction({"dtype": "bfloat16"}, "faster; same loss as float32 in our studies")
    if fused.rounding in ("compensated", "compensated8", "master"):
        yield Reduction({"fused.rounding": "stochastic"}, "no extra time; same loss in our studies")
    with suppress(LowmemError):  # a rule may need the name of a parameter
        specs = [rule.spec("", (4096, 4096), group) for rule, group in groups]
        follows = any(state.follows_state_storage for spec in specs for state in spec.states.values())
        if follows and fused.state_storage in ("auto", "float32", "bfloat16"):
            yield Reduction({"fused.state_storage": "8bit"}, "no loss in our fine-tuning study")
    if any(rule.name not in _SMALL_STATES for rule, _ in groups):
        rate = {"learning_rate": AdaLomo.usual_lr[0]}
        loss = "loss up to 0.07 nats higher than with AdamW in our studies; different learning rate"
        yield Reduction({**_MOMENTUM, **rate}, loss)
        yield Reduction({"fused.rule": "adalomo", **rate}, f"no momentum; {loss}")
    quantizable = recipe.command == "sft" and not (args.deepspeed or args.fsdp)
    quantizable &= recipe.layers.computed_gradients is not False and fused.weight_format is None
    quantizable &= fused.rounding in ("auto", "stochastic")
    if quantizable and not any(rule.materializes for rule, _ in groups):
        yield Reduction({"fused.weight_format": "int12"}, "slower steps; same loss as bfloat16 in our study")


def _of_activations(recipe: Recipe) -> Iterator[Reduction]:
    args, name = recipe.training, checkpointing(recipe.training)
    on_gpu = recipe.device == "gpu" or (recipe.device is None and torch.cuda.is_available())
    if not recomputed(args):
        yield Reduction({name: True}, "one more forward per step; equal results")
    elif on_gpu and args.gradient_checkpointing and not offloading(args):
        with_kwargs = name == "activation_checkpointing"  # of transformers since 5.23, of TRL before
        kwargs = {f"{name}_kwargs": {**(args.gradient_checkpointing_kwargs or {}), "offload": True}}
        yield Reduction(kwargs if with_kwargs else {"activation_offloading": True}, "copies to the host; equal results")
    tile, rows, length = recipe.layers.mlp_tile, args.per_device_train_batch_size, _length(args)
    if rows * length >= 2 * _MLP_TILE and (tile is None or tile > _MLP_TILE):
        yield Reduction({"layers.mlp_tile": _MLP_TILE}, "about one more down_proj per layer; equal results")


def _of_ranks(recipe: Recipe, ranks: int) -> Iterator[Reduction]:
    sharded = recipe.training.deepspeed or recipe.training.fsdp
    if recipe.device == "gpu" and not sharded and ranks == 1 and recipe.optimizer.placement == "auto":
        values = {"fused.placement": "streamed", checkpointing(recipe.training): True}
        yield Reduction(values, "weights on the host, copied in each pass; equal results")
    if recipe.device == "gpu" and not recipe.model.use_peft:
        values = {} if sharded else {"fsdp": True}
        if not sharded and ranks > 1:
            yield Reduction(values, "gathers weights in forward and backward; equal results", ranks)
        yield Reduction(values, "more GPUs, and a larger batch", 2 * ranks)


def _of_rows(recipe: Recipe) -> Iterator[Reduction]:
    args, rows = recipe.training, recipe.training.per_device_train_batch_size
    for fewer in sorted({rows // 2, 1} - {0, rows}, reverse=True):
        yield Reduction({"per_device_train_batch_size": fewer}, "a smaller batch")
    if hasattr(args, "max_length"):
        yield Reduction({"max_length": _length(args) // 2}, "longer rows are truncated")


def _length(args: Any) -> int:
    return getattr(args, "max_length", None) or LONGEST
