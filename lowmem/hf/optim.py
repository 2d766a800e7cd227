"""The rule and hyperparameters that the arguments of a trainer name: `optim`, `optim_args` and those of Adam."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from lowmem.errors import ConfigError, UnsupportedError
from lowmem.options import FusedConfig
from lowmem.rules import resolve

_ADAM = ("adam_beta1", "adam_beta2", "adam_epsilon")

# Names of the rule that the default learning rates of trainers are chosen for.
_ADAMW = ("adamw", f"{torch.optim.AdamW.__module__}.AdamW")

# Optimizers that Hugging Face gives the whole model. Their rules are in this package.
_OURS = ("lomo", "adalomo")


def changed(args: TrainingArguments) -> dict[str, Any]:
    """The arguments about the optimizer that do not have their default value. Names of optimizers are strings."""
    values = {f.name: (getattr(args, f.name), f.default) for f in fields(type(args))}
    names = ("optim", "optim_args", "optim_target_modules", *_ADAM)
    return {
        name: getattr(value, "value", value)
        for name, (value, default) in ((name, values[name]) for name in names)
        if value is not None and value != default
    }


def choose(args: TrainingArguments, fused: FusedConfig | None) -> FusedConfig:
    """`fused` with the hyperparameters that the arguments name, and with their optimizer where it names no rule.

    Raises:
        ConfigError: an argument contradicts `fused`, or names nothing that the rule has.
        UnsupportedError: the optimizer cannot run fused.
    """
    settings, fused = changed(args), fused or FusedConfig()
    if "optim_target_modules" in settings:
        raise UnsupportedError(
            f"optim_target_modules={settings['optim_target_modules']!r} is of optimizers that project the gradients of "
            "some modules, which do not run fused; omit it, and set FusedConfig.groups for several rules"
        )
    optim, optim_args = getattr(args.optim, "value", args.optim), settings.get("optim_args", "")
    named = "optim" in settings or fused.rule is None
    rule, same, hyper = _named(args, optim) if named else (fused.rule, set(), {})
    chosen = resolve(fused.rule or rule)
    if named and chosen.name not in same:
        raise ConfigError(
            f"optim={optim!r} contradicts FusedConfig.rule={chosen.name!r}; omit optim, or set rule={rule!r}"
        )
    merged = {**hyper, **fused.hyper}
    for name in (part.partition("=")[0].strip() for part in optim_args.split(",") if part.strip()):
        if name not in hyper:
            raise ConfigError(f"optim_args={optim_args!r}: {optim!r} takes no {name!r}, or FusedConfig.rule is used")
        if merged[name] != hyper[name]:
            raise ConfigError(f"FusedConfig({name}={merged[name]!r}) contradicts optim_args={optim_args!r}; omit one")
    for argument in settings.keys() & {*_ADAM}:
        value, place = settings[argument], _place(argument, hyper if named else {**chosen.defaults, **merged})
        if place is None:
            raise ConfigError(
                f"{argument}={value!r} has no effect with {chosen.name!r}; omit it, or use another optimizer"
            )
        name, index = place
        present = fused.hyper.get(name)
        if present is not None and (present if index is None else present[index]) != value:
            raise ConfigError(f"FusedConfig({name}={present!r}) contradicts {argument}={value!r}; omit one")
        pair = merged.get(name, chosen.defaults[name])
        merged[name] = value if index is None else (*pair[:index], value, *pair[index + 1 :])
    return replace(fused, rule=fused.rule or rule, hyper=merged)


def learning_rate(args: TrainingArguments, fused: FusedConfig, model: nn.Module) -> float:
    """The learning rate of a trainer: `learning_rate`, or `FusedConfig.lr` where that has its default value.

    Raises:
        ConfigError: both are set and differ, or it is left at a default that is chosen for another rule.
    """
    rule, rate = resolve(fused.rule), args.learning_rate
    default = next(option.default for option in fields(type(args)) if option.name == "learning_rate")
    left_alone = rate == default and rule.name not in _ADAMW
    if not left_alone and fused.lr not in (None, rate):
        raise ConfigError(
            f"FusedConfig.lr={fused.lr!r} contradicts learning_rate={rate!r}; in a trainer set learning_rate"
        )
    if left_alone and fused.lr is None and rule.usual_lr:
        raise ConfigError(
            f"learning_rate={rate:g} is the default of {type(args).__name__}, chosen for AdamW, and the rule is "
            f"{rule.name!r}: {rule.rates(model.parameters(), rate)}. Set learning_rate, or keep it with "
            f"fused=FusedConfig(lr={rate:g}, ...)"
        )
    return rate if fused.lr is None else fused.lr


def _named(args: TrainingArguments, optim: str) -> tuple[str, set[str], dict[str, Any]]:
    """The rule of an optimizer of Hugging Face, the names of all rules that do the same, and its hyperparameters."""
    if optim in _OURS:
        return optim, {optim}, {}
    try:
        cls, hyper = Trainer.get_optimizer_cls_and_kwargs(args)
    except (ImportError, ValueError) as error:  # its package is not installed, or it needs the model
        raise ConfigError(f"optim={optim!r}: {str(error).replace(str(args.optim), optim)}") from error
    if hyper.get("optim_bits") == 8:
        raise UnsupportedError(
            f"optim={optim!r}: Hugging Face keeps the states of embeddings in 32 bits, which it tells bitsandbytes by "
            "the names of modules, and a fused update sees none. Set fused=FusedConfig(rule=...) with the "
            "class, which then has 8 bits for every large parameter"
        )
    path = f"{cls.__module__}.{cls.__qualname__}"
    hyper = {name: value for name, value in hyper.items() if name not in ("lr", "fused")}
    return ("adamw", {"adamw", path}, hyper) if cls is torch.optim.AdamW else (path, {path}, hyper)


def _place(argument: str, hyper: Mapping[str, Any]) -> tuple[str, int | None] | None:
    """The hyperparameter that an argument of Adam names, and the index in it; None if there is none."""
    if argument == "adam_epsilon":
        return next(((name, None) for name in ("eps", "epsilon") if isinstance(hyper.get(name), float)), None)
    number = int(argument[-1])
    if isinstance(hyper.get("betas"), tuple | list):
        return "betas", number - 1
    return (f"beta{number}", None) if {"beta1", "beta2"} <= hyper.keys() else None
