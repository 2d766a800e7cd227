"""TRL's fused head, which computes the loss from tiles of logits: whether it is a model's own, and tiles for a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lowmem.errors import UnsupportedError

# Columns of a tile on a CPU.
_WIDTH = 2048


def check(model: Any) -> None:
    """Raises `UnsupportedError` for a model with more between its last hidden state and its logits than one matrix.

    TRL would leave that out, train without it and say nothing.
    """
    matrix = model.get_output_embeddings()
    parts = [model.base_model] if matrix is None else [model.base_model, matrix]
    known = {id(param) for part in parts for param in part.parameters()}
    others = [name for name, param in model.named_parameters() if id(param) not in known]
    if matrix is None or others:
        found = f"{others[0]!r} lies between" if others else "there is no such matrix"
        raise UnsupportedError(
            f"{type(model).__name__}: TRL's SFTTrainer computes logits from the last hidden state by one matrix, the "
            f"output embedding, and in this model {found}. Take a model whose head is one matrix; in Python, "
            "FusedTrainer takes the loss that a model computes itself"
        )


@contextmanager
def tiles(device: torch.device) -> Iterator[None]:
    """Smaller tiles on a CPU, where the head makes some eight float32 copies of a tile of 4096 x 32768 logits."""
    if device.type != "cpu":
        yield
        return
    from trl.trainer import utils

    width = utils._CHUNKED_LOGPROB_CHUNK_SIZE
    utils._CHUNKED_LOGPROB_CHUNK_SIZE = _WIDTH
    try:
        yield
    finally:
        utils._CHUNKED_LOGPROB_CHUNK_SIZE = width
