"""TRL's fused head, which computes the loss from tiles of logits: the models that it suits, and the size of a tile."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import is_peft_model

from lowmem.errors import UnsupportedError

# Columns of a tile of logits on a CPU.
_CPU_COLUMNS = 2048


def check(model: Any) -> None:
    """Raises `UnsupportedError` for a model that has layers between its last hidden state and its output embedding.

    TRL 1.16 (trainer/utils.py, add_fused_lm_head) would train without those layers and would not warn. Of a PEFT model
    it calls the base model, in which adapters are; prompts come before its first layer.
    """
    model = model.get_base_model() if is_peft_model(model) else model
    embedding = model.get_output_embeddings()
    if embedding is not None and not hasattr(embedding, "bias"):
        raise UnsupportedError(
            f"{type(embedding).__name__}: TRL's SFTTrainer multiplies the last hidden state by one matrix, the output "
            "embedding, to compute logits, and here an adapter changes rows of it. Leave the output embedding out of "
            "trainable_token_indices, in which a tied embedding also is, or use FusedTrainer, which uses the loss that "
            "the model computes"
        )
    modules = [model.base_model] if embedding is None else [model.base_model, embedding]
    known = {id(param) for module in modules for param in module.parameters()}
    others = [name for name, param in model.named_parameters() if id(param) not in known]
    if embedding is None or others:
        reason = f"{others[0]!r} lies between" if others else "there is no such matrix"
        raise UnsupportedError(
            f"{type(model).__name__}: TRL's SFTTrainer multiplies the last hidden state by one matrix, the output "
            f"embedding, to compute logits, and in this model {reason}. Use a model whose head is one matrix, or, in "
            "Python, FusedTrainer, which uses the loss that the model computes"
        )


@contextmanager
def tiles(device: torch.device) -> Iterator[None]:
    """Makes the tiles smaller on a CPU.

    TRL 1.16 (trainer/utils.py) has no option for their size, and allocates about eight float32 tensors of
    4096 x 32768 logits.
    """
    if device.type != "cpu":
        yield
        return
    from trl.trainer import utils

    columns = utils._CHUNKED_LOGPROB_CHUNK_SIZE
    utils._CHUNKED_LOGPROB_CHUNK_SIZE = _CPU_COLUMNS
    try:
        yield
    finally:
        utils._CHUNKED_LOGPROB_CHUNK_SIZE = columns
