"""The options of layers, applied to the model of a trainer."""

from typing import Any, Literal

from torch import nn
from transformers import TrainingArguments

from lowmem.errors import ConfigError
from lowmem.layers.activations import offload_to_file
from lowmem.layers.config import LayersConfig
from lowmem.layers.embedding import compute_gradient
from lowmem.layers.head import Head
from lowmem.layers.mlp import tile_mlps
from lowmem.optimizer import FusedOptimizer


def check(args: TrainingArguments, layers: LayersConfig) -> None:
    """Raises `ConfigError` where arguments of the trainer and options of layers exclude each other."""
    if layers.activation_offload is None:
        return
    if not args.gradient_checkpointing:
        raise ConfigError(
            "activation_offload='disk' writes what checkpointed layers keep, and without gradient_checkpointing "
            "every activation would be kept; set gradient_checkpointing=True in the trainer's arguments"
        )
    if getattr(args, "activation_offloading", False) or (args.gradient_checkpointing_kwargs or {}).get("offload"):
        raise ConfigError(
            "activation_offload='disk' and offloading to the host exclude each other: omit activation_offloading and "
            "gradient_checkpointing_kwargs={'offload': True}, or activation_offload"
        )
    if args.torch_compile:
        raise ConfigError(
            "activation_offload='disk': with torch_compile=True layers are compiled together with their checkpointing, "
            "and keep their activations on the device; omit one of the two"
        )


def change(model: Any, layers: LayersConfig) -> None:
    """Tiles the MLPs of a model, makes its embedding one whose gradient the optimizer computes as it reads it, and lets
    checkpointed layers write what they keep to a file, once train() has enabled activation checkpointing.

    A model that is to be sharded is changed before.

    Raises:
        ConfigError: `head_memory` is not enough for one row.
        UnsupportedError: the model has no MLP that can be tiled.
    """
    if layers.mlp_tile is not None:
        tile_mlps(model, layers.mlp_tile)
    table = embedding(model, "input")
    if layers.computed_gradients and isinstance(table, nn.Embedding):
        head = Head(memory=layers.head_bytes)
        head.tile(1, table.num_embeddings, table.embedding_dim)  # raises if that is too little
        compute_gradient(table, head.memory)
    checkpointed = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    if checkpointed and layers.activation_offload == "disk":
        offload_to_file(model, layers.activation_dir)


def embedding(model: Any, side: Literal["input", "output"]) -> Any:
    """The input or output embedding that a model names; None if it has none, as vision models and plain modules."""
    try:
        return getattr(model, f"get_{side}_embeddings")()
    except (AttributeError, NotImplementedError):
        return None


def described(model: Any, optimizer: FusedOptimizer) -> str:
    """Says whether the gradients of a model's head and input embedding are computed as they are read."""
    layers = (embedding(model, "output"), embedding(model, "input"))
    weights = [layer.weight for layer in layers if hasattr(layer, "weight") and layer.weight.requires_grad]
    records = [optimizer._records[weight] for weight in weights if weight in optimizer._records]
    if not records:
        return "the head and the embedding are not trained"
    how = "computed as they are read" if all(record.computes for record in records) else "tensors"
    return f"of the head and the embedding: {how}"
