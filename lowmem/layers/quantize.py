"""Models whose matrices are held in 8, 10 or 12 bits per element."""

import functools
import logging
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from lowmem.errors import ConfigError, UnsupportedError, did_you_mean, require_known
from lowmem.placements import find
from lowmem.step.program import SMALLEST_GROUPED
from lowmem.tiles.quantized import QuantizedWeight, in_codes, plain
from lowmem.tiles.storage import LARGEST_GROUP, STORED_DTYPES, WEIGHT_FORMATS, Integer

logger = logging.getLogger(__name__)


@torch.inference_mode(False)  # or nothing could train them
def quantize_(model: nn.Module, weight_format: str, *, group: int = 64, skip: Sequence[str] = ()) -> nn.Module:
    """Holds the weights of linear layers, embeddings and stacks of experts in fewer bits from now on, one after the
    other, in place.

    Each such weight becomes a parameter that autograd sees as what it was, and that a `FusedOptimizer` updates where it
    is held. Make the optimizer afterwards. Weights of fewer than 4,096 elements and all other parameters stay as they
    are; weights that are tied stay tied.

    Args:
        model: its weights are float32, bfloat16 or float16.
        weight_format: "int8", "int10" or "int12": integers of so many bits, with a bfloat16 unit for each group.
        group: elements of a row that share a unit: a power of two, at most 1,024.
        skip: names of modules that stay as they are, with all inside; `*` stands for any characters.

    Returns:
        The model.

    Raises:
        ConfigError: an unknown format, a group that does not divide the rows of a weight, or a name in `skip` that no
            module has.
        UnsupportedError: the model is sharded; `fully_shard` comes after. Or a weight has Inf or NaN.
    """
    require_known("weight_format", weight_format, [*WEIGHT_FORMATS])
    if group < 8 or group > LARGEST_GROUP or LARGEST_GROUP % group:
        raise ConfigError(f"group={group}: allowed are the powers of two from 8 to {LARGEST_GROUP}")
    storage = Integer(WEIGHT_FORMATS[weight_format], group)
    modules, skipped = [name for name, _ in model.named_modules()], list[str]()
    for pattern in skip:
        matching = [f"{name}." for name in modules if fnmatchcase(name, pattern)]
        if not matching:
            raise ConfigError(f"skip: no module is named {pattern!r}.{did_you_mean(pattern, modules)}")
        skipped += matching
    chosen = [names for weight, names in _shared(model, _can_be_held) if _is_chosen(weight, names, group, skipped)]
    if chosen and weight_format == "int8":
        logger.warning(
            "int8 weights learn about four fifths as much as float32 weights in a long run near the optimum, int12 "
            "weights almost as much (docs/how-to/fewer_bits.md)"
        )
    for names in chosen:
        _replace(model, names, functools.partial(QuantizedWeight.of, format=storage, name=names[0]))
    return model


def _is_chosen(weight: Tensor, names: list[str], group: int, skipped: list[str]) -> bool:
    """Returns whether `quantize_` holds a weight in codes, or raises what it raises."""
    shard = find("auto", [weight]).shard
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
            f"group={group} does not divide the rows of {names[0]}, {list(weight.shape)}. Choose a smaller one, or "
            f"skip=[{names[0].rpartition('.')[0]!r}]"
        )
    return True


@torch.inference_mode(False)
def dequantize_(model: nn.Module) -> nn.Module:
    """Holds all weights as ordinary matrices again, rounded to the dtype that they show, one after the other, in place:
    what `save_pretrained`, merging and `model.to(dtype)` need. An optimizer of the model has no use after that.

    Returns:
        The model.

    Raises:
        UnsupportedError: the model is sharded.
    """
    held = [names for _, names in _shared(model, lambda module, param: isinstance(param, QuantizedWeight))]
    if in_codes(model) and not held:
        raise UnsupportedError(
            "the model is sharded. Use lowmem.placements.full_tensor(weight) for the full tensor of each weight"
        )
    for names in held:
        _replace(model, names, plain)
    return model


def _shared(model: nn.Module, wanted: Callable[[nn.Module, Tensor], bool]) -> list[tuple[Tensor, list[str]]]:
    """The parameters that are wanted in one of their modules, each with all its names."""
    shared: dict[Tensor, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        shared.setdefault(param, []).append(name)
    owners = {
        param: [model.get_submodule(name.rpartition(".")[0]) for name in names] for param, names in shared.items()
    }
    return [pair for pair in shared.items() if any(wanted(module, pair[0]) for module in owners[pair[0]])]


def _replace(model: nn.Module, names: list[str], change: Callable[[Tensor], Tensor]) -> None:
    """Puts another parameter in all places of one, which is freed."""
    param = model.get_parameter(names[0])
    new = nn.Parameter(change(param.detach()), param.requires_grad)
    for name in names:
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, new)


def _can_be_held(module: nn.Module, param: Tensor) -> bool:
    """Returns whether a parameter is the weight of a linear layer or an embedding, or of a stack of experts."""
    if param.ndim == 3:
        return len(param) == getattr(module, "num_experts", None)  # as modules of transformers call it
    linear = isinstance(module, nn.Linear | nn.Embedding) or hasattr(module, "nf")  # Conv1D of transformers
    return linear and param is module.weight
