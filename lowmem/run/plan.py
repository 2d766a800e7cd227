"""Predicts the memory of a run's training step: the run's own trainer takes one step with fake tensors.

The model is built from its configuration alone. The step has the run's own rule, policy, loss and checkpointing, and
the largest batch that the run can meet. Nothing is allocated, and every machine predicts the same.
"""

import copy
import json
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from lowmem.errors import ConfigError, LowmemError, UnsupportedError
from lowmem.hf import arguments, optim
from lowmem.hf.layers import positions
from lowmem.options import FusedConfig
from lowmem.rules import AdaLomo
from lowmem.run import build
from lowmem.run.boundary import blaming
from lowmem.run.description import describe, offloaded, recomputed
from lowmem.run.memory import StepMemory, step_memory
from lowmem.run.recipe import Recipe
from lowmem.step.program import rounding_of

# The device of fake tensors. A GPU is "meta", so that its tensors differ from those on the host.
DEVICES = {"gpu": torch.device("meta"), "cpu": torch.device("cpu")}

# Commands and arguments that cannot be planned: the reason, and what to plan instead.
_BOUND = "`lowmem plan sft` with the same model and length of rows is a lower bound"
_COMMANDS = {
    "reward": "its model has no output head. `lowmem plan sft` with twice the batch size is an estimate",
    "kto": f"its step also computes answers to other prompts. {_BOUND}",
    **dict.fromkeys(("grpo", "rloo"), f"its step also generates text. {_BOUND}"),
}
_ARGUMENTS = {
    "deepspeed": "a plan covers one device. Omit deepspeed to plan a rank with the full model",
    "fsdp": "a plan covers one device. Omit fsdp to plan a rank with the full model",
    "use_liger_kernel": "its kernels need data. Omit it to plan PyTorch's code, which needs more memory",
    "precompute_ref_log_probs": "it needs data. Omit it to plan a step with the reference model in memory",
    "torch_compile": "a compiled model cannot run on fake tensors. Omit it to plan the eager model",
    **dict.fromkeys(("use_peft", "load_in_4bit", "load_in_8bit"), "plans cover full training"),
}

# Arguments that are unset, because a plan creates its own rows.
_OF_DATA: dict[str, Any] = {
    "dataset_num_proc": None, "assistant_only_loss": False, "completion_only_loss": None, "chat_template_path": None,
    "eos_token": None, "pad_token": None,
}  # fmt: skip

# The options of activation checkpointing, before and since transformers 5.23.
_KWARGS = ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs")

# Memory that is not in tensors.
NOT_COUNTED = {
    "gpu": "CUDA's context (0.3 to 1 GiB), fragmentation, workspaces of kernels, evaluation",
    "cpu": "Python and its libraries (about 0.6 GiB), fragmentation, evaluation",
}

_SMALL_STATES = ("lomo", "adalomo", "adafactor", "adafactor_t2t")  # rules with almost no states
_MICRO_BATCHES = 3  # a micro-batch after the third needs the same memory as the third
_MLP_TILE = 4096  # tokens that an MLP computes at a time, where a plan proposes it
_MIN_OFFLOAD = 1024  # TRL offloads activations of at least so many bytes
_LONGEST = 1024  # tokens of a row where max_length is None


class RunPlan(NamedTuple):
    """The memory of a run's training step, and the run in words by topic."""

    step: StepMemory
    summary: dict[str, str]


def plan(recipe: Recipe) -> RunPlan:
    """Predicts the memory of a training step on the recipe's device.

    Raises:
        ConfigError: the model's configuration cannot be read, or the arguments cannot be trained with.
        UnsupportedError: they cannot be planned.
    """
    config = _model_config(recipe)  # before the checks, which depend on its dtype
    require_plannable(recipe)
    device = DEVICES[recipe.device or "gpu"]
    _fused(recipe)  # raises here, where no weights are fake
    fake = FakeTensorMode(allow_non_fake_inputs=True)  # torch.tensor(n, device="meta") is not a fake tensor
    with tempfile.TemporaryDirectory() as folder:  # a trainer creates its output folder
        trainer, others = _trainer(recipe, config, folder, fake, device)
        args, model = trainer.args, trainer.model
        largest = [trainer.train_dataset[n % 2] for n in range(args.per_device_train_batch_size)]
        collated = trainer.data_collator(largest)
    with fake, _Values(), _recomputed_and_offloaded(model, recipe.training), _autocast_on_meta():
        batch = tree_map_only(Tensor, lambda value: torch.empty_like(value, device=device), dict(collated))

        def loss() -> Tensor:
            with trainer.compute_loss_context_manager():
                return trainer.compute_loss(model, dict(batch))

        losses = [loss] * min(args.gradient_accumulation_steps, _MICRO_BATCHES)
        tensors = [*filter(torch.is_tensor, batch.values())]
        step = step_memory(model.train(), trainer.create_optimizer, losses, tensors, others)
    micro = f"{args.gradient_accumulation_steps} micro-batches of " if args.gradient_accumulation_steps > 1 else ""
    rows = f"{micro}{len(largest)} x {args.max_length or _LONGEST} tokens"
    return RunPlan(step, {**describe(trainer), "step": rows})


def require_plannable(recipe: Recipe) -> None:
    """Raises `UnsupportedError` for a command, a device or an argument that a plan does not cover."""
    arguments_of = (name for name in _ARGUMENTS if any(getattr(p, name, None) for p in (recipe.training, recipe.model)))
    for name in (recipe.command, *arguments_of):
        if reason := {**_COMMANDS, **_ARGUMENTS}.get(name):
            raise UnsupportedError(f"{name} cannot be planned: {reason}")
    values = recipe.values
    autocast = values.get("fp16") or (recipe.dtype == torch.float32 and values.get("bf16") is not False)
    if recipe.device != "cpu" and autocast:
        raise UnsupportedError(
            "plans for a GPU do not support autocast. Set dtype: bfloat16, which also halves the memory, or bf16: "
            "false, or use --device cpu"
        )


def _trainer(
    recipe: Recipe, config: Any, folder: str, fake: FakeTensorMode, device: torch.device
) -> tuple[Any, list[PreTrainedModel]]:
    """The trainer of a run, with fake weights and two rows of data, and its other models."""
    args = recipe.training
    length = args.max_length or _LONGEST
    rows, names = _rows(recipe.command, length)
    masked = args.per_device_train_batch_size > 1 or getattr(args, "packing", False)
    with fake, device:
        model, *others = (_empty_model(recipe, config, masked) for _ in range(1 + len(names)))
    if (places := positions(model)) is not None and places < length:
        raise ConfigError(f"max_length={length}: the model has {places:,} positions; set max_length: {places}")
    for item in (model, *others):
        item.hf_device_map = dict.fromkeys(("", "model"), device.type)  # keeps Accelerate from moving the model
    changed = dict(_OF_DATA)
    if device.type == "meta":  # a trainer on this device raises for offloading, which `_recomputed_and_offloaded` adds
        inside = {name: value for name, value in _kwargs(args).items() if name != "offload"} or None
        changed |= {"activation_offloading": False, **dict.fromkeys(_KWARGS, inside)}
    options = {"processing_class": _tokenizer(), **dict(zip(names, others, strict=True))}
    return build.trainer(recipe.alone(folder, **changed), rows, None, model, **options), others


@contextmanager
def _recomputed_and_offloaded(model: Any, args: Any) -> Iterator[None]:
    """Applies what the arguments say of activations."""
    if args.gradient_checkpointing:
        kwargs = {"use_reentrant": False, **_kwargs(args)}
        which = {name: kwargs.pop(name) for name in ("every_n_layers", "offload") if name in kwargs}
        getattr(model, f"{_checkpointing(args)}_enable")(kwargs, **which)
    hooks = saved_tensors_hooks(_offload, lambda packed: packed[1].to(packed[0]))
    with hooks if getattr(args, "activation_offloading", False) else nullcontext():
        yield


@contextmanager
def _autocast_on_meta() -> Iterator[None]:
    """Lets code ask about autocast on "meta", where torch raises: TRL's head (2.13), transformers 4's positions."""
    enabled, autocast = torch.is_autocast_enabled, torch.autocast

    def on_cpu(device_type: str, *options: Any, **named: Any) -> Any:
        return autocast(device_type.replace("meta", "cpu"), *options, **named)

    asked = patch.object(torch, "is_autocast_enabled", lambda on="cuda": on != "meta" and enabled(on))
    with asked, patch.object(torch, "autocast", on_cpu):
        yield


def _kwargs(args: Any) -> dict[str, Any]:
    """The options of activation checkpointing."""
    return args.gradient_checkpointing_kwargs or {}


def _checkpointing(args: Any) -> str:
    """The name of activation checkpointing, in arguments and methods; transformers 5.23 has changed it."""
    return "activation_checkpointing" if hasattr(args, "activation_checkpointing") else "gradient_checkpointing"


def ways(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Values of arguments that reduce the memory of a step and are valid in this recipe, by the words of the command
    line. A smaller batch and shorter rows change the training most, and come after the others.
    """
    valid = {}
    for values in chain(_savings_of_weights(recipe), _savings_of_activations(recipe), _savings_of_rows(recipe)):
        with suppress(LowmemError):  # values may conflict with others of the recipe
            _fused(recipe.having(**values))
            valid[_words(values)] = values
    return valid


def _savings_of_weights(recipe: Recipe) -> Iterator[dict[str, Any]]:
    if recipe.model.use_peft:  # adapters have small states, and their base model may be quantized already
        return
    fused, args = _fused(recipe), recipe.training
    groups = [fused.complete({k: v for k, v in group.items() if k != "match"}) for group in ({}, *fused.groups)]
    if recipe.layers.computed_gradients is not True:
        yield {"layers.computed_gradients": True}
    nearest = any(rounding_of(rule, group, torch.bfloat16) == "nearest" for rule, group in groups)
    if recipe.dtype == torch.float32 and not nearest:
        yield {"dtype": "bfloat16"}
    if fused.rounding in ("compensated", "compensated8", "master"):
        yield {"fused.rounding": "stochastic"}
    quantizable = (
        recipe.command == "sft" and not (args.deepspeed or args.fsdp) and recipe.layers.computed_gradients is not False
    )
    quantizable &= fused.weight_format is None and fused.rounding in ("auto", "stochastic")
    if quantizable and not any(rule.materializes for rule, _ in groups):
        yield {"fused.weight_format": "int12"}
    with suppress(LowmemError):  # a rule may need the name of a parameter
        states = [state for rule, group in groups for state in rule.spec("", (4096, 4096), group).states.values()]
        if fused.state_storage in ("auto", "float32", "bfloat16") and any(state.held_as_asked for state in states):
            yield {"fused.state_storage": "8bit"}
    if any(rule.name not in _SMALL_STATES for rule, _ in groups):
        yield {"fused.rule": "adalomo", "learning_rate": AdaLomo.usual_lr[0]}


def _savings_of_activations(recipe: Recipe) -> Iterator[dict[str, Any]]:
    args, name = recipe.training, _checkpointing(recipe.training)
    on_gpu = recipe.device == "gpu" or (recipe.device is None and torch.cuda.is_available())
    if not recomputed(args):
        yield {name: True}
    elif on_gpu and args.gradient_checkpointing and not offloaded(args):
        with_kwargs = name == "activation_checkpointing"  # of transformers, since 5.23; before, of TRL
        yield {f"{name}_kwargs": {**_kwargs(args), "offload": True}} if with_kwargs else {"activation_offloading": True}


def _savings_of_rows(recipe: Recipe) -> Iterator[dict[str, Any]]:
    args, tile = recipe.training, recipe.layers.mlp_tile
    rows, length = args.per_device_train_batch_size, getattr(args, "max_length", None) or _LONGEST
    if rows * length >= 2 * _MLP_TILE and (tile is None or tile > _MLP_TILE):
        yield {"layers.mlp_tile": _MLP_TILE}
    for fewer in sorted({rows // 2, 1} - {0, rows}, reverse=True):
        yield {"per_device_train_batch_size": fewer}
    if hasattr(args, "max_length"):
        yield {"max_length": length // 2}


def _words(values: dict[str, Any]) -> str:
    """Arguments on the command line."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    return " ".join(f"--{name} {shlex.quote(text)}" for name, text in texts.items())


def _fused(recipe: Recipe) -> FusedConfig:
    """The options of the optimizer. Raises if the arguments cannot be trained with."""
    args, fused = recipe.training, recipe.fused
    completed = arguments.Inputs(None, args, None, fused).options(args)
    optim.with_learning_rate(args, completed, nn.Module())
    return completed


def _model_config(recipe: Recipe) -> Any:
    name = recipe.model.model_name_or_path
    if name is None:
        raise ConfigError("no model: set model_name_or_path to a directory with a config.json, or a name on the Hub")
    try:
        with blaming("model_name_or_path"):
            return AutoConfig.from_pretrained(name, revision=recipe.model.model_revision, trust_remote_code=False)
    except ConfigError as error:
        raise ConfigError(
            f"model_name_or_path: a plan needs the config.json of {name!r}, which cannot be read ({error}). Download "
            f"it on a machine with network access (hf download {name} config.json), and set model_name_or_path to its "
            "directory"
        ) from error


def _empty_model(recipe: Recipe, config: Any, masked: bool) -> PreTrainedModel:
    """The model from its configuration, on the device of the context, without the memory of attention scores."""
    attention = recipe.model.attn_implementation or "sdpa"
    fake = _MASKED if masked else _UNMASKED
    with blaming("model_name_or_path: no model can be built from its configuration"):
        return AutoModelForCausalLM.from_config(
            copy.deepcopy(config), trust_remote_code=False, dtype=recipe.dtype,
            attn_implementation=fake if attention == "sdpa" else attention,
        )  # fmt: skip


def _rows(command: str, length: int) -> tuple[Dataset, list[str]]:
    """Two rows of `length` tokens at most, and the other models of the trainer. One row is a token shorter than the
    other, so that a batch has padding and a mask.
    """
    if command == "sft":
        ids = [[1] * length for length in (length, length - 1)]
        return Dataset.from_dict({"input_ids": ids, "labels": ids}), []
    prompt, answers = length // 2, length - length // 2 - 1  # TRL adds an end token
    answer = [" a" * answers, " a" * (answers - 1)]
    rows = {"prompt": ["a" + " a" * (prompt - 1)] * 2, "chosen": answer, "rejected": answer}
    return Dataset.from_dict(rows), ["ref_model"]


def _tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer for which every word is a token, in place of the model's, which would be downloaded."""
    words = Tokenizer(models.WordLevel({"<pad>": 0, "a": 1, "</s>": 2}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="<pad>")


class _Values(TorchDispatchMode):
    """Values of fake tensors where code asks for them: integers are 1, other numbers 1/2, elements of a mask True."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func is aten._local_scalar_dense.default:
            return True if args[0].dtype == torch.bool else 0.5 if args[0].is_floating_point() else 1
        if func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
            mask = args[1][0]
            if len(args[1]) == 1 and mask is not None and mask.dtype == torch.bool:
                selected = (mask.numel(), *args[0].shape[mask.ndim :])
                return args[0].new_empty(selected) if func is aten.index.Tensor else torch.empty_like(args[0])
        return func(*args, **(kwargs or {}))


def _offload(saved: Tensor) -> tuple[torch.device, Tensor]:
    """TRL's activation offloading without its streams: tensors saved for backward are on the host."""
    stays = isinstance(saved, nn.Parameter) or saved.nbytes < _MIN_OFFLOAD
    return saved.device, saved if stays else saved.cpu()


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
               **options: Any) -> tuple[Tensor, None]:  # fmt: skip
    """`sdpa` with a kernel that does not hold all attention scores, as on GPUs and CPUs.

    With fake tensors, PyTorch chooses a kernel that holds them, and transformers creates a mask where none is needed.
    """
    if attention_mask is not None:  # sdpa then repeats keys and values for each head and converts the mask to numbers
        groups = getattr(module, "num_key_value_groups", 1)
        key, value = (x.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(1, 2) for x in (key, value))
        zero, lowest = (torch.full((), number, dtype=query.dtype, device=query.device) for number in (0, -torch.inf))
        attention_mask = torch.where(attention_mask, zero, lowest)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    masks = {"is_causal": attention_mask is None, "attn_mask": attention_mask}
    return kernel(query, key, value, **masks, scale=options["scaling"])[0].transpose(1, 2).contiguous(), None


_UNMASKED, _MASKED = "fake", "fake_masked"
for _name in (_UNMASKED, _MASKED):
    AttentionInterface.register(_name, _attention)
AttentionMaskInterface.register(_MASKED, AttentionMaskInterface()["sdpa"])
