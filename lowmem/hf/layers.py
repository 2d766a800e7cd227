"""Applies `LayersConfig` to the models of a trainer: tiled MLPs, and losses without materialized logits.

From TRL 1.15 on, trainers call a model with `fused_lm_head=True` and expect log-probabilities of labels. In earlier
versions, the loss "chunked_nll" expects sums over tokens. A new forward of the model returns both, computed by
`lowmem.layers.head`. Losses that read logits get `lowmem.layers.logits`, which are computed when they are read.
"""

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, Literal

import torch
from accelerate.utils import is_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils import ModelOutput

from lowmem.errors import ConfigError
from lowmem.layers.logits import LazyHead, Logits
from lowmem.layers.mlp import tile_mlps
from lowmem.layers.quantize import quantize_
from lowmem.layers.tied import share_gradient
from lowmem.options import FusedConfig, LayersConfig

# The parent module of a model's output embedding, the name of its attribute, and the layer that replaces it.
HeadSlot = tuple[nn.Module, str, LazyHead]

# TRL's trainers with a language-model loss, and the token metrics that they log. Trainers that are listed neither here
# nor below may use the entropy in their loss.
_LOGGED: dict[str, tuple[str, ...]] = {
    "SFTTrainer": ("entropy", "is_top1"),
    "DPOTrainer": ("entropy", "is_top1", "mean_logits"),
    "KTOTrainer": ("entropy", "mean_logits"),
}
_OTHERS = ("GRPOTrainer", "RLOOTrainer")


def apply(model: Any, layers: LayersConfig) -> None:
    """Tiles the MLPs of a model, and adds the gradient of a tied embedding to the head's gradient. Raises
    `UnsupportedError` if no MLP can be tiled.
    """
    if layers.mlp_tile is not None:
        tile_mlps(model, layers.mlp_tile)
    table, head = embedding(model, "input"), embedding(model, "output")
    if layers.computed_gradients and head is not None and getattr(table, "weight", None) is head.weight:
        share_gradient(table)


def quantize(model: Any, fused: FusedConfig | None, device: torch.device | None = None) -> None:
    """Quantizes the weights if `fused` requests it. Each weight is moved to the device when it is quantized."""
    if fused is None or fused.weight_format is None:
        return
    if is_peft_model(model):
        raise ConfigError("fused.weight_format is for training all weights, but this model has adapters; omit it")
    quantize_(model, fused.weight_format, device=device)


def embedding(model: Any, side: Literal["input", "output"]) -> Any:
    """Returns the input or output embedding of a model, or None. Vision models and plain modules have neither."""
    get = getattr(model, f"get_{side}_embeddings", None)
    try:
        return None if get is None else get()
    except NotImplementedError:  # models without an embedding, since transformers 5.23 (modeling_utils.py)
        return None


@dataclass
class TokenLosses(ModelOutput):
    """The output of a model instead of logits, with the field names that TRL's trainers read."""

    loss: Tensor | None = None
    log_probs: Tensor | None = None  # this and the next five: [batch, tokens], 0 for tokens without a label
    label_mask: Tensor | None = None
    entropy: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None
    num_correct_tokens: Tensor | None = None
    entropy_sum: Tensor | None = None
    num_valid_tokens: Tensor | None = None
    aux_loss: Tensor | None = None


def compute_losses(trainer: Any, layers: LayersConfig) -> list[HeadSlot]:
    """Replaces the head in the losses of a TRL trainer and its reference model by `lowmem.layers.head`, unless
    `computed_gradients` is False. From TRL 1.15 on, this includes the label smoothing of `SFTTrainer`. If the loss
    reads logits, returns the heads for `lazily`.
    """
    # by name, because importing the class of another trainer may need a package that is not installed
    classes = [cls.__name__ for cls in type(trainer).__mro__ if cls.__module__.startswith("trl.")]
    trainer_class = next((name for name in classes if name in (*_LOGGED, *_OTHERS)), None)
    if trainer_class is None or not layers.computed_gradients:
        return []
    metrics = _LOGGED.get(trainer_class, ())
    args = trainer.args
    smoothing = 0.0
    calls_fused_head = hasattr(sys.modules["trl.trainer.utils"], "add_fused_lm_head")  # since TRL 1.15
    chunked = trainer_class == "SFTTrainer" and getattr(args, "loss_type", None) == "chunked_nll"
    if calls_fused_head and trainer_class == "SFTTrainer" and trainer.label_smoother is not None:
        smoothing = args.label_smoothing_factor
        trainer.label_smoother = None
    if getattr(args, "use_weighting", False):
        metrics = (*metrics, "log_sum_sq_probs")
    slots: list[HeadSlot] = []
    for model in (trainer.model, getattr(trainer, "ref_model", None)):
        if model is None:
            continue
        base = model.get_base_model() if is_peft_model(model) else model
        slot = _head_slot(base, layers)
        if metrics and (calls_fused_head or chunked):
            logged = metrics if model is trainer.model else ()
            base.forward = MethodType(_forward(base, slot, logged, smoothing, chunked), base)
        elif not calls_fused_head and not trainer._inputs.sharded:  # a sharded head would be gathered for every row
            slots += slot
    return slots


@contextmanager
def lazily(slots: Sequence[HeadSlot]) -> Iterator[None]:
    """A context in which models return logits that are computed when they are read."""
    before = [getattr(parent, name) for parent, name, _ in slots]
    for parent, name, head in slots:
        setattr(parent, name, head)
    try:
        yield
    finally:
        for (parent, name, _), output in zip(slots, before, strict=True):
            setattr(parent, name, output)


def _head_slot(model: Any, layers: LayersConfig) -> list[HeadSlot]:
    """Returns the head of a model, or an empty list if it cannot be replaced: it has an adapter or is not linear."""
    output = embedding(model, "output")
    linear = output.original_module if hasattr(output, "modules_to_save") else output  # PEFT trains a copy of it
    if getattr(type(linear), "forward", None) is not nn.Linear.forward:
        return []
    parent, _, name = next(path for path, module in model.named_modules() if module is output).rpartition(".")
    head = LazyHead(output, memory=layers.head_bytes)
    return [(model.get_submodule(parent), name, head)]


def _forward(model: Any, slot: list[HeadSlot], metrics: tuple[str, ...], smoothing: float, chunked: bool) -> Any:
    """Creates a forward that returns `TokenLosses` if TRL requests them, and otherwise the output of the model."""
    inner = model.forward

    @functools.wraps(type(model).forward)  # `generate` reads its signature
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **options: Any) -> Any:
        labelled = options.get("labels") is not None or options.get("shift_labels") is not None
        if not fused_lm_head and not (chunked and labelled):
            return inner(*args, **options)
        labels, shifted, count = (options.pop(n, None) for n in ("labels", "shift_labels", "num_items_in_batch"))
        with lazily(slot):
            output = inner(*args, **{**options, "use_cache": False})
            logits, targets = (output.logits[:, :-1], labels[:, 1:]) if shifted is None else (output.logits, shifted)
            targets = targets.to(logits.device)
            mask = targets != -100
            compact = mask.is_cuda  # only tokens with labels are computed, as in TRL
            rows = (logits[mask], targets[mask]) if compact else (logits, targets.clamp(min=0))
            losses, values = _losses(*rows, metrics, smoothing)
        values = {
            # connected to the logits even if no token has a label, so that backward works
            name: value.new_zeros(mask.shape).masked_scatter(mask, value) if compact else value.masked_fill(~mask, 0)
            for name, value in {"log_probs": -losses, **values}.items()
        }
        loss = -values["log_probs"].sum() / (mask.sum().clamp(min=1) if count is None else count)
        aux_loss = getattr(output, "aux_loss", None)
        if aux_loss is None and options.get("output_router_logits"):
            raise ConfigError(f"{type(self).__name__} has no auxiliary loss of its router. Set router_aux_loss_coef: 0")
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
    """Returns the loss and the metrics of each token."""
    if isinstance(logits, Logits) and logits.pending:
        losses, _, values = logits.source.losses(targets, metrics, smoothing, caches_probabilities=True)
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
