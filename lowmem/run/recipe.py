"""The recipe of a run: the arguments of a training command, parsed once, and the TRL dataclasses built from them.

The keys of a YAML file are the names of the arguments, and a value means the same as on the command line. The libraries
that define an argument check it. Errors name the line of the file, or the argument.
"""

import argparse
import copy
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from transformers import AutoConfig

from lowmem.errors import ConfigError, LowmemError, require_packages
from lowmem.hf.arguments import Inputs, check_number
from lowmem.hf.optim import with_learning_rate
from lowmem.options import DynamicScale, FusedConfig, LayersConfig
from lowmem.run import secrets
from lowmem.run.boundary import convert_errors, reason
from lowmem.run.parser import Parser, dataclasses_of
from lowmem.run.terminal import CONFIG, METRICS
from lowmem.run.yaml_file import SECTIONS, Setting, configured

# Without these, trainers log a NaN loss as 0, the progress bar depends on the log level of transformers, and trainers
# upload the run folder whenever they save.
_DEFAULTS = {"logging_nan_inf_filter": False, "disable_tqdm": False, "hub_strategy": "end"}

# The rule whose hyperparameters are arguments if no rule is set.
_DEFAULT_RULE = "adamw"


@dataclass(frozen=True)
class Recipe:
    """The arguments of a run. `with_values(max_length=1024)` returns a changed copy. Both raise `ConfigError`."""

    command: str  # the training command, such as "sft"
    settings: Mapping[str, Setting] = field(repr=False)  # all arguments that are set; `section.option` in a section
    device: str | None = None  # target of the arguments: "gpu", "cpu", or None for the device of this machine
    file: Path | None = None  # the YAML file
    options: argparse.Namespace = field(default_factory=argparse.Namespace)  # of `plan`, `inspect` and others

    script: Any = field(init=False)  # TRL's `ScriptArguments`, or the subclass of the command
    training: Any = field(init=False)  # the trainer's own arguments, such as `trl.SFTConfig`
    model: Any = field(init=False)  # TRL's `ModelConfig`
    mixture: Any = field(init=False)  # TRL's `DatasetMixtureConfig`
    fused: FusedConfig | None = field(init=False)
    layers: LayersConfig = field(init=False)

    def __post_init__(self) -> None:
        if self.values.get("deepspeed"):
            require_packages("deepspeed", "deepspeed")
        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would warn that it found no accelerator
        parts: dict[str, Any] = {name: self._section(name) for name in SECTIONS}
        kinds = dataclasses_of(self.command)
        for part, kind in zip(("script", "training", "model", "mixture"), kinds, strict=True):
            names = {option.name for option in fields(kind)}
            arguments = {name: copy.deepcopy(value) for name, value in self.values.items() if name in names}
            if part == "training":
                arguments |= _for_device(self.device, arguments)
            with convert_errors(self.subject_of(kind)):
                parts[part] = kind(**arguments)
        vars(self).update(parts)  # the dataclass is frozen

    def with_values(self, **values: Any) -> "Recipe":
        """Returns the recipe with these values of arguments."""
        settings = {name: Setting(name, value) for name, value in values.items()}
        return replace(self, settings={**self.settings, **settings})

    def probe(self, folder: str, *, sharded: bool = False, **attributes: Any) -> "Recipe":
        """Returns the recipe of a trainer in another folder, which does not report or evaluate.

        Args:
            sharded: whether it shards its model, if this recipe does.
            attributes: other arguments of the trainer. They are not checked again. Unknown arguments are ignored.
        """
        recipe, training = copy.copy(self), copy.copy(self.training)
        attributes |= {"output_dir": folder, "report_to": [], "eval_strategy": "no"}
        if not sharded:
            attributes |= {"deepspeed": None, "fsdp": type(training.fsdp)()}
        vars(training).update({name: value for name, value in attributes.items() if hasattr(training, name)})
        vars(recipe)["training"] = training  # the dataclass is frozen
        return recipe

    @cached_property
    def values(self) -> dict[str, Any]:
        """The value of every argument that is set."""
        return {name: setting.value for name, setting in self.settings.items()}

    def subject_of(self, kind: type) -> str:
        """Returns the subject of messages about one of TRL's dataclasses: the file, or the command line."""
        return f"{self.file or 'the command line'}: {kind.__name__}"

    @cached_property
    def config(self) -> Any:
        """The configuration of the model. Raises `ConfigError` if it cannot be read."""
        name = self.model.model_name_or_path
        if name is None:
            raise ConfigError(
                "no model: set model_name_or_path to a directory with a config.json, or a name on the Hub"
            )
        try:
            return AutoConfig.from_pretrained(name, revision=self.model.model_revision, trust_remote_code=False)
        except Exception as error:  # libraries rarely document which
            raise ConfigError(
                f"model_name_or_path: the config.json of {name!r} cannot be read ({reason(error)}). Download it on a "
                f"machine with network access (hf download {name} config.json), and set model_name_or_path to its "
                "directory"
            ) from error

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which weights are loaded."""
        name = (self.training.model_init_kwargs or {}).get("dtype", self.model.dtype)
        name = self.config.dtype if name == "auto" else name
        dtype = getattr(torch, str(name).removeprefix("torch."), None)
        return dtype if isinstance(dtype, torch.dtype) else torch.get_default_dtype()

    @cached_property
    def optimizer(self) -> FusedConfig:
        """The options of the optimizer. Raises `LowmemError` if the arguments are not valid for training."""
        completed = Inputs(None, self.training, None, self.fused).options(self.training)
        with_learning_rate(self.training, completed, nn.Module())
        return completed

    @property
    def loading_options(self) -> dict[str, Any]:
        """Options for every `from_pretrained` call: the revision, and whether code of the model may be executed."""
        # trust_remote_code is an argument of trainers, and of models before TRL 1.16
        trusted = any(getattr(part, "trust_remote_code", False) for part in (self.training, self.model))
        return {"revision": self.model.model_revision, "trust_remote_code": trusted}

    def to_yaml(self) -> str:
        """Returns the recipe as YAML without `env`, and without `resume_from_checkpoint`, which a command line sets."""
        nested: dict[str, Any] = {}
        for name, value in self.values.items():
            if name == "resume_from_checkpoint":
                continue
            section, _, option = name.rpartition(".")
            (nested.setdefault(section, {}) if section else nested)[option] = _plain(value)
        return yaml.safe_dump(nested, sort_keys=False, allow_unicode=True, width=120)

    def _section(self, name: str) -> Any:
        """Returns the options of a section, or None for `fused` if none of its options is set."""
        options = {key.partition(".")[2]: value for key, value in self.values.items() if key.startswith(f"{name}.")}
        if not options and name == "fused":
            return None
        with _located(name, self.settings):
            if isinstance(options.get("groups"), list):
                options["groups"] = tuple(options["groups"])
            if isinstance(options.get("loss_scale"), dict):
                with convert_errors("loss_scale"):
                    options["loss_scale"] = DynamicScale(**options["loss_scale"])
            return SECTIONS[name](**options)


class _ExplicitArguments(argparse.Namespace):
    """The arguments that are set. argparse reads None for other arguments, so it does not add defaults."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


def parse(
    command: str, argv: Sequence[str], *, device: str | None = None, more: Callable[[Any], None] | None = None
) -> Recipe:
    """Parses the command line of a training command, and the YAML file that it names. Raises `ConfigError`.

    Args:
        argv: the words after the command.
        device: "gpu" or "cpu" for the recipe of a run on this device. The machine does not need to have it.
        more: a function that adds the options of `plan` or `inspect` to a group; their `--device` comes first.
    """
    file, rule, in_file = configured(argv)
    with _located("fused", {} if rule else in_file):
        rule = rule or (in_file["fused.rule"].value if "fused.rule" in in_file else None) or _DEFAULT_RULE
        parser = Parser(command, rule, more)
    options = _ExplicitArguments()
    _, unknown = parser.parse_known_args(list(argv), options)
    settings = {setting.name: setting for setting in map(parser.convert, in_file.values())}
    if unknown:
        parser.unknown(unknown[0].lstrip("-").partition("=")[0].replace("-", "_"))
    if options.output_dir is None and file is not None and file.name == CONFIG and (file.parent / METRICS).exists():
        settings["output_dir"] = Setting("output_dir", str(file.parent))  # the run folder may have been moved
    names = [name for name in vars(options) if name in parser.hints or "." in name]
    settings |= {name: Setting(name, vars(options).pop(name)) for name in names}
    settings = {name: parser.nested(setting) for name, setting in settings.items()}
    _check(settings)
    return Recipe(command, settings, options.device or device, file, options)


def _for_device(device: str | None, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns changed defaults, and values for the device: transformers raises an error for TRL's `bf16` on a CPU."""
    changed: dict[str, Any] = {name: value for name, value in _DEFAULTS.items() if name not in arguments}
    autocast = arguments.get("bf16"), arguments.get("fp16")
    if device is not None:
        off = dict.fromkeys(("fp16", "bf16_full_eval", "fp16_full_eval"), False)
        return {**changed, **off, "use_cpu": True, "bf16": device == "cpu" and bool(autocast[0])}
    if torch.accelerator.is_available():
        if arguments.get("dataloader_pin_memory", True) and "accelerator_config" not in arguments:
            # otherwise the host waits for every tensor of a batch
            changed["accelerator_config"] = {"non_blocking": True}
        return changed
    changed["dataloader_pin_memory"] = False
    if not arguments.get("use_cpu") and autocast == (None, None):
        changed["bf16"] = False
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        changed["use_cpu"] = True  # without it, transformers does not join processes on a CPU
    return changed


@contextmanager
def _located(section: str, settings: Mapping[str, Setting]) -> Iterator[None]:
    """Prepends the file and line of an option to an error that begins with its name."""
    try:
        yield
    except LowmemError as error:
        option = re.split(r"\W", str(error), maxsplit=1)[0]
        setting = settings.get(f"{section}.{option}")
        place = "" if setting is None else setting.place.removeprefix("--")
        raise type(error)(f"{place}{section}: {error}") from error


def _check(settings: Mapping[str, Setting]) -> None:
    """Raises `ConfigError` for secrets, and for invalid values that libraries accept."""
    for name, setting in settings.items():
        if secrets.is_secret(name, _plain(setting.value)):
            raise ConfigError(
                f"{setting} contains a password or token, and arguments are written into output_dir. Omit it, and set "
                "the environment variable of the service, such as HF_TOKEN"
            )
    if all(name in settings and settings[name].value for name in ("datasets", "dataset_name")):
        raise ConfigError(f"{settings['dataset_name']} has no effect together with datasets. Omit one of them")
    if (strategy := settings.get("hub_strategy")) is not None and _plain(strategy.value) != "end":
        raise ConfigError(f"{strategy}: only the final model is uploaded. Omit it; `hf upload` uploads a checkpoint")
    for name, setting in settings.items():
        try:
            check_number(name, setting.value)
        except ConfigError as error:
            raise ConfigError(f"{setting.place}{error}") from None


def _plain(value: Any) -> Any:
    """Converts a value to types that YAML can represent."""
    if is_dataclass(value) and not isinstance(value, type):
        return {name: item for name, item in _plain(asdict(value)).items() if item is not None}
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value
