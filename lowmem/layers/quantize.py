"""Models whose matrices are held in 8, 10 or 12 bits per element."""

import logging
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from lowmem.errors import ConfigError, UnsupportedError, did_you_mean, require_known
from lowmem.placements import find
from lowmem.step.program import SMALLEST_GROUPED
from lowmem.tiles.quantized import QuantizedWeight, in_codes, plain
from lowmem.tiles.storage import LARGEST_GROUP, STORED_DTYPES, WEIGHT_FORMATS, Integer

logger = logging.getLogger(__name__)


def quantize_(model: nn.Module, weight_format: str, *, group: int = 64, skip: Sequence[str] = ()) -> nn.Module:
    """Holds the weights of linear layers and embeddings in fewer bits from now on, one after the other, in place.

    Each such weight becomes a parameter that autograd sees as the matrix that it was, and that a `FusedOptimizer`
    updates where it is held. Make the optimizer afterwards. Weights of fewer than 4,096 elements and all other
    parameters stay as they are; weights that are tied stay tied.

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
        UnsupportedError: the model is sharded; `fully_shard` comes after.
    """
    require_known("weight_format", weight_format, [*WEIGHT_FORMATS])
    if group < 8 or group > LARGEST_GROUP or LARGEST_GROUP % group:
        raise ConfigError(f"group={group}: allowed are the powers of two from 8 to {LARGEST_GROUP}")
    if weight_format == "int8":
        logger.warning(
            "int8 weights keep four fifths of what float32 learns in a long run near the optimum, int12 nearly all of "
            "it (docs/how-to/fewer_bits.md)"
        )
    storage = Integer(WEIGHT_FORMATS[weight_format], group)
    named = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)}
    modules, skipped = [name for name, _ in model.named_modules()], set[str]()
    for pattern in skip:
        inside = [name for name in modules if fnmatchcase(name, pattern)]
        if not inside:
            raise ConfigError(f"skip: no module is called {pattern!r}.{did_you_mean(pattern, named)}")
        skipped.update(name for name in named for outer in inside if f"{name}.".startswith(f"{outer}."))
    sharing: dict[int, list[str]] = {}  # by the identity of a weight, which is freed when it is replaced
    for name, module in named.items():
        shard = find("auto", [module.weight]).shard
        if shard.quantized(module.weight) is not None:  # type: ignore[arg-type]
            continue
        if shard.sharded and name not in skipped:
            raise UnsupportedError(
                f"{name}.weight is sharded already, and can only be held in codes before it is: call quantize_ before "
                "fully_shard. Weights held in codes cannot be sharded by DeepSpeed ZeRO-3; use FSDP2"
            )
        sharing.setdefault(id(module.weight), []).append(name)
    chosen = []
    for names in sharing.values():
        weight = named[names[0]].weight
        if weight.numel() < SMALLEST_GROUPED or weight.dtype not in STORED_DTYPES or not skipped.isdisjoint(names):
            continue
        if weight.shape[1] % group:
            raise ConfigError(
                f"group={group} does not divide the rows of {names[0]}.weight, {list(weight.shape)}. Choose a smaller "
                f"one, or skip=[{names[0]!r}]"
            )
        chosen.append(names)
    for names in chosen:
        own = named[names[0]].weight
        held = nn.Parameter(QuantizedWeight.of(own.detach(), storage), own.requires_grad)  # type: ignore[arg-type,operator]
        for name in names:
            named[name].weight = held
    return model


def dequantize_(model: nn.Module) -> nn.Module:
    """Holds all weights as ordinary matrices again, rounded to the dtype that they show, one after the other, in place:
    what `save_pretrained`, merging and `model.to(dtype)` need. An optimizer of the model has no use after that.

    Returns:
        The model.

    Raises:
        UnsupportedError: the model is sharded.
    """
    sharing: dict[int, list[nn.Module]] = {}  # by the identity of a weight, which is freed when it is replaced
    for module in model.modules():
        if isinstance(getattr(module, "weight", None), QuantizedWeight):
            sharing.setdefault(id(module.weight), []).append(module)
    if in_codes(model) and not sharing:
        raise UnsupportedError("the model is sharded; lowmem.placements.full_tensor(weight) gives one matrix of it")
    for modules in sharing.values():
        weight = modules[0].weight
        held = nn.Parameter(plain(weight), weight.requires_grad)  # type: ignore[arg-type]
        for module in modules:
            module.weight = held
    return model
