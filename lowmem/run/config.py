"""The dataclasses behind a YAML file: read, overridden, checked strictly, written back."""

import contextlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from lowmem.errors import ConfigError, ConfigTypeError, LowmemError, did_you_mean
from lowmem.files import write_file
from lowmem.options import FusedConfig
from lowmem.rules import resolve
from lowmem.run.data import DataConfig

Key = tuple[str, ...]

# Fields of SFTConfig that another section owns, or that a run of this package can't honour: what to use instead.
ELSEWHERE = {
    "learning_rate": "set optimizer.lr",
    "weight_decay": "set optimizer.weight_decay, or what the rule calls it",
    "max_grad_norm": "set optimizer.clip_norm",
    "optim": "set optimizer.rule",
    "optim_args": "set optimizer.rule and, beside it, its hyperparameters",
    "optim_target_modules": "every parameter is trained, by optimizer.rule",
    "adam_beta1": "set optimizer.betas, where the rule has it",
    "adam_beta2": "set optimizer.betas, where the rule has it",
    "adam_epsilon": "set optimizer.eps, where the rule has it",
    "output_dir": "set run_dir",
    "seed": "set seed, at the top of the file",
    "data_seed": "set seed, at the top of the file",
    "max_length": "set data.max_length",
    "packing": "set data.packing",
    "packing_strategy": "set data.packing; the kind of data decides how samples are packed",
    "completion_only_loss": "set data.answer_only",
    "assistant_only_loss": "set data.answer_only",
    "dataset_text_field": "set data.columns, as in {text: body}",
    "dataset_num_proc": "set data.workers",
    "model_init_kwargs": "set model.dtype and model.attention",
    "chat_template_path": "set model.chat_template",
    "gradient_checkpointing": "set trainer.activation_checkpointing, which is its name now",
    "gradient_checkpointing_kwargs": "set trainer.activation_checkpointing_kwargs, which is its name now",
    "resume_from_checkpoint": "start the command with --resume",
    "local_rank": "the launcher (torchrun, deepspeed, accelerate) sets it",
    "parallelism_config": "set deepspeed, or fsdp and fsdp_config",
    "hub_token": "set the environment variable HF_TOKEN: this file is copied into the run folder",
}

# Fields of SFTConfig that are narrower here than there.
NARROWED = {
    "fsdp": bool,
    "deepspeed": dict | str | None,
    "loss_type": Literal["nll", "dft"],
    "activation_checkpointing": bool,
    "activation_checkpointing_kwargs": dict | None,
}

# What `activation_checkpointing_kwargs` may hold: keys of transformers, of TRL (selective) and of torch's `checkpoint`.
CHECKPOINTING = {
    "every_n_layers": int,
    "offload": bool,
    "selective": bool,
    "use_reentrant": bool,
    "preserve_rng_state": bool,
    "determinism_check": Literal["default", "none"],
}


@dataclass
class TokenizerTraining:
    """A tokenizer that is trained on the data before the run."""

    vocab_size: int

    def __post_init__(self) -> None:
        if self.vocab_size < 1:
            raise ConfigError(f"vocab_size must be positive, found {self.vocab_size}.")


@dataclass
class ModelConfig:
    """Which weights and which tokenizer a run starts from."""

    path: str | None = None
    config: dict[str, Any] | None = None
    tokenizer: str | None = None
    train_tokenizer: TokenizerTraining | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    attention: str = "sdpa"
    chat_template: str | None = None

    def __post_init__(self) -> None:
        if (self.path is None) == (self.config is None):
            raise ConfigError("give either model.path (weights to start from) or model.config (random weights).")
        if self.tokenizer is not None and self.train_tokenizer is not None:
            raise ConfigError("give model.tokenizer or model.train_tokenizer, not both.")
        if self.config is not None and self.tokenizer is None and self.train_tokenizer is None:
            raise ConfigError(
                "model.config brings no tokenizer: set model.tokenizer to a Hub name or a folder, "
                "or model.train_tokenizer to {vocab_size: ...}."
            )


@dataclass
class OptimizerConfig:
    """The learning rate and everything else that the fused optimizer takes."""

    lr: float
    fused: FusedConfig = field(default_factory=FusedConfig)

    def __post_init__(self) -> None:
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise ConfigError(f"optimizer.lr must be a positive number, found {self.lr}.")


@dataclass
class RunConfig:
    """One run: what a YAML file says after its overrides."""

    run_dir: str
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    trainer: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.run_dir:
            raise ConfigError("run_dir must name a folder, found an empty string.")
        if self.seed < 0:
            raise ConfigError(f"seed must not be negative, found {self.seed}.")


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file, apply `key=value` overrides and check every key and value.

    An override replaces what was at its key (`model.config.hidden_size=64`), at any depth; its value is YAML.
    Numbers and booleans are those of YAML 1.2: `1e-3` is a number, and `no` is a word.
    """
    source = _read(Path(path))
    for override in overrides:
        source.override(override)
    sections = get_type_hints(RunConfig) | {"optimizer": dict, "trainer": dict}
    values = _check_keys(source.data, sections, ("run_dir", "model", "data", "optimizer"), (), source)
    if values["model"].config is not None:
        _check_model(values["model"].config, source)
    values["optimizer"] = _optimizer(values["optimizer"], values.get("seed", 0), source)
    values["trainer"] = _trainer(values.get("trainer", {}), source)
    with _placed(source.around(())):
        return RunConfig(**values)


def save(config: RunConfig, path: str | Path) -> None:
    """Write the merged configuration as YAML that `load` reads back as an equal `RunConfig`."""
    fused = asdict(config.optimizer.fused)
    hyper, _ = fused.pop("hyper"), fused.pop("seed")  # `hyper` lies flat beside the others, `seed` at the top
    data = asdict(config) | {"optimizer": {"lr": config.optimizer.lr, **fused, **hyper}}
    order = ("run_dir", "seed", "model", "data", "optimizer", "trainer")
    text = yaml.dump({key: data[key] for key in order}, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    write_file(Path(path), text.encode())


# --- YAML ---------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        """Write a value out wherever it stands, also where one object stands twice."""
        return True


# PyYAML follows YAML 1.1, where `1e-3` is a string, `no` is false, `1:30` is 90 and `2024-01-01` a date.
_SCALARS = (
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(0|[1-9][0-9_]*)", "-+0123456789"),
    ("float", r"[-+]?((\d+\.\d*|\.\d+)([eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.inf)|\.nan", "-+.0123456789"),
    ("merge", r"<<", "<"),
)
# The dumper keeps the old meanings beside these, so that it quotes a word that either takes for something else.
for _name, _pattern, _first in _SCALARS:
    for _class in (_Loader, _Dumper):
        _starts = [*_first, ""] if _name == "null" else list(_first)
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"^(?:{_pattern})$"), _starts)


@dataclass
class _Source:
    """What was read, and where each key came from."""

    data: dict[str, Any]
    places: dict[Key, str]

    def at(self, key: Key) -> str:
        """The file and line, or the override, that `key` or the nearest key around it came from."""
        while key not in self.places:
            key = key[:-1]
        return self.places[key]

    def around(self, key: Key) -> str:
        """Where the section `key` stands, and the overrides inside it."""
        inside = [place for k, place in self.places.items() if k[: len(key)] == key and place.startswith("override")]
        return ", ".join(dict.fromkeys([self.at(key), *inside]))

    def override(self, text: str) -> None:
        """Set one `key=value`."""
        place = f"override {text!r}"
        name, equals, value = text.partition("=")
        key = tuple(name.strip().split("."))
        if not equals or not all(key):
            raise ConfigError(f"{place}: an override is written key=value, as in trainer.max_steps=10.")
        level = self.data
        for depth, part in enumerate(key[:-1], start=1):
            if level.get(part) is None:
                level[part] = {}
            level = level[part]
            if not isinstance(level, dict):
                raise ConfigError(f"{place}: {_dotted(key[:depth])} is {_found(level)}, it has no keys to set.")
        level[key[-1]] = _parse(value, place)[0]
        self.places = {k: v for k, v in self.places.items() if k[: len(key)] != key} | {key: place}


def _read(path: Path) -> _Source:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: the configuration can't be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: the configuration can't be read: it is not UTF-8 text.") from error
    data, lines = _parse(text, str(path))
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a configuration is a mapping of keys (run_dir, model, ...), found {_found(data)}.")
    return _Source(data, {(): str(path)} | {key: f"{path}, line {line}" for key, line in lines.items()})


def _parse(text: str, name: str) -> tuple[Any, dict[Key, int]]:
    """The value of a YAML document and the line of each of its keys."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        lines = dict(_lines(node, (), name))
        return (None if node is None else loader.construct_document(node)), lines
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{name}{line}: not valid YAML: {error.problem}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {error}.") from error


def _lines(node: yaml.Node | None, key: Key, name: str) -> Iterator[tuple[Key, int]]:
    """Each key below `node` with its line; a key that is written twice raises."""
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _lines(item, (*key, str(index)), name)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[Key, int] = {}
    for key_node, value_node in node.value:
        inner, line = (*key, str(key_node.value)), key_node.start_mark.line + 1
        if inner in seen:
            raise ConfigError(
                f"{name}, line {line}: key '{_dotted(inner)}' is written twice (first in line {seen[inner]}); keep one."
            )
        seen[inner] = line
        yield inner, line
        yield from _lines(value_node, inner, name)


# --- Sections -----------------------------------------------------------------------------------------------------


def _optimizer(raw: dict[str, Any], seed: int, source: _Source) -> OptimizerConfig:
    """`lr`, the fields of `FusedConfig` and the hyperparameters of the rule, which lie side by side."""
    if "seed" in raw:
        place = source.at(("optimizer", "seed"))
        raise ConfigError(f"{place}: 'optimizer.seed' is not set here: set seed, at the top of the file.")
    engine = {name: hint for name, hint in get_type_hints(FusedConfig).items() if name not in ("hyper", "seed")}
    name = _convert(raw.get("rule", FusedConfig.rule), str, ("optimizer", "rule"), source)
    with _placed(source.at(("optimizer", "rule"))):
        defaults = resolve(name).defaults
    hyper = {name: _hint(default) for name, default in defaults.items() if name not in engine}
    values = _check_keys(raw, {**hyper, **engine, "lr": float}, ("lr",), ("optimizer",), source)
    lr = values.pop("lr")
    chosen = {key: values.pop(key) for key in hyper if key in values}
    with _placed(source.around(("optimizer",))):
        return OptimizerConfig(lr, FusedConfig(**values, seed=seed, hyper=chosen))


def _hint(default: Any) -> Any:
    """The type that a hyperparameter with this default takes; its range, and whether null will do, is for the rule."""
    if isinstance(default, tuple):
        return tuple[tuple(map(_hint, default))] | None  # type: ignore[misc]
    if isinstance(default, bool):
        return bool | dict | list | None  # or a map by parameter name
    if isinstance(default, int | float):
        return float | None
    return str | None if isinstance(default, str) else Any


def _trainer(raw: dict[str, Any], source: _Source) -> dict[str, Any]:
    """Fields of `trl.SFTConfig`, less those that have their place elsewhere."""
    from trl import SFTConfig

    for name in raw:
        if name in ELSEWHERE:
            place = source.at(("trainer", name))
            raise ConfigError(f"{place}: 'trainer.{name}' is not set here: {ELSEWHERE[name]}.")
    hints = {name: hint for name, hint in get_type_hints(SFTConfig).items() if name not in ELSEWHERE}
    values = _check_keys(raw, hints | NARROWED, (), ("trainer",), source)
    kwargs = values.get("activation_checkpointing_kwargs") or {}
    _check_keys(kwargs, CHECKPOINTING, (), ("trainer", "activation_checkpointing_kwargs"), source)
    for name in ("deepspeed", "fsdp_config"):
        if isinstance(values.get(name), str):  # the run folder is to say what was in it
            values[name] = _read_json(Path(values[name]), source.at(("trainer", name)))
    return values


def _read_json(path: Path, place: str) -> dict[str, Any]:
    """An engine's own configuration."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{place}: {path} can't be read: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"{place}: {path} is not JSON: {error}.") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{place}: {path} is no mapping of keys.")
    return found


def _check_model(raw: dict[str, Any], source: _Source) -> None:
    """transformers takes any key into a model's configuration without a word; here a misspelt one raises."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    key = ("model", "config")
    kind = raw.get("model_type")
    if kind not in CONFIG_MAPPING:
        hint = did_you_mean(str(kind), CONFIG_MAPPING.keys())
        raise ConfigError(f"{source.at((*key, 'model_type'))}: model.config.model_type {kind!r} is unknown.{hint}")
    cls = CONFIG_MAPPING[kind]
    rope = {"rope_theta", "rope_scaling", "partial_rotary_factor"}  # folded into rope_parameters
    known = {"model_type", *rope, *cls.attribute_map, *(f.name for f in fields(cls) if f.init)} - {"dtype"}
    _check_keys(raw, dict.fromkeys(known, Any), (), key, source)
    try:
        cls(**{name: value for name, value in raw.items() if name != "model_type"})
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ConfigError(f"{source.around(key)}: model.config doesn't make a {kind} model: {error}") from error


# --- Types --------------------------------------------------------------------------------------------------------


def _check_keys(
    value: dict[str, Any], hints: Mapping[str, Any], required: Iterable[str], key: Key, source: _Source
) -> dict[str, Any]:
    """The values of one mapping, each checked against its hint; unknown and missing keys raise."""
    for name in value:
        if name not in hints:
            known = did_you_mean(str(name), hints) or (f" Known: {', '.join(hints)}." if len(hints) < 30 else "")
            inner = (*key, str(name))
            raise ConfigError(f"{source.at(inner)}: unknown key '{_dotted(inner)}'.{known}")
    missing = [_dotted((*key, name)) for name in required if name not in value]
    if missing:
        raise ConfigError(f"{source.at(key)}: missing {', '.join(missing)}.")
    return {name: _convert(item, hints[name], (*key, name), source) for name, item in value.items()}


def _convert(value: Any, hint: Any, key: Key, source: _Source) -> Any:
    """`value` as its type hint wants it: mappings become dataclasses, lists tuples; everything else stays as it is."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        for member in _members(hint):
            if is_dataclass(member) and isinstance(value, dict):
                return _convert(value, member, key, source)  # an error inside it must be told, not tried around
            with contextlib.suppress(ConfigTypeError):
                return _convert(value, member, key, source)
    elif origin is list and isinstance(value, list):
        return [_convert(item, args[0], (*key, str(i)), source) for i, item in enumerate(value)]
    elif origin is tuple and isinstance(value, list):
        hints = args[:1] * len(value) if args[-1] is ... else args
        if len(hints) == len(value):
            return tuple(_convert(item, hints[i], (*key, str(i)), source) for i, item in enumerate(value))
    elif origin is dict and isinstance(value, dict):
        names = [_convert(name, args[0], (*key, str(name)), source) for name in value]
        return {name: _convert(value[name], args[1], (*key, str(name)), source) for name in names}
    elif is_dataclass(hint) and isinstance(value, dict):
        required = [f.name for f in fields(hint) if f.default is MISSING and f.default_factory is MISSING]
        values = _check_keys(value, get_type_hints(hint), required, key, source)
        with _placed(source.around(key)):
            return hint(**values)  # type: ignore[operator]
    elif hint is int and isinstance(value, float) and value.is_integer():
        return int(value)  # 1e3
    elif _fits(value, hint):
        return value
    guess = did_you_mean(value, map(str, _choices(hint))) if isinstance(value, str) else ""
    raise ConfigTypeError(f"{source.at(key)}: '{_dotted(key)}' must be {_wanted(hint)}, found {_found(value)}.{guess}")


def _fits(value: Any, hint: Any) -> bool:
    """Whether a plain value is one of a plain hint; an int is fine for a float, a bool for nothing but a bool."""
    if hint is Any:
        return True
    if choices := _choices(hint):
        return any(value == choice and type(value) is type(choice) for choice in choices)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(hint, type) and isinstance(value, (int, float) if hint is float else hint)


def _choices(hint: Any) -> tuple[Any, ...]:
    """The values that a Literal, an Enum or a union with one of them lists."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        return tuple(choice for member in _members(hint) for choice in _choices(member))
    return tuple(member.value for member in hint) if isinstance(hint, type) and issubclass(hint, Enum) else ()


def _members(hint: Any) -> list[Any]:
    """The members of a union. Beside an Enum a `str` only says how its values are written."""
    members = get_args(hint)
    has_enum = any(isinstance(member, type) and issubclass(member, Enum) for member in members)
    return [member for member in members if not (has_enum and member is str)]


_WORDS = {int: "an integer", float: "a number", str: "a string", bool: "true or false", NoneType: "null"} | {
    list: "a list", tuple: "a list", dict: "a mapping"
}  # fmt: skip


def _wanted(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_wanted, _members(hint)))
    if choices := _choices(hint):
        return ("one of " if len(choices) > 1 else "") + ", ".join(map(repr, choices))
    if get_origin(hint) is tuple and ... not in get_args(hint):
        return f"a list of {len(get_args(hint))}"
    return "a mapping" if is_dataclass(hint) else _WORDS.get(get_origin(hint) or hint, str(hint))


def _found(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    return f"{value!r} ({_WORDS.get(type(value), type(value).__name__)})"


def _dotted(key: Key) -> str:
    return ".".join(key)


@contextlib.contextmanager
def _placed(place: str) -> Iterator[None]:
    """Say where in the configuration a value lies that a dataclass or a rule refused."""
    try:
        yield
    except LowmemError as error:
        raise type(error)(f"{place}: {error}") from error
