"""YAML 1.2 with the line of every key, `key=value` overrides, and YAML that any reader reads the same way."""

import contextlib
import io
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from lowmem.errors import ConfigError, LowmemError
from lowmem.run import secrets

Key = tuple[str, ...]

# A configuration is far below all of these. What is above them would take minutes, or more than the stack of Python.
_MAX_BYTES = 1 << 18
_MAX_NODES = 20_000  # with what aliases repeat
_MAX_DEPTH = 40
_MAX_INTEGER = 2**63

_TAG = "tag:yaml.org,2002:"
_TYPES = {_TAG + name for name in ("map", "seq", "str", "int", "float", "bool", "null", "merge", "timestamp")}
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


class _Constructor(SafeConstructor):
    """Reads a date as the string that it is written as."""


_Constructor.add_constructor(_TAG + "timestamp", SafeConstructor.construct_yaml_str)


@dataclass
class Source:
    """The values of a file after overrides, and where each key comes from."""

    data: dict[str, Any]
    places: dict[Key, str]

    @classmethod
    def read(cls, path: Path) -> "Source":
        data, lines = _parse(read_text(path, "the configuration"), str(path))
        if not isinstance(data, dict):
            found = shortened(repr(data))
            raise ConfigError(f"{path}: a configuration is a mapping of keys (run_dir, model, ...), not {found}.")
        return cls(data, {key: f"{path}, line {line}" for key, line in lines.items()} | {(): str(path)})

    def at(self, key: Sequence[Any]) -> str:
        """The file and line, or the override, of `key` or else of the nearest key around it."""
        key = tuple(map(str, key))
        while key not in self.places:
            key = key[:-1]
        return self.places[key]

    def around(self, key: Sequence[Any]) -> str:
        """The place of the section `key`, and of the overrides inside it."""
        inside = (at for k, at in self.places.items() if k[: len(key)] == key and at.startswith("override"))
        return ", ".join(list(dict.fromkeys([self.at(key), *inside]))[:4])

    def override(self, text: str) -> None:
        place = f"override {shortened(secrets.redacted(text))!r}"
        name, equals, value = text.partition("=")
        key = tuple(name.strip().split("."))
        if not equals or not all(key):
            raise ConfigError(f"{place}: an override is written key=value, as in trainer.max_steps=10.")
        if len(key) > _MAX_DEPTH:
            raise ConfigError(f"{place}: no key is so deep.")
        _check_text(name, place)
        section = self.data
        for depth, part in enumerate(key[:-1], start=1):
            if section.get(part) is None:
                section[part] = {}
            section = section[part]
            if not isinstance(section, dict):
                found = shortened(secrets.redacted(repr(section)))
                raise ConfigError(f"{place}: {'.'.join(key[:depth])} is {found}, which has no keys to set.")
        section[key[-1]] = _parse(value, place)[0]
        self.places = {k: v for k, v in self.places.items() if k[: len(key)] != key} | {key: place}

    def include(self, key: Key) -> None:
        """Puts the content of a JSON file in place of its path at `key`."""
        section: Any = self.data
        for part in key[:-1]:
            section = section.get(part) if isinstance(section, dict) else None
        if not isinstance(section, dict) or not isinstance(path := section.get(key[-1]), str):
            return
        with located(f"{self.at(key)}: {'.'.join(key)} (JSON, read as YAML)"):
            # YAML has no tabs between values
            value, lines = _parse(read_text(Path(path), "the file").replace("\t", " "), shortened(path))
        section[key[-1]] = value
        self.places |= {(*key, *inner): f"{shortened(path)}, line {line}" for inner, line in lines.items()}


def read_text(path: Path, what: str) -> str:
    """The text of a small file.

    Raises:
        ConfigError: it can't be read, is not UTF-8, or is far larger than such a file is.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) <= _MAX_BYTES:
            return data.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{shortened(str(path))}: {what} can't be read: {shortened(str(error))}.") from error
    raise ConfigError(f"{path}: {what} can't be read: it has more than {_MAX_BYTES >> 10} KiB. Is it the right file?")


def shortened(text: str, longest: int = 100) -> str:
    """The text, or the beginning and the end of it."""
    return text if len(text) <= longest else f"{text[: longest * 3 // 4]} ... {text[-longest // 8 :]}"


# Errors whose messages are sentences. Of others, such as KeyError, the name says what is wrong.
_SENTENCES = (ValueError, RuntimeError, ImportError, AssertionError)


def reason(error: Exception) -> str:
    """An error of another package in one line."""
    text = " ".join(str(error).split())
    name = "" if text and isinstance(error, _SENTENCES) else f"{type(error).__name__}: "
    return shortened(f"{name}{text or 'no reason is given'}", 600)


def _parse(text: str, name: str) -> tuple[Any, dict[Key, int]]:
    """The value of a YAML document and the line of each of its keys."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _Constructor
    try:
        # ruamel.yaml 0.19 (scanner.py) takes seconds for thousands of brackets before it fails
        if any(depth > 500 for depth in accumulate((char in "[{") - (char in "]}") for char in text)):
            raise RecursionError
        if (root := yaml.compose(text)) is None:
            return None, {}
        lines: dict[Key, int] = {}
        for count, (key, line, node) in enumerate(_walk(root, (), 1, name)):
            if count == _MAX_NODES:
                raise ConfigError(f"{name}: a configuration has fewer than {_MAX_NODES:,} values, aliases included.")
            _check_value(node, yaml.constructor, f"{name}, line {node.start_mark.line + 1}")
            lines[key] = line
        return yaml.constructor.construct_document(root), lines
    except MarkedYAMLError as error:
        place = f"{name}, line {error.problem_mark.line + 1}" if error.problem_mark else name
        raise ConfigError(f"{place}: not valid YAML: {_problem(error.problem)}.") from error
    except YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {_problem(error)}.") from error
    except RecursionError:
        raise ConfigError(f"{name}: not valid YAML: nested more than {_MAX_DEPTH} deep.") from None


def _problem(error: Any) -> str:
    return shortened(secrets.redacted(" ".join(str(error).split())), 300)


def _walk(node: Node, key: Key, line: int, name: str) -> Iterator[tuple[Key, int, Node]]:
    """Each value from `node` downwards with its key and the line of that, as often as aliases repeat it."""
    if len(key) > _MAX_DEPTH:
        raise ConfigError(f"{name}, line {line}: not valid YAML: nested more than {_MAX_DEPTH} deep, or in itself.")
    yield key, line, node
    items = []
    if isinstance(node, SequenceNode):
        items = [(str(index), item, item) for index, item in enumerate(node.value)]
    elif isinstance(node, MappingNode):
        _check_keys(node, name)
        items = [(str(key.value), key, value) for key, value in node.value]
    for part, first, value in items:
        yield from _walk(value, (*key, part), first.start_mark.line + 1, name)


def _check_keys(node: MappingNode, name: str) -> None:
    """Refuses keys that are no strings or are written twice."""
    keys = dict[str, int]()
    for key, _ in node.value:
        line = key.start_mark.line + 1
        tag = str(key.tag).removeprefix(_TAG)
        if tag not in ("str", "merge", "timestamp"):
            found = shortened(str(key.value)) if isinstance(key, ScalarNode) else f"a {tag}"
            raise ConfigError(f"{name}, line {line}: not valid YAML: a key is a string; found {found}.")
        if key.value in keys and tag != "merge":
            raise ConfigError(
                f"{name}, line {line}: not valid YAML: the key {shortened(key.value)!r} is already on line "
                f"{keys[key.value]}. Delete one of them."
            )
        _check_text(key.value, f"{name}, line {line}")
        keys[key.value] = line


def _check_value(node: Node, constructor: Any, place: str) -> None:
    """Refuses types of which a configuration has none, and values that are not of the type they are tagged with."""
    kind = str(node.tag).removeprefix(_TAG)
    if str(node.tag) not in _TYPES:
        tag = shortened(str(node.tag).replace(_TAG, "!!"))
        raise ConfigError(f"{place}: not valid YAML: {tag} is a type that a configuration does not have.")
    if isinstance(node, ScalarNode):
        _check_text(node.value, place)
    if kind not in ("int", "float", "bool"):
        return
    try:
        value = constructor.construct_object(node)
    except (ValueError, LookupError) as error:  # what ruamel.yaml 0.19 makes of `!!int x` and `!!bool x`
        found = shortened(node.value)
        raise ConfigError(f"{place}: not valid YAML: {found!r} is not of type {kind}.") from error
    if isinstance(value, int) and abs(value) >= _MAX_INTEGER:
        raise ConfigError(f"{place}: {shortened(node.value)} does not fit into an integer of 64 bits.")
    if value in (math.inf, -math.inf) and "inf" not in node.value.lower():
        raise ConfigError(f"{place}: {shortened(node.value)} does not fit into a number of 64 bits.")


def _check_text(text: str, place: str) -> None:
    if found := _CONTROL.search(text):
        raise ConfigError(f"{place}: contains the character U+{ord(found[0]):04X}, which is not part of any text.")


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
        raise type(error)(f"{place}: {shortened(str(error), 1000)}") from error
