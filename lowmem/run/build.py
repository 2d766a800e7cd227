"""Creates the trainer of a run from its arguments, as TRL's own scripts do."""

import copy
import importlib
import re
import sys
import traceback
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import trl
from accelerate.utils import purge_accelerate_environment
from trl import get_peft_config, get_quantization_config

from lowmem.errors import ConfigError, DataError
from lowmem.run.arguments import Arguments, reason, refused
from lowmem.trainer import FusedSFTTrainer, FusedTrainerMixin

# The trainers that take reward functions.
_WITH_REWARDS = ("grpo", "rloo")

_CPUINFO = Path("/proc/cpuinfo")


@cache
def trainer_class(name: str) -> Any:
    """The fused trainer for one of TRL: `FusedDPOTrainer` for "DPOTrainer"."""
    if name == "SFTTrainer":
        return FusedSFTTrainer
    return type(f"Fused{name}", (FusedTrainerMixin, getattr(trl, name)), {})


@purge_accelerate_environment  # type: ignore[untyped-decorator]
def trainer(arguments: Arguments, train: Any, evaluation: Any, model: Any = None, **options: Any) -> Any:
    """The trainer of a run, with its model loaded and its data tokenized.

    Args:
        train, evaluation: data sets as `lowmem.run.data.load` returns them.
        model: a model in place of the one that the arguments name.

    Raises:
        ConfigError: TRL, transformers or DeepSpeed refuse the arguments, the model or the data.
    """
    args, names = copy.copy(arguments.training), arguments.model
    if names.model_name_or_path is None:
        raise ConfigError("no model: set model_name_or_path to a directory or to a name on the Hub")
    loading = {
        "revision": names.model_revision,
        "trust_remote_code": args.trust_remote_code,
        "attn_implementation": names.attn_implementation,
        "dtype": names.dtype,
        "use_safetensors": True,  # and no pickles
        **(args.model_init_kwargs or {}),
    }
    args.model_init_kwargs = loading if model is None else None
    if arguments.command in _WITH_REWARDS:
        options["reward_funcs"] = _reward_functions(arguments.script)
    with refused(f"{arguments.file or 'the command line'}: {type(args).__name__}"):
        peft, quantization = get_peft_config(names), get_quantization_config(names)
        try:
            return trainer_class(type(args).__name__.replace("Config", "Trainer"))(
                model=names.model_name_or_path if model is None else model,
                args=args,
                train_dataset=train,
                eval_dataset=evaluation,
                quantization_config=quantization,
                peft_config=peft,
                fused=arguments.fused,
                layers=arguments.layers,
                **options,
            )
        except OSError as error:
            if model is None and error.errno is None and not Path(names.model_name_or_path).is_dir():
                raise ConfigError(
                    f"model_name_or_path {names.model_name_or_path!r}: there is no such directory, and as a name on "
                    f"the Hub: {reason(error)}"
                ) from error
            raise
        except RuntimeError as error:
            if "assistant_only_loss" not in str(error):
                raise
            raise DataError(
                f"row {_unmarked(train) + 1} of the data has no answer that assistant_only_loss could find: no message "
                "is of the role assistant, or the chat template does not mark answers with {% generation %}. Set "
                "chat_template_path to a template that does, or omit assistant_only_loss"
            ) from error
        except KeyError as error:  # with which TRL reads the columns of rows
            columns = ", ".join(next(iter(train)))
            raise DataError(
                f"the data has no column {error}, which {arguments.command} needs. It has {columns}"
            ) from error
        except (AttributeError, IndexError) as error:  # with which tokenizers meet values that are missing
            if any(Path(frame.filename).match("datasets/*.py") for frame in traceback.extract_tb(error.__traceback__)):
                raise DataError(f"a row of the data has a value that is missing or no text: {reason(error)}") from error
            raise
        except ValueError as error:
            if "`pad_token`" not in str(error):
                raise
            raise ConfigError(
                f"set pad_token to one of the tokens of {names.model_name_or_path}: {reason(error)}"
            ) from error


def _unmarked(train: Any) -> int:
    """The number of the first row without an answer, or 0."""
    for number, row in enumerate(islice(train, 1000)):
        messages = row.get("messages") or row.get("completion") or ()
        if all(message["role"] != "assistant" for message in messages):
            return number
    return 0


def _reward_functions(script: Any) -> list[Any]:
    """Reward functions by name, as TRL's scripts find them: its own, import paths, and a reward model."""
    from trl import rewards

    functions: list[Any] = [script.reward_model_name_or_path] if script.reward_model_name_or_path else []
    for name in script.reward_funcs or ():
        module, _, attribute = name.rpartition(".")
        try:
            if name == "get_soft_overlong_punishment":
                functions.append(rewards.get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256))
            elif not module:
                functions.append(getattr(rewards, name))
            else:
                sys.path.insert(0, str(Path.cwd()))
                functions.append(getattr(importlib.import_module(module), attribute))
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"reward_funcs: {name!r} is neither a reward function of TRL nor can it be imported: {error}"
            ) from error
    if not functions:
        raise ConfigError("no reward: set reward_funcs, such as my_module.reward, or reward_model_name_or_path")
    return functions


def has_bfloat16(device: torch.device) -> bool:
    """Returns whether a device has instructions for bfloat16, or True if that is unknown."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu" or not _CPUINFO.exists():
        return True
    flags = re.search(r"^(flags|Features)\s*:(.*)$", _CPUINFO.read_text(), re.MULTILINE)
    return flags is None or not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags[2].split())


def slow_bfloat16(arguments: Arguments, device: torch.device) -> str | None:
    """A warning if a run asks for bfloat16 on a device without instructions for it."""
    in_weights = arguments.dtype == torch.bfloat16
    if not (in_weights or arguments.training.bf16) or has_bfloat16(device):
        return None
    key = "dtype: float32" if in_weights else "bf16: false"
    return f"this {device.type.upper()} has no bfloat16 instructions, so bfloat16 is slow here; set {key}"
