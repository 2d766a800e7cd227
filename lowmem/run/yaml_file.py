"""Reads the keys of YAML files with their values and lines, without executing code. `1e-3` is a number."""

import argparse
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lowmem.errors import ConfigError
from lowmem.options import FusedConfig, LayersConfig
from lowmem.run import secrets

# lowmem's sections of a configuration, and their classes.
SECTIONS: dict[str, Any] = {"fused": FusedConfig, "layers": LayersConfig}


class Setting(NamedTuple):
    """An argument that is set: its name, value and place (file and line, or "--"). As a string, its place and name."""

    name: str
    value: Any
    place: str = "--"
    texts: list[str] | None = None  # the scalars of a value in a YAML file, as written; None if it is nested

    def __str__(self) -> str:
        return f"{self.place}{self.name}"


class Loader(yaml.SafeLoader):
    """Reads `1e-3` as a number, as YAML 1.2 does. Raises an error that names the line for a repeated key or a value
    that does not match its tag.
    """

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            problem = f"{str(node.value)[:100]!r} is not of the type {node.tag.replace('tag:yaml.org,2002:', '!!')}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: list[Any] = []
        for key, _ in node.value:
            if key.value in seen:
                problem = f"the key {key.value!r} is repeated"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.append(key.value)
        return super().construct_mapping(node, deep)


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+"), list("-+.0123456789")
)


def yaml_value(text: str) -> Any:
    """Returns the value of a YAML string, such as `0.1`, `[0.9, 0.95]` or `adamw`."""
    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text[:100]!r} is not YAML{_problem(error)}") from error


def configured(argv: Sequence[str]) -> tuple[Path | None, Any, dict[str, Setting]]:
    """Returns the YAML file of a command line, the rule that the command line sets, and the keys of the file. Sets the
    environment variables of its section `env`, as TRL does. Libraries read some of them when they are imported. Raises
    `ConfigError` if the file cannot be read, or a variable cannot be set.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path, nargs="?")
    parser.add_argument("--fused.rule", dest="rule", nargs="?")
    options, _ = parser.parse_known_args(list(argv))
    settings = {} if options.config is None else _read(options.config)
    if (env := settings.pop("env", None)) is not None:
        if not isinstance(env.value, dict):
            raise ConfigError(f"{env}: expected names and values of environment variables")
        variables = {str(name): str(value) for name, value in env.value.items()}
        try:
            os.environ.update(variables)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{env}: a variable cannot be set: {error}") from error
        secrets.hide(variables.values())  # their values are not written into files
    return options.config, options.rule, settings


def _read(path: Path) -> dict[str, Setting]:
    """Reads the keys of a YAML file. A key in one of the sections is named `section.key`."""
    try:
        loader = Loader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{path}: expected keys and values, such as 'learning_rate: 1e-3'")
        loader.construct_mapping(node, deep=True)
        return {setting.name: setting for setting in _settings(node, loader, path)}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}{_problem(error)}") from error


def _settings(node: Any, loader: Loader, path: Path, section: str = "") -> Iterator[Setting]:
    for key, value in node.value:
        setting = Setting(f"{section}{key.value}", None, f"{path}, line {key.start_mark.line + 1}: ")
        if setting.name not in SECTIONS:
            nodes = value.value if isinstance(value, yaml.SequenceNode) else [value]
            scalars = all(isinstance(item, yaml.ScalarNode) for item in nodes)
            texts = [item.value for item in nodes] if scalars else None
            yield setting._replace(value=loader.construct_object(value, deep=True), texts=texts)
        elif isinstance(value, yaml.MappingNode):
            yield from _settings(value, loader, path, f"{key.value}.")
        else:
            raise ConfigError(f"{setting} is a section. Write its options below it, indented")


def _problem(error: Any) -> str:
    mark = getattr(error, "problem_mark", None)
    place = "" if mark is None else f", line {mark.line + 1}"
    return f"{place}: {getattr(error, 'problem', None) or 'it is nested too deeply or has invalid characters'}"
