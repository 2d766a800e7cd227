"""The losses of TRL's trainers by `lowmem.layers.head`: no matrix of logits exists, nor the gradient of its weight.

From TRL 1.15 on, trainers call a model with `fused_lm_head=True` and expect log-probabilities of labels. Before, the
loss "chunked_nll" expects sums over tokens. A forward of the model answers both. All else reads logits, and gets those
of `lowmem.layers.logits` while a loss is computed.
"""

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils import ModelOutput

from lowmem.errors import ConfigError
from lowmem.hf.layers import embedding
from lowmem.layers.config import LayersConfig
from lowmem.layers.logits import LazyHead, Logits
from lowmem.placements.zero3 import gathered
from lowmem.tiles.quantized import in_codes

# A module, the name of an output embedding in it, and what stands in for that.
Place = tuple[nn.Module, str, LazyHead]

# Metrics of tokens that trainers log. Others than these may use the entropy in their loss.
_LOGGED: dict[str, tuple[str, ...]] = {
    "SFTTrainer": ("entropy", "is_top1"),
    "DPOTrainer": ("entropy", "is_top1", "mean_logits"),
    "KTOTrainer": ("entropy", "mean_logits"),
}
_OTHERS = ("GRPOTrainer", "RLOOTrainer")


@dataclass
class TokenLosses(ModelOutput):
    """Output of a model in place of logits, with the field names that trainers of TRL read."""

    loss: Tensor | None = None
    log_probs: Tensor | None = None  # [batch, tokens], as the others to is_top1; 0 where there is no label
    label_mask: Tensor | None = None
    entropy: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None
    num_correct_tokens: Tensor | None = None
    entropy_sum: Tensor | None = None
    num_valid_tokens: Tensor | None = None
    aux_loss: Tensor | None = None


def compute(trainer: Any, layers: LayersConfig) -> list[Place]:
    """Lets the losses of a trainer of TRL, and of its reference model, be those of `lowmem.layers.head`, unless
    `computed_gradients` is False. From TRL 1.15 on, an `SFTTrainer` smooths labels there.

    Returns:
        Where to put logits that are computed as they are read in while a loss is computed.
    """
    # by name: another trainer may need a package that is not installed
    classes = [cls.__name__ for cls in type(trainer).__mro__ if cls.__module__.startswith("trl.")]
    known = next((name for name in classes if name in (*_LOGGED, *_OTHERS)), None)
    if known is None:
        return []
    if not layers.computed_gradients:
        if in_codes(trainer.model):
            raise ConfigError(
                "layers.computed_gradients: false makes TRL compute the head from an ordinary matrix, but "
                "fused.weight_format quantizes it. Omit one of them"
            )
        return []
    metrics, args, smoothing = _LOGGED.get(known, ()), trainer.args, 0.0
    fused = hasattr(sys.modules["trl.trainer.utils"], "add_fused_lm_head")
    chunked = known == "SFTTrainer" and getattr(args, "loss_type", None) == "chunked_nll"
    if fused and known == "SFTTrainer" and trainer.label_smoother is not None:
        smoothing, trainer.label_smoother = args.label_smoothing_factor, None
    if getattr(args, "use_weighting", False):
        metrics = (*metrics, "log_sum_sq_probs")
    places: list[Place] = []
    for model in (trainer.model, getattr(trainer, "ref_model", None)):
        if model is None:
            continue
        base = model.get_base_model() if is_peft_model(model) else model
        own = _place(base, layers.head_bytes)
        if metrics and (fused or chunked):
            forward = _forward(base, own, metrics if model is trainer.model else (), smoothing, chunked)
            base.forward = MethodType(forward, base)
        elif not fused and trainer._sharding is None:  # ranks would gather the weight as often as they have rows
            places += own
    return places


@contextmanager
def lazily(places: Sequence[Place]) -> Iterator[None]:
    """A context in which models return logits that are computed as they are read."""
    before = [getattr(parent, name) for parent, name, _ in places]
    for parent, name, head in places:
        setattr(parent, name, head)
    try:
        yield
    finally:
        for (parent, name, _), output in zip(places, before, strict=True):
            setattr(parent, name, output)


def _place(model: Any, memory: int | None) -> list[Place]:
    """The place of the output embedding, if it is a linear layer without an adapter: all others stay as they are."""
    output = embedding(model, "output")
    linear = output.original_module if hasattr(output, "modules_to_save") else output  # PEFT trains a copy of it
    if getattr(type(linear), "forward", None) is not nn.Linear.forward:
        return []
    parent, _, name = next(path for path, module in model.named_modules() if module is output).rpartition(".")
    return [(model.get_submodule(parent), name, LazyHead(output, memory, gathered))]


def _forward(model: Any, places: list[Place], metrics: tuple[str, ...], smoothing: float, chunked: bool) -> Any:
    """A forward that returns `TokenLosses` where TRL asks for them, from the logits that the model's own returns."""
    inner = model.forward

    @functools.wraps(type(model).forward)  # `generate` reads its signature
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **options: Any) -> Any:
        labelled = options.get("labels") is not None or options.get("shift_labels") is not None
        if not fused_lm_head and not (chunked and labelled):
            return inner(*args, **options)
        labels, shifted, count = (options.pop(n, None) for n in ("labels", "shift_labels", "num_items_in_batch"))
        with lazily(places):
            output = inner(*args, **{**options, "use_cache": False})
            logits, targets = (output.logits[:, :-1], labels[:, 1:]) if shifted is None else (output.logits, shifted)
            targets = targets.to(logits.device)
            mask = targets != -100
            compact = mask.is_cuda  # only tokens with labels are computed, as in TRL
            rows = (logits[mask], targets[mask]) if compact else (logits, targets.clamp(min=0))
            losses, values = _losses(*rows, metrics, smoothing)
        values = {
            # without labels, too, the loss has a gradient
            name: value.new_zeros(mask.shape).masked_scatter(mask, value) if compact else value.masked_fill(~mask, 0)
            for name, value in {"log_probs": -losses, **values}.items()
        }
        loss = -values["log_probs"].sum() / (mask.sum().clamp(min=1) if count is None else count)
        aux_loss = getattr(output, "aux_loss", None)
        if aux_loss is not None:
            loss = loss + getattr(self.config.get_text_config(), "router_aux_loss_coef", 0.0) * aux_loss.to(loss.device)
        if fused_lm_head:
            return TokenLosses(loss, label_mask=mask, aux_loss=aux_loss, **values)
        correct, entropy = values["is_top1"].sum().float(), values["entropy"].sum()
        return TokenLosses(
            loss, num_correct_tokens=correct, entropy_sum=entropy, num_valid_tokens=mask.sum(), aux_loss=aux_loss
        )

    return forward


def _losses(
    logits: Tensor, targets: Tensor, metrics: Sequence[str], smoothing: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and metrics of each token."""
    if isinstance(logits, Logits) and logits.pending:
        losses, _, values = logits.source.losses(targets, metrics, smoothing)
        return losses, values
    z = logits.float()
    losses = F.cross_entropy(z.flatten(0, -2), targets.flatten(), reduction="none", label_smoothing=smoothing)
    with torch.no_grad():
        logs = z.log_softmax(-1)
        values = {
            "entropy": -(logs.exp() * logs).sum(-1), "log_sum_sq_probs": (2 * logs).logsumexp(-1),
            "mean_logits": z.mean(-1), "is_top1": z.argmax(-1) == targets,
        }  # fmt: skip
    return losses.view(targets.shape), {name: values[name] for name in metrics}
