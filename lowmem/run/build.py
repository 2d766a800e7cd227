"""Creates tokenizer, data, model and trainer from a `RunConfig`, each checked before the next is created."""

import copy
import math
import os
import re
import tempfile
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import purge_accelerate_environment
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, get_scheduler, set_seed

from lowmem.errors import ConfigError, LowmemError
from lowmem.hf import sharding
from lowmem.hf.layers import embedding
from lowmem.rules import resolve
from lowmem.run import data
from lowmem.run.config import ModelConfig, RunConfig
from lowmem.run.engine import check_deepspeed
from lowmem.run.pretrained import load_model, load_tokenizer
from lowmem.run.source import read_text, reason
from lowmem.run.tokenizers import train_tokenizer
from lowmem.trainer import FusedSFTTrainer

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from trl import SFTConfig

# Arguments of the trainer where a configuration does not set them and SFTConfig's defaults do not suit a run.
_TRAINER_DEFAULTS = {
    "report_to": "none",
    "bf16": False,
    "dataloader_pin_memory": torch.cuda.is_available(),
    "logging_nan_inf_filter": False,  # a loss that is NaN is shown as NaN, and not as 0
    "disable_tqdm": False,  # else it follows the libraries' log level, and removes the progress bar of the report
    # transformers 5.23 (training_args.py) joins several processes on CPUs only with use_cpu
    "use_cpu": not torch.accelerator.is_available() and int(os.environ.get("WORLD_SIZE", 1)) > 1,
}

_CPUINFO = Path("/proc/cpuinfo")


@dataclass
class Samples:
    """The data of a run as its tokenizer and TRL get it."""

    tokenizer: "PreTrainedTokenizerBase"
    train: "Dataset"
    held_out: "Dataset | None"


def samples(config: RunConfig, resume_from: Path | None = None) -> Samples:
    """Reads the data and loads or trains the tokenizer, which a resumed run loads from its checkpoint.

    Raises:
        DataError: what is wrong with the data, by file and record.
        ConfigError: the tokenizer cannot be loaded.
    """
    train, held_out = data.load(config.data)
    tokenizer = _tokenizer(config.model, train, resume_from)
    train = data.for_tokenizer(train, config.data, tokenizer)
    if held_out is not None:
        held_out = data.for_tokenizer(held_out, config.data, tokenizer)
    return Samples(tokenizer, train, held_out)


def _tokenizer(model: ModelConfig, train: "Dataset", resume_from: Path | None) -> "PreTrainedTokenizerBase":
    template = read_text(Path(model.chat_template), "model.chat_template") if model.chat_template else None
    if model.train_tokenizer is not None and resume_from is None:
        return train_tokenizer(data.texts(train), model.train_tokenizer.vocab_size, template)
    name = str(resume_from) if model.train_tokenizer is not None else model.tokenizer or model.path or ""
    try:
        tokenizer = load_tokenizer(name)
    except Exception as error:  # tokenizers raises no narrower type for a damaged file
        advice = f"no tokenizer can be loaded from {name!r}; set it to a directory or model that has one"
        raise ConfigError(f"model.tokenizer: {advice}. Transformers says: {reason(error)}") from error
    for origin in ("is_local", "local_files_only"):  # would be saved, and a resumed run saves the same files
        tokenizer.init_kwargs.pop(origin, None)
    if template is not None:
        tokenizer.chat_template = template
    if tokenizer.pad_token is None:  # padding is masked everywhere, so any token will do
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def arguments(config: RunConfig, samples: Samples) -> "SFTConfig":
    """The arguments of the trainer.

    Raises:
        ConfigError: `trl.SFTConfig` refuses one, or DeepSpeed is needed and not installed.
    """
    from trl import SFTConfig

    if config.trainer.get("deepspeed"):
        sharding.require_deepspeed()
        check_deepspeed(config.trainer["deepspeed"])
    if config.trainer.get("eval_strategy", "no") != "no" and samples.held_out is None:
        raise ConfigError("trainer.eval_strategy asks to evaluate, but no data is held out: set data.eval_fraction or "
                          "data.eval_path")  # fmt: skip
    rule = resolve(config.optimizer.rule)
    options = {**rule.defaults, **config.optimizer.hyper}
    arguments = {
        **_TRAINER_DEFAULTS,
        **data.sft_arguments(config.data, samples.train),
        "output_dir": config.run_dir,
        "seed": config.seed,
        "learning_rate": config.optimizer.lr,
        "weight_decay": options.get(rule.decay) or 0.0,
        "max_grad_norm": config.optimizer.clip_norm or 0.0,
        "activation_checkpointing": not (config.trainer.get("fsdp_config") or {}).get("activation_checkpointing"),
        **config.trainer,
    }
    if arguments["activation_checkpointing"]:  # if any other key is set, torch's default is reentrant
        kwargs = config.trainer.get("activation_checkpointing_kwargs") or {}
        arguments["activation_checkpointing_kwargs"] = {"use_reentrant": False, **kwargs}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            args = SFTConfig(**arguments)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"trainer: {reason(error)}") from error
    _check_schedule(args)
    return args


def _check_schedule(args: "SFTConfig") -> None:
    """Raises `ConfigError` if the schedule can't be made or gives learning rates that are no numbers."""
    steps = args.max_steps if args.max_steps > 0 else 1_000_000
    options = {"num_warmup_steps": args.get_warmup_steps(steps), "num_training_steps": steps}
    kwargs = args.lr_scheduler_kwargs
    place = f"trainer.lr_scheduler_type={args.lr_scheduler_type.value}" + (", lr_scheduler_kwargs" if kwargs else "")
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    try:
        schedule = get_scheduler(
            args.lr_scheduler_type, optimizer, **options, scheduler_specific_kwargs=copy.deepcopy(kwargs)
        )
        factors = schedule.get_last_lr()
        if isinstance(schedule, LambdaLR):
            factors = [schedule.lr_lambdas[0](step) for step in range(0, steps, max(1, steps // 1000))]
    except Exception as error:  # of schedules that are given any keyword arguments
        raise ConfigError(f"{place}: no schedule can be made: {reason(error)}") from error
    if not all(isinstance(factor, int | float) and 0 <= factor < math.inf for factor in factors):
        raise ConfigError(f"{place}: the schedule gives learning rates that are negative or no numbers.")


@purge_accelerate_environment  # type: ignore[untyped-decorator]
def model(config: RunConfig, tokenizer: "PreTrainedTokenizerBase", args: "SFTConfig") -> "PreTrainedModel":
    """The model in `model.dtype`, with pretrained weights or with random ones from `model.config`. Under ZeRO-3 no
    process ever holds the full model.

    Raises:
        ConfigError: the weights cannot be loaded, or their vocabulary is smaller than the tokenizer's.
        UnsupportedError: the arguments ask for a sharding that is not supported.
    """
    dtype = getattr(torch, config.model.dtype)
    if (sharded := sharding.of(args)) is not None:
        sharded.prepare(dtype)
    set_seed(config.seed)
    try:
        if config.model.path is not None:
            model = load_model(config.model.path, dtype=dtype, attention=config.model.attention)
        else:
            raw = model_config(config.model.config or {}, tokenizer)
            with sharded.creating() if sharded is not None else nullcontext():
                model = AutoModelForCausalLM.from_config(raw, dtype=dtype, attn_implementation=config.model.attention)
    except AssertionError as error:  # such as batch sizes that do not fit the number of processes
        raise ConfigError(f"trainer.deepspeed: {reason(error)}") from error
    except LowmemError:
        raise
    except Exception as error:  # of model classes, which document none
        key = "model.path" if config.model.path is not None else "model.config"
        raise ConfigError(f"{key}: no model can be created from it: {reason(error)}") from error
    _check_positions(model, config)
    size = getattr(embedding(model, "input"), "num_embeddings", len(tokenizer))
    if size < len(tokenizer):
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} tokens and the model embeds {size}. Omit model.config.vocab_size, or "
            "choose a tokenizer of this model."
        )
    return model


def _check_positions(model: "PreTrainedModel", config: RunConfig) -> None:
    """Raises `ConfigError` if a sample may be longer than a table of learned positions."""
    for name, module in model.named_modules():
        learned = isinstance(module, torch.nn.Embedding) and re.search(
            r"(wpe|position_embeddings|embed_positions)$", name
        )
        if learned and 0 < module.num_embeddings < config.data.max_length:
            raise ConfigError(
                f"data.max_length is {config.data.max_length}, and the model has {module.num_embeddings} positions. "
                "Set data.max_length to at most that."
            )


def model_config(raw: dict[str, Any], tokenizer: "PreTrainedTokenizerBase") -> Any:
    from transformers import AutoConfig

    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return AutoConfig.for_model(**{"vocab_size": len(tokenizer), **special, **raw})


def trainer(config: RunConfig, samples: Samples, model: "PreTrainedModel", args: "SFTConfig") -> Any:
    """The `FusedSFTTrainer` of a run, with its data tokenized.

    Raises:
        ConfigError, UnsupportedError: a fused trainer refuses an argument.
    """
    try:
        return FusedSFTTrainer(
            model,
            args=args,
            train_dataset=samples.train,
            eval_dataset=samples.held_out,
            processing_class=samples.tokenizer,
            fused=config.optimizer,
            layers=config.layers,
        )
    except LowmemError:
        raise
    except (RuntimeError, ImportError) as error:
        if "installed" not in str(error):
            raise
        raise ConfigError(f"trainer: {reason(error)}") from error  # a package that trainer.report_to needs
    except ValueError as error:  # with which TRL and transformers refuse arguments
        raise ConfigError(f"trainer: {reason(error)}") from error


def tokenized(config: RunConfig, samples: Samples) -> "Dataset":
    """The training data as the trainer tokenizes and packs it, without loading the model of the run."""
    stand_in = LlamaConfig(
        vocab_size=len(samples.tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1,
    )  # fmt: skip
    one_device = {
        key: value for key, value in config.trainer.items() if key not in ("deepspeed", "fsdp", "fsdp_config")
    }
    with tempfile.TemporaryDirectory() as temporary:  # a trainer creates its output directory at once
        config = replace(config, run_dir=temporary, trainer=one_device)
        return trainer(config, samples, LlamaForCausalLM(stand_in), arguments(config, samples)).train_dataset


def has_bfloat16(device: torch.device) -> bool:
    """Whether a device has instructions for bfloat16; True where that is not known."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu" or not _CPUINFO.exists():
        return True
    flags = re.search(r"^(flags|Features)\s*:(.*)$", _CPUINFO.read_text(), re.MULTILINE)
    return flags is None or not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags[2].split())


def slow_bfloat16(config: RunConfig, device: torch.device) -> str | None:
    """A warning if a run asks for bfloat16 on a device without instructions for it."""
    asked = config.model.dtype == "bfloat16" or config.trainer.get("bf16", False)
    if not asked or has_bfloat16(device):
        return None
    key = "model.dtype=float32" if config.model.dtype == "bfloat16" else "trainer.bf16=false"
    return f"this {device.type.upper()} has no bfloat16 instructions, so bfloat16 is slow here; set {key}"
