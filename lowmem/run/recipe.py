"""The arguments of a training command, from its command line and a YAML file: TRL's own, and the sections `fused` and
`layers`.

A YAML file has the names of the arguments as keys, and a value means what the same text would mean on the command line.
The libraries that own an argument check it; what they refuse is reported with the file and line, or the argument.
"""

import argparse
import contextlib
import importlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, NoReturn, get_args, get_origin, get_type_hints

import torch
import trl
import yaml
from transformers import TrainingArguments
from trl import TrlParser

from lowmem.errors import ConfigError, LowmemError, did_you_mean, require_packages
from lowmem.hf.arguments import check_number
from lowmem.layers.config import LayersConfig
from lowmem.options import DynamicScale, FusedConfig
from lowmem.rules import resolve
from lowmem.run import secrets
from lowmem.run.environment import CONFIG, ENVIRONMENT
from lowmem.run.memory import is_out_of_memory
from lowmem.run.terminal import warn

# The sections of a configuration that are lowmem's, and their classes.
SECTIONS: dict[str, Any] = {"fused": FusedConfig, "layers": LayersConfig}

# The value of `resume_from_checkpoint` that stands for the newest intact checkpoint in `output_dir`.
LAST = "last"

# By default trainers show a loss that is NaN as 0, and let the progress bar follow the log level of transformers.
_DEFAULTS = {"logging_nan_inf_filter": False, "disable_tqdm": False}

# The optimizer whose hyperparameters `--help` lists where no rule is set.
_DEFAULT_RULE = "adamw"


# Arguments of earlier versions that no similar name replaces, and what is written today; nothing where it is None.
_FORMER = {
    "group_by_length": "train_sampling_strategy: group_by_length",
    "include_tokens_per_second": None,
    "max_prompt_length": "max_length",
    "no_cuda": "use_cpu",
    "overwrite_output_dir": None,
    "save_safetensors": None,
    "torch_dtype": "dtype",
    "use_flash_attention_2": "attn_implementation: flash_attention_2",
    "use_flash_attn": "attn_implementation: flash_attention_2",
    "warmup_ratio": "warmup_steps: SHARE, with a share of all steps below 1",
}

# Characters of a YAML text once every alias in it is written out.
_LONGEST = 100_000


class _Loader(yaml.SafeLoader):
    """Reads `1e-3` as a number, as YAML 1.2 does. Refuses a mapping that has a key twice, a value that is not of its
    tag, and a text that aliases make enormous.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        node: Any = super().compose_node(parent, index)
        parts = () if isinstance(node, yaml.ScalarNode) else node.value
        parts = [part for item in parts for part in (item if isinstance(item, tuple) else (item,))]
        node.length = sum(getattr(part, "length", 0) for part in parts) if parts else 1 + len(node.value)
        if node.length > _LONGEST:
            problem = f"it has more than {_LONGEST:,} characters after its aliases are expanded"
            raise yaml.composer.ComposerError(None, None, problem, node.start_mark)
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            problem = f"{str(node.value)[:100]!r} is not of the type {node.tag.replace('tag:yaml.org,2002:', '!!')}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for number, (key, _) in enumerate(node.value):
            if key.value in keys[:number]:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is repeated", key.start_mark
                )
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+"), list("-+.0123456789")
)


def yaml_value(text: str) -> Any:
    """The value of one YAML text, such as `0.1`, `[0.9, 0.95]` or `adamw`."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text[:100]!r} is not YAML{_problem(error)}") from error


class Entry(NamedTuple):
    """One key of a YAML file: its value, the texts of its scalars (None where it is nested), and its file and line."""

    value: Any
    texts: list[str] | None
    place: str


@dataclass(frozen=True)
class Recipe:
    """The parsed arguments of a training command."""

    command: str
    script: Any
    """TRL's `ScriptArguments`, or the subclass of the command."""
    training: Any
    """The trainer's own arguments, such as `trl.SFTConfig`."""
    model: Any
    """TRL's `ModelConfig`."""
    mixture: Any
    """TRL's `DatasetMixtureConfig`."""
    fused: FusedConfig | None
    layers: LayersConfig
    options: argparse.Namespace
    """The options of `plan` and `inspect`."""
    values: dict[str, Any]
    """Every argument that was set, by its name in a YAML file without sections."""
    file: Path | None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which weights are loaded."""
        name = (self.training.model_init_kwargs or {}).get("dtype", self.model.dtype)
        dtype = getattr(torch, str(name).removeprefix("torch."), None)
        return dtype if isinstance(dtype, torch.dtype) else torch.get_default_dtype()

    @property
    def trust_remote_code(self) -> bool:
        """An argument of trainers, and of models before TRL 1.16."""
        return any(getattr(part, "trust_remote_code", False) for part in (self.training, self.model))

    def to_yaml(self) -> str:
        """A YAML file that gives the same arguments, without `env`."""
        nested: dict[str, Any] = {}
        for name, value in self.values.items():
            section, _, option = name.rpartition(".")
            (nested.setdefault(section, {}) if section else nested)[option] = _plain(value)
        return yaml.safe_dump(nested, sort_keys=False, allow_unicode=True, width=120)


class _Set(argparse.Namespace):
    """Collects arguments that are set. argparse finds every name here, and so adds no defaults."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class Parser(TrlParser):
    """TRL's parser of one command, with the arguments of `fused` and `layers`, which raises errors of lowmem."""

    def __init__(self, command: str, rule: Any = None, **options: Any) -> None:
        try:
            module = importlib.import_module(f"trl.scripts.{command}")
        except (ImportError, RuntimeError) as error:  # TRL 0.24 asks for packages that it does not require
            raise ConfigError(
                f"{command}: TRL {trl.__version__} cannot be imported: {reason(error)}. Install what is missing, or "
                "run: pip install --upgrade trl"
            ) from error
        types = module.make_parser().dataclass_types
        super().__init__(types, allow_abbrev=False, **options)
        self.hints = {name: hint for kind in types for name, hint in get_type_hints(kind).items()}
        for section, kind in SECTIONS.items():
            group = self.add_argument_group(f"lowmem: {section}", (kind.__doc__ or "").partition("\n\n")[0])
            described = _described(kind)
            for option in fields(kind):
                if option.name != "hyper":
                    group.add_argument(
                        f"--{section}.{option.name}", type=yaml_value, metavar="VALUE", default=option.default,
                        help=described[option.name].replace("%", "%%"),
                    )  # fmt: skip
        self.rule = resolve(rule or _DEFAULT_RULE)
        group = self.add_argument_group(f"lowmem: hyperparameters of the rule {self.rule.name}")
        taken = {option.name for option in fields(FusedConfig)}
        for name, default in self.rule.defaults.items():
            if name not in taken:
                group.add_argument(f"--fused.{name}", type=yaml_value, metavar="VALUE", default=default, help=" ")
        group = self.add_argument_group("lowmem")
        group.add_argument("--config", metavar="FILE", type=Path, help="a YAML file with these arguments as keys")
        group.add_argument("--traceback", action="store_true", help="show the traceback of an error")

    def error(self, message: str) -> NoReturn:
        raise ConfigError(re.sub(r"^argument (--[\w.]+)(/--[\w.-]+)*", r"\1", message))

    def convert(self, name: str, entry: Entry) -> Any:
        """The value of a key, as its argument would have it on the command line."""
        action, place = self._option_string_actions[f"--{name}"], f"{entry.place}{name}"
        hint = self.hints.get(action.dest, Any)
        if entry.value is None and (hint is Any or _accepts(hint, NoneType)):
            return None
        if isinstance(entry.value, bool) and action.nargs == "?" and action.type is str:  # `fsdp: true` is `--fsdp`
            return action.const if entry.value else None
        if isinstance(entry.value, bool) and name == "fsdp":  # before transformers 5.16 it is text
            return "full_shard auto_wrap" if entry.value else None
        if entry.texts is None or (isinstance(entry.value, list) and action.nargs != "+"):
            if hint is not Any and not _accepts(hint, type(entry.value)):
                expected = "a list" if action.nargs == "+" else "a single value"
                raise ConfigError(f"{place}: expected {expected}, found {entry.value!r}")
            for item in entry.value if isinstance(entry.value, list) and is_dataclass(action.type) else ():
                _check_names(item, action.type, place)
            return entry.value
        texts = entry.texts
        if _accepts(hint, float):  # which reads "nan" and "inf", and YAML has .nan and .inf
            values = entry.value if isinstance(entry.value, list) else [entry.value]
            texts = [str(v) if isinstance(v, float) else text for v, text in zip(values, texts, strict=True)]
        try:
            return self._get_values(action, texts)
        except argparse.ArgumentError as error:
            raise ConfigError(f"{place}: {error.message}") from None

    def known(self) -> list[str]:
        """The names of all arguments, as they are written in a YAML file."""
        return [option[2:] for option, action in self._option_string_actions.items() if action.nargs != 0]


def parse(command: str, argv: Sequence[str], *, device: str | None = None, more: Any = None) -> Recipe:
    """Parses the command line of a training command.

    Args:
        command: one of TRL's, such as "sft".
        argv: what follows the command's name.
        device: "gpu" or "cpu" builds the arguments for that device, which this machine need not have.
        more: a function that adds the arguments of `plan` or `inspect` to the parser.

    Raises:
        ConfigError: an argument or a key that is unknown or has an invalid value.
    """
    file = early(argv).config
    entries = {} if file is None else read(file)
    with _located("fused", {"rule"}, entries):
        parser = Parser(command, early(argv, entries).rule, prog=f"lowmem {command}")
    if more is not None:
        more(parser)
    namespace, rest = parser.parse_known_args(list(argv), _Set())
    values: dict[str, Any] = {}
    _set_environment(entries)
    for name, entry in entries.items():
        action = parser._option_string_actions.get(f"--{name}")
        if action is None or action.nargs == 0 or name == "config":
            _unknown(name, parser, entry.place)
        values[action.dest] = parser.convert(name, entry)
    if rest:
        _unknown(rest[0].lstrip("-").partition("=")[0].replace("-", "_"), parser)
    values |= vars(namespace)
    entries = {name: entry for name, entry in entries.items() if name not in vars(namespace)}
    if (words := " ".join(str(entry.path) for entry in vars(namespace).get("datasets") or ())).startswith(("[", "{")):
        with refused("--datasets"):  # as in a YAML file: [{path: json, data_files: chats.jsonl}]
            values["datasets"] = parser.convert("datasets", Entry(yaml_value(words), None, "--"))
    if "output_dir" not in vars(namespace):
        _stay_in_place(values, file)
    own = {name for name in vars(namespace) if name not in parser.hints and "." not in name}
    options = _Set(**{name: values.pop(name) for name in own})
    _check_values(values, parser, entries)
    fused, layers = (_section(name, values, entries) for name in SECTIONS)
    kinds = parser.dataclass_types
    kwargs = [{f.name: values[f.name] for f in fields(kind) if f.name in values} for kind in kinds]
    training = next(number for number, kind in enumerate(kinds) if issubclass(kind, TrainingArguments))
    kwargs[training] |= _for_device(device, kwargs[training])
    if values.get("deepspeed"):
        require_packages("deepspeed", "deepspeed")
    objects = []
    for kind, arguments in zip(kinds, kwargs, strict=True):
        with refused(f"{file or 'the command line'}: {kind.__name__}"):
            objects.append(kind(**arguments))
    script, trainer, model, mixture = objects
    return Recipe(command, script, trainer, model, mixture, fused, layers, options, values, file)


def _stay_in_place(values: dict[str, Any], file: Path | None) -> None:
    """Sets `output_dir` to the folder of a run whose configuration is read, which may have been moved or copied."""
    if file is None or file.name != CONFIG or not (file.parent / ENVIRONMENT).exists():
        return
    if Path(values.get("output_dir", "")).resolve() != file.parent.resolve():
        warn(f"this run was started in {values.get('output_dir')}. It continues in the folder of its configuration")
    values["output_dir"] = str(file.parent)


@contextlib.contextmanager
def refused(place: str) -> Iterator[None]:
    """Converts what a library raises for arguments or data that it refuses into a `ConfigError`."""
    try:
        yield
    except Exception as error:  # libraries do not say which there can be
        if isinstance(error, LowmemError) or is_out_of_memory(error):
            raise
        raise ConfigError(f"{place}: {reason(error)}") from error


def reason(error: BaseException, longest: int = 600) -> str:
    """The message of another package's error in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = f"{text} is missing" if isinstance(error, KeyError) else text
    return text if len(text) <= longest else f"{text[: longest - 4]} ..."


def read(path: Path) -> dict[str, Entry]:
    """The keys of a YAML file, those of sections as `section.key`.

    Raises:
        ConfigError: the file cannot be read or is not a mapping, or a key is repeated.
    """
    try:
        text = path.read_text(encoding="utf-8")
        loader = _Loader(text)
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{path}: expected keys and values, such as 'learning_rate: 1e-3'")
        loader.construct_mapping(node, deep=True)
        return dict(_entries(node, loader, path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}{_problem(error)}") from error


def _entries(node: Any, loader: _Loader, path: Path, section: str = "") -> Iterator[tuple[str, Entry]]:
    for key, value in node.value:
        name, place = f"{section}{key.value}", f"{path}, line {key.start_mark.line + 1}: "
        if not section and key.value in SECTIONS:
            if not isinstance(value, yaml.MappingNode):
                raise ConfigError(f"{place}{name} is a section; write its options below it, indented")
            yield from _entries(value, loader, path, f"{name}.")
            continue
        nodes = value.value if isinstance(value, yaml.SequenceNode) else [value]
        scalars = all(isinstance(item, yaml.ScalarNode) for item in nodes)
        texts = [item.value for item in nodes] if scalars else None
        yield name, Entry(loader.construct_object(value, deep=True), texts, place)


def _problem(error: Any) -> str:
    mark = getattr(error, "problem_mark", None)
    place = "" if mark is None else f", line {mark.line + 1}"
    return f"{place}: {getattr(error, 'problem', None) or 'it is nested too deeply or has invalid characters'}"


def early(argv: Sequence[str], entries: Mapping[str, Entry] | None = None) -> argparse.Namespace:
    """The arguments on which others depend: `config`, `device` and, if the rule can be resolved, `rule`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    entry = (entries or {}).get("fused.rule")
    parser.add_argument("--fused.rule", dest="rule", default=entry.value if entry else None)
    try:
        return parser.parse_known_args(list(argv))[0]
    except argparse.ArgumentError as error:
        raise ConfigError(str(error).replace("argument --", "--", 1)) from None


def _for_device(device: str | None, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults that differ from those of trainers, and what follows from the device: the default of `bf16` is True,
    which transformers refuses where there is no GPU.
    """
    changed: dict[str, Any] = {name: value for name, value in _DEFAULTS.items() if name not in arguments}
    autocast = arguments.get("bf16"), arguments.get("fp16")
    if device is None:
        if torch.accelerator.is_available():
            if arguments.get("dataloader_pin_memory", True) and "accelerator_config" not in arguments:
                changed["accelerator_config"] = {"non_blocking": True}  # or the host waits for every tensor of a batch
        else:
            changed["dataloader_pin_memory"] = False
            if not arguments.get("use_cpu") and autocast == (None, None):
                changed["bf16"] = False
            if int(os.environ.get("WORLD_SIZE", 1)) > 1:
                changed["use_cpu"] = True  # without it, transformers does not join processes on a CPU
        return changed
    bf16 = device == "cpu" and bool(autocast[0])
    full = dict.fromkeys(("fp16", "bf16_full_eval", "fp16_full_eval"), False)
    return {**changed, "use_cpu": True, "bf16": bf16, **full}


def _section(name: str, values: dict[str, Any], entries: Mapping[str, Entry]) -> Any:
    """The options of a section, or None for `fused` where nothing is set."""
    options = {key.partition(".")[2]: values[key] for key in values if key.startswith(f"{name}.")}
    if not options and name == "fused":
        return None
    with _located(name, options.keys(), entries):
        if isinstance(options.get("groups"), list):
            options["groups"] = tuple(options["groups"])
        if isinstance(options.get("loss_scale"), dict):
            _check_names(options["loss_scale"], DynamicScale, "loss_scale")
            options["loss_scale"] = DynamicScale(**options["loss_scale"])
        return SECTIONS[name](**options)


@contextlib.contextmanager
def _located(section: str, options: Any, entries: Mapping[str, Entry]) -> Iterator[None]:
    """Puts the place of the option that an error is about before its message."""
    try:
        yield
    except LowmemError as error:
        words = re.findall(r"\w+", str(error))
        option = min((o for o in options if o in words), key=words.index, default=None)
        entry = entries.get(f"{section}.{option}")
        raise type(error)(f"{entry.place if entry else ''}{section}: {error}") from error


def _check_names(item: Any, kind: Any, place: str) -> None:
    if not isinstance(item, dict):
        raise ConfigError(
            f"{place}: expected a mapping such as {{path: json, data_files: chats.jsonl}}, found {item!r}"
        )
    names = [option.name for option in fields(kind)]
    for key in item.keys() - set(names):
        raise ConfigError(
            f"{place}: unknown key {key!r}.{did_you_mean(str(key), names)} Choose from {', '.join(names)}"
        )
    if missing := [f.name for f in fields(kind) if f.default is MISSING and f.name not in item]:
        raise ConfigError(f"{place}: {missing[0]} is missing, such as 'path: json'")


def _unknown(name: str, parser: Parser, place: str = "") -> NoReturn:
    """Raises `ConfigError` for an argument or key that the parser does not know, or that `trl` takes for a launcher."""
    name = name[:100]
    section, _, option = name.rpartition(".")
    known = [other for other in parser.known() if other != name]
    hint = did_you_mean(name, known)
    if name in _FORMER:
        hint = f" It belongs to an earlier version: {f'write {now} instead' if (now := _FORMER[name]) else 'omit it'}."
    if section in SECTIONS:
        hint = did_you_mean(option, (other.partition(".")[2] for other in known if other.startswith(f"{section}.")))
        if not hint and section == "fused":
            hint = f" The rule {parser.rule.name} takes {', '.join(parser.rule.defaults)}."
    elif not hint and (inside := next((other.split(".") for other in known if other.endswith(f".{name}")), None)):
        hint = f" Did you mean {name!r} of the section {inside[0]!r}?"
    raise ConfigError(
        f"{place}unknown {'key' if place else 'argument'} {name!r}.{hint} `{parser.prog} --help` lists all. Write the "
        f"options of the launcher before the command: accelerate launch OPTIONS -m {parser.prog} ..."
    )


def _set_environment(entries: dict[str, Entry]) -> None:
    """Sets the environment variables of the section `env`, as TRL does. No file has their values."""
    if (entry := entries.pop("env", None)) is None:
        return
    if not isinstance(entry.value, dict):
        raise ConfigError(f"{entry.place}env: expected names and values of environment variables")
    variables = {str(name): str(value) for name, value in entry.value.items()}
    try:
        os.environ.update(variables)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{entry.place}env: a variable cannot be set: {error}") from error
    secrets.hide(variables.values())


def _check_values(values: Mapping[str, Any], parser: Parser, entries: Mapping[str, Entry]) -> None:
    """Raises `ConfigError` for secrets, and for values that make no sense and that libraries would take."""
    places = {name: entries[name].place if name in entries else "--" for name in values}
    for key in secrets.find(_plain(dict(values))):
        raise ConfigError(
            f"{places[key[0]]}{key[0]} contains a password or token, and arguments are written into output_dir. Omit "
            "it, and set the environment variable of the service, such as HF_TOKEN"
        )
    if values.get("datasets") and values.get("dataset_name"):
        raise ConfigError(
            f"{places['dataset_name']}dataset_name has no effect together with datasets. Omit one of them"
        )
    for name, value in values.items():
        mapping = isinstance(value, str) and _accepts(parser.hints.get(name), dict)
        if mapping and not value.startswith("{") and not value.endswith((".json", ".yaml", ".yml")):
            expected = f"expected a mapping, such as '{{\"a\": 1}}', and found {value[:100]!r}"
            raise ConfigError(f"{places[name]}{name}: {expected}")
        try:
            check_number(name, value)
        except ConfigError as error:
            raise ConfigError(f"{places[name]}{error}") from None


def _described(kind: Any) -> dict[str, str]:
    """The description of each attribute in the docstring of a dataclass."""
    text = (kind.__doc__ or "").partition("Attributes:")[2].partition("Raises:")[0]
    parts = re.split(r"\n {8}(\w+): ", text)
    return {name: " ".join(words.split()) for name, words in zip(parts[1::2], parts[2::2], strict=True)}


def _accepts(hint: Any, kind: Any) -> bool:
    members = get_args(hint) if get_origin(hint) not in (list, dict) else ()
    return any(_accepts(member, kind) for member in members) if members else (get_origin(hint) or hint) is kind


def _plain(value: Any) -> Any:
    """The value as YAML has it."""
    if is_dataclass(value) and not isinstance(value, type):
        return {name: item for name, item in _plain(asdict(value)).items() if item is not None}
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value
