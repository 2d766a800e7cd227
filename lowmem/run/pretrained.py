"""Loads models and tokenizers that others have made: tensors and settings, and never code.

A model's folder can have Python files (`auto_map` in its configuration), name compiled kernels to download, and have
weights that are pickled. Unless it is told not to, transformers asks on the terminal whether to run such files.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lowmem.errors import CheckpointError, ConfigError
from lowmem.hf import adapters


def _load(auto_class: Any, name: str | Path, **options: Any) -> Any:
    """Loads from a directory or the Hub. Raises `ConfigError` if that needs code of its own."""
    with no_code(name):
        return auto_class.from_pretrained(name, trust_remote_code=False, **options)


load_tokenizer, load_config = partial(_load, AutoTokenizer), partial(_load, AutoConfig)


def load_model(name: str | Path, *, dtype: Any, attention: str | None = None) -> Any:
    """Loads a causal language model from a directory or the Hub.

    Args:
        attention: the implementation of attention, whatever the model's own configuration names; None is the default of
            transformers.

    Raises:
        CheckpointError: the directory has PEFT adapters, which are a part of a model.
        ConfigError: the model needs code of its own, or has more in its weights than tensors.
    """
    check_no_adapters(Path(name))
    config = load_config(name)
    config._attn_implementation = attention  # a configuration could name kernels to download
    return _load(AutoModelForCausalLM, name, config=config, dtype=dtype, attn_implementation=attention)


def check_no_adapters(folder: Path) -> None:
    """Raises `CheckpointError` if a directory has PEFT adapters, whose base model would be loaded from elsewhere."""
    if adapters.files(folder):
        raise CheckpointError(
            f"{folder} has PEFT adapters without their base model. Merge them first, in Python: "
            f'peft.PeftModel.from_pretrained(model, "{folder}").merge_and_unload().save_pretrained("merged"), and '
            'tokenizer.save_pretrained("merged"); then name the folder "merged"'
        )


@contextmanager
def no_code(name: str | Path | None) -> Iterator[None]:
    """Converts what transformers and PyTorch raise for a model that needs code to be run into a `ConfigError`."""
    try:
        yield
    except UnpicklingError as error:
        raise ConfigError(
            f"{name}: a file of weights is damaged or has more than tensors, and is not loaded. Use weights in "
            "safetensors files"
        ) from error
    except ValueError as error:
        if "custom code" not in str(error):
            raise
        raise ConfigError(
            f"{name} needs Python code that comes with it (auto_map in its configuration), which lowmem never runs. "
            "Use a model that transformers has, or load this one in Python and train it with lowmem.trainer"
        ) from error
