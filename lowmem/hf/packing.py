"""Packed rows of TRL: whether the samples of a row are apart, which depends on the model and on its attention."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from lowmem.errors import UnsupportedError
from lowmem.hf.layers import embedding

# Tokens of each of the two samples that are tried.
_LENGTH = 8


def check_borders(
    model: Any, collate: Callable[[list[Any]], Any], device: torch.device, autocast: AbstractContextManager[Any]
) -> None:
    """Raises `UnsupportedError` if a sample depends on the one before it in a row.

    TRL says by position ids where samples begin. Most models of transformers 5.23 make a mask of them, and some do
    not (modeling_afmoe.py). Two samples are computed as one row, and the second must have no gradient in the first:
    it is exactly zero in every dtype, where outputs can change in the last bits with what else is in a batch. No
    parameter gets a gradient.

    Args:
        model: where and as it is trained; the ranks of a sharded model call together.
        collate: makes a batch of samples, without padding.
        device: where the model computes.
        autocast: that of the trainer.
    """
    if any(is_fake(param) or param.is_meta for param in model.parameters()):
        return  # a plan has no values
    first = model.config.get_text_config().vocab_size // 2  # ordinary tokens are in the middle
    ids = [first + n % max(first, 1) for n in range(_LENGTH)]
    batch = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in collate([{"input_ids": ids}] * 2).items()
        if name != "labels"
    }
    embedded: list[Tensor] = []

    def cut(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1].clone()  # some models scale it in place

    if (table := embedding(model, "input")) is None:
        raise UnsupportedError(
            f"packing=True or padding_free=True: {type(model).__name__} needs get_input_embeddings(); or omit both"
        )
    hook, training = table.register_forward_hook(cut), model.training
    try:
        with torch.enable_grad(), autocast:
            logits = model.eval()(**batch, use_cache=False).logits
            begin = logits.shape[1] - batch["input_ids"].shape[1] + _LENGTH  # after a prompt of PEFT
            second = logits[:, begin : begin + _LENGTH].float()
            weights = torch.linspace(-1, 1, second.shape[-1], device=second.device)
            (grad,) = torch.autograd.grad((second * weights).sum(), embedded[0])
    finally:
        hook.remove()
        model.train(training)
    if grad[:, :_LENGTH].any():
        raise UnsupportedError(
            f"packing=True or padding_free=True: in {type(model).__name__} with attention "
            f"{model.config._attn_implementation!r} a sample depends on the samples before it in its row; omit both, "
            "or use a model that keeps them apart, such as Llama or Qwen3 with 'sdpa', without adapters of prompts"
        )
