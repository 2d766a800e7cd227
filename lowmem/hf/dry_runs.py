"""A dry run of a few tokens before the first step: whether packed samples depend on one another. The ranks of a sharded
model call together. No parameter gets a gradient.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from lowmem.errors import UnsupportedError
from lowmem.hf.layers import embedding

# Tokens of each of the two samples that are packed into one row.
_SAMPLE = 8


def check(trainer: Any) -> None:
    """Raises `UnsupportedError` if an `SFTTrainer` of TRL packs samples that its model does not keep apart."""
    module, model = sys.modules.get("trl.trainer.sft_trainer"), trainer.model
    if module is None or not isinstance(trainer, module.SFTTrainer) or not trainer.padding_free:
        return
    if any(is_fake(param) or param.is_meta for param in model.parameters()):
        return  # a plan has no values
    with trainer.compute_loss_context_manager():
        check_borders(model, trainer.data_collator, trainer.args.device)


def check_borders(model: Any, collate: Callable[[list[Any]], Any], device: torch.device) -> None:
    """Raises `UnsupportedError` if a sample depends on the one before it in a row.

    TRL says by position ids where samples begin. Most models of transformers 5.23 make a mask of them, and some do
    not (modeling_afmoe.py). Two samples are computed as one row, and the second must have no gradient in the first:
    it is exactly zero in every dtype, where outputs can change in the last bits with what else is in a batch.

    Args:
        model: where and as it is trained.
        collate: makes a batch of samples, without padding.
        device: where the model computes.
    """
    batch = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in collate([{"input_ids": _ordinary_tokens(model, _SAMPLE)}] * 2).items()
        if name != "labels"
    }
    embedded: list[Tensor] = []

    def cut(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1].clone()  # some models scale it in place

    if (table := embedding(model, "input")) is None:
        raise UnsupportedError(
            f"packing=True or padding_free=True: {type(model).__name__} does not implement get_input_embeddings(). "
            "Implement it, or omit both options"
        )
    with torch.enable_grad(), _evaluated(model, table, cut):
        logits = model(**batch, use_cache=False).logits
        begin = logits.shape[1] - batch["input_ids"].shape[1] + _SAMPLE  # after a prompt of PEFT
        second = logits[:, begin : begin + _SAMPLE].float()
        weights = torch.linspace(-1, 1, second.shape[-1], device=second.device)
        (grad,) = torch.autograd.grad((second * weights).sum(), embedded[0])
    if grad[:, :_SAMPLE].any():
        raise UnsupportedError(
            f"packing=True or padding_free=True: in {type(model).__name__} a sample depends on the samples before it "
            "in its row. Omit both options, or use a model that separates samples, such as Llama or Qwen3 with "
            "attn_implementation 'sdpa', without prompt-learning adapters"
        )


def _ordinary_tokens(model: Any, count: int) -> list[int]:
    """Tokens from the middle of the vocabulary: special ones are at its ends."""
    vocabulary = model.config.get_text_config().vocab_size
    return [(vocabulary // 2 + n) % vocabulary for n in range(count)]


@contextmanager
def _evaluated(model: nn.Module, module: nn.Module, change: Callable[..., Any]) -> Iterator[None]:
    """Puts a model into evaluation mode for a while, in which `change` is a forward hook of one of its modules."""
    hook, training = module.register_forward_hook(change), model.training
    model.eval()
    try:
        yield
    finally:
        hook.remove()
        model.train(training)
