"""Creates the trainer of a run from its recipe, as TRL's own scripts do."""

import copy
import json
import pkgutil
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import transformers
import trl
from accelerate.utils import purge_accelerate_environment
from transformers import AutoModelForCausalLM
from trl import get_peft_config, get_quantization_config

from lowmem.errors import ConfigError, DataError, LowmemError
from lowmem.run.boundary import convert_errors, reason
from lowmem.run.recipe import Recipe
from lowmem.trainer import FusedTrainerMixin

# Commands whose trainers take reward functions.
_WITH_REWARDS = ("grpo", "rloo")

# The number of rows that are tokenized first.
FIRST_ROWS = 100


class EvaluationStopped(Exception):
    """Raised by a callback to end an evaluation during training, after which the checkpoint is saved."""


@cache
def trainer_class(name: str) -> Any:
    """Returns the fused subclass of one of TRL's trainers for a run: `FusedDPOTrainer` for "DPOTrainer"."""
    return type(f"Fused{name}", (_RunTrainer, FusedTrainerMixin, getattr(trl, name)), {})


class _RunTrainer:
    """Names the row that TRL cannot prepare, stops evaluations, and completes the model card."""

    def _maybe_log_save_evaluate(self, *args: Any, **options: Any) -> None:
        try:
            super()._maybe_log_save_evaluate(*args, **options)  # type: ignore[misc]
        except EvaluationStopped:
            super()._maybe_log_save_evaluate(*args, **options)  # type: ignore[misc]

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, *options: Any) -> Any:
        prepare = super()._prepare_dataset  # type: ignore[misc]
        return _by_row(lambda rows: prepare(rows, processing_class, args, *options), dataset)

    def create_model_card(self: Any, *args: Any, **kwargs: Any) -> None:
        super().create_model_card(*args, **kwargs)  # type: ignore[misc]
        card = Path(self.args.output_dir, "README.md")
        base = Path(self.model.config._name_or_path)
        if self.is_world_process_zero() and base.is_dir():
            # TRL 1.16 (base_trainer.py) writes None for a model from a directory or outside the Hub
            where = self.hub_model_id or self.args.output_dir
            text = card.read_text("utf-8").replace('model="None"', f'model="{where}"')
            card.write_text(re.sub(r"\[None\]\(\S*\)", lambda _: f"`{base.name}`", text), "utf-8")


def _by_row(prepare: Callable[[Any], Any], dataset: Any) -> Any:
    """Prepares a data set. Raises `DataError` for the first row that fails, which it finds by bisection."""
    if not isinstance(dataset, datasets.Dataset):
        return prepare(dataset)
    try:
        # TRL warns about rows only while it tokenizes them, so these rows must not come from the cache
        prepare(dataset.select(range(min(FIRST_ROWS, len(dataset)))).flatten_indices(keep_in_memory=True))
        return prepare(dataset)
    except (OSError, LowmemError):
        raise
    except Exception as error:  # from tokenizers, chat templates and TRL
        first, last, cause = 0, len(dataset), error
        while last - first > 1:
            middle = (first + last) // 2
            try:
                prepare(dataset.select([0, *range(first, middle)]))  # the first row decides how TRL reads the others
                first = middle
            except Exception as failure:
                last, cause = middle, failure
        row, in_file = dataset[first], datasets.Dataset(dataset.data)  # all rows, in the order of the file
        number = next((number for number, other in enumerate(in_file) if other == row), first)
        content = json.dumps(row, default=str, ensure_ascii=False)[:300]
        advice = ""
        if "chat_template is not set" in str(cause):  # in transformers 5.23 (tokenization_utils_base.py)
            advice = " Write a template into chat_template.jinja in the model's directory, or set chat_template_path."
        raise DataError(
            f"row {number + 1} of the data cannot be tokenized: {reason(cause)}.{advice} The row: {content}"
        ) from error


def model_class(config: Any) -> Any:
    """Returns the model class that a configuration names, which is the class that TRL loads."""
    return getattr(transformers, (config.architectures or [""])[0], AutoModelForCausalLM)


@purge_accelerate_environment  # type: ignore[untyped-decorator]
def trainer(recipe: Recipe, train: Any, evaluation: Any, model: Any = None, **options: Any) -> Any:
    """Creates the trainer of a run, with its model loaded and its data tokenized.

    Args:
        train, evaluation: data sets as `lowmem.run.data.load` returns them.
        model: a model to use instead of the model that the recipe names.
        options: further arguments of the trainer.

    Raises:
        ConfigError: TRL, transformers or DeepSpeed raise an error for the arguments, the model or the data.
    """
    args = copy.copy(recipe.training)
    model_args = recipe.model
    if model_args.model_name_or_path is None:
        raise ConfigError("no model: set model_name_or_path to a directory or to a name on the Hub")
    if model is None:
        model = model_args.model_name_or_path
        args.model_init_kwargs = {
            **recipe.loading_options,
            "attn_implementation": model_args.attn_implementation,
            "dtype": model_args.dtype,
            "use_safetensors": True,  # never load pickles
            **(args.model_init_kwargs or {}),
        }
    else:
        args.model_init_kwargs = None
    if recipe.command in _WITH_REWARDS:
        options["reward_funcs"] = _reward_functions(recipe.script)
    with convert_errors(f"{recipe.subject_of(type(args))} of {model_args.model_name_or_path}"):
        if (quantization := get_quantization_config(model_args)) is not None and args.model_init_kwargs is not None:
            args.model_init_kwargs["quantization_config"] = quantization
        return trainer_class(type(args).__name__.replace("Config", "Trainer"))(
            model=model,
            args=args,
            train_dataset=train,
            eval_dataset=evaluation,
            peft_config=get_peft_config(model_args),
            fused=recipe.fused,
            layers=recipe.layers,
            **options,
        )


def _reward_functions(script: Any) -> list[Any]:
    """Finds reward functions as TRL's scripts do: a reward model, TRL's functions by name, and import paths."""
    functions: list[Any] = [script.reward_model_name_or_path] if script.reward_model_name_or_path else []
    sys.path.insert(0, str(Path.cwd()))
    for name in script.reward_funcs or ():
        try:
            function = pkgutil.resolve_name(name if "." in name else f"trl.rewards.{name}")
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"reward_funcs: {name!r} is not a reward function of TRL and cannot be imported: {error}"
            ) from error
        overlong = name == "get_soft_overlong_punishment"
        functions.append(function(max_completion_len=1280, soft_punish_cache=256) if overlong else function)
    if not functions:
        raise ConfigError("no reward: set reward_funcs, such as my_module.reward, or reward_model_name_or_path")
    return functions
