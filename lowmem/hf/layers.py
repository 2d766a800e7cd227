"""The options of layers, applied to the model of a trainer."""

from typing import Any, Literal

from torch import nn

from lowmem.layers.config import LayersConfig
from lowmem.layers.embedding import compute_gradient
from lowmem.layers.head import Head
from lowmem.layers.mlp import tile_mlps
from lowmem.optimizer import FusedOptimizer

# Names of tables of learned positions in transformers 5.23.
_POSITIONS = ("wpe", "embed_positions", "position_embeddings", "position_embedding", "positions_embed")


def change(model: Any, layers: LayersConfig) -> None:
    """Tiles the MLPs of a model, and makes its embedding one whose gradient the optimizer computes as it reads it.

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
        head.tile(1, table.num_embeddings, table.embedding_dim, table.weight.device)  # raises if that is too little
        compute_gradient(table, head.memory)


def embedding(model: Any, side: Literal["input", "output"]) -> Any:
    """The input or output embedding that a model names; None if it has none, as vision models and plain modules."""
    try:
        return getattr(model, f"get_{side}_embeddings")()
    except (AttributeError, NotImplementedError):
        return None


def positions(model: Any) -> int | None:
    """The number of tokens for which a model has learned positions; None if its positions are computed."""
    for name, table in model.named_modules():
        if isinstance(table, nn.Embedding) and name.rpartition(".")[2] in _POSITIONS:
            padding = 0 if table.padding_idx is None else table.padding_idx + 1
            return int(table.num_embeddings - getattr(table, "offset", padding))
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
