"""A model's weights, to Hugging Face files and back, one parameter at a time.

Files are those of `save_pretrained`. What is held beside the model is one whole parameter, or those that lie in files
together, so that sharded models are saved and loaded too: how a parameter becomes whole, and how a rank takes its part
of one, `placements` says.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, apply_converters, revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from lowmem import placements
from lowmem.errors import CheckpointError
from lowmem.files import begin, check_safetensors, put, read_json

ShapeOf = Callable[[Tensor], tuple[int, ...]]
Gather = Callable[[Tensor], Tensor]
Fill = Callable[[Tensor, Tensor], None]
Places = dict[str, tuple[BinaryIO, int]]

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def save_weights(
    model: nn.Module,
    folder: Path,
    *,
    shape_of: ShapeOf = placements.shape_of,
    gather: Gather = placements.full_tensor,
    write: bool = True,
    max_shard_size: int | str = "50GB",
) -> None:
    """Writes what `save_pretrained` writes on one device: weights and configuration. Of other modules, weights alone.

    Every rank calls it: `gather` is called for the same tensors in the same order on all.

    Args:
        shape_of: the logical shape of a parameter or buffer of the model.
        gather: the whole of it, in that shape.
        write: whether this rank writes; the others touch no file.
        max_shard_size: bytes of one file, as `save_pretrained` takes them.

    Raises:
        OSError: a file cannot be written.
    """
    files = _Files(model, shape_of)
    with ExitStack() as stack, torch.no_grad():
        places: Places | None = None
        if write:
            folder.mkdir(parents=True, exist_ok=True)
            if isinstance(model, PreTrainedModel):
                model.save_pretrained(folder, state_dict={})  # everything but weights
            count = sum(math.prod(shape_of(param)) for param in model.parameters())
            places = _begin(folder, files.tensors, max_shard_size, count, stack)
        for group in files.groups:
            _save(files, group, gather, places)


def load_weights(
    model: nn.Module, folder: Path, *, shape_of: ShapeOf = placements.shape_of, fill: Fill = placements.fill
) -> None:
    """Copies the weights of a checkpoint into a model. Every rank reads, and nothing is copied unless everything fits.

    Args:
        shape_of: the logical shape of a parameter or buffer of the model.
        fill: copies what belongs to this rank out of the whole of it, which comes in that shape and in any dtype.

    Raises:
        CheckpointError: the weights are missing or cut short, or their names or shapes are not this model's.
    """
    paths = weight_files(folder)
    for path in paths:
        check_safetensors(path)
    files = _Files(model, shape_of)
    with ExitStack() as stack, torch.no_grad():
        saved: dict[str, Any] = {}
        for path in paths:
            file = stack.enter_context(safe_open(path, framework="pt"))
            saved |= dict.fromkeys(file.keys(), file)
        for group in _find(files, saved, folder):
            _load(files, group, saved, fill)


def weight_files(folder: Path) -> list[Path]:
    """The files that a folder's weights are in, there or not."""
    index = folder / INDEX_FILE
    if not index.exists():
        return [folder / WEIGHTS_FILE]
    return [folder / name for name in sorted(set(read_json(index)["weight_map"].values()))]


@dataclass(frozen=True)
class _Group:
    """Weights of the model, and the tensors in files that they become together; stand-ins without data, by name."""

    weights: dict[str, Tensor]
    tensors: dict[str, Tensor]
    converted: bool = False


class _Files:
    """How a model's weights lie in files: all `tensors`, in the order of `save_pretrained`, and in `groups`."""

    def __init__(self, model: nn.Module, shape_of: ShapeOf) -> None:
        self.own: dict[str, Tensor] = dict(model.state_dict(keep_vars=True))
        weights = {name: torch.empty(shape_of(t), dtype=t.dtype, device="meta") for name, t in self.own.items()}
        if isinstance(model, PreTrainedModel):
            for name in model._keys_to_ignore_on_save or ():
                weights.pop(name, None)
            weights = remove_tied_weights_from_state_dict(weights, model)
            self._model = _unsharded(model, weights)
            self.tensors = revert_weight_conversion(self._model, weights)
            self.groups = list(self._grouped(weights))
        else:
            first: dict[int, str] = {}
            for name, tensor in self.own.items():
                first.setdefault(id(tensor), name)
            self.tensors = {name: weights[name] for name in first.values()}
            self.groups = [_Group({name: weight}, {name: weight}) for name, weight in self.tensors.items()]

    def _grouped(self, weights: dict[str, Tensor]) -> Iterator[_Group]:
        renamed = {id(tensor): name for name, tensor in self.tensors.items()}
        converters = _converters(self._model)
        together: dict[str, dict[str, Tensor]] = {}
        for name, weight in weights.items():
            if id(weight) in renamed:
                yield _Group({name: weight}, {renamed[id(weight)]: weight})
            else:
                together.setdefault(apply_converters(name, converters)[0], {})[name] = weight
        for members in together.values():
            names = revert_weight_conversion(self._model, members)
            yield _Group(members, {name: self.tensors[name] for name in names}, converted=True)

    def convert(self, group: _Group, wholes: Iterable[Tensor]) -> dict[str, Tensor]:
        """The tensors of files, which are views of the whole weights where that is possible."""
        if group.converted:
            with _NoStraightening():
                named = dict(zip(group.weights, wholes, strict=True))
                wholes = revert_weight_conversion(self._model, named).values()
        return dict(zip(group.tensors, wholes, strict=True))


def _unsharded(model: Any, weights: dict[str, Tensor]) -> Any:
    """The model as conversions would see it on one device."""
    own_class = type(model).__mro__[2] if isinstance(model, FSDPModule) else type(model)
    unsharded: Any = object.__new__(own_class)
    unsharded.__dict__ |= model.__dict__ | {"get_parameter": weights.__getitem__}
    if (loaded_by := getattr(model, "_weight_conversions", None)) is not None:
        unsharded._weight_conversions = [c for c in loaded_by if c.was_used()]  # ZeRO-3 keeps the others, too
    return unsharded


def _converters(model: Any) -> list[Any]:
    """What `revert_weight_conversion` converts with."""
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    return [c.reverse_transform() for c in reversed(conversions) if isinstance(c, WeightConverter)]


class _NoStraightening(TorchFunctionMode):
    """Leaves out copies that only straighten memory: pieces of a tensor stay views of it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


def _save(files: _Files, group: _Group, gather: Gather, places: Places | None) -> None:
    wholes = [gather(files.own[name]).detach() for name in group.weights]
    if places is None:
        return
    for name, tensor in files.convert(group, wholes).items():
        file, start = places[name]
        put(file, start, tensor)


def _find(files: _Files, saved: dict[str, Any], folder: Path) -> list[_Group]:
    """The groups as they are saved: weights may lie in files as they do in memory, too, and by any of their names.

    Raises:
        CheckpointError: what is saved is not just what is looked for.
    """
    unknown = saved.keys() - files.tensors.keys() - files.own.keys()
    if unknown:
        raise CheckpointError(f"{folder}: the model has no weight {min(unknown)!r}; the checkpoint is of another model")
    plain = {id(tensor): name for name, tensor in files.own.items() if name in saved}
    found: list[_Group] = []
    missing: list[str] = []
    for group in files.groups:
        if group.tensors.keys() <= saved.keys():
            found.append(group)
        elif all(id(files.own[name]) in plain for name in group.weights):
            found += [_Group({name: t}, {plain[id(files.own[name])]: t}) for name, t in group.weights.items()]
        else:
            missing += [name for name in group.tensors if name not in saved]
    for name, tensor in (pair for group in found for pair in group.tensors.items()):
        if (shape := saved[name].get_slice(name).get_shape()) != list(tensor.shape):
            raise CheckpointError(
                f"{folder}: weight {name!r} has shape {shape} in the checkpoint and {list(tensor.shape)} in the model; "
                "the checkpoint is of another model"
            )
    if missing:
        raise CheckpointError(f"{folder}: {len(missing)} weights are missing, such as {missing[0]!r}")
    return found


def _load(files: _Files, group: _Group, saved: dict[str, Any], fill: Fill) -> None:
    if not group.converted:
        (weight,), (name,) = group.weights, group.tensors
        fill(files.own[weight], saved[name].get_tensor(name))
        return
    shapes = [weight.shape for weight in group.weights.values()]
    memory = torch.empty(sum(map(math.prod, shapes)), dtype=next(iter(group.tensors.values())).dtype)
    wholes = _split(memory, shapes)
    pieces = files.convert(group, wholes)
    if all(piece.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr() for piece in pieces.values()):
        for name, piece in pieces.items():
            piece.copy_(saved[name].get_tensor(name))
    else:  # the conversion copies: where each element comes from, it tells by what it does with their numbers
        numbers = files.convert(group, _split(torch.arange(len(memory)), shapes))
        for name, number in numbers.items():
            memory[number] = saved[name].get_tensor(name).to(memory.dtype)
    for name, whole in zip(group.weights, wholes, strict=True):
        fill(files.own[name], whole)


def _split(memory: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    parts = memory.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _begin(folder: Path, tensors: dict[str, Tensor], max_shard_size: int | str, count: int, stack: ExitStack) -> Places:
    """Begins the files of a model of `count` parameters, with an index where they are many.

    Returns:
        Where each tensor's bytes go: a file, open while `stack` is, and the offset in it.
    """
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
    places: Places = {}
    for name, inside in split.filename_to_tensors.items():
        file = stack.enter_context((folder / name).open("wb"))
        starts = begin(file, {tensor: tensors[tensor] for tensor in inside}, {"format": "pt"})
        places |= {tensor: (file, start) for tensor, start in starts.items()}
    return places
