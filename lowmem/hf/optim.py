"""The rule and hyperparameters that the arguments of a trainer name (`optim`, `optim_args` and those of Adam), or that
a method of its class chooses.
"""

import inspect
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from lowmem.errors import ConfigError, UnsupportedError
from lowmem.options import FusedConfig
from lowmem.rules import resolve

# Arguments, and the hyperparameters that they set. No optimizer that runs fused has the last one.
_ARGUMENTS = {"adam_beta1": "betas", "adam_beta2": "betas", "adam_epsilon": "eps", "optim_target_modules": "modules"}

# Names of the rule that the default learning rates of trainers are chosen for.
_ADAMW = ("adamw", f"{torch.optim.AdamW.__module__}.AdamW")

# Optimizers that Hugging Face gives the whole model. Their rules are in this package.
_OURS = ("lomo", "adalomo")


def changed(args: TrainingArguments) -> dict[str, Any]:
    """The arguments about the optimizer that do not have their default value. Names of optimizers are strings."""
    defaults = {option.name: option.default for option in fields(type(args))}
    values = {name: getattr(args, name) for name in ("optim", "optim_args", *_ARGUMENTS)}
    changed = {name: value for name, value in values.items() if value not in (None, defaults[name])}
    return {name: getattr(value, "value", value) for name, value in changed.items()}


def choose(args: TrainingArguments, fused: FusedConfig | None) -> FusedConfig:
    """Returns `fused` itself if it names a rule, else with the rule and hyperparameters that the arguments name.

    Raises:
        ConfigError: an argument contradicts `fused`, or has no effect.
        UnsupportedError: the optimizer cannot run fused.
    """
    settings, fused = changed(args), fused or FusedConfig()
    if fused.rule is not None:
        for name, value in settings.items():
            raise ConfigError(
                f"{name}={value!r} has no effect, because fused.rule={resolve(fused.rule).name!r} names the optimizer. "
                f"Omit {name} and set the hyperparameters of the rule in fused, or omit fused.rule"
            )
        return fused
    optim = str(getattr(args.optim, "value", args.optim))
    rule, hyper = _named(args, optim)
    for argument in settings.keys() & _ARGUMENTS.keys() - {name for name, key in _ARGUMENTS.items() if key in hyper}:
        raise ConfigError(f"{argument}={settings[argument]!r} has no effect with optim={optim!r}; omit it")
    for part in filter(None, settings.get("optim_args", "").split(",")):
        if (name := part.partition("=")[0].strip()) not in hyper:
            raise ConfigError(f"optim_args={settings['optim_args']!r}: optim={optim!r} does not take {name!r}")
    if settings.keys() - {"optim"}:
        for name in fused.hyper.keys() & hyper.keys():
            if (value := fused.hyper[name]) != hyper[name]:
                raise ConfigError(f"fused.{name}={value!r} contradicts {name}={hyper[name]!r} in the arguments")
    rate = fused.lr if fused.lr is not None or rule in ("adamw", *_OURS) else args.learning_rate  # some need it
    return replace(fused, rule=rule, lr=rate, hyper={**hyper, **fused.hyper})


def read(optimizer: Any, fused: FusedConfig) -> tuple[FusedConfig, list[dict[str, Any]]]:
    """Reads an optimizer that a trainer's class has made. Returns `fused` with its class and options, unless `fused`
    names a rule; and its groups, with the options in which they differ from it and their weight decay (None for 0).

    Raises:
        ConfigError: it is not an optimizer, or has more than can be read from it.
    """
    cls = type(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"this trainer creates {optimizer!r}, which is not a torch.optim.Optimizer")
    defaults = optimizer.defaults
    hyper = {name: defaults[name] for name in inspect.signature(cls).parameters if name in defaults}
    fresh = cls([nn.Parameter(torch.zeros(2, 2))], **hyper)
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks or "step" in vars(optimizer)
    others = _settings(optimizer) != _settings(fresh) or bool(optimizer.state) != bool(fresh.state)
    if hooks or (others and fused.rule is None):
        extra = "hooks around its step or a schedule" if hooks else "states, or options that are not in its `defaults`,"
        raise ConfigError(
            f"this trainer creates a {cls.__name__} with {extra} which a fused optimizer does not support. Omit them"
            + ("" if hooks else ", or name the optimizer in fused.rule, with its options in FusedConfig")
        )
    groups = [
        {key: value for key, value in group.items() if key not in defaults or value != defaults[key]}
        | {"weight_decay": group.get("weight_decay") or None}
        for group in optimizer.param_groups
    ]
    if fused.rule is None:
        adamw = cls is torch.optim.AdamW and not (hyper["amsgrad"] or hyper["maximize"])
        kept = ("lr", "betas", "eps") if adamw else hyper.keys() - {"weight_decay", "fused"}
        options = {**{name: hyper[name] for name in kept}, **fused.given}
        fused = replace(fused, rule="adamw" if adamw else cls, lr=options.pop("lr", None), hyper=options)
    return fused, groups


def _settings(optimizer: torch.optim.Optimizer) -> str:
    """Its attributes, beside parameters and states."""
    own = {name: value for name, value in vars(optimizer).items() if name not in ("param_groups", "state")}
    return repr({name: getattr(value, "__dict__", value) for name, value in own.items()})


def learning_rate(args: TrainingArguments, fused: FusedConfig, model: nn.Module) -> float:
    """Returns the learning rate of a trainer: `learning_rate`, or `fused.lr` where that has its default value.

    Raises:
        ConfigError: both are set and differ, or it is left at a default that is chosen for another rule.
    """
    rule, rate = resolve(fused.rule), args.learning_rate
    default = next(option.default for option in fields(type(args)) if option.name == "learning_rate")
    left_alone = rate == default and rule.name not in _ADAMW
    if not left_alone and fused.lr not in (None, rate):
        raise ConfigError(f"fused.lr={fused.lr!r} contradicts learning_rate={rate!r}; set only learning_rate")
    if left_alone and fused.lr is None and rule.usual_lr:
        raise ConfigError(
            f"learning_rate={rate:g} is the default of {type(args).__name__} for AdamW, but the rule is {rule.name!r}: "
            f"{rule.rates(model.parameters(), rate)}. Set another learning_rate, or keep this one with "
            f"fused.lr={rate:g}"
        )
    return rate if fused.lr is None else fused.lr


def _named(args: TrainingArguments, optim: str) -> tuple[str, dict[str, Any]]:
    """Returns the rule of an optimizer of Hugging Face, and its hyperparameters."""
    if optim in _OURS:
        return optim, {}
    try:
        cls, hyper = Trainer.get_optimizer_cls_and_kwargs(args)
    except (ImportError, ValueError) as error:  # its package is not installed, or it needs the model
        raise ConfigError(f"optim={optim!r}: {str(error).replace(str(args.optim), optim)}") from error
    if hyper.get("optim_bits") == 8:
        raise UnsupportedError(
            f"optim={optim!r}: Hugging Face selects 32-bit states for embeddings by the names of modules, which a "
            "fused update does not know. Set fused.rule to the class, which then uses 8-bit states for every large "
            "parameter"
        )
    path = "adamw" if cls is torch.optim.AdamW else f"{cls.__module__}.{cls.__qualname__}"
    return path, {name: value for name, value in hyper.items() if name not in ("lr", "fused")}
