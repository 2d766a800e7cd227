"""The files of a PEFT model: PEFT's own for each adapter, and one for the rest of what is trained.

PEFT 0.21 (utils/save_and_load.py) saves what using an adapter needs. Training also needs what PEFT leaves out: the
parameters of prompt encoders (PEFT saves the prompts that they compute), parameters of the base model, and buffers.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.utils import is_peft_model
from torch import Tensor, nn
from transformers import TrainingArguments
from transformers.utils import ADAPTER_CONFIG_NAME, ADAPTER_SAFE_WEIGHTS_NAME

from lowmem import placements
from lowmem.errors import CheckpointError, UnsupportedError
from lowmem.files import begin_safetensors, open_safetensors, read_json, write_tensor

logger = logging.getLogger(__name__)

OTHERS_FILE = "trained.safetensors"

_PROMPT_ENCODER = "prompt_encoder."


# Prompts that are keys and values of every layer.
_PREFIXES = ("PREFIX_TUNING", "CARTRIDGE")


def check(model: Any, args: TrainingArguments, *, sharded: bool, saves: bool) -> None:
    """Raises `UnsupportedError` for adapters that cannot be trained, saved or resumed.

    Logs a warning if parameters are trained that PEFT does not save.
    """
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
        if kind in _PREFIXES and args.gradient_checkpointing:
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
    others = _others(model).items()
    base = [name for name, tensor in others if tensor.requires_grad and not name.startswith(_PROMPT_ENCODER)]
    if base and saves and args.should_save:
        logger.warning(
            "PEFT does not save %d of the trained parameters, such as %r. Checkpoints store them in %s, which "
            "lowmem.hf.weights.load_weights(model, folder) loads and PeftModel.from_pretrained does not. To let PEFT "
            "save a module, list it in modules_to_save of the adapter's configuration.",
            len(base), base[0], OTHERS_FILE,
        )  # fmt: skip


def files(folder: Path) -> list[Path]:
    """The safetensors files that a directory with PEFT adapters should have. Empty if it has no adapters.

    Raises:
        CheckpointError: the configuration of an adapter is missing or damaged.
    """
    names = (ADAPTER_CONFIG_NAME, ADAPTER_SAFE_WEIGHTS_NAME)
    parents = {path.parent for name in names for path in folder.glob(name)}
    # PEFT writes a model card where it saves a model, such as a checkpoint in a run directory, and not for each adapter
    inside = {path.parent for name in names for path in folder.glob(f"*/{name}")}
    parents |= {parent for parent in inside if not (parent / "README.md").exists()}
    for parent in sorted(parents):
        read_json(parent / ADAPTER_CONFIG_NAME)
    others = [folder / OTHERS_FILE] if parents and (folder / OTHERS_FILE).exists() else []
    return [parent / ADAPTER_SAFE_WEIGHTS_NAME for parent in sorted(parents)] + others


def full_state(model: Any) -> dict[str, Tensor]:
    """The full tensors that PEFT saves, as the `state_dict` of its `save_pretrained`. Every rank calls it."""
    saved = [tensor for tensors in _adapters(model, "auto").values() for tensor in tensors.values()]
    state, needed = model.state_dict(keep_vars=True), {*map(id, saved)}
    return {name: placements.full_tensor(t).detach() for name, t in state.items() if id(t) in needed}


def save_others(model: Any, folder: Path, *, write: bool = True) -> None:
    """Writes what is trained and not saved by PEFT, one full tensor at a time. Every rank calls it.

    Raises:
        OSError: the file cannot be written.
    """
    others, path = _others(model), folder / OTHERS_FILE
    if write:
        path.unlink(missing_ok=True)  # of an earlier save into this directory
    with ExitStack() as stack:
        file = None
        if write and others:
            file = stack.enter_context(path.open("wb"))
            shapes = {n: torch.empty(placements.shape_of(t), dtype=t.dtype, device="meta") for n, t in others.items()}
            offsets = begin_safetensors(file, shapes, {"format": "pt"})
        for name, tensor in others.items():
            full = placements.full_tensor(tensor).detach()
            if file is not None:
                write_tensor(file, offsets[name], full)


def load(model: Any, folder: Path) -> None:
    """Copies adapters, and what else is trained, into a model. Nothing is copied unless everything fits.

    Raises:
        CheckpointError: something is missing or cut short, or has other names or shapes than in the model.
    """
    found = files(folder)
    if not found:
        raise CheckpointError(
            f"{folder} contains no PEFT adapters, but the model has adapters. The checkpoint belongs to another model"
        )
    expected = {_path(folder, name): tensors for name, tensors in _adapters(model, False).items()}
    # an embedding that was resized or has an adapter: whether PEFT saves it depends on the files of the base model
    optional = {_path(folder, name): tensors for name, tensors in _adapters(model, True).items()}
    others = folder / OTHERS_FILE
    if tensors := _others(model):
        expected[others] = tensors
    elif others in found:
        raise CheckpointError(
            f"{others} contains parameters, apart from the adapters, that are frozen in this model. Set requires_grad "
            "as in the saved run before creating the trainer"
        )
    prompts = {_path(folder, name) for name, config in model.peft_config.items() if config.is_prompt_learning}
    with ExitStack() as stack, torch.no_grad():
        pairs: list[tuple[Tensor, Any, str]] = []
        for path in sorted(expected.keys() | set(found)):
            file = stack.enter_context(open_safetensors(path))
            if path not in prompts:  # computed; the encoder itself is in OTHERS_FILE
                own = {**optional.get(path, {}), **expected.get(path, {})}
                shapes = {name: placements.shape_of(tensor) for name, tensor in own.items()}
                compare(path, dict.fromkeys(file.keys(), file), shapes, expected.get(path, {}))
                pairs += [(own[name], file, name) for name in file.keys()]  # noqa: SIM118 (not a mapping)
        for tensor, file, name in pairs:
            placements.fill(tensor, file.get_tensor(name))


def compare(path: Path, saved: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], needed: Iterable[str]) -> None:
    """Compares the tensors of a checkpoint with those of a model.

    Args:
        path: named in errors.
        saved: the open safetensors file of each tensor, by its name there.
        shapes: those that tensors may have, by the same names.
        needed: names that must be there.

    Raises:
        CheckpointError: a tensor is missing, or is not one of the model, or has another shape.
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


def _path(folder: Path, adapter: str) -> Path:
    """The file in which `PeftModel.save_pretrained` saves the weights of an adapter."""
    return (folder if adapter == "default" else folder / adapter) / ADAPTER_SAFE_WEIGHTS_NAME


def _adapters(model: Any, embeddings: bool | Literal["auto"]) -> dict[str, dict[str, Tensor]]:
    """The tensors in the file of each adapter, by their names there. None for prompts, which are computed.

    Args:
        embeddings: whether embeddings are saved, as in `save_pretrained`.
    """
    from peft import get_peft_model_state_dict

    state = dict(model.state_dict(keep_vars=True))
    return {
        name: {}
        if config.is_prompt_learning
        else get_peft_model_state_dict(model, state, adapter_name=name, save_embedding_layers=embeddings)
        for name, config in model.peft_config.items()
    }


def _others(model: nn.Module) -> dict[str, Tensor]:
    """Tensors that are trained and not saved by PEFT, and prompt encoders and buffers, by their names in the model."""
    seen = {id(tensor) for tensors in _adapters(model, False).values() for tensor in tensors.values()}
    buffers = {id(buffer) for buffer in model.buffers()}
    others: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen or not isinstance(tensor, Tensor):
            continue
        if tensor.requires_grad or id(tensor) in buffers or name.startswith(_PROMPT_ENCODER):
            others[name] = tensor
            seen.add(id(tensor))
    return others
