"""Saves and loads the weights of a model in Hugging Face files, one parameter at a time.

The files are the same as from `save_pretrained`, which needs more memory in transformers 5.23 (modeling_utils.py): for
all tensors of a file on the host, the full model if it is sharded, and a copy of every weight that it converts. Here,
only one full parameter exists at a time, or the parameters that a conversion combines.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from lowmem import placements
from lowmem.errors import CheckpointError
from lowmem.files import SafetensorsFile, read_json, write_safetensors
from lowmem.hf import adapters

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def save_weights(
    model: nn.Module, folder: str | Path, *, write: bool = True, max_shard_size: int | str = "50GB",
    save: Callable[..., Any] | None = None,
) -> None:  # fmt: skip
    """Writes the files that `save_pretrained` writes on one device: weights and configuration. For a module that is not
    a `PreTrainedModel`, writes only the weights. For a `PeftModel`, writes the adapters. Every rank calls it.

    Args:
        write: whether this rank writes the files.
        max_shard_size: the maximum size of a file, as in `save_pretrained`.
        save: a function that writes everything else, with the arguments of `model.save_pretrained` (the default).
    """
    folder = Path(folder)
    if save is None and isinstance(model, PreTrainedModel):
        save = model.save_pretrained
    if is_peft_model(model):
        adapters.save(model, folder, save or model.save_pretrained, write=write)  # type: ignore[arg-type]
        return
    layout = _FileLayout(model)
    files: dict[Path, dict[str, Tensor]] = {}
    if write:
        folder.mkdir(parents=True, exist_ok=True)
        if save is not None:
            save(str(folder), state_dict={})  # everything except weights
        count = sum(math.prod(placements.shape_of(param)) for param in model.parameters())
        files = _split(layout.tensors, folder, max_shard_size, count)
    with torch.no_grad():
        write_safetensors(files, layout.full_tensors(), {"format": "pt"})


def load_weights(model: nn.Module, folder: str | Path) -> None:
    """Copies the weights of a checkpoint into a model, or adapters into a `PeftModel`. Every rank reads the files.
    Nothing is copied unless all tensors match.

    Raises:
        CheckpointError: the weights are missing or truncated, or their names or shapes differ from the model's.
    """
    folder = Path(folder)
    if is_peft_model(model):
        adapters.load(model, folder)
        return
    if adapters.files(folder):
        raise CheckpointError(
            f"{folder} contains PEFT adapters, but the model has none. Add them to the model first: "
            "peft.get_peft_model(model, config), or peft.PeftModel.from_pretrained(model, folder)"
        )
    layout = _FileLayout(model)
    saved: dict[str, Any] = {}
    for file in map(SafetensorsFile, weight_files(folder)):
        saved |= dict.fromkeys(file.keys(), file)
    shapes = {name: placements.shape_of(tensor) for name, tensor in layout.state.items()}  # includes tied weights
    shapes |= {name: tensor.shape for name, tensor in layout.tensors.items()}
    adapters.compare(folder, saved, shapes, layout.tensors)
    with torch.no_grad():
        for group in layout.groups:
            layout.load(group, saved)


def weight_files(folder: Path) -> list[Path]:
    """Returns the weight files that a model directory should contain, or the files of its adapters. Raises
    `CheckpointError` if an index or a configuration is damaged.
    """
    if paths := adapters.files(folder):
        return paths
    index = folder / INDEX_FILE
    if not index.exists():
        return [folder / WEIGHTS_FILE]
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise CheckpointError(f"{index} is damaged: it has no weight_map")
    for name in names.values():
        if not isinstance(name, str) or name != Path(name).name:
            raise CheckpointError(f"{index} names {str(name)[:100]!r}, which is not a file of the same folder")
    return [folder / name for name in sorted(set(names.values()))]


@dataclass(frozen=True)
class _Group:
    """Weights of the model, and the tensors in files that they are converted to, by name and on `meta`."""

    weights: dict[str, Tensor]
    tensors: dict[str, Tensor]
    converted: bool = False


class _FileLayout:
    """The mapping between the weights of a model and the tensors in its files.

    Attributes:
        state: the weights and buffers of the model, by name.
        tensors: the tensors in files, in the order of `save_pretrained`, on `meta`.
        groups: the weights that are converted together, with their tensors.
    """

    def __init__(self, model: nn.Module) -> None:
        self.state: dict[str, Tensor] = dict(model.state_dict(keep_vars=True))
        weights = {
            name: torch.empty(placements.shape_of(tensor), dtype=tensor.dtype, device="meta")
            for name, tensor in self.state.items()
        }
        is_pretrained = isinstance(model, PreTrainedModel)
        ignored: Any = model._keys_to_ignore_on_save if is_pretrained else None
        for name in ignored or ():
            weights.pop(name, None)
        tied = getattr(model, "all_tied_weights_keys", {})  # names that are tied to others on loading
        saved = {id(self.state[name]): name for name in weights if name in tied}
        saved |= {id(self.state[name]): name for name in reversed(weights) if name not in tied}
        weights = {name: weight for name, weight in weights.items() if saved[id(self.state[name])] == name}
        self._model = _unsharded(model, weights) if is_pretrained else model
        with _Sources(weights) as sources:
            self.tensors = revert_weight_conversion(self._model, weights) if is_pretrained else weights
        together: dict[frozenset[str], dict[str, Tensor]] = {}
        for name, tensor in self.tensors.items():
            together.setdefault(sources.names[id(tensor)], {})[name] = tensor
        self.groups: list[_Group] = []
        for names, tensors in together.items():
            members = {name: weights[name] for name in sorted(names)}
            converted = {*map(id, members.values())} != {*map(id, tensors.values())}
            self.groups.append(_Group(members, tensors, converted))

    def convert(self, group: _Group, weights: Iterable[Tensor]) -> dict[str, Tensor]:
        """Converts the weights of a group to its tensors in files, which are views of the weights where possible."""
        if group.converted:
            with _SkipContiguous():
                named = dict(zip(group.weights, weights, strict=True))
                weights = revert_weight_conversion(self._model, named).values()
        return dict(zip(group.tensors, weights, strict=True))

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Gathers weights group by group and yields tensors of files. Frees each group before gathering the next."""
        for group in self.groups:
            yield from self.convert(
                group, [placements.full_tensor(self.state[name]).detach() for name in group.weights]
            ).items()

    def load(self, group: _Group, saved: dict[str, Any]) -> None:
        """Copies a group from open safetensors files into the model."""
        if not group.converted:
            (weight,), (name,) = group.weights, group.tensors
            placements.fill(self.state[weight], saved[name].get_tensor(name))
            return
        shapes = [weight.shape for weight in group.weights.values()]
        # the first element receives the elements of files that no weight has, such as padding
        memory = torch.empty(1 + sum(map(math.prod, shapes)), dtype=next(iter(group.tensors.values())).dtype)
        weights = _views(memory[1:], shapes)
        tensors = self.convert(group, weights)
        if all(tensor.untyped_storage().data_ptr() == memory.data_ptr() for tensor in tensors.values()):
            for name, tensor in tensors.items():
                tensor.copy_(saved[name].get_tensor(name))
        else:  # the conversion copies: converting the index of each element shows its source
            for name, index in self.convert(group, _views(torch.arange(1, len(memory)), shapes)).items():
                memory[index] = saved[name].get_tensor(name).to(memory.dtype)
        for name, tensor in zip(group.weights, weights, strict=True):
            placements.fill(self.state[name], tensor)


def _unsharded(model: Any, weights: dict[str, Tensor]) -> Any:
    """Creates a stand-in for the unsharded model. Conversions read its class and the shapes of its parameters."""
    unsharded_class = type(model).__mro__[2] if isinstance(model, FSDPModule) else type(model)
    unsharded: Any = object.__new__(unsharded_class)  # FSDPModule.__new__, which copy.copy calls, would run __init__
    unsharded.__dict__ |= model.__dict__ | {"get_parameter": weights.__getitem__}
    if (conversions := getattr(model, "_weight_conversions", None)) is not None:
        # transformers 5.23 (core_model_loading.py) drops unused conversions after loading, but not under ZeRO-3
        unsharded._weight_conversions = [conversion for conversion in conversions if conversion.was_used()]
    return unsharded


class _Sources(TorchFunctionMode):
    """Tracks which weights each tensor is computed from: `names` by the id of the tensor."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.names = {id(weight): frozenset((name,)) for name, weight in weights.items()}
        self._seen: list[Tensor] = []  # keeps them alive, so that no id is used twice

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [self.names.get(id(value), frozenset()) for value in tree_leaves((args, kwargs))]
        for value in filter(torch.is_tensor, tree_leaves(result)):
            self.names.setdefault(id(value), frozenset[str]().union(*inputs))
            self._seen.append(value)
        return result


class _SkipContiguous(TorchFunctionMode):
    """Makes `Tensor.contiguous` return its input: a conversion of stacked experts calls it on every part, which would
    need memory for two copies. `write_safetensors` copies a few rows at a time, for any strides.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


def _views(memory: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    parts = memory.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _split(
    tensors: dict[str, Tensor], folder: Path, max_shard_size: int | str, count: int
) -> dict[Path, dict[str, Tensor]]:
    """Splits the tensors of a model with `count` parameters into files, and writes an index for several files."""
    split = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: tensor.untyped_storage().nbytes(),
        get_storage_id=lambda tensor: tensor.untyped_storage()._cdata,
        filename_pattern=WEIGHTS_FILE.replace(".", "{suffix}."),
        max_shard_size=max_shard_size,
    )
    if split.is_sharded:
        metadata = {"total_parameters": count, **split.metadata}
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return {folder / file: {name: tensors[name] for name in names} for file, names in split.filename_to_tensors.items()}
