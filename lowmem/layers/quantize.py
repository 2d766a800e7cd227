"""Quantizes the matrices of a model to 8, 10 or 12 bits per element, and back."""

import functools
import logging
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from lowmem.errors import ConfigError, UnsupportedError, did_you_mean, require_known
from lowmem.placements import shard_of
from lowmem.tiles.quantized import QuantizedWeight, has_quantized_weights, plain
from lowmem.tiles.storage import LARGEST_GROUP, SMALLEST_GROUPED, STORED_DTYPES, WEIGHT_FORMATS, Integer

logger = logging.getLogger(__name__)


@torch.inference_mode(False)  # parameters made in inference mode cannot be trained
def quantize_(
    model: nn.Module, weight_format: str, *, group: int = 64, skip: Sequence[str] = (), device: Any = None
) -> nn.Module:
    """Quantizes the weights of linear layers, embeddings and stacks of experts in-place, one after the other.

    For autograd, each weight is still a parameter with its original dtype and shape. Create the `FusedOptimizer`
    afterwards: it updates the quantized values. Weights with fewer than 4,096 elements and all other parameters do not
    change. Tied weights stay tied.

    Args:
        model: a model with float32, bfloat16 or float16 weights.
        weight_format: "int8", "int10" or "int12": integers with 8, 10 or 12 bits, and one bfloat16 scale per group.
        group: number of consecutive elements of a row that share a scale, a power of two from 8 to 1,024.
        skip: names of modules that are not quantized, including their submodules; `*` matches any characters.
        device: device to which each weight is moved when it is quantized. By default weights are not moved.

    Returns:
        The model.

    Raises:
        ConfigError: `weight_format` is unknown, `group` does not divide a weight's rows, or `skip` matches no module.
        UnsupportedError: the model is sharded (call `fully_shard` afterwards), or a weight contains Inf or NaN.
    """
    require_known("weight_format", weight_format, [*WEIGHT_FORMATS])
    if group < 8 or group > LARGEST_GROUP or LARGEST_GROUP % group:
        raise ConfigError(f"group={group} is not valid. Expected a power of two from 8 to {LARGEST_GROUP}")
    storage = Integer(WEIGHT_FORMATS[weight_format], group)
    modules = [name for name, _ in model.named_modules()]
    skipped = list[str]()
    for pattern in skip:
        matching = [f"{name}." for name in modules if fnmatchcase(name, pattern)]
        if not matching:
            raise ConfigError(f"skip: {pattern!r} is not the name of a module.{did_you_mean(pattern, modules)}")
        skipped += matching
    chosen = [names for weight, names in _shared(model, _is_matrix) if _is_chosen(weight, names, group, skipped)]
    if chosen and weight_format == "int8":
        logger.warning(
            "in a long run near the optimum, int8 weights reach a higher loss than float32 weights; int12 weights "
            "reach almost the same loss (docs/how-to/fewer_bits.md)"
        )
    for names in chosen:
        _replace(model, names, functools.partial(QuantizedWeight.of, format=storage, name=names[0]), device)
    return model


def _is_chosen(weight: Tensor, names: list[str], group: int, skipped: list[str]) -> bool:
    """Returns whether to quantize a weight. Raises the errors of `quantize_`."""
    shard = shard_of(weight)
    if any(name.startswith(tuple(skipped)) for name in names) or shard.quantized(weight) is not None:
        return False
    if shard.sharded:
        raise UnsupportedError(
            f"{names[0]} is already sharded. Call quantize_ before fully_shard. DeepSpeed ZeRO-3 cannot shard "
            "quantized weights: use FSDP2, or omit weight_format"
        )
    if weight.numel() < SMALLEST_GROUPED or weight.dtype not in STORED_DTYPES:
        return False
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        raise UnsupportedError(f"{names[0]} has hooks, which quantize_ would drop. Register them after quantize_")
    if weight.shape[-1] % group:
        raise ConfigError(
            f"group={group} does not divide the rows of {names[0]} of shape {list(weight.shape)}. Choose a smaller "
            f"group, or skip=[{names[0].rpartition('.')[0]!r}]"
        )
    return True


@torch.inference_mode(False)
def dequantize_(model: nn.Module) -> nn.Module:
    """Converts all quantized weights back to ordinary matrices of their dtype, in-place, one after the other.

    `save_pretrained`, merging and `model.to(dtype)` need this. Existing optimizers of the model become invalid.

    Returns:
        The model.

    Raises:
        UnsupportedError: the model is sharded.
    """
    quantized = [names for _, names in _shared(model, lambda module, param: isinstance(param, QuantizedWeight))]
    if has_quantized_weights(model) and not quantized:
        raise UnsupportedError("the model is sharded. Use lowmem.placements.full_tensor(weight) for each weight")
    for names in quantized:
        _replace(model, names, plain)
    return model


def _shared(model: nn.Module, matches: Callable[[nn.Module, Tensor], bool]) -> list[tuple[Tensor, list[str]]]:
    """Returns the parameters that match in at least one module, each with all its names."""
    names: dict[Tensor, list[str]] = {}
    matching: set[Tensor] = set()
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
        if matches(model.get_submodule(name.rpartition(".")[0]), param):
            matching.add(param)
    return [(param, names[param]) for param in names if param in matching]


def _replace(model: nn.Module, names: list[str], change: Callable[[Tensor], Tensor], device: Any = None) -> None:
    """Replaces a parameter in all modules that use it, so that it is freed."""
    param = model.get_parameter(names[0])
    new = nn.Parameter(change(param.detach()).to(device or param.device), param.requires_grad)
    for name in names:
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, new)


def _is_matrix(module: nn.Module, param: Tensor) -> bool:
    """Returns whether a parameter is the weight of a linear layer or an embedding, or a stack of experts."""
    if param.ndim == 3:
        return len(param) == getattr(module, "num_experts", None)  # the attribute of transformers' modules
    linear = isinstance(module, nn.Linear | nn.Embedding) or hasattr(module, "nf")  # transformers' Conv1D
    return linear and param.ndim < 3 and param is getattr(module, "weight", None)
