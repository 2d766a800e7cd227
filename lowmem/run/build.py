"""From a `RunConfig` to what trains: tokenizer, data, model, trainer, each checked before the next is made."""

import os
import tempfile
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, set_seed

from lowmem.errors import ConfigError
from lowmem.hf import sharding
from lowmem.options import FusedConfig
from lowmem.rules import resolve
from lowmem.run import data
from lowmem.run.config import ModelConfig, RunConfig
from lowmem.run.tokenizers import train_tokenizer
from lowmem.trainer import FusedSFTTrainer

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from trl import SFTConfig

# What a run has where its configuration does not say otherwise; Hugging Face's own default would be in the way.
_TRAINER_DEFAULTS = {
    "report_to": "none",
    "bf16": False,
    "dataloader_pin_memory": torch.cuda.is_available(),
    "disable_tqdm": False,  # else it follows the libraries' log level, and takes the report's bar with it
    # several processes on CPUs find each other only if told
    "use_cpu": not torch.accelerator.is_available() and int(os.environ.get("WORLD_SIZE", 1)) > 1,
}


@dataclass
class Samples:
    """The data of a run as its tokenizer and TRL will see it."""

    tokenizer: "PreTrainedTokenizerBase"
    train: "Dataset"
    held_out: "Dataset | None"


def samples(config: RunConfig, resume_from: Path | None = None) -> Samples:
    """Reads the data and makes the tokenizer; a run that is resumed has one in its checkpoint already.

    Raises:
        DataError: what is wrong with the data, by file and record.
        ConfigError: the tokenizer cannot be had.
    """
    train, held_out = data.load(config.data)
    tokenizer = _tokenizer(config.model, train, resume_from)
    train = data.for_tokenizer(train, config.data, tokenizer)
    if held_out is not None:
        held_out = data.for_tokenizer(held_out, config.data, tokenizer)
    return Samples(tokenizer, train, held_out)


def _tokenizer(model: ModelConfig, train: "Dataset", resume_from: Path | None) -> "PreTrainedTokenizerBase":
    template = _read_template(model.chat_template) if model.chat_template else None
    if model.train_tokenizer is not None and resume_from is None:
        return train_tokenizer(data.texts(train), model.train_tokenizer.vocab_size, template)
    name = str(resume_from) if model.train_tokenizer is not None else model.tokenizer or model.path
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.tokenizer: no tokenizer can be loaded from {name!r}: {first_line(error)}") from error
    if template is not None:
        tokenizer.chat_template = template
    if tokenizer.pad_token is None:  # padding is masked everywhere, so any token serves
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _read_template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"model.chat_template: {path} can't be read: {error.strerror}.") from error


def arguments(config: RunConfig, found: Samples) -> "SFTConfig":
    """The arguments of a run's trainer.

    Raises:
        ConfigError: one that `trl.SFTConfig` refuses.
    """
    return _sft_config(config, found, _weight_decay(config.optimizer.fused))


def model(config: RunConfig, tokenizer: "PreTrainedTokenizerBase", args: "SFTConfig") -> "PreTrainedModel":
    """The model in `model.dtype`: pretrained weights, or random ones from `model.config`. Under ZeRO-3 no process ever
    holds it whole.

    Raises:
        ConfigError: the weights cannot be had, or their vocabulary is smaller than the tokenizer's.
        UnsupportedError: the arguments ask for a sharding that cannot be honoured.
    """
    wanted = config.model
    if (cut := sharding.of(args)) is not None:
        cut.prepare(getattr(torch, wanted.dtype))
    set_seed(config.seed)
    options: dict[str, Any] = {"dtype": getattr(torch, wanted.dtype), "attn_implementation": wanted.attention}
    try:
        if wanted.path is not None:
            made = AutoModelForCausalLM.from_pretrained(wanted.path, **options)
        else:
            made = AutoModelForCausalLM.from_config(model_config(wanted.config or {}, tokenizer), **options)
    except AssertionError as error:  # as when batch sizes do not fit the number of processes
        raise ConfigError(f"trainer.deepspeed: {first_line(error)}") from error
    except (OSError, ValueError, ImportError) as error:
        where = "model.path" if wanted.path is not None else "model.config"
        raise ConfigError(f"{where}: no model can be made from it: {first_line(error)}") from error
    size = made.get_input_embeddings().num_embeddings
    if size < len(tokenizer):
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} tokens and the model embeds {size}. Leave model.config.vocab_size "
            "out, or choose a tokenizer of this model."
        )
    return made


def model_config(raw: dict[str, Any], tokenizer: "PreTrainedTokenizerBase") -> Any:
    from transformers import AutoConfig

    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return AutoConfig.for_model(**{"vocab_size": len(tokenizer), **special, **raw})


def trainer(config: RunConfig, found: Samples, made: "PreTrainedModel", args: "SFTConfig") -> Any:
    """The `FusedSFTTrainer` of a run, its data tokenized.

    Raises:
        ConfigError, UnsupportedError: an argument that a fused trainer refuses.
    """
    try:
        return FusedSFTTrainer(
            made,
            args=args,
            train_dataset=found.train,
            eval_dataset=found.held_out,
            processing_class=found.tokenizer,
            fused=_without_decay(config.optimizer.fused),
        )
    except (RuntimeError, ImportError) as error:
        if "installed" not in str(error):
            raise
        raise ConfigError(f"trainer: {first_line(error)}") from error  # what trainer.report_to asks for


def tokenized(config: RunConfig, found: Samples) -> "Dataset":
    """The training data as the trainer of this run tokenizes and packs it, without loading the run's model."""
    size = len(found.tokenizer)
    stand_in = LlamaConfig(
        vocab_size=size, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    on_one = {key: value for key, value in config.trainer.items() if key not in ("deepspeed", "fsdp", "fsdp_config")}
    with tempfile.TemporaryDirectory() as aside:  # a trainer makes its folder at once
        config = replace(config, run_dir=aside, trainer=on_one)
        return trainer(config, found, LlamaForCausalLM(stand_in), arguments(config, found)).train_dataset


def _weight_decay(fused: FusedConfig) -> float:
    """The weight decay that a configuration asks for under its rule's own name, or else the rule's default."""
    rule = resolve(fused.rule)
    return fused.hyper.get(rule.decay, rule.defaults.get(rule.decay)) or 0.0


def _without_decay(fused: FusedConfig) -> FusedConfig:
    """The settings but for weight decay, which in a trainer is the trainer's and spares norms and biases."""
    decay = resolve(fused.rule).decay
    return replace(fused, hyper={name: value for name, value in fused.hyper.items() if name != decay})


def _sft_config(config: RunConfig, found: Samples, weight_decay: float) -> "SFTConfig":
    from trl import SFTConfig

    evaluates = config.trainer.get("eval_strategy", "no") != "no"
    if evaluates and found.held_out is None:
        raise ConfigError("trainer.eval_strategy asks to evaluate, but nothing is held out: set data.eval_fraction or "
                          "data.eval_path")  # fmt: skip
    given = {
        **_TRAINER_DEFAULTS,
        **data.sft_arguments(config.data, found.train),
        "output_dir": config.run_dir,
        "seed": config.seed,
        "learning_rate": config.optimizer.lr,
        "weight_decay": weight_decay,
        "max_grad_norm": config.optimizer.fused.clip_norm or 0.0,
        "activation_checkpointing": not (config.trainer.get("fsdp_config") or {}).get("activation_checkpointing"),
        **config.trainer,
    }
    if given["activation_checkpointing"]:  # torch's own default is reentrant as soon as another key is given
        kwargs = config.trainer.get("activation_checkpointing_kwargs") or {}
        given["activation_checkpointing_kwargs"] = {"use_reentrant": False, **kwargs}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            return SFTConfig(**given)
        except ValueError as error:
            raise ConfigError(f"trainer: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
