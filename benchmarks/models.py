"""Llamas with random weights, and their loss."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def llama(
    layers: int, hidden: int, intermediate: int, vocabulary: int, dtype: str, device: str | torch.device = "cpu",
    *, checkpointing: bool = True, seed: int = 0, **config: Any,
) -> Any:  # fmt: skip
    """Returns a Llama in training mode, by default with activation checkpointing and attention heads of 64 elements.

    Args:
        config: further arguments of `LlamaConfig`.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": intermediate}
    options = {"num_hidden_layers": layers, "num_attention_heads": hidden // 64, "use_cache": False, **config}
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **options), dtype=getattr(torch, dtype))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def loss_of(model: Any, ids: Tensor) -> Callable[[], Tensor]:
    """Returns a function that computes the language-model loss of token ids of shape [rows, tokens]."""
    return lambda: model(input_ids=ids, labels=ids).loss
