"""Parses a training command, which accepts TRL's arguments and the options of `fused` and `layers`."""

import importlib
import re
from argparse import SUPPRESS, ArgumentError, ArgumentTypeError
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from trl import TrlParser

from lowmem.errors import ConfigError, did_you_mean
from lowmem.rules import resolve
from lowmem.run.boundary import convert_errors
from lowmem.run.yaml_file import SECTIONS, Setting, yaml_value

# Arguments of earlier versions, with their replacements.
FORMER = {
    "group_by_length": "train_sampling_strategy: group_by_length",
    "max_prompt_length": "max_length",
    "no_cuda": "use_cpu",
    "torch_dtype": "dtype",
    "warmup_ratio": "warmup_steps: SHARE, with a share of all steps below 1",
}

# Options of `accelerate launch` that `trl` accepts.
_LAUNCHER_OPTIONS = (
    "accelerate_config", "config_file", "gpu_ids", "machine_rank", "main_process_ip", "main_process_port",
    "mixed_precision", "num_machines", "num_processes",
)  # fmt: skip

_FILES = (".json", ".yaml", ".yml")  # suffixes of a value that names a file instead of a mapping


@cache
def dataclasses_of(command: str) -> tuple[Any, ...]:
    """Returns TRL's dataclasses for a command: arguments of the script, the trainer, the model and the data mixture."""
    return tuple(importlib.import_module(f"trl.scripts.{command}").make_parser().dataclass_types)


class Parser(TrlParser):
    """TRL's parser of one command, with the options of the two sections. It raises `ConfigError` instead of exiting.

    Args:
        rule: the rule whose hyperparameters are arguments.
        more: a function that adds the options of `plan` or `inspect` to a group.
    """

    def __init__(self, command: str, rule: Any, more: Callable[[Any], None] | None = None) -> None:
        self.rule = resolve(rule)
        types = dataclasses_of(command)
        super().__init__(types, prog=f"lowmem {command}", allow_abbrev=False, add_help=False)
        self.argument_default = SUPPRESS  # --help shows the defaults of the dataclasses
        self.hints = {name: hint for kind in types for name, hint in get_type_hints(kind).items()}
        self.items: dict[str, Any] = {}  # arguments that take a list of mappings → dataclass of a mapping
        for action in self._actions:
            if is_dataclass(action.type):
                self.items[action.dest], action.type = action.type, str
        for section, kind in SECTIONS.items():
            group = self.add_argument_group(f"lowmem: {section}", (kind.__doc__ or "").partition("\n\n")[0])
            for name, default, text in _options(kind):
                group.add_argument(f"--{section}.{name}", type=yaml_value, metavar="VALUE", default=default, help=text)
        group = self.add_argument_group("lowmem")
        group.add_argument("--config", metavar="FILE", type=Path, help="a YAML file with these arguments as keys")
        group.add_argument("--traceback", action="store_true", help="show the traceback of an error")
        if more is not None:
            more(group)
        group = self.add_argument_group(f"lowmem: hyperparameters of the rule {self.rule.name}")
        for name, default in self.rule.defaults.items():
            if f"--fused.{name}" not in self._option_string_actions:
                group.add_argument(f"--fused.{name}", type=yaml_value, metavar="VALUE", default=default, help=" ")
        group.add_argument("-h", "--help", action="help", help="show this message and exit")

    def error(self, message: str) -> NoReturn:
        raise ConfigError(re.sub(r"^argument (--[\w.]+)(/--[\w.-]+)*", r"\1", message))

    def known(self) -> list[str]:
        """Returns the names of all arguments as written in a YAML file."""
        return [option[2:] for option, action in self._option_string_actions.items() if action.nargs != 0]

    def convert(self, setting: Setting) -> Setting:
        """Returns a setting of a YAML file with the name and value that it would have on the command line. Raises
        `ConfigError` if the argument does not exist, or the value does not have its type.
        """
        action = self._option_string_actions.get(f"--{setting.name}")
        if action is None or action.nargs == 0 or setting.name == "config" or setting.name in _LAUNCHER_OPTIONS:
            self.unknown(setting.name, setting.place)
        hint, value, takes_list = self.hints.get(action.dest, Any), setting.value, action.nargs == "+"
        is_list = isinstance(value, list)
        plain = isinstance(value, bool | float | dict | NoneType) or (is_list and not takes_list)
        if hint is Any or (plain and _accepts(hint, type(value))) or (is_list and takes_list and not setting.texts):
            pass  # not text, so the value is used as it is, or an empty or nested list
        elif setting.name == "fsdp" and isinstance(value, bool):  # a flag since transformers 5.16, a string before
            value = (action.const or "full_shard auto_wrap") if value else None
        elif setting.texts is None or (is_list and not takes_list):
            raise ConfigError(f"{setting}: expected {'a list' if takes_list else 'a single value'}, found {value!r}")
        else:
            try:
                value = self._get_values(action, setting.texts)
            except ArgumentError as error:
                raise ConfigError(f"{setting}: {error.message}") from None
        return setting._replace(name=action.dest, value=value)

    def nested(self, setting: Setting) -> Setting:
        """Returns the setting of an argument that takes a mapping or a list of mappings, which may be a YAML string.
        Raises `ConfigError` if it is something else, or if a mapping has an unknown key.
        """
        name, value, *_ = setting
        if isinstance(value, str) and _accepts(self.hints.get(name), dict) and not value.endswith(_FILES):
            value = _yaml(value, setting)
            if not isinstance(value, dict):
                raise ConfigError(f"{setting}: expected a mapping, such as '{{\"a\": 1}}', found {str(value)[:100]!r}")
        elif (kind := self.items.get(name)) is not None:
            if len(value) == 1 and str(value[0]).startswith("["):
                value = _yaml(value[0], setting)
            with convert_errors(str(setting)):
                value = [kind(item) if isinstance(item, str) else kind(**item) for item in value]  # a name, as in TRL
        return setting._replace(value=value)

    def unknown(self, name: str, place: str = "") -> NoReturn:
        """Raises `ConfigError`, which suggests the closest name, for an unknown argument or key."""
        name = name[:100]
        section, _, option = name.rpartition(".")
        known = [other for other in self.known() if other != name]
        if section in SECTIONS:
            options = [other.partition(".")[2] for other in known if other.startswith(f"{section}.")]
            hint = did_you_mean(option, options)
            if not hint and section == "fused":
                hint = f" The rule {self.rule.name} takes {', '.join(self.rule.defaults)}."
        elif name in FORMER:
            hint = f" It belongs to an earlier version: write {FORMER[name]} instead."
        elif name == "num_processes":
            hint = " Write it on the command line of a training command. In `lowmem plan`, it is --ranks."
        elif name in _LAUNCHER_OPTIONS:
            launch = f"accelerate launch OPTIONS -m {self.prog} ..."
            hint = f" Write the options of the launcher before the command: {launch}"
        else:
            sections = [other.partition(".")[0] for other in known if other.endswith(f".{name}")]
            hint = did_you_mean(name, known)
            if not hint and sections:
                hint = f" Did you mean {name!r} of the section {sections[0]!r}?"
        raise ConfigError(f"{place}unknown {'key' if place else 'argument'} {name!r}.{hint} See `{self.prog} --help`.")


def _options(kind: Any) -> Iterator[tuple[str, Any, str]]:
    """Yields the name, default and description of each option of a dataclass. Descriptions are from its docstring."""
    text = (kind.__doc__ or "").partition("Attributes:")[2].partition("Raises:")[0]
    parts = re.split(r"\n {8}(\w+): ", text)
    described = dict(zip(parts[1::2], parts[2::2], strict=True))
    for option in fields(kind):
        if option.name != "hyper":
            yield option.name, option.default, " ".join(described[option.name].split()).replace("%", "%%")


def _accepts(hint: Any, kind: Any) -> bool:
    """Returns whether a type hint, or a member of its union, is the type `kind`."""
    members = get_args(hint) if get_origin(hint) not in (list, dict) else ()
    return any(_accepts(member, kind) for member in members) if members else (get_origin(hint) or hint) is kind


def _yaml(text: str, place: object) -> Any:
    try:
        return yaml_value(text)
    except ArgumentTypeError as error:
        raise ConfigError(f"{place}: {error}") from None
