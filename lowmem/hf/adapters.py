"""The files of a PEFT model, one for each adapter. PEFT writes them; they are read one tensor at a time."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.utils import is_peft_model
from torch import Tensor
from transformers import TrainingArguments
from transformers.utils import ADAPTER_CONFIG_NAME, ADAPTER_SAFE_WEIGHTS_NAME

from lowmem import placements
from lowmem.errors import CheckpointError, UnsupportedError
from lowmem.files import SafetensorsFile, read_json


def check(model: Any, args: TrainingArguments, *, sharded: bool, saves: bool) -> None:
    """Raises `UnsupportedError` for adapters that cannot be trained, saved or resumed."""
    if not is_peft_model(model):
        if saves and getattr(model, "peft_config", None):
            raise UnsupportedError(
                f"{type(model).__name__}.add_adapter(...): transformers saves only the active adapter of such a model, "
                "so no trainer can resume from its checkpoints. Use model = peft.get_peft_model(model, config) "
                "instead, or set save_strategy to 'no'"
            )
        return
    for config in model.peft_config.values():
        kind = config.peft_type.value
        if kind in ("PREFIX_TUNING", "CARTRIDGE") and args.gradient_checkpointing:
            raise UnsupportedError(
                f"{kind}: with gradient_checkpointing, each layer runs twice and would append its keys and values to "
                "the prefix twice. Set gradient_checkpointing=False (SFTConfig and DPOConfig set it to True)"
            )
        if config.is_prompt_learning and sharded:
            raise UnsupportedError(
                f"{kind}: PEFT computes the prompts that it saves from the full prompt encoder, which is sharded here. "
                "Train without fsdp and deepspeed, or use adapters inside the layers, such as LoRA"
            )
    if args.fsdp and getattr(model, "is_loaded_in_8bit", False):
        raise UnsupportedError(
            "load_in_8bit: bitsandbytes stores the scales of 8-bit weights on the parameters, which FSDP2 replaces. "
            "Use load_in_4bit, or deepspeed with ZeRO-3"
        )
    saved = _saved_ids(model, model.state_dict(keep_vars=True))
    unsaved = [name for name, param in model.named_parameters() if param.requires_grad and id(param) not in saved]
    if unsaved and saves:
        raise UnsupportedError(
            f"PEFT does not save {len(unsaved)} of the trained parameters, such as {unsaved[0]!r}, so training cannot "
            "resume from its checkpoints. List modules of the base model in modules_to_save of the adapter's "
            "configuration, or set save_strategy to 'no'"
        )


def files(folder: Path) -> list[Path]:
    """Returns the safetensors files of the PEFT adapters in a directory, which may have no adapters. Raises
    `CheckpointError` if the configuration of an adapter is missing or damaged.
    """
    names = (ADAPTER_CONFIG_NAME, ADAPTER_SAFE_WEIGHTS_NAME)
    parents = {path.parent for name in names for path in folder.glob(name)}
    # a directory with a model card is a saved model, such as a checkpoint. PEFT writes no card for a single adapter
    inside = {path.parent for name in names for path in folder.glob(f"*/{name}")}
    parents |= {parent for parent in inside if not (parent / "README.md").exists()}
    for parent in sorted(parents):
        read_json(parent / ADAPTER_CONFIG_NAME)
    return [parent / ADAPTER_SAFE_WEIGHTS_NAME for parent in sorted(parents)]


def save(model: Any, folder: Path, save_adapters: Any, *, write: bool) -> None:
    """Writes the adapters of a `PeftModel`. Every rank calls it.

    Args:
        save_adapters: `model.save_pretrained`, or a function with the same arguments that calls it.
        write: whether this rank writes the files.
    """
    state = model.state_dict(keep_vars=True)
    saved = _saved_ids(model, state)
    full = {name: placements.full_tensor(tensor).detach() for name, tensor in state.items() if id(tensor) in saved}
    if write:
        save_adapters(str(folder), state_dict=full)


def load(model: Any, folder: Path) -> None:
    """Copies adapters into a `PeftModel`. If a file or a tensor is missing or does not match the model, raises
    `CheckpointError` before anything is copied.
    """
    paths = files(folder)
    if not paths:
        raise CheckpointError(
            f"{folder} contains no PEFT adapters, but the model has adapters. The checkpoint belongs to another model"
        )
    state = model.state_dict(keep_vars=True)
    expected = {_file_of(folder, name): tensors for name, tensors in _tensors(model, state, False).items()}
    # whether PEFT saves an embedding that was resized or has an adapter depends on the files of the base model
    optional = {_file_of(folder, name): tensors for name, tensors in _tensors(model, state, True).items()}
    pairs: list[tuple[Tensor, SafetensorsFile, str]] = []
    for path in sorted({*expected, *paths}):
        file = SafetensorsFile(path)
        tensors = {**optional.get(path, {}), **expected.get(path, {})}
        shapes = {name: placements.shape_of(tensor) for name, tensor in tensors.items()}
        compare(path, dict.fromkeys(file.keys(), file), shapes, expected.get(path, {}))
        pairs += [(tensors[name], file, name) for name in file.keys()]  # noqa: SIM118 (not a mapping)
    with torch.no_grad():
        for tensor, file, name in pairs:
            placements.fill(tensor, file.get_tensor(name))


def compare(path: Path, saved: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], needed: Iterable[str]) -> None:
    """Compares the tensors of a checkpoint with a model.

    Args:
        path: the file or directory to name in errors.
        saved: the open safetensors file of each tensor, by the tensor's name in it.
        shapes: the shapes in the model, by the same names.
        needed: the names that the checkpoint must contain.

    Raises:
        CheckpointError: a tensor is missing, is not in the model, or has a different shape.
    """
    for name, file in saved.items():
        if name not in shapes:
            raise CheckpointError(f"{path}: the model has no weight {name!r}. The checkpoint belongs to another model")
        if (shape := file.get_slice(name).get_shape()) != list(shapes[name]):
            raise CheckpointError(
                f"{path}: weight {name!r} has shape {shape} in the checkpoint, but {list(shapes[name])} in the model. "
                "The checkpoint belongs to another model"
            )
    if missing := sorted(set(needed) - saved.keys()):
        raise CheckpointError(f"{path}: {len(missing)} weights are missing, such as {missing[0]!r}")


def _file_of(folder: Path, adapter: str) -> Path:
    """Returns the file in which `PeftModel.save_pretrained` saves an adapter."""
    return (folder if adapter == "default" else folder / adapter) / ADAPTER_SAFE_WEIGHTS_NAME


def _tensors(model: Any, state: dict[str, Tensor], embeddings: bool | Literal["auto"]) -> dict[str, dict[str, Tensor]]:
    """Returns the tensors in the file of each adapter by name. Prompts that an encoder computes are not among them.
    `embeddings`: see `save_embedding_layers` of `save_pretrained`.
    """
    from peft import get_peft_model_state_dict

    adapters: dict[str, dict[str, Tensor]] = {}
    for name, config in model.peft_config.items():
        if config.is_prompt_learning:
            params = [*model.prompt_encoder[name].parameters()]
            adapters[name] = {"prompt_embeddings": params[0]} if len(params) == 1 else {}
        else:
            adapters[name] = get_peft_model_state_dict(
                model, state, adapter_name=name, save_embedding_layers=embeddings
            )
    return adapters


def _saved_ids(model: Any, state: dict[str, Tensor]) -> set[int]:
    """Returns the ids of the tensors that PEFT saves."""
    return {id(tensor) for tensors in _tensors(model, state, "auto").values() for tensor in tensors.values()}
