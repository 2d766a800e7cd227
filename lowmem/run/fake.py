"""The trainer of a run with fake tensors. The model is built from its config.json, the only file that is downloaded.
The rows are the longest rows that the run can produce.
"""

import copy
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import is_fake
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TrainingArguments,
    masking_utils,
)
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from lowmem.errors import ConfigError
from lowmem.hf.arguments import Inputs
from lowmem.hf.sharding import StreamedSharding
from lowmem.run import build, data, images
from lowmem.run.boundary import convert_errors, convert_library_errors
from lowmem.run.fake_ranks import Patch, patched
from lowmem.run.known_values import KnownValues
from lowmem.run.memory import StepMemory, step_memory
from lowmem.run.recipe import Recipe

# Values that disable arguments about data, because a plan creates its own rows.
_DATA_ARGUMENTS: dict[str, Any] = {
    **dict.fromkeys(("dataset_num_proc", "completion_only_loss", "chat_template_path", "eos_token", "pad_token")),
    **dict.fromkeys(("assistant_only_loss", "precompute_ref_log_probs"), False),
}

# The options of activation checkpointing, before and since transformers 5.23.
_KWARGS = ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs")

# Columns with precomputed log-probabilities of a reference model.
_REFERENCES = ("ref_chosen_logps", "ref_rejected_logps", "ref_logps", "ref_KL_logps")

_MIN_OFFLOAD = 1024  # bytes of the smallest activation that TRL offloads
MICRO_BATCHES = 3  # later micro-batches need the memory of the third
LONGEST = 1024  # tokens per row if max_length is None


class FakeRun(NamedTuple):
    """A trainer with fake weights (sharded if the run shards them), its other models and its largest batches."""

    trainer: Any
    others: list[PreTrainedModel]
    batch: dict[str, Any]
    evaluated: dict[str, Any] | None

    def loss(self) -> Tensor:
        with self.trainer.compute_loss_context_manager():
            loss: Tensor = self.trainer.compute_loss(self.trainer.model, dict(self.batch))
        return loss

    def evaluate(self) -> None:
        assert self.evaluated is not None
        self.trainer.prediction_step(self.trainer.model.eval(), dict(self.evaluated), prediction_loss_only=True)

    def step(self) -> StepMemory:
        """Records as many steps as a plan needs, and an evaluation if the run evaluates."""
        trainer, args = self.trainer, self.trainer.args
        with convert_library_errors("the memory of a step cannot be predicted"):
            return step_memory(
                trainer.model.train(),
                trainer.create_optimizer,
                losses=[self.loss] * min(args.gradient_accumulation_steps, MICRO_BATCHES),
                batch=[*filter(torch.is_tensor, (self.batch | (self.evaluated or {})).values())],
                others=self.others,
                evaluate=None if self.evaluated is None else self.evaluate,
                steps=2 if args.deepspeed else 1,
            )


@contextmanager
def running(recipe: Recipe, device: torch.device, *, real: bool = False) -> Iterator[FakeRun]:
    """A context in which the trainer of a run computes with fake tensors on `device`, or if `real`, with real tensors
    and random weights, to measure the memory that a plan predicts.
    """
    args, fake = recipe.training, None if real else FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # DeepSpeed and PyTorch warn about ranks that do not exist
        stack.enter_context(patched(_of_every_run(device)))
        stack.enter_context(patched(() if real else _of_fake_runs(args)))
        folder = stack.enter_context(tempfile.TemporaryDirectory())  # a trainer creates its output folder
        trainer, others = _trainer(recipe, folder, fake, device)
        batch = _batch(trainer, args.per_device_train_batch_size)
        evaluated = None if args.eval_strategy == "no" else _batch(trainer, args.per_device_eval_batch_size)
        to_device = Tensor.to
        if fake is not None:
            stack.enter_context(fake)
            to_device = stack.enter_context(KnownValues()).fake
        stack.enter_context(_recomputed_and_offloaded(trainer.model, args))
        sharded = trainer._inputs.sharding
        if sharded is not None:
            sharded.broadcasts = False  # fake weights cannot be replaced by broadcast shards
        trainer._shard()
        for other in others if isinstance(sharded, StreamedSharding) else ():
            sharded.shard(other, reference=True)
        batches = tree_map_only(Tensor, lambda value: to_device(value, device), (batch, evaluated))
        yield FakeRun(trainer, others, *batches)


def offloaded_to_nvme(args: Any) -> dict[str, Any] | None:
    """Returns DeepSpeed's options for offloaded weights if they are on NVMe, otherwise None."""
    if not args.deepspeed:
        return None
    options = args.hf_deepspeed_config.get_value("zero_optimization.offload_param") or {}
    return options if options.get("device") == "nvme" else None


def checkpointing(args: Any) -> str:
    """Returns the name of activation checkpointing in arguments and methods, which transformers 5.23 has changed."""
    return "activation_checkpointing" if hasattr(args, "activation_checkpointing") else "gradient_checkpointing"


def _trainer(
    recipe: Recipe, folder: str, fake: FakeTensorMode | None, device: torch.device
) -> tuple[Any, list[PreTrainedModel]]:
    """Creates the trainer of a run with random weights and two rows of data. Returns it and its other models."""
    args, has_adapters = recipe.training, recipe.model.use_peft
    length = args.max_length or LONGEST
    rows_with_images = None
    if images.is_multimodal(recipe.config) and (recipe.mixture.datasets or recipe.script.dataset_name):
        rows_with_images = images.largest(recipe, data.first(data.load(recipe)[0]))
    rows, processor = rows_with_images or (_rows(recipe.command, length), _tokenizer())
    changed = {} if rows_with_images else dict(_DATA_ARGUMENTS)
    if not args.deepspeed:  # left by an earlier plan, for which transformers would partition the model
        unset_hf_deepspeed_config()
    if (sharding := Inputs(None, args, None, recipe.fused).sharding) is not None:
        if fake is not None and (nvme := offloaded_to_nvme(args)):
            nvme["device"] = "cpu"  # fake tensors cannot be written
        sharding.prepare(recipe.dtype)
    names = ["ref_model"] if recipe.command in ("dpo", "kto") and not has_adapters else []
    model, *others = _models(recipe, 1 + len(names), fake, device)
    if (places := data.positions(model)) is not None and places < length:
        raise ConfigError(f"max_length={length}: the model has {places:,} positions; set max_length: {places}")
    if device.type == "meta":  # a trainer would raise for offloading here, so `_recomputed_and_offloaded` adds it
        kwargs = args.gradient_checkpointing_kwargs or {}
        inside = {name: value for name, value in kwargs.items() if name != "offload"} or None
        changed |= {"activation_offloading": False, **dict.fromkeys(_KWARGS, inside)}
    options = {"processing_class": processor, **dict(zip(names, others, strict=True))}
    with ExitStack() as stack:
        if has_adapters:
            stack.enter_context(device)  # creates the adapters there
        if fake is not None:  # the model is streamed later, when new tensors are fake
            stack.enter_context(patch.object(StreamedSharding, "shard", lambda *_, **__: None))
        trainer = build.trainer(recipe.probe(folder, sharded=True, **changed), rows, None, model, **options)
    if has_adapters and fake is not None:
        _fake_parameters(trainer.model, fake)
    if getattr(args, "precompute_ref_log_probs", False):
        trainer.precompute_ref_logps, trainer.ref_model, others = True, None, []
    return trainer, others


def _models(recipe: Recipe, count: int, fake: FakeTensorMode | None, device: torch.device) -> list[PreTrainedModel]:
    """Creates `count` untrained models of a run on the device."""
    with ExitStack() as stack:
        if fake is not None:
            stack.enter_context(fake)
            stack.enter_context(KnownValues())
        stack.enter_context(device)
        created = [_untrained(recipe) for _ in range(count)]
    for model in () if fake is None else created:
        model.hf_device_map = dict.fromkeys(("", "model"), device.type)  # keeps Accelerate from moving the model
    return created


def _fake_parameters(model: nn.Module, fake: FakeTensorMode) -> None:
    """Replaces real parameters by fake ones: the adapters that a trainer has added."""
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            if not is_fake(param):
                setattr(module, name, nn.Parameter(fake.from_tensor(param.detach()), param.requires_grad))


@contextmanager
def _recomputed_and_offloaded(model: Any, args: Any) -> Iterator[None]:
    """Applies the activation checkpointing and offloading that the arguments request."""
    if args.gradient_checkpointing:
        kwargs = {"use_reentrant": False, **(args.gradient_checkpointing_kwargs or {})}
        which = {name: kwargs.pop(name) for name in ("every_n_layers", "offload") if name in kwargs}
        with convert_errors(f"{checkpointing(args)}=True"):
            getattr(model, f"{checkpointing(args)}_enable")(kwargs, **which)
    hooks = saved_tensors_hooks(_offload, lambda packed: packed[1].to(packed[0]))
    with hooks if getattr(args, "activation_offloading", False) else nullcontext():
        yield


def _of_every_run(device: torch.device) -> Iterator[Patch]:
    yield TrainingArguments, "device", property(lambda args: args._setup_devices and device)  # arguments use the CPU
    yield Accelerator, "device", property(lambda _: device)


def _of_fake_runs(args: Any) -> Iterator[Patch]:
    """Yields replacements for functions that read or move weights, and for functions that torch 2.13 does not support
    on "meta" or for fake tensors. TRL's head and DeepSpeed query autocast.
    """
    enabled, dtype, autocast = torch.is_autocast_enabled, torch.get_autocast_dtype, torch.autocast
    with torch.device("cpu"):
        torch.empty(0)  # torch caches the functions with a default device here, and must not cache a replacement

    def on_cpu(device_type: str, *options: Any, **named: Any) -> Any:
        return autocast(device_type.replace("meta", "cpu"), *options, **named)

    yield Accelerator, "prepare_model", lambda _, model, **__: model  # the original moves the model to the CPU
    if args.deepspeed:  # TRL reads it to shard reference models; Accelerate has none on a CPU
        yield AcceleratorState, "deepspeed_plugin", property(lambda _: args.deepspeed_plugin)
    # some models draw initial values until all are in a range, which never happens with fake tensors
    yield PreTrainedModel, "initialize_weights", lambda _: None
    yield masking_utils, "is_tracing", lambda *_: False  # values are known, so unneeded masks are omitted
    yield nn.functional, "scaled_dot_product_attention", _attend
    yield torch, "autocast", on_cpu
    yield torch, "is_autocast_enabled", lambda on="cuda": on != "meta" and enabled(on)
    yield torch, "get_autocast_dtype", lambda on: dtype(on.replace("meta", "cpu"))
    yield torch, "tensor", _constant


def _constant(data: Any, *, device: Any = None, tensor: Any = torch.tensor, **options: Any) -> Tensor:
    """Replaces `torch.tensor`: in torch 2.13 it returns no fake tensor on "meta", and reads memory of fake numbers."""
    data = data if isinstance(data, Tensor) else tree_map_only(Tensor, Tensor.item, data)
    return tensor(data, device="cpu", **options).to(device)


def _untrained(recipe: Recipe) -> PreTrainedModel:
    """Creates the model of a run from its configuration, on the device of the context."""
    config, kind = copy.deepcopy(recipe.config), build.model_class(recipe.config)
    if recipe.command == "reward":
        config.num_labels, kind = 1, AutoModelForSequenceClassification
    with convert_errors("model_name_or_path: no model can be built from its configuration"):
        options = {"dtype": recipe.dtype, "attn_implementation": recipe.model.attn_implementation}
        if hasattr(kind, "from_config"):  # an automatic class would ask on the terminal
            return kind.from_config(config, trust_remote_code=False, **options)
        return kind._from_config(config, **options)


def _rows(command: str, length: int) -> Dataset:
    """Creates two rows or pairs of at most `length` tokens. One is a token shorter, so that a mask is needed."""
    if command == "sft":
        ids = [[1] * length for length in (length, length - 1)]
        return Dataset.from_dict({"input_ids": ids, "labels": ids})
    prompt, answers = length // 2, length - length // 2 - 1  # TRL adds an end token
    prompts, longer, shorter = ["a" + " a" * (prompt - 1)] * 2, " a" * answers, " a" * (answers - 1)
    if command == "kto":
        return Dataset.from_dict({"prompt": prompts, "completion": [longer, shorter], "label": [True, False]})
    return Dataset.from_dict({"prompt": prompts, "chosen": [longer] * 2, "rejected": [shorter] * 2})


def _batch(trainer: Any, size: int) -> dict[str, Any]:
    """Creates a batch of `size` rows of maximum length."""
    length = trainer.args.max_length or LONGEST
    rows = [dict(trainer.train_dataset[n % 2]) for n in range(size)]
    if getattr(trainer, "precompute_ref_logps", False):
        for row in rows:
            row |= dict.fromkeys(_REFERENCES, 0.0)
    with convert_errors(f"max_length={trainer.args.max_length}: a batch of the data cannot be made"):
        batch = dict(trainer.data_collator(rows))
    if getattr(trainer, "_is_vision_dataset", False):  # repeat the last token up to `length`, and add padding
        sequences = batch["input_ids"].shape
        for name in [name for name, value in batch.items() if getattr(value, "shape", None) == sequences]:
            last = batch[name][:, -1:].expand(-1, max(0, length - sequences[1]))
            batch[name] = torch.cat([batch[name], last], 1)
        batch["attention_mask"][1::2, -1] = 0
    return batch


def _tokenizer() -> PreTrainedTokenizerFast:
    """Creates a tokenizer for which every word is a token. The model's tokenizer would have to be downloaded."""
    words = Tokenizer(models.WordLevel({"<pad>": 0, "a": 1, "</s>": 2}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="<pad>")


def _offload(saved: Tensor) -> tuple[torch.device, Tensor]:
    """Moves a tensor that is saved for backward to the host, as TRL's activation offloading does, without streams."""
    stays = isinstance(saved, nn.Parameter) or saved.nbytes < _MIN_OFFLOAD
    return saved.device, saved if stays else saved.cpu()


def _attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
            is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
            sdpa: Any = nn.functional.scaled_dot_product_attention) -> Any:  # fmt: skip
    """Computes attention as for real tensors. For fake tensors, torch 2.13 selects a kernel that stores all scores."""
    if query.device.type != "meta":
        return sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # converted to numbers
        zero, lowest = (torch.full((), x, dtype=query.dtype, device=query.device) for x in (0, -torch.inf))
        attn_mask = torch.where(attn_mask, zero, lowest)
    if query.shape[-1] == value.shape[-1]:  # also with fewer keys and values than queries
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    return kernel(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]
