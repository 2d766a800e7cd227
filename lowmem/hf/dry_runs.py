"""Dry runs of a few tokens before the first step: whether TRL would train a model with another loss, or with packed
samples that depend on one another. The ranks of a sharded model call together. No parameter gets a gradient.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn import functional as F

from lowmem.errors import UnsupportedError
from lowmem.hf.layers import embedding
from lowmem.layers.config import LayersConfig

# Tokens of the row on which losses are compared, and the standard deviation of its logits: a cap shows in large ones.
_LENGTH, _SPREAD = 16, 30.0

# Tokens of each of the two samples that are packed into one row.
_SAMPLE = 8


def check(trainer: Any, layers: LayersConfig) -> None:
    """Raises `UnsupportedError` if an `SFTTrainer` of TRL would train its model with another loss than its own."""
    module, model, args = sys.modules.get("trl.trainer.sft_trainer"), trainer.model, trainer.args
    if module is None or not isinstance(trainer, module.SFTTrainer):
        return
    if any(is_fake(param) or param.is_meta for param in model.parameters()):
        return  # a plan has no values
    with trainer.compute_loss_context_manager():
        if not args.deepspeed:  # 0.19 fails in backward if a forward without gradients came first
            check_loss(model, args.device, args.label_smoothing_factor if layers.computed_gradients else 0.0)
        if trainer.padding_free:
            check_borders(model, trainer.data_collator, args.device)


def check_loss(model: Any, device: torch.device, label_smoothing: float) -> None:
    """Raises `UnsupportedError` if a model computes another loss from its last hidden state than TRL's head does.

    TRL 1.16 reads scales and caps of logits under the names that most configurations have. Both losses are computed for
    one row, also with a hidden state that is scaled so that logits are large.
    """
    base = model.get_base_model() if is_peft_model(model) else model
    ids = torch.tensor([_ordinary_tokens(model, _LENGTH)], device=device)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    scale, logits = 1.0, None

    def enlarge(module: nn.Module, args: Any, output: Any) -> None:
        output["last_hidden_state"] = output["last_hidden_state"] * scale

    with torch.no_grad(), _evaluated(model, base.base_model, enlarge):
        for _ in range(2):
            own, fused = (model(**batch, use_cache=False, **head) for head in ({}, {"fused_lm_head": True}))
            if logits is not None and torch.equal(own.logits, logits):
                return  # as in OPT, which calls the decoder of its base model
            logits, loss = own.logits[0, -_LENGTH:].float(), own.loss.float()
            if label_smoothing:
                loss = F.cross_entropy(logits[:-1], ids[0, 1:], label_smoothing=label_smoothing)
            rtol = 2e-3 if own.logits.dtype == torch.float32 else 2e-2
            if not torch.isclose(fused.loss.float(), loss, rtol=rtol):
                raise UnsupportedError(
                    f"{type(base).__name__}: for one row, the model computes a loss of {float(loss):.4g}, but TRL's "
                    f"SFTTrainer computes {float(fused.loss):.4g} from the last hidden state and one matrix. In "
                    "Python, use FusedTrainer, which uses the loss that the model computes"
                )
            scale, logits = _SPREAD / float(logits.std()), own.logits


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
            f"packing=True or padding_free=True: in {type(model).__name__} with attention "
            f"{model.config._attn_implementation!r} a sample depends on the samples before it in its row. Omit both "
            "options, or use a model that separates samples, such as Llama or Qwen3 with 'sdpa', without "
            "prompt-learning adapters"
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
