"""TRL's fused head, which computes the loss from tiles of logits: the models that it suits, and how it is computed."""

import sys
from functools import partial, update_wrapper
from types import FunctionType, MethodType
from typing import Any

from accelerate.utils import is_peft_model
from torch import Tensor

from lowmem.errors import ConfigError, UnsupportedError
from lowmem.hf.layers import embedding
from lowmem.layers.config import LayersConfig
from lowmem.layers.head import METRICS, Head, token_losses
from lowmem.tiles.quantized import in_codes

# Columns of a tile of logits on a CPU, where TRL's own function computes them.
_CPU_COLUMNS = 2048


def check(model: Any) -> None:
    """Raises `UnsupportedError` for a model that has layers between its last hidden state and its output embedding.

    TRL 1.16 (trainer/utils.py, add_fused_lm_head) would train without those layers and would not warn. Of a PEFT model
    it calls the base model, in which adapters are; prompts come before its first layer.
    """
    model = model.get_base_model() if is_peft_model(model) else model
    output = embedding(model, "output")
    modules = [model.base_model] if output is None else [model.base_model, output]
    known = {id(param) for module in modules for param in module.parameters()}
    others = [name for name, param in model.named_parameters() if id(param) not in known]
    reason = f"{others[0]!r} is between them" if others else ""
    if output is None or model.base_model is model:
        reason = "there is no such matrix"
    if output is not None and not hasattr(output, "bias"):
        reason = (
            f"{type(output).__name__} changes some of its rows (leave the output embedding, also a tied one, out of "
            "trainable_token_indices)"
        )
    if reason:
        raise UnsupportedError(
            f"{type(model).__name__}: TRL's SFTTrainer computes logits as the product of the last hidden state and one "
            f"matrix, the output embedding, but in this model {reason}. Use a model whose head is one matrix, or, in "
            "Python, FusedTrainer, which uses the loss that the model computes"
        )


def compute(trainer: Any, layers: LayersConfig) -> None:
    """Lets the losses of a trainer of TRL, and of its reference model, be those of `lowmem.layers.head`, unless
    `computed_gradients` is False. An `SFTTrainer` smooths labels there, and its model is checked.

    TRL 1.16 (trainer/utils.py, add_fused_lm_head) has given its models a forward that calls one autograd function by
    its name. Each gets a copy of that forward in which the name is of another function, and tiles are smaller on a
    CPU: TRL has no option for their size, and allocates about eight float32 tensors of 4096 x 32768 logits.
    """
    if "trl.trainer.utils" not in sys.modules:  # it is none of TRL's trainers
        return
    from trl import DPOTrainer, KTOTrainer, SFTTrainer
    from trl.trainer.utils import _ChunkedLogProbFunction

    names: dict[str, Any] = {}
    if trainer.args.device.type == "cpu":
        names["_CHUNKED_LOGPROB_CHUNK_SIZE"] = _CPU_COLUMNS
    smoothing = 0.0
    if isinstance(trainer, SFTTrainer):
        check(trainer.model)
        if layers.computed_gradients and trainer.label_smoother is not None:
            smoothing, trainer.label_smoother = trainer.args.label_smoothing_factor, None
    if layers.computed_gradients:
        entropy = isinstance(trainer, SFTTrainer | DPOTrainer | KTOTrainer)  # is a metric, and not part of the loss
        function = _LogProbs(_ChunkedLogProbFunction, layers.head_bytes, smoothing, entropy)
        names["_ChunkedLogProbFunction"] = function
    for model in (trainer.model, getattr(trainer, "ref_model", None)):
        for module in () if model is None else model.modules():
            forward = getattr(vars(module).get("forward"), "__func__", None)
            if forward is None or "_ChunkedLogProbFunction" not in forward.__code__.co_names:
                continue
            if in_codes(trainer.model) and not layers.computed_gradients:
                raise ConfigError(
                    "layers.computed_gradients: false makes TRL compute the head from an ordinary matrix, but "
                    "fused.weight_format quantizes it. Omit one of them"
                )
            parts = forward.__name__, forward.__defaults__, forward.__closure__
            copy = FunctionType(forward.__code__, {**forward.__globals__, **names}, *parts)
            copy.__kwdefaults__ = forward.__kwdefaults__
            module.forward = MethodType(update_wrapper(copy, forward), module)


class _LogProbs:
    """Called by TRL in place of its ChunkedLogProbFunction, which it calls if the loss may depend on the entropy. Where
    labels are smoothed, minus the loss of a token takes the place of its log-probability, of which the loss is the sum.
    """

    def __init__(self, own: Any, memory: int | None, label_smoothing: float, logs_entropy: bool) -> None:
        self._own, self._memory, self._label_smoothing = own, memory, label_smoothing
        self._logs_entropy = logs_entropy

    def apply(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, columns: int,
        softcap: float | None, scale: float, outputs: tuple[str, ...],
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        if "entropy" in outputs and not self._logs_entropy:
            returned: tuple[Tensor | None, ...] = self._own.apply(
                hidden, weight, bias, targets, temperature, columns, softcap, scale, outputs
            )
            return returned
        from trl.trainer.utils import maybe_gather_lm_head_ctx

        head = Head(scale, softcap, temperature, self._label_smoothing, memory=self._memory)
        metrics = tuple(name for name in METRICS if name in outputs)
        gather = partial(maybe_gather_lm_head_ctx, weight, bias)
        losses, values = token_losses(hidden, weight, bias, targets, head, metrics, gather)
        return -losses, *(values.get(name) for name in METRICS)
