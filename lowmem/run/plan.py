"""Predicts the memory of a run's training step: the run's own trainer takes one step with fake tensors.

The model is built from its configuration alone. The step has the run's own rule, policy, loss and checkpointing, and
the largest batch that the run can meet. Nothing is allocated, and every machine predicts the same.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch
from datasets import Dataset
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import sdpa_mask
from trl import SFTConfig
from trl.kernels import chunked_logprob

from lowmem.errors import ConfigError, UnsupportedError
from lowmem.rules import AdaLomo
from lowmem.run import build
from lowmem.run.config import ModelConfig, RunConfig
from lowmem.run.memory import StepMemory, step_memory
from lowmem.run.pretrained import load_config, no_code
from lowmem.run.report import describe
from lowmem.run.source import reason
from lowmem.run.tokenizers import SMALLEST_VOCABULARY, train_tokenizer
from lowmem.step.program import rounding_of

# The device of fake tensors. A GPU is "meta", so that its tensors differ from those on the host.
DEVICES = {"gpu": torch.device("meta"), "cpu": torch.device("cpu")}

# Arguments of the trainer that cannot be planned, why, and what to set instead; _AUTOCAST is of bf16 and fp16.
_UNSUPPORTED = {
    "deepspeed": "a plan covers one device; trainer.deepspeed=null plans a rank with the full model",
    "fsdp": "a plan covers one device; trainer.fsdp=false plans a rank with the full model",
    "use_liger_kernel": "its kernels need data; trainer.use_liger_kernel=false plans PyTorch's, which need more memory",
    "torch_compile": "a compiled model cannot run on fake tensors; trainer.torch_compile=false plans the eager model",
}
_AUTOCAST = "a plan for a GPU has no autocast; set model.dtype, which also needs less memory, or use --device cpu"

# Memory that is not in tensors.
NOT_COUNTED = {
    "gpu": "CUDA's context (0.3 to 1 GiB), fragmentation, workspaces of kernels, evaluation",
    "cpu": "Python and its libraries (about 0.6 GiB), fragmentation, evaluation",
}

_SMALL_STATES = ("lomo", "adalomo", "adafactor", "adafactor_t2t")  # rules with almost no states
_MICRO_BATCHES = 3  # a micro-batch after the third needs the same memory as the third
_MLP_TILE = 4096  # tokens that an MLP computes at a time, where a plan proposes it
_MIN_OFFLOAD = 1024  # TRL offloads activations of at least so many bytes


class RunPlan(NamedTuple):
    """The memory of a run's training step, and the run in words by topic."""

    step: StepMemory
    summary: dict[str, str]


def plan(config: RunConfig, device: str) -> RunPlan:
    """Predicts the memory of a training step on a "gpu" or on the "cpu".

    Raises:
        ConfigError: the model's configuration cannot be read, or `config` cannot be trained.
        UnsupportedError: `config` cannot be planned.
    """
    place, requested = DEVICES[device], config.trainer
    autocast = dict.fromkeys(("bf16", "fp16"), _AUTOCAST) if device == "gpu" else {}
    for name, instead in (_UNSUPPORTED | autocast).items():
        if requested.get(name):
            raise UnsupportedError(f"trainer.{name} cannot be planned: {instead}")
    arguments, recomputing = dict(requested), dict(requested.get("activation_checkpointing_kwargs") or {})
    if device == "gpu":  # with use_cpu the trainer refuses offloading, which is therefore set afterwards
        arguments.pop("activation_offloading", None)
        if recomputing:
            arguments["activation_checkpointing_kwargs"] = {k: v for k, v in recomputing.items() if k != "offload"}
    with tempfile.TemporaryDirectory() as folder:  # a trainer creates its output folder
        data = replace(config.data, workers=None)  # there are two rows
        config = replace(config, run_dir=folder, data=data, trainer={**arguments, "use_cpu": True})
        # one row is a token shorter than the other, so that a batch has padding and a mask
        ids = [[1] * length for length in (config.data.max_length, config.data.max_length - 1)]
        rows = Dataset.from_dict({"input_ids": ids, "labels": ids})
        samples = build.Samples(train_tokenizer(["a"], SMALLEST_VOCABULARY), rows, rows)
        args = build.arguments(config, samples)
        masked = args.per_device_train_batch_size > 1 or args.packing
        fake = FakeTensorMode(allow_non_fake_inputs=True)  # torch.tensor(n, device="meta") is not a fake tensor
        with fake, place:
            model = empty_model(config.model, samples.tokenizer, _MASKED if masked else _UNMASKED)
        model.hf_device_map = {"": place.type}  # keeps the trainer from moving the model
        trainer = build.trainer(config, samples, model, args)
        largest = [trainer.train_dataset[n % 2] for n in range(args.per_device_train_batch_size)]
        collated = trainer.data_collator(largest)
    args.activation_offloading = bool(requested.get("activation_offloading"))
    hooks = saved_tensors_hooks(_offload, lambda packed: packed[1].to(packed[0]))
    offloading = hooks if args.activation_offloading else nullcontext()
    if args.activation_checkpointing:
        kwargs = {**args.activation_checkpointing_kwargs, **recomputing}
        args.activation_checkpointing_kwargs = kwargs.copy()
        every, offload = kwargs.pop("every_n_layers", 1), kwargs.pop("offload", False)
        model.activation_checkpointing_enable(kwargs or None, every_n_layers=every, offload=offload)
    with fake, _ScalarsAreOne(), offloading, _gpu_kernels() if device == "gpu" else nullcontext():
        batch = tree_map_only(Tensor, lambda value: torch.empty_like(value, device=place), dict(collated))

        def loss() -> Tensor:
            with trainer.compute_loss_context_manager():
                return trainer.compute_loss(model, dict(batch))

        losses = [loss] * min(args.gradient_accumulation_steps, _MICRO_BATCHES)
        step = step_memory(model.train(), trainer.create_optimizer, losses, [*filter(torch.is_tensor, batch.values())])
    micro = f"{args.gradient_accumulation_steps} micro-batches of " if args.gradient_accumulation_steps > 1 else ""
    return RunPlan(step, {**describe(config, trainer), "step": f"{micro}{len(largest)} x {args.max_length} tokens"})


def ways(config: RunConfig, device: str) -> list[str]:
    """Overrides of a configuration that reduce the memory of a step, and train as well."""
    trainer, optimizer = config.trainer, config.optimizer
    groups = [optimizer.complete({k: v for k, v in group.items() if k != "match"}) for group in ({}, *optimizer.groups)]
    large_states = {rule.name for rule, _ in groups} - {*_SMALL_STATES}
    nearest = any(rounding_of(rule, group, torch.bfloat16) == "nearest" for rule, group in groups)
    rows = trainer.get("per_device_train_batch_size", SFTConfig.per_device_train_batch_size)
    on_gpu, recomputed = device == "gpu", trainer.get("activation_checkpointing", True)
    kwargs = trainer.get("activation_checkpointing_kwargs") or {}
    to_host = trainer.get("activation_offloading") or kwargs.get("offload")
    tile, tokens = config.layers.mlp_tile, rows * config.data.max_length
    helps = {
        "trainer.activation_checkpointing=true": not recomputed,
        "layers.computed_gradients=true": not config.layers.computed_gradients,
        "trainer.label_smoothing_factor=0": trainer.get("label_smoothing_factor"),
        "model.dtype=bfloat16": config.model.dtype == "float32" and not nearest,
        "optimizer.rounding=stochastic": optimizer.rounding in ("compensated", "master"),
        "optimizer.state_storage=bfloat16": large_states and optimizer.state_storage == "float32",
        f"optimizer={{rule: adalomo, lr: {AdaLomo.usual_lr[0]:g}}}": large_states,
        f"trainer.per_device_train_batch_size={rows // 2}": rows > 1,
        "trainer.per_device_train_batch_size=1": rows > 1,
        "trainer.activation_checkpointing_kwargs={offload: true}": on_gpu and recomputed and not (kwargs or to_host),
        f"layers.mlp_tile={_MLP_TILE}": tokens >= 2 * _MLP_TILE and (tile is None or tile > _MLP_TILE),
        f"data.max_length={config.data.max_length // 2}": True,
    }
    return [override for override in helps if helps[override]]


def empty_model(model: ModelConfig, tokenizer: PreTrainedTokenizerBase, sdpa: str = "sdpa") -> PreTrainedModel:
    """The model from its configuration, on the device of the context, with `sdpa` in place of attention "sdpa"."""
    options = {"dtype": model.dtype, "attn_implementation": sdpa if model.attention == "sdpa" else model.attention}
    try:
        with no_code(model.path):
            return AutoModelForCausalLM.from_config(_model_config(model, tokenizer), trust_remote_code=False, **options)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"model: cannot be built from its configuration: {reason(error)}") from error


def _model_config(model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> Any:
    if model.path is None:
        vocabulary = {"vocab_size": model.train_tokenizer.vocab_size} if model.train_tokenizer else {}
        config = vocabulary | (model.config or {})
        if "vocab_size" in config:
            return build.model_config(config, tokenizer)
        raise ConfigError("model.config has no vocab_size, and a plan does not load the tokenizer "
                          f"{model.tokenizer!r}: add model.config.vocab_size=N")  # fmt: skip
    try:
        return load_config(model.path)
    except OSError as error:
        raise ConfigError(f"model.path: a plan needs the configuration of {model.path!r}, which cannot be downloaded "
                          f"here. Download it where there is a network (hf download {model.path} config.json) and name "
                          "its folder, or describe the model in model.config") from error  # fmt: skip


class _ScalarsAreOne(TorchDispatchMode):
    """Returns 1 to code that reads a number from a fake tensor, such as a metric."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return True if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
        return func(*args, **(kwargs or {}))


@contextmanager
def _gpu_kernels() -> Iterator[None]:
    """Skips the Triton kernels of TRL's head (trl.kernels.chunked_logprob, TRL 1.16), which work in place on a GPU."""
    names = ("_forward_tile", "_backward_tile", "_addmm_fp32")
    kernels: dict[str, Any] = dict.fromkeys(names, lambda *_, **__: None)
    # torch 2.13 raises when asked about autocast on "meta" (torch.is_autocast_enabled)
    no_autocast = mock.patch.object(torch, "is_autocast_enabled", lambda *_: False)
    with no_autocast, mock.patch.multiple(chunked_logprob, **kernels):
        yield


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
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        zero, lowest = (torch.full((), number, dtype=query.dtype, device=query.device) for number in (0, -torch.inf))
        attention_mask = torch.where(attention_mask, zero, lowest)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    masks = {"is_causal": attention_mask is None, "attn_mask": attention_mask}
    return kernel(query, key, value, **masks, scale=options["scaling"])[0].transpose(1, 2).contiguous(), None


_UNMASKED, _MASKED = "fake", "fake_masked"
for _name in (_UNMASKED, _MASKED):
    AttentionInterface.register(_name, _attention)
AttentionMaskInterface.register(_MASKED, sdpa_mask)
