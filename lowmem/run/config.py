"""The configuration of a run: a YAML file is read, overridden, checked against types, and written back."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from enum import EnumType
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pydantic
from huggingface_hub.errors import StrictDataclassError
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from transformers import CONFIG_MAPPING
from trl import SFTConfig
from typing_extensions import is_typeddict

from lowmem.errors import ConfigError, did_you_mean
from lowmem.files import write_file
from lowmem.options import FusedConfig
from lowmem.rules import ENGINE_KEYS, resolve
from lowmem.run.checks import STRICT, Problem, Whole, mapping, problems
from lowmem.run.data import DataConfig
from lowmem.run.source import Key, Source, dump, located

# What to write instead of keys that another section sets, or that a run of this package can't honour.
ELSEWHERE = {
    "optimizer.placement": "it follows from trainer.deepspeed, trainer.fsdp and the launcher",
    "optimizer.hyper": "write the hyperparameters next to the other options of the optimizer",
    "trainer.learning_rate": "set optimizer.lr",
    "trainer.weight_decay": "set optimizer.weight_decay, or what the rule calls it",
    "trainer.max_grad_norm": "set optimizer.clip_norm",
    "trainer.optim": "set optimizer.rule",
    "trainer.optim_args": "set optimizer.rule and, next to it, its hyperparameters",
    "trainer.optim_target_modules": "every parameter is trained; set optimizer.groups for several rules",
    **dict.fromkeys(("trainer.adam_beta1", "trainer.adam_beta2"), "set optimizer.betas, where the rule has it"),
    "trainer.adam_epsilon": "set optimizer.eps, where the rule has it",
    "trainer.output_dir": "set run_dir",
    **dict.fromkeys(("optimizer.seed", "trainer.seed", "trainer.data_seed"), "set seed, at the top of the file"),
    "trainer.max_length": "set data.max_length",
    "trainer.packing": "set data.packing",
    "trainer.packing_strategy": "set data.packing; the kind of data decides how samples are packed",
    **dict.fromkeys(("trainer.completion_only_loss", "trainer.assistant_only_loss"), "set data.answer_only"),
    "trainer.dataset_text_field": "set data.columns, as in {text: body}",
    "trainer.dataset_num_proc": "set data.workers",
    "trainer.model_init_kwargs": "set model.dtype and model.attention",
    "trainer.chat_template_path": "set model.chat_template",
    "trainer.gradient_checkpointing": "set trainer.activation_checkpointing, its new name",
    "trainer.gradient_checkpointing_kwargs": "set trainer.activation_checkpointing_kwargs, its new name",
    "trainer.resume_from_checkpoint": "start the command with --resume",
    "trainer.local_rank": "the launcher (torchrun, deepspeed, accelerate) sets it",
    "trainer.parallelism_config": "set deepspeed, or fsdp and fsdp_config",
    "trainer.hub_token": "set the environment variable HF_TOKEN: this file is copied into run_dir",
}


def _read_json(path: str) -> dict[str, Any]:
    """The configuration of an engine, which becomes a part of this one."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a file with JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a mapping of keys.")
    return value


_JSON_FILE = Annotated[str, AfterValidator(_read_json)]

# Fields of SFTConfig that allow less here than there. The keys of checkpointing are those of transformers, of TRL
# (selective) and of torch.utils.checkpoint.
_SWITCHES = ("offload", "selective", "use_reentrant", "preserve_rng_state")
_RECOMPUTING = dict.fromkeys(_SWITCHES, bool) | {"every_n_layers": int, "determinism_check": Literal["default", "none"]}
NARROWED: dict[str, Any] = {
    "fsdp": bool,
    **dict.fromkeys(("deepspeed", "fsdp_config"), dict[str, Any] | _JSON_FILE | None),
    "loss_type": Literal["nll", "dft"],
    "activation_checkpointing": bool,
    "activation_checkpointing_kwargs": mapping({}, _RECOMPUTING) | None,
}


@pydantic.dataclasses.dataclass(config=STRICT)
class TokenizerTraining:
    """A tokenizer that is trained on the data before the run."""

    vocab_size: Annotated[Whole, Field(ge=1)]


@pydantic.dataclasses.dataclass(config=STRICT)
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
            raise ConfigError("model.config brings no tokenizer: set model.tokenizer to a Hub name or a directory, or "
                              "model.train_tokenizer to {vocab_size: ...}.")  # fmt: skip


@dataclass(kw_only=True)
class RunConfig:
    """One run: a YAML file after its overrides."""

    run_dir: Annotated[str, Field(min_length=1)]
    seed: Annotated[Whole, Field(ge=0)] = 0
    model: ModelConfig
    data: DataConfig
    optimizer: FusedConfig
    trainer: dict[str, Any] = field(default_factory=dict)


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a YAML file, applies `key=value` overrides and checks every key and value.

    An override replaces the value of its key (`model.config.hidden_size=64`), at any depth; its value is YAML.
    Numbers and booleans are those of YAML 1.2: `1e-3` is a number, and `no` is a string.

    Raises:
        ConfigError: everything that is wrong, one per line, with the line of the file or the override it comes from.
    """
    source = Source.read(Path(path))
    for override in overrides:
        source.override(override)
    types = get_type_hints(RunConfig, include_extras=True) | {"optimizer": _optimizer_types(source)}
    optional = {"seed": types.pop("seed"), "trainer": _trainer_types()}
    values = _check(mapping(types, optional), (), source.data, source)
    if values["model"].config is not None:
        _check_model(values["model"].config, source)
    hyper = values.pop("optimizer")
    options = {f.name: hyper.pop(f.name) for f in fields(FusedConfig) if f.name in hyper}
    with located(source.around(("optimizer",))):
        fused = FusedConfig(**options, hyper=hyper, seed=values.get("seed", 0))
    return RunConfig(**values, optimizer=fused)


def save(config: RunConfig, path: str | Path) -> None:
    """Writes the merged configuration as YAML that `load` reads back as an equal `RunConfig`."""
    optimizer = asdict(config.optimizer)
    optimizer |= optimizer.pop("hyper")
    del optimizer["seed"], optimizer["placement"]
    write_file(Path(path), dump(asdict(config) | {"optimizer": optimizer}).encode())


def _optimizer_types(source: Source) -> Any:
    """The options of `FusedConfig` and the hyperparameters of the rule."""
    raw = source.data.get("optimizer")
    if not isinstance(raw, dict):
        return dict[str, Any]
    rule, groups = raw.get("rule", FusedConfig.rule), []
    for index, group in enumerate(raw["groups"] if isinstance(raw.get("groups"), list) else ()):
        own = isinstance(group, dict) and "rule" in group
        key = ("optimizer", "groups", index, "rule") if own else ("optimizer", "rule")
        types = _hyperparameters(group["rule"] if own else rule, source.at(key))
        groups.append(mapping({"match": str}, types | dict.fromkeys(ENGINE_KEYS, str) | {"lr": float}))
    types = _hyperparameters(rule, source.at(("optimizer", "rule"))) | get_type_hints(FusedConfig, include_extras=True)
    types |= {"rule": str, "groups": tuple[tuple(groups)]}  # type: ignore[misc]
    optional = {name: types[name] for name in types if name != "lr" and f"optimizer.{name}" not in ELSEWHERE}
    return mapping({"lr": Annotated[float, Field(gt=0, allow_inf_nan=False)]}, optional)


def _hyperparameters(rule: Any, place: str) -> dict[str, Any]:
    with located(place):
        return {name: _hint(default) for name, default in resolve(rule).defaults.items()}


def _hint(default: Any) -> Any:
    """The type of a hyperparameter with this default; the rule checks its range, and whether it may be null."""
    if isinstance(default, tuple):
        return tuple[tuple(map(_hint, default))] | None  # type: ignore[misc]
    if isinstance(default, bool):
        return bool | dict[str, Any] | list[Any] | None  # or a map by parameter name
    return {float: float | None, int: int | float | None, str: str | None}.get(type(default), Any)


def _trainer_types() -> Any:
    """Fields of `trl.SFTConfig`, less those that are set elsewhere."""
    types = {name: _adapted(hint) for name, hint in get_type_hints(SFTConfig).items()} | NARROWED
    return mapping({}, {name: types[name] for name in types if f"trainer.{name}" not in ELSEWHERE})


def _adapted(hint: Any) -> Any:
    """The hint with `1e3` as an integer, and without `str` in a union with an Enum, which would allow any string."""
    if get_origin(hint) not in (Union, UnionType):
        return Whole if hint is int else hint
    closed = any(isinstance(member, EnumType) for member in get_args(hint))
    return Union[tuple(_adapted(member) for member in get_args(hint) if not (closed and member is str))]  # noqa: UP007


def _check_model(raw: dict[str, Any], source: Source) -> None:
    """Checks keys, since transformers ignores those that are misspelt, and values as transformers does."""
    key, kind = ("model", "config"), raw.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        hint = did_you_mean(str(kind), CONFIG_MAPPING.keys())
        raise ConfigError(f"{source.at((*key, 'model_type'))}: model.config.model_type {kind!r} is unknown.{hint}")
    cls = CONFIG_MAPPING[kind]
    rope = {"rope_theta", "rope_scaling", "partial_rotary_factor"}  # become part of rope_parameters
    known = {"model_type", *rope, *cls.attribute_map, *(f.name for f in fields(cls) if f.init)} - {"dtype"}
    _check(mapping({}, dict.fromkeys(known, Any)), key, raw, source)
    try:
        cls(**{name: value for name, value in raw.items() if name != "model_type"})
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ConfigError(f"{source.around(key)}: model.config can't make a {kind} model: {error}") from error


def _check(types: Any, key: Key, value: Any, source: Source) -> Any:
    """The value at `key` as `types` has it: mappings become dataclasses, lists tuples."""
    text = json.dumps(value)
    try:
        return TypeAdapter(types).validate_json(text)
    except ValidationError as error:
        unknown_first = sorted(problems(error, json.loads(text)), key=lambda problem: problem.kind not in _UNKNOWN)
        raise ConfigError("\n".join(_message(types, key, problem, source) for problem in unknown_first)) from error


_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")


def _message(types: Any, key: Key, problem: Problem, source: Source) -> str:
    place = (*key, *problem.path)
    name, at = ".".join(map(str, place)), source.at(place)
    if name in ELSEWHERE:
        return f"{at}: '{name}' is not set here: {ELSEWHERE[name]}."
    if problem.kind in _UNKNOWN:
        names = _names(types, problem.path[:-1])
        known = did_you_mean(str(place[-1]), names) or (f" Known: {', '.join(names)}." if len(names) < 30 else "")
        return f"{at}: unknown key '{name}'.{known}"
    if problem.kind == "missing":
        return f"{at}: missing {name}."
    if problem.kind == "value_error":
        return f"{source.around(place)}: {problem.text}"
    return f"{at}: '{name}' {problem.text}"


def _names(types: Any, path: tuple[Any, ...]) -> list[str]:
    """The keys that the mapping at `path` may have."""
    if members := get_args(types):
        if path and get_origin(types) is tuple:
            return _names(members[path[0]], path[1:])
        return [name for member in members for name in _names(member, path)]
    hints = get_type_hints(types) if is_dataclass(types) or is_typeddict(types) else {}
    return _names(hints[path[0]], path[1:]) if path and hints else list(hints)
