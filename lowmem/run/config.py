"""The configuration of a run: a YAML file is read, overridden, checked against types, and written back."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pydantic
from pydantic import Field, TypeAdapter, ValidationError
from transformers import CONFIG_MAPPING
from trl import SFTConfig
from typing_extensions import is_typeddict

from lowmem.errors import ConfigError, did_you_mean
from lowmem.files import write_file
from lowmem.layers.config import LayersConfig
from lowmem.options import DynamicScale, FusedConfig
from lowmem.rules import ENGINE_KEYS, resolve
from lowmem.run import fields as trainer_fields
from lowmem.run import models, secrets
from lowmem.run.checks import STRICT, Problem, Whole, mapping, problems
from lowmem.run.data import DataConfig
from lowmem.run.source import Key, Source, dump, located, shortened
from lowmem.run.tokenizers import SMALLEST_VOCABULARY

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
    **dict.fromkeys(("trainer.do_train", "trainer.do_eval", "trainer.do_predict"), "the command decides what is done"),
    **dict.fromkeys(
        ("trainer.ddp_find_unused_parameters", "trainer.ddp_bucket_cap_mb", "trainer.ddp_static_graph"),
        "the model is not wrapped in DistributedDataParallel",
    ),
    "trainer.local_rank": "the launcher (torchrun, deepspeed, accelerate) sets it",
    "trainer.parallelism_config": "set deepspeed, or fsdp and fsdp_config",
    "trainer.trust_remote_code": "code that comes with a model is never run; use a model that transformers has",
    "trainer.hub_token": "set the environment variable HF_TOKEN: this file is copied into run_dir",
}


# What other tools call keys of a configuration.
SYNONYMS = {
    **dict.fromkeys(("lr", "learning_rate", "base_lr"), "optimizer.lr"),
    **dict.fromkeys(("wd", "weight_decay"), "optimizer.weight_decay"),
    **dict.fromkeys(("optim", "optimizer_type", "rule"), "optimizer.rule"),
    **dict.fromkeys(
        ("clip", "clip_grad", "grad_clip", "gradient_clip", "gradient_clipping", "gradient_clip_val", "clip_grad_norm",
         "max_grad_norm", "max_norm", "clip_norm"),
        "optimizer.clip_norm",
    ),
    **dict.fromkeys(
        ("batch_size", "batchsize", "bs", "train_batch_size", "micro_batch_size", "train_micro_batch_size_per_gpu"),
        "trainer.per_device_train_batch_size",
    ),
    "eval_batch_size": "trainer.per_device_eval_batch_size",
    **dict.fromkeys(("epoch", "epochs", "num_epochs", "max_epochs", "n_epochs"), "trainer.num_train_epochs"),
    **dict.fromkeys(("steps", "num_steps", "max_iters", "train_steps", "total_steps"), "trainer.max_steps"),
    **dict.fromkeys(("warmup", "warmup_ratio", "num_warmup_steps", "lr_warmup_steps"), "trainer.warmup_steps"),
    **dict.fromkeys(("scheduler", "lr_scheduler", "schedule"), "trainer.lr_scheduler_type"),
    **dict.fromkeys(("grad_accum", "gradient_accumulation", "accumulate_grad_batches", "grad_accumulation_steps"),
                    "trainer.gradient_accumulation_steps"),
    **dict.fromkeys(("gradient_checkpointing", "checkpointing"), "trainer.activation_checkpointing"),
    **dict.fromkeys(("output_dir", "out_dir", "save_dir", "run_folder"), "run_dir"),
    **dict.fromkeys(("random_seed", "manual_seed"), "seed"),
    **dict.fromkeys(("max_seq_length", "max_seq_len", "seq_len", "seq_length", "sequence_length", "block_size",
                     "cutoff_len", "max_len"), "data.max_length"),
    **dict.fromkeys(("dataset", "dataset_name", "dataset_path", "train_file", "data_path"), "data.path"),
    **dict.fromkeys(("model_name", "model_name_or_path", "base_model", "pretrained", "checkpoint"), "model.path"),
    **dict.fromkeys(("precision", "torch_dtype"), "model.dtype"),
    **dict.fromkeys(("attn_implementation", "attn"), "model.attention"),
}  # fmt: skip


@pydantic.dataclasses.dataclass(config=STRICT)
class TokenizerTraining:
    """A tokenizer that is trained on the data before the run."""

    # tokenizers 0.23 ends the process where memory is too small
    vocab_size: Annotated[Whole, Field(ge=SMALLEST_VOCABULARY, le=2**22)]


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
    seed: Annotated[Whole, Field(ge=0, lt=2**32)] = 0  # NumPy takes 32 bits
    model: ModelConfig
    data: DataConfig
    optimizer: FusedConfig
    layers: LayersConfig = field(default_factory=LayersConfig)
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
    for key in (("trainer", "deepspeed"), ("trainer", "fsdp_config")):
        source.include(key)
    _refuse_secrets(source)
    types = get_type_hints(RunConfig, include_extras=True) | {"optimizer": _optimizer_types(source)}
    types |= {"layers": mapping({}, get_type_hints(LayersConfig)), "trainer": trainer_fields.trainer_types(ELSEWHERE)}
    optional = {name: types.pop(name) for name in ("seed", "layers", "trainer")}
    values = _check(mapping(types, optional), (), source.data, source)
    trainer_fields.check_needs(values.get("trainer", {}), lambda name: source.at(("trainer", name)))
    if values["model"].config is not None:
        _check_model(values["model"], source)
    options = {"rule": "adalomo", **values.pop("optimizer"), "seed": values.get("seed", 0)}
    with located(source.around(("optimizer",))):
        fused = FusedConfig(**options)
    with located(source.around(("layers",))):
        layers = LayersConfig(**values.pop("layers", {}))
    return RunConfig(**values, optimizer=fused, layers=layers)


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
    rule, groups = raw.get("rule", "adalomo"), []
    for index, group in enumerate(raw["groups"] if isinstance(raw.get("groups"), list) else ()):
        own = isinstance(group, dict) and "rule" in group
        key = ("optimizer", "groups", index, "rule") if own else ("optimizer", "rule")
        types = _hyperparameters(group["rule"] if own else rule, source.at(key))
        groups.append(mapping({"match": str}, types | dict.fromkeys(ENGINE_KEYS, str) | {"lr": float}))
    types = _hyperparameters(rule, source.at(("optimizer", "rule"))) | get_type_hints(FusedConfig, include_extras=True)
    types |= {"rule": str, "groups": tuple[tuple(groups)]}  # type: ignore[misc]
    types["loss_scale"] = Annotated[float, Field(gt=0)] | Literal["dynamic"] | DynamicScale | None
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


def _check_model(model: ModelConfig, source: Source) -> None:
    """Checks keys, since transformers ignores those that are misspelt, and values as transformers does."""
    raw = model.config or {}
    key, kind = ("model", "config"), raw.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        hint = _did_you_mean(str(kind), CONFIG_MAPPING)
        found = shortened(repr(kind))
        raise ConfigError(f"{source.at((*key, 'model_type'))}: model.config.model_type {found} is unknown.{hint}")
    raw = model.config = _check(models.types(kind), key, raw, source)
    with located(source.around(key)):
        models.check(raw, model.train_tokenizer.vocab_size if model.train_tokenizer else None)


def _refuse_secrets(source: Source) -> None:
    for key in secrets.find(source.data):
        name = ".".join(key)
        if name in ELSEWHERE:
            raise ConfigError(f"{source.at(key)}: '{name}' is not set here: {ELSEWHERE[name]}.")
        raise ConfigError(
            f"{source.at(key)}: '{shortened(secrets.redacted(name))}' has a password or token, and this file is copied "
            "into run_dir. Delete it here, and set the environment variable of the service, such as HF_TOKEN."
        )


def _check(types: Any, key: Key, value: Any, source: Source) -> Any:
    """The value at `key` as `types` has it: mappings become dataclasses, lists tuples."""
    text = json.dumps(value)
    try:
        return TypeAdapter(types).validate_json(text)
    except ValidationError as error:
        unknown_first = sorted(problems(error, json.loads(text)), key=lambda problem: problem.kind not in _UNKNOWN)
        messages = [_message(types, key, problem, source) for problem in unknown_first[:_MAX_MESSAGES]]
        if more := len(unknown_first) - len(messages):
            messages.append(f"and {more} more like these.")
        raise ConfigError("\n".join(messages)) from error


_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_MAX_MESSAGES = 5


def _message(types: Any, key: Key, problem: Problem, source: Source) -> str:
    place = (*key, *problem.path)
    name, at = shortened(".".join(map(str, place))), source.at(place)
    if name in ELSEWHERE:
        return f"{at}: '{name}' is not set here: {ELSEWHERE[name]}."
    if problem.kind in _UNKNOWN:
        return f"{at}: unknown key '{name}'.{_instead(place, _names(types, problem.path[:-1]))}"
    if problem.kind == "missing":
        return f"{at}: missing {name}."
    if problem.kind == "value_error":
        return f"{source.around(place)}: {problem.text}"
    return f"{at}: '{name}' {problem.text}"


def _instead(place: Key, names: list[str]) -> str:
    """The key that an unknown one may stand for: by another tool's name, in another section, or misspelt."""
    *section, word = map(str, place)
    other = SYNONYMS.get(word.lower().replace("-", "_"), "")
    if (last := other.rpartition(".")[2]) in names:
        return f" Did you mean '{'.'.join((*section, last))}'?"
    if hint := _did_you_mean(word, names):
        return hint
    if elsewhere := other or next((f"{name}.{word}" for name in _SECTIONS if word in _SECTIONS[name]), ""):
        return f" Did you mean '{elsewhere}'?"
    return f" Known: {', '.join(names)}." if 0 < len(names) < 30 else ""


def _did_you_mean(word: str, names: Iterable[str]) -> str:
    return did_you_mean(word, names) if len(word) < 100 else ""  # which takes seconds for a long word


_SECTIONS = {
    "trainer": [f.name for f in fields(SFTConfig) if f"trainer.{f.name}" not in ELSEWHERE],
    "optimizer": [f.name for f in fields(FusedConfig) if f"optimizer.{f.name}" not in ELSEWHERE],
    "data": [f.name for f in fields(DataConfig)],
    "model": [f.name for f in fields(ModelConfig)],
    "layers": [f.name for f in fields(LayersConfig)],
}


def _names(types: Any, path: tuple[Any, ...]) -> list[str]:
    """The keys that the mapping at `path` may have."""
    if members := get_args(types):
        if path and get_origin(types) is tuple:
            return _names(members[path[0]], path[1:])
        return [name for member in members for name in _names(member, path)]
    hints = get_type_hints(types) if is_dataclass(types) or is_typeddict(types) else {}
    return _names(hints[path[0]], path[1:]) if path and hints else list(hints)
