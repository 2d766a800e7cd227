"""The rule and hyperparameters that the arguments of a trainer name: `optim`, `optim_args` and those of Adam."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from lowmem.errors import ConfigError, UnsupportedError
from lowmem.options import FusedConfig
from lowmem.rules import resolve

_ADAM = ("adam_beta1", "adam_beta2", "adam_epsilon")

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
    """`fused` with what the arguments name; `FusedConfig()` if neither names a rule.

    Raises:
        ConfigError: an argument contradicts `fused`, or names nothing that the rule has.
        UnsupportedError: the optimizer cannot run fused.
    """
    settings = changed(args)
    if "optim_target_modules" in settings:
        raise UnsupportedError(
            f"optim_target_modules={settings['optim_target_modules']!r} is of optimizers that project the gradients of "
            "some modules, which do not run fused; omit it, and set FusedConfig.groups for several rules"
        )
    options = (fused or FusedConfig()) if "optim" not in settings else _with_optim(args, fused, settings)
    if "optim" not in settings and "optim_args" in settings:
        raise ConfigError(
            f"optim_args={settings['optim_args']!r} has no effect without optim; set optim, or give hyperparameters in "
            "fused=FusedConfig(rule=..., hyper={...})"
        )
    return replace(options, hyper=_with_adam(options, settings))


def _with_optim(args: TrainingArguments, fused: FusedConfig | None, settings: Mapping[str, Any]) -> FusedConfig:
    """The options of the optimizer that `optim` names, as Hugging Face would construct it."""
    optim, optim_args = settings["optim"], settings.get("optim_args", "")
    rule, same, hyper = _named(args, optim)
    arguments = {part.partition("=")[0].strip() for part in optim_args.split(",") if part.strip()}
    for name in arguments - hyper.keys():
        raise ConfigError(f"optim_args={optim_args!r}: optim={optim!r} takes no {name!r}")
    for name in settings.keys() & {*_ADAM}:
        if _place(name, hyper) is None:
            raise ConfigError(f"{name}={settings[name]!r} has no effect with optim={optim!r}; omit it")
    if fused is None:
        return FusedConfig(rule=rule, hyper=hyper)
    chosen = resolve(fused.rule).name
    if chosen not in same:
        raise ConfigError(
            f"optim={optim!r} contradicts FusedConfig.rule={chosen!r}; omit optim, or set rule={rule!r} in FusedConfig"
        )
    for name in arguments & fused.hyper.keys():
        if fused.hyper[name] != hyper[name]:
            raise ConfigError(
                f"FusedConfig.hyper[{name!r}]={fused.hyper[name]!r} contradicts optim_args={optim_args!r}; omit one"
            )
    return replace(fused, hyper={**hyper, **fused.hyper})


def _named(args: TrainingArguments, optim: str) -> tuple[str, set[str], dict[str, Any]]:
    """The rule of an optimizer of Hugging Face, the names of all rules that do the same, and its hyperparameters."""
    if optim in _OURS:
        return optim, {optim}, {}
    try:
        cls, hyper = Trainer.get_optimizer_cls_and_kwargs(args)
    except (ImportError, ValueError) as error:  # its package is not installed, or it needs the model
        raise ConfigError(f"optim={optim!r}: {error}") from error
    if hyper.get("optim_bits") == 8:
        raise UnsupportedError(
            f"optim={optim!r}: Hugging Face keeps the states of embeddings in 32 bits, which it tells bitsandbytes by "
            "the names of modules, and a fused update sees none. Set fused=FusedConfig(rule=..., hyper={...}) with the "
            "class, which then has 8 bits for every large parameter"
        )
    path = f"{cls.__module__}.{cls.__qualname__}"
    hyper = {name: value for name, value in hyper.items() if name not in ("lr", "fused")}
    return ("adamw", {"adamw", path}, hyper) if cls is torch.optim.AdamW else (path, {path}, hyper)


def _with_adam(options: FusedConfig, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of `options` with `adam_beta1`, `adam_beta2` and `adam_epsilon` where they are set."""
    rule, hyper = resolve(options.rule), dict(options.hyper)
    for argument in settings.keys() & {*_ADAM}:
        value = settings[argument]
        place = _place(argument, {**rule.defaults, **hyper})
        if place is None:
            raise ConfigError(
                f"{argument}={value!r}: rule {rule.name!r} has no such hyperparameter; omit it, or set another rule, "
                "such as fused=FusedConfig(rule='adamw')"
            )
        name, index = place
        present = options.hyper.get(name)
        if present is not None and (present if index is None else present[index]) != value:
            raise ConfigError(f"FusedConfig.hyper[{name!r}]={present!r} contradicts {argument}={value!r}; omit one")
        if index is None:
            hyper[name] = value
        else:
            pair = list(hyper.get(name, rule.defaults[name]))
            pair[index] = value
            hyper[name] = tuple(pair)
    return hyper


def _place(argument: str, hyper: Mapping[str, Any]) -> tuple[str, int | None] | None:
    """The hyperparameter that an argument of Adam names, and the index in it; None if there is none."""
    if argument == "adam_epsilon":
        return next(((name, None) for name in ("eps", "epsilon") if isinstance(hyper.get(name), float)), None)
    number = int(argument[-1])
    if isinstance(hyper.get("betas"), tuple | list):
        return "betas", number - 1
    return (f"beta{number}", None) if {"beta1", "beta2"} <= hyper.keys() else None
