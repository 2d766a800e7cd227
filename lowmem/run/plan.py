"""What a run will take, before anything of it is downloaded: its own trainer takes a step with tensors without data.

The model is made from its configuration alone, and one step is taken with the largest batch that the run can meet, by
the rule, policy, loss and checkpointing that it asks for. Nothing is allocated, and every machine gives the same plan.
"""

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from unittest import mock

import torch
from datasets import Dataset
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import sdpa_mask
from trl import SFTConfig

from lowmem.errors import ConfigError, UnsupportedError
from lowmem.rules import resolve
from lowmem.run import build
from lowmem.run.config import ModelConfig, RunConfig, TokenizerTraining
from lowmem.run.memory import StepMemory, step_memory
from lowmem.run.tokenizers import SMALLEST_VOCABULARY, train_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Where the tensors of a dry run are. Those of a GPU are nowhere, and so told apart from those on its host.
DEVICES = {"gpu": torch.device("meta"), "cpu": torch.device("cpu")}

# Arguments of the trainer whose memory cannot be told like this, and what to do about them.
_UNPLANNED = {
    "deepspeed": "a plan is of one device; trainer.deepspeed=null plans a rank that holds everything",
    "fsdp": "a plan is of one device; trainer.fsdp=false plans a rank that holds everything",
    "use_liger_kernel": "its kernels need data; trainer.use_liger_kernel=false plans PyTorch's, which take more",
    "torch_compile": "a compiled model cannot run dry; trainer.torch_compile=false plans it as it is written",
}

# What is no tensor.
NOT_COUNTED = {
    "gpu": "CUDA's context (0.3 to 1 GiB), gaps that the allocator leaves, workspaces of kernels, evaluation",
    "cpu": "Python and its libraries (some 0.6 GiB), gaps that the allocator leaves, evaluation",
}

# Rules that keep next to nothing.
_LEAN = ("lomo", "adalomo", "adafactor", "adafactor_t2t")

# Micro-batches that differ: the first, the one that sums begin with, and all others.
_DIFFERENT = 3

# Bytes from which TRL offloads what is saved for backward.
_OFFLOADED_FROM = 1024


class Plan(NamedTuple):
    """The memory of a step, and what is said of it: topic → words."""

    step: StepMemory
    of: dict[str, str]


def plan(config: RunConfig, device: str) -> Plan:
    """The memory of a training step on a "gpu", or on the "cpu".

    Raises:
        ConfigError: the model's configuration cannot be had, or something in `config` cannot be trained.
        UnsupportedError: `config` asks for what cannot be planned.
    """
    _refuse(config, device)
    place, asked = DEVICES[device], config.trainer
    given = _without_offloading(asked) if device == "gpu" else asked  # which the trainer refuses here
    with tempfile.TemporaryDirectory() as aside:  # a trainer makes its folder at once
        config = replace(config, run_dir=aside, trainer={**given, "use_cpu": True})
        rows = _longest(config.data.max_length)
        found = build.Samples(train_tokenizer(["a"], SMALLEST_VOCABULARY), rows, rows)
        args = build.arguments(config, found)
        several = args.per_device_train_batch_size > 1 or args.packing
        dry = FakeTensorMode(allow_non_fake_inputs=True)  # torch.tensor(n, device="meta") stays one of its own
        with dry, place:
            model = _model(config.model, found.tokenizer, masked=several)
        model.hf_device_map = {"": place.type}  # a trainer leaves a model alone that has its place
        trainer = build.trainer(config, found, model, args)
        samples = [trainer.train_dataset[n % len(rows)] for n in range(args.per_device_train_batch_size)]
        collated = trainer.data_collator(samples)
    args.activation_offloading = bool(asked.get("activation_offloading"))
    offloading = _Offloading() if args.activation_offloading else nullcontext()
    if args.activation_checkpointing:
        kwargs = dict(args.activation_checkpointing_kwargs or {})
        every = kwargs.pop("every_n_layers", 1)
        offload = (asked.get("activation_checkpointing_kwargs") or {}).get("offload", False)
        model.activation_checkpointing_enable(kwargs or None, every_n_layers=every, offload=offload)
    with dry, _EveryNumberIsOne(), offloading, _gpu() if device == "gpu" else nullcontext():
        batch = {name: _without_data(value, place) for name, value in collated.items()}

        def loss() -> Tensor:
            with trainer.compute_loss_context_manager():
                return trainer.compute_loss(model, dict(batch))

        losses = [loss] * min(args.gradient_accumulation_steps, _DIFFERENT)
        tensors = [value for value in batch.values() if isinstance(value, Tensor)]
        step = step_memory(model.train(), trainer.create_optimizer, losses, tensors)
    return Plan(step, _described_run(config, trainer))


def ways(config: RunConfig, device: str) -> Iterator[str]:
    """Overrides of a configuration that make a step take less."""
    trainer, fused = config.trainer, config.optimizer.fused
    if not trainer.get("activation_checkpointing", True):
        yield "trainer.activation_checkpointing=true"
    if trainer.get("label_smoothing_factor"):
        yield "trainer.label_smoothing_factor=0"
    if config.model.dtype == "float32":
        yield "model.dtype=bfloat16"
    if fused.rounding == "compensated":
        yield "optimizer.rounding=stochastic"
    if resolve(fused.rule).name not in _LEAN:
        yield f"optimizer={{rule: adalomo, lr: {config.optimizer.lr:g}, rounding: {fused.rounding}}}"
    rows = trainer.get("per_device_train_batch_size", SFTConfig.per_device_train_batch_size)
    for fewer in dict.fromkeys((rows // 2, 1)) if rows > 1 else ():
        yield f"trainer.per_device_train_batch_size={fewer}"
    if device == "gpu" and not trainer.get("activation_offloading"):
        yield "trainer.activation_offloading=true"
    yield f"data.max_length={config.data.max_length // 2}"


def parse_bytes(text: str) -> int:
    """An amount of memory as people write it: 24GiB, 80 GB, 512MiB.

    Raises:
        ConfigError: it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT])(i?)B", text.strip())
    if found is None or not float(found[1]):
        raise ConfigError(f"--memory {text!r} is no amount of memory; write it as in 24GiB, 80GB or 512MiB")
    number, prefix, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** ("KMGT".index(prefix) + 1))


def _described_run(config: RunConfig, trainer: Any) -> dict[str, str]:
    model, args, optimizer = trainer.model, trainer.args, trainer.optimizer
    fused, steps = config.optimizer.fused, args.gradient_accumulation_steps
    parameters = sum(param.numel() for param in model.parameters())
    micro = f"{steps} micro-batches of " if steps > 1 else ""
    recomputed = "recomputed in backward" if args.activation_checkpointing else "kept for backward"
    return {
        "model": f"{type(model).__name__}, {parameters / 1e6:,.1f}M parameters, {config.model.dtype}",
        "optimizer": f"{fused.rule}, rounding {fused.rounding}",
        "policy": f"{optimizer.policy}: {optimizer.policy_reason}",
        "step": f"{micro}{args.per_device_train_batch_size} x {args.max_length} tokens, activations {recomputed}",
    }


def _refuse(config: RunConfig, device: str) -> None:
    for name, instead in _UNPLANNED.items():
        if config.trainer.get(name):
            raise UnsupportedError(f"trainer.{name} cannot be planned: {instead}")
    for name in ("bf16", "fp16"):
        if config.trainer.get(name) and device == "gpu":
            raise UnsupportedError(
                f"trainer.{name}: what autocast keeps on a GPU cannot be planned; set model.dtype instead, which is "
                "also what takes less, or plan for the CPU (--device cpu)"
            )


def _without_offloading(trainer: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in trainer.items() if name != "activation_offloading"}
    if kwargs := kept.get("activation_checkpointing_kwargs"):
        kept["activation_checkpointing_kwargs"] = {name: kwargs[name] for name in kwargs if name != "offload"}
    return kept


def _longest(length: int) -> Dataset:
    """The samples of the largest batch: one is a token shorter, so that there is something to pad and to mask."""
    rows = [[1] * length, [1] * (length - 1)]
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def _model(wanted: ModelConfig, tokenizer: "PreTrainedTokenizerBase", masked: bool) -> "PreTrainedModel":
    """The model from its configuration, on the device of the context."""
    attention = wanted.attention if wanted.attention != "sdpa" else _MASKED if masked else _UNMASKED
    try:
        described = _described(wanted, tokenizer)
        return AutoModelForCausalLM.from_config(
            described, dtype=getattr(torch, wanted.dtype), attn_implementation=attention
        )
    except (ValueError, ImportError) as error:
        raise ConfigError(f"model: no model can be made from its configuration: {build.first_line(error)}") from error


def _described(wanted: ModelConfig, tokenizer: "PreTrainedTokenizerBase") -> Any:
    if wanted.path is None:
        raw = wanted.config or {}
        if "vocab_size" not in raw and wanted.train_tokenizer is None:
            raise ConfigError(
                f"model.config has no vocab_size, and a plan does not load the tokenizer {wanted.tokenizer!r} to ask "
                "it: give model.config.vocab_size=N"
            )
        size = raw.get("vocab_size") or cast(TokenizerTraining, wanted.train_tokenizer).vocab_size
        return build.model_config({**raw, "vocab_size": size}, tokenizer)
    try:
        return AutoConfig.from_pretrained(wanted.path)
    except OSError as error:
        raise ConfigError(
            f"model.path: a plan needs the configuration of {wanted.path!r}, which is not on this machine and cannot "
            f"be fetched. Fetch it where there is a network (hf download {wanted.path} config.json), name a folder "
            "that has its config.json, or describe the model in model.config"
        ) from error


def _without_data(value: Any, device: torch.device) -> Any:
    return torch.empty(value.shape, dtype=value.dtype, device=device) if isinstance(value, Tensor) else value


class _EveryNumberIsOne(TorchDispatchMode):
    """Answers who reads a number back, such as a metric: tensors without data have none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return True if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
        return func(*args, **(kwargs or {}))


@contextmanager
def _gpu() -> Iterator[None]:
    """What differs on a GPU: TRL's head works in place there, by Triton."""
    from trl.kernels import chunked_logprob

    in_place = ("_forward_tile", "_backward_tile", "_addmm_fp32")
    nothing: dict[str, Any] = dict.fromkeys(in_place, lambda *_, **__: None)
    # torch knows no autocast of tensors that are nowhere, not even to say that there is none
    no_autocast = mock.patch.object(torch, "is_autocast_enabled", lambda *_: False)
    with no_autocast, mock.patch.multiple(chunked_logprob, **nothing):
        yield


class _Offloading(saved_tensors_hooks):
    """TRL's activation offloading without its streams: what backward needs waits on the host."""

    def __init__(self) -> None:
        super().__init__(self._pack, self._unpack)

    @staticmethod
    def _pack(saved: Tensor) -> tuple[torch.device, Tensor]:
        stays = isinstance(saved, nn.Parameter) or saved.nbytes < _OFFLOADED_FROM
        return saved.device, saved if stays else saved.cpu()

    @staticmethod
    def _unpack(packed: tuple[torch.device, Tensor]) -> Tensor:
        device, saved = packed
        return saved.to(device)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """What `sdpa` keeps where it takes a kernel that never has the scores as a whole, as on GPUs and CPUs it does.

    Without data PyTorch would take the one that does, and transformers make a mask where there is nothing to mask.
    """
    if attention_mask is not None:  # then each head gets keys of its own, and the mask becomes numbers
        groups = getattr(module, "num_key_value_groups", 1)
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        zero, never = (torch.full((), number, dtype=query.dtype, device=query.device) for number in (0, -torch.inf))
        attention_mask = torch.where(attention_mask, zero, never)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    kept = kernel(query, key, value, 0.0, attention_mask is None, attn_mask=attention_mask, scale=options["scaling"])
    return kept[0].transpose(1, 2).contiguous(), None


_UNMASKED, _MASKED = "dry", "dry_masked"
for _name in (_UNMASKED, _MASKED):
    AttentionInterface.register(_name, _attend)
AttentionMaskInterface.register(_MASKED, sdpa_mask)
