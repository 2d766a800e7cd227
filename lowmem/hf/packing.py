"""Tests before the first step, with a few tokens, that packed samples do not depend on one another."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from lowmem.errors import UnsupportedError
from lowmem.hf.layers import embedding

# Tokens of each of the two samples that are packed into one row.
_SAMPLE = 8


def check(trainer: Any) -> None:
    """Raises `UnsupportedError` if TRL's `SFTTrainer` packs samples that its model does not separate. If the model is
    sharded, every rank calls it. Parameters do not get gradients.
    """
    module, model = sys.modules.get("trl.trainer.sft_trainer"), trainer.model
    if module is None or not isinstance(trainer, module.SFTTrainer) or not trainer.padding_free:
        return
    if any(is_fake(param) or param.is_meta for param in model.parameters()):
        return  # a plan has no values
    with trainer.compute_loss_context_manager():
        check_borders(model, trainer.data_collator, trainer.args.device)


def check_borders(model: Any, collate: Callable[[list[Any]], Any], device: torch.device) -> None:
    """Raises `UnsupportedError` if a sample depends on the previous sample in its row.

    TRL marks the beginning of samples by position ids. Most models of transformers 5.23 convert these to a mask, but
    some do not (modeling_afmoe.py). Two samples are computed as one row, and the gradient of the second sample with
    respect to the first must be zero. This holds in every dtype, whereas outputs may differ in their last bits.

    Args:
        model: the model, on the device and in the mode in which it is trained.
        collate: a function that creates a batch of samples without padding.
    """
    vocabulary = model.config.get_text_config().vocab_size
    middle = vocabulary // 2  # special tokens are at the ends
    sample = {"input_ids": [(middle + n) % vocabulary for n in range(_SAMPLE)]}
    batch = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in collate([sample] * 2).items()
        if name != "labels"
    }
    embedded: list[Tensor] = []

    def detach(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1].clone()  # some models scale it in place

    if (table := embedding(model, "input")) is None:
        raise UnsupportedError(
            f"packing=True or padding_free=True: {type(model).__name__} does not implement get_input_embeddings(). "
            "Implement it, or omit both options"
        )
    with torch.enable_grad(), table.register_forward_hook(detach), ExitStack() as stack:
        stack.callback(model.train, model.training)
        model.eval()
        logits = model(**batch, use_cache=False).logits
        begin = logits.shape[1] - batch["input_ids"].shape[1] + _SAMPLE  # after the prompt of a PEFT adapter
        second = logits[:, begin : begin + _SAMPLE].float()
        weights = torch.linspace(-1, 1, second.shape[-1], device=second.device)
        (grad,) = torch.autograd.grad((second * weights).sum(), embedded[0])
    if grad[:, :_SAMPLE].any():
        raise UnsupportedError(
            f"packing=True or padding_free=True: in {type(model).__name__} a sample depends on the samples before it "
            "in its row. Omit both options, or use a model that separates samples, such as Llama or Qwen3 with "
            "attn_implementation 'sdpa', without prompt-learning adapters"
        )
