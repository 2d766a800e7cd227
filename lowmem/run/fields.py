"""Types of the trainer's fields where SFTConfig allows more than a run can honour, and which field needs which."""

from collections.abc import Callable, Mapping
from enum import EnumType
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import Field
from trl import SFTConfig

from lowmem.errors import ConfigError
from lowmem.run.checks import Whole, mapping, within

Finite = Annotated[float, Field(allow_inf_nan=False)]


def _is_steps(value: float) -> bool:
    return 0 < value < 1 or (value >= 1 and value == int(value))


_COUNT = within(Whole, lambda n: n >= 1, "at least 1")
_OPTIONAL_COUNT = _COUNT | None
_FROM_ZERO = within(Whole, lambda n: n >= 0, "at least 0")
_AMOUNT = within(Finite, lambda x: x >= 0, "at least 0")
_IN_STEPS = "a whole number of steps, or a part of the training between 0 and 1"
_STEPS = within(Finite, _is_steps, _IN_STEPS)
_LEVEL: Any = Literal[tuple(SFTConfig.__dataclass_fields__["log_level"].metadata["choices"])]

# The keys of checkpointing are those of transformers, of TRL (selective) and of torch.utils.checkpoint.
_SWITCHES = ("offload", "selective", "use_reentrant", "preserve_rng_state")
_RECOMPUTING = dict.fromkeys(_SWITCHES, bool) | {
    "every_n_layers": _COUNT,
    "determinism_check": Literal["default", "none"],
}
_FSDP = {
    **dict.fromkeys(("reshard_after_forward", "cpu_offload", "cpu_ram_efficient_loading"), bool),
    **dict.fromkeys(("activation_checkpointing", "xla"), bool),
    "version": Whole,
    "min_num_params": _FROM_ZERO,
    "auto_wrap_policy": Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"],
    "transformer_layer_cls_to_wrap": str | list[str],
    "state_dict_type": Literal["FULL_STATE_DICT", "SHARDED_STATE_DICT"],
}
# DeepSpeed checks the rest itself (`lowmem.run.engine`).
_DEEPSPEED_SECTIONS = (
    *("activation_checkpointing", "aio", "amp", "bf16", "checkpoint", "comms_logger", "compile", "csv_monitor"),
    *("data_types", "flops_profiler", "tensor_parallel", "tensorboard", "torch_autocast", "wandb", "zero_optimization"),
)
_DEEPSPEED = {
    **dict.fromkeys(_DEEPSPEED_SECTIONS, dict[str, Any]),
    **dict.fromkeys(("optimizer", "scheduler"), mapping({}, {"params": dict[str, Any]}, extra="allow")),
    **dict.fromkeys(("wall_clock_breakdown", "prescale_gradients", "dump_state", "memory_breakdown"), bool),
    "fp16": mapping({}, {"initial_scale_power": within(Whole, lambda n: 0 <= n <= 64, "0 to 64")}, extra="allow"),
}

NARROWED: dict[str, Any] = {
    # training
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), _COUNT),
    **dict.fromkeys(("gradient_accumulation_steps", "ddp_timeout"), _COUNT),
    "max_steps": within(Whole, lambda n: n == -1 or n >= 1, "at least 1, or -1 for all epochs"),
    "num_train_epochs": within(Finite, lambda x: x > 0, "greater than 0"),
    "warmup_steps": within(Finite, lambda x: x == 0 or _is_steps(x), _IN_STEPS),
    "lr_scheduler_kwargs": dict[str, Any] | None,
    "label_smoothing_factor": within(Finite, lambda x: 0 <= x < 1, "at least 0 and less than 1"),
    "neftune_noise_alpha": _AMOUNT | None,
    "router_aux_loss_coef": _AMOUNT,
    "loss_type": Literal["nll", "dft"],
    "truncation_mode": Literal["keep_start", "keep_end"],
    "train_sampling_strategy": Literal["random", "sequential", "group_by_length", "batch_rebalance"],
    "pad_to_multiple_of": _COUNT | Literal["auto"] | None,
    "torch_empty_cache_steps": _OPTIONAL_COUNT,
    "torch_compile_mode": Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None,
    # evaluation, logging, saving
    **dict.fromkeys(("eval_accumulation_steps", "save_total_limit"), _OPTIONAL_COUNT),
    **dict.fromkeys(("logging_steps", "save_steps"), _STEPS),
    "eval_steps": _STEPS | None,
    "eval_delay": _AMOUNT,
    "include_num_input_tokens_seen": bool | Literal["all", "non_padding", "no"],
    **dict.fromkeys(("log_level", "log_level_replica"), _LEVEL),
    # data loaders
    "dataloader_num_workers": within(Whole, lambda n: 0 <= n <= 1024, "0 to 1024"),
    "dataloader_prefetch_factor": _OPTIONAL_COUNT,
    "dataloader_multiprocessing_context": Literal["fork", "spawn", "forkserver"] | None,
    **dict.fromkeys(("accelerator_config", "dataset_kwargs"), dict[str, Any] | None),
    # devices
    "ddp_backend": Literal["nccl", "gloo", "mpi", "ccl", "hccl", "cncl", "mccl"] | None,
    "fsdp": bool,
    "fsdp_config": mapping({}, _FSDP | {f"fsdp_{name}": kind for name, kind in _FSDP.items()}) | None,
    "deepspeed": mapping({}, _DEEPSPEED, extra="allow") | None,
    "activation_checkpointing": bool,
    "activation_checkpointing_kwargs": mapping({}, _RECOMPUTING) | None,
}


def trainer_types(elsewhere: Mapping[str, str]) -> Any:
    """Fields of `trl.SFTConfig`, less those that are set elsewhere."""
    types = {name: _adapted(hint) for name, hint in get_type_hints(SFTConfig).items()} | NARROWED
    return mapping({}, {name: types[name] for name in types if f"trainer.{name}" not in elsewhere})


def _adapted(hint: Any) -> Any:
    """The hint with `1e3` as an integer, with finite numbers, and without `str` in a union with an Enum, which would
    allow any string.
    """
    if get_origin(hint) not in (Union, UnionType):
        return {int: Whole, float: Finite}.get(hint, hint)
    closed = any(isinstance(member, EnumType) for member in get_args(hint))
    return Union[tuple(_adapted(member) for member in get_args(hint) if not (closed and member is str))]  # noqa: UP007


# Fields that have no effect unless another one is set: the condition, and what to set. A field that is switched off in
# so many words ("eval_strategy: no") may leave its options where they are.
_Trainer = Mapping[str, Any]


def _evaluates(trainer: _Trainer) -> bool:
    return "eval_strategy" in trainer or bool(trainer.get("eval_on_start"))


def _in_steps(strategy: str) -> Callable[[_Trainer], bool]:
    return lambda trainer: trainer.get(strategy) in (None, "steps", "no", "best")


_EVALUATION = (
    *("per_device_eval_batch_size", "eval_accumulation_steps", "eval_delay", "bf16_full_eval", "fp16_full_eval"),
    *("eval_packing", "batch_eval_metrics", "include_for_metrics", "prediction_loss_only", "eval_do_concat_batches"),
    *("eval_use_gather_object", "label_names", "load_best_model_at_end"),
)
_WORKERS = ("dataloader_prefetch_factor", "dataloader_persistent_workers", "dataloader_multiprocessing_context")
_HUB = ("hub_model_id", "hub_strategy", "hub_private_repo", "hub_always_push", "hub_revision")
_BEST = ("metric_for_best_model", "greater_is_better")
_TRACKIO = ("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id")

_NEEDS: list[tuple[tuple[str, ...], Callable[[_Trainer], Any], str]] = [
    (("eval_steps", *_EVALUATION), _evaluates, "without evaluation; set trainer.eval_strategy, or omit it"),
    (("eval_steps",), _in_steps("eval_strategy"), "unless trainer.eval_strategy is steps; omit it"),
    (("save_steps",), _in_steps("save_strategy"), "unless trainer.save_strategy is steps; omit it"),
    (("logging_steps",), _in_steps("logging_strategy"), "unless trainer.logging_strategy is steps; omit it"),
    (_WORKERS, lambda t: t.get("dataloader_num_workers"), "without trainer.dataloader_num_workers; omit it"),
    (_HUB, lambda t: t.get("push_to_hub"), "without trainer.push_to_hub; omit it"),
    (
        _BEST,
        lambda t: (
            t.get("load_best_model_at_end")
            or t.get("save_strategy") == "best"
            or t.get("lr_scheduler_type") == "reduce_lr_on_plateau"
        ),
        "without trainer.load_best_model_at_end; omit it",
    ),
    (("liger_kernel_config",), lambda t: t.get("use_liger_kernel"), "without trainer.use_liger_kernel; omit it"),
    (("fsdp_config",), lambda t: "fsdp" in t, "without trainer.fsdp; set it to true, or omit it"),
    (
        ("length_column_name",),
        lambda t: t.get("train_sampling_strategy") in ("group_by_length", "batch_rebalance"),
        "unless trainer.train_sampling_strategy is group_by_length; omit it",
    ),
    (_TRACKIO, lambda t: "trackio" in str(t.get("report_to")), "unless trainer.report_to has trackio; omit it"),
    (
        ("lr_scheduler_kwargs",),
        lambda t: t.get("lr_scheduler_type") not in ("constant", "constant_with_warmup"),
        "with this trainer.lr_scheduler_type; omit it",
    ),
    (
        ("warmup_steps",),
        lambda t: t.get("lr_scheduler_type") not in ("constant", "reduce_lr_on_plateau"),
        "with this trainer.lr_scheduler_type; set that to constant_with_warmup, or omit it",
    ),
]


def check_needs(trainer: _Trainer, at: Callable[[str], str]) -> None:
    """Raises `ConfigError` for a field that has no effect without another one; `at` tells where a field is set."""
    for names, met, instead in _NEEDS:
        for name in names:
            if trainer.get(name) not in (None, False, 0, []) and not met(trainer):
                raise ConfigError(f"{at(name)}: 'trainer.{name}' has no effect {instead}.")
    if trainer.get("fsdp") and trainer.get("deepspeed"):
        raise ConfigError(f"{at('fsdp')}: trainer.fsdp and trainer.deepspeed are both set. Omit one of them.")
