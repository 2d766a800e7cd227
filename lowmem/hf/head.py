"""The losses of TRL's trainers by `lowmem.layers.head`: no matrix of logits exists, nor the gradient of its weight.

TRL from 1.15 on calls a model with `fused_lm_head=True` and expects the log-probabilities of labels, and before that the
loss "chunked_nll" calls it with labels: models get a forward that answers both. Other trainers read logits, and get some
that are computed where they are read.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
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
from lowmem.tiles.quantized import in_codes

Lazy = Callable[[], AbstractContextManager[None]]

# What trainers log of the tokens of the model that they train.
_LOGGED = {
    "SFTTrainer": ("entropy", "is_top1"),
    "DPOTrainer": ("entropy", "is_top1", "mean_logits"),
    "KTOTrainer": ("entropy", "mean_logits"),
}


@dataclass
class TokenLosses(ModelOutput):
    """The output of a model that is asked for losses: what TRL's trainers read, by the names that they have there.

    Attributes:
        loss: the mean.  log_probs: minus the loss of each token, [batch, tokens].  label_mask: where there are labels.
        entropy, log_sum_sq_probs, mean_logits, is_top1: see `lowmem.layers.head.METRICS`.
        num_correct_tokens, entropy_sum, num_valid_tokens: sums of these.  aux_loss: that of experts.
    """

    loss: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None
    label_mask: Tensor | None = None
    num_correct_tokens: Tensor | None = None
    entropy_sum: Tensor | None = None
    num_valid_tokens: Tensor | None = None
    aux_loss: Tensor | None = None


def compute(trainer: Any, layers: LayersConfig) -> list[Lazy]:
    """Lets the losses of a trainer of TRL, and of its reference model, be those of `lowmem.layers.head`, unless
    `computed_gradients` is False. An `SFTTrainer` from TRL 1.15 on smooths labels there.

    Returns:
        Contexts in which `compute_loss` gets logits that are computed where they are read.
    """
    if "trl.trainer.utils" not in sys.modules:  # it is none of TRL's trainers
        return []
    import trl

    # by name: importing another trainer of TRL may need a package that is not there
    classes = [cls.__name__ for cls in type(trainer).__mro__ if cls.__module__.startswith("trl.")]
    names = [name for name in classes if name in (*_LOGGED, "GRPOTrainer", "RLOOTrainer")]
    if names and in_codes(trainer.model) and not layers.computed_gradients:
        raise ConfigError(
            "layers.computed_gradients: false, with which TRL computes the head from an ordinary matrix, and "
            "fused.weight_format, which holds it in codes; omit one of them"
        )
    if not names or not layers.computed_gradients:
        return []
    logged, args, smoothing = _LOGGED.get(names[0]), trainer.args, 0.0
    fused, chunked = hasattr(trl.trainer, "add_fused_lm_head"), getattr(args, "loss_type", None) == "chunked_nll"
    if fused and logged and trainer.label_smoother is not None:
        smoothing, trainer.label_smoother = args.label_smoothing_factor, None
    contexts: list[Lazy] = []
    for model in (trainer.model, getattr(trainer, "ref_model", None)):
        if model is None:
            continue
        base = model.get_base_model() if is_peft_model(model) else model
        lazy = _lazy(base, layers.head_bytes)
        if logged and (fused or chunked):
            weighted = ("log_sum_sq_probs",) if getattr(args, "use_weighting", False) else ()
            metrics = (*logged, *weighted) if model is trainer.model else ()
            base.forward = MethodType(_forward(base, lazy, metrics, smoothing, chunked), base)
        elif not fused and trainer._sharding is None:
            contexts.append(lazy)
    return contexts


@contextmanager
def lazily(contexts: Sequence[Lazy]) -> Iterator[None]:
    """A context of all of these."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield


def _lazy(model: Any, memory: int | None) -> Lazy:
    """Makes a context in which a model returns logits that are computed where they are read, if its output embedding is
    a linear layer. One with an adapter, or of a class of its own, is left as it is.
    """
    output = embedding(model, "output")
    # PEFT calls a copy of the layer if it trains it (modules_to_save)
    linear = output.original_module if hasattr(output, "modules_to_save") else output
    if getattr(type(linear), "forward", None) is not nn.Linear.forward:
        return nullcontext
    path = next(name for name, module in model.named_modules() if module is output)
    parent, _, name = path.rpartition(".")
    return functools.partial(_swapped, model.get_submodule(parent), name, LazyHead(output, memory, _gathered))


@contextmanager
def _swapped(parent: nn.Module, name: str, module: nn.Module) -> Iterator[None]:
    before = getattr(parent, name)
    setattr(parent, name, module)
    try:
        yield
    finally:
        setattr(parent, name, before)


def _gathered(*params: Tensor | None) -> AbstractContextManager[Any]:
    """A context in which parameters that ZeRO-3 has partitioned are complete."""
    partitioned = [param for param in params if param is not None and not param.numel()]
    if not partitioned:
        return nullcontext()
    import deepspeed

    gathered: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(partitioned)
    return gathered


def _forward(model: Any, lazy: Lazy, metrics: Sequence[str], smoothing: float, chunked: bool) -> Callable[..., Any]:
    """A forward of a model that returns `TokenLosses` where TRL asks for them. Everything else is that of `model`, and
    so are logits: scaled, capped or computed by layers of its own.
    """
    inner, config = model.forward, model.config.get_text_config()

    @functools.wraps(type(model).forward)  # `generate` reads its signature
    def forward(
        self: Any, *args: Any, fused_lm_head: bool = False, labels: Tensor | None = None,
        shift_labels: Tensor | None = None, num_items_in_batch: Any = None, **options: Any,
    ) -> Any:  # fmt: skip
        given = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
        given = {name: value for name, value in given.items() if value is not None}
        if not fused_lm_head and not (chunked and {"labels", "shift_labels"} & given.keys()):
            return inner(*args, **given, **options)
        with lazy():
            output = inner(*args, **{**options, "use_cache": False})
            logits, targets = output.logits, shift_labels
            if targets is None:
                logits, targets = logits[:, :-1], labels[:, 1:]  # type: ignore[index]
            targets = targets.to(logits.device)
            mask = targets != -100
            compact = mask.is_cuda  # as TRL: only tokens with labels are computed
            rows = (logits[mask], targets[mask]) if compact else (logits, targets.clamp(min=0))
            losses, values = _losses(*rows, metrics, smoothing)
        losses, *metrics_of = (
            # a loss without labels is 0 and has a gradient
            x.new_zeros(mask.shape).masked_scatter(mask, x) if compact else x.masked_fill(~mask, 0)
            for x in (losses, *values.values())
        )
        values = dict(zip(values, metrics_of, strict=True))
        count = mask.sum()
        loss = losses.sum() / (count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch)
        aux_loss = getattr(output, "aux_loss", None)
        if aux_loss is not None:
            loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * aux_loss.to(loss.device)
        if fused_lm_head:
            return TokenLosses(loss, -losses, label_mask=mask, aux_loss=aux_loss, **values)
        sums = {"num_correct_tokens": values["is_top1"].sum().float(), "entropy_sum": values["entropy"].sum()}
        return TokenLosses(loss, num_valid_tokens=count, aux_loss=aux_loss, **sums)

    return forward


def _losses(
    logits: Tensor, targets: Tensor, metrics: Sequence[str], smoothing: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each token and metrics, from logits that are computed where they are read or from ordinary ones."""
    if isinstance(logits, Logits) and logits.pending:
        losses, _, values = logits.source.losses(targets, metrics, label_smoothing=smoothing)
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
