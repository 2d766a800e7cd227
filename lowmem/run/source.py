"""YAML 1.2 with the line of every key, `key=value` overrides, and YAML that any reader reads the same way."""

import contextlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

from lowmem.errors import ConfigError, LowmemError

Key = tuple[str, ...]


class _Constructor(SafeConstructor):
    """Reads a date as the string that it is written as."""


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


@dataclass
class Source:
    """The values of a file after overrides, and where each key comes from."""

    data: dict[str, Any]
    places: dict[Key, str]

    @classmethod
    def read(cls, path: Path) -> "Source":
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: the configuration can't be read: {error}.") from error
        data, lines = _parse(text, str(path))
        if not isinstance(data, dict):
            raise ConfigError(f"{path}: a configuration is a mapping of keys (run_dir, model, ...), not {data!r}.")
        return cls(data, {(): str(path)} | {key: f"{path}, line {line}" for key, line in lines.items()})

    def at(self, key: Sequence[Any]) -> str:
        """The file and line, or the override, of `key` or else of the nearest key around it."""
        key = tuple(map(str, key))
        while key not in self.places:
            key = key[:-1]
        return self.places[key]

    def around(self, key: Sequence[Any]) -> str:
        """The place of the section `key`, and of the overrides inside it."""
        inside = (at for k, at in self.places.items() if k[: len(key)] == key and at.startswith("override"))
        return ", ".join(dict.fromkeys([self.at(key), *inside]))

    def override(self, text: str) -> None:
        place = f"override {text!r}"
        name, equals, value = text.partition("=")
        key = tuple(name.strip().split("."))
        if not equals or not all(key):
            raise ConfigError(f"{place}: an override is written key=value, as in trainer.max_steps=10.")
        section = self.data
        for depth, part in enumerate(key[:-1], start=1):
            if section.get(part) is None:
                section[part] = {}
            section = section[part]
            if not isinstance(section, dict):
                raise ConfigError(f"{place}: {'.'.join(key[:depth])} is {section!r}, which has no keys to set.")
        section[key[-1]] = _parse(value, place)[0]
        self.places = {k: v for k, v in self.places.items() if k[: len(key)] != key} | {key: place}


def _parse(text: str, name: str) -> tuple[Any, dict[Key, int]]:
    """The value of a YAML document and the line of each of its keys."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _Constructor
    try:
        node = yaml.compose(text)
        value = None if node is None else yaml.constructor.construct_document(node)
        json.dumps(value)  # raises for what pydantic could not check: sets, bytes, a list that contains itself
        return value, dict(_lines(node, ()))
    except MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{name}{line}: not valid YAML: {error.problem}.") from error
    except (YAMLError, TypeError, ValueError) as error:
        raise ConfigError(f"{name}: not valid YAML: {error}.") from error


def _lines(node: Node | None, key: Key) -> Iterator[tuple[Key, int]]:
    """Each key and each index of a list below `node`, with its line."""
    items = []
    if isinstance(node, SequenceNode):
        items = [(str(index), item, item) for index, item in enumerate(node.value)]
    elif isinstance(node, MappingNode):
        items = [(str(name.value), name, value) for name, value in node.value]
    for name, first, value in items:
        yield (*key, name), first.start_mark.line + 1
        yield from _lines(value, (*key, name))


def dump(data: dict[str, Any]) -> str:
    """YAML without aliases, with quotes where YAML 1.1 would take a string such as "no" for something else."""
    yaml = YAML(typ="safe", pure=True)
    yaml.version, yaml.width = "1.1", 120
    yaml.default_flow_style = False  # type: ignore[assignment]
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.representer.ignore_aliases = lambda _: True
    yaml.dump(data, text := io.StringIO())
    return text.getvalue().removeprefix("%YAML 1.1\n---\n")


@contextlib.contextmanager
def located(place: str) -> Iterator[None]:
    """Puts `place` before the message of an error."""
    try:
        yield
    except LowmemError as error:
        raise type(error)(f"{place}: {error}") from error
