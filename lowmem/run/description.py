"""Describes the model, optimizer and memory options of a run, for its first lines and for a plan."""

import math
from typing import Any

from lowmem.hf import arguments
from lowmem.placements import in_group, nbytes, shape_of, streaming_of
from lowmem.placements.homes import FileHome
from lowmem.placements.streaming import Streaming
from lowmem.step.policies import POLICIES
from lowmem.step.record import states_in_words, weights_in_words


def describe(trainer: Any) -> dict[str, str]:
    """Describes the run of a trainer, which must have an optimizer, as topic → text."""
    model, args, optimizer = trainer.model, trainer.args, trainer.optimizer
    topics = {
        "model": f"{type(model).__name__}, {_count([*model.parameters()])}, {str(model.dtype).removeprefix('torch.')}",
        "optimizer": _optimizer(optimizer),
    }
    if in_group():
        share = "a shard of the parameters" if optimizer.placement in ("zero3", "fsdp2") else "all parameters"
        topics["placement"] = f"{optimizer.placement}: each of {args.world_size} processes has {share}"
    if (streaming := streaming_of(model)) is not None:
        topics["placement"] = f"streamed: {_streamed_in_words(streaming, model)}"
    why = "" if optimizer.policy == "immediate" else f": {optimizer.policy_reason}"
    topics["updates"] = f"{POLICIES[optimizer.policy].when} (policy {optimizer.policy}{why})"
    topics["activations"] = _activations(args, trainer.layers.mlp_tile)
    return topics


def _streamed_in_words(streaming: Streaming, model: Any) -> str:
    """Describes the streamed layers, and the weights that stay on the device."""
    sizes = [unit.nbytes for unit in streaming.units]
    stays = sum(map(nbytes, model.parameters())) - sum(sizes)
    if not sizes:
        return f"no layer, because all {stays / 2**20:,.1f} MiB of weights fit on the device"
    home = streaming.units[0].home
    text = (
        f"{len(sizes)} layers of up to {max(sizes) / 2**20:,.1f} MiB in {home}. Two are on the device at a time, in "
        f"addition to {stays / 2**20:,.1f} MiB of other weights"
    )
    if isinstance(home, FileHome):
        text += ". Each step writes the trained layers to the disk, which wears it out"
    return text


def _optimizer(optimizer: Any) -> str:
    params: dict[str, list[Any]] = {}  # by rule and learning rate
    for group in optimizer.param_groups:
        rate = "" if group.get("lr") is None else f", lr {group['lr']:g}"
        params.setdefault(group["rule"] + rate, []).extend(group["params"])
    rules = [f"{rule}: {_count(group)}" if len(params) > 1 else rule for rule, group in params.items()]
    records = optimizer._records.values()
    weights, states = weights_in_words(records), states_in_words(records)
    states = "" if states in ("", "float32") else f", states in {states}"
    compiled = ", compiled in the first step (10 to 30 seconds)" if optimizer.compiled else ""
    return f"{'; '.join(rules)}; weights in {weights}{states}, fused into backward{compiled}"


def _activations(args: Any, mlp_tile: int | None) -> str:
    place = "recomputed in backward" if recomputed(args) else "stored for backward"
    place += ", offloaded to the host" if arguments.offloading(args) else ""
    return place + (f"; MLPs compute {mlp_tile:,} tokens at a time" if mlp_tile else "")


def recomputed(args: Any) -> bool:
    """Returns whether activations are recomputed in backward."""
    return bool(args.gradient_checkpointing or (args.fsdp and args.fsdp_config.get("activation_checkpointing")))


def _count(params: list[Any]) -> str:
    return f"{sum(math.prod(shape_of(param)) for param in params):,} parameters"
