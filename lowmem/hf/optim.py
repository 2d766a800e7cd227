"""Determines the rule, hyperparameters and groups of a trainer from its arguments (`optim`, `optim_args`, `adam_beta1`,
...) or from an optimizer that its class creates.
"""

import copy
import inspect
import re
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from lowmem.errors import ConfigError, UnsupportedError
from lowmem.options import FusedConfig
from lowmem.rules import UpdateRule, resolve
from lowmem.rules.rule import describe_rates

# Arguments and the hyperparameters that they set. The last is for optimizers that cannot run fused (GaLore, APOLLO).
_ARGUMENTS = {"adam_beta1": "betas", "adam_beta2": "betas", "adam_epsilon": "eps", "optim_target_modules": "modules"}

# Names of the rule for which trainers choose their default learning rates.
_ADAMW = ("adamw", f"{torch.optim.AdamW.__module__}.AdamW")

# Optimizers that Hugging Face creates from the model, but that lowmem implements as rules.
_OURS = ("lomo", "adalomo")


def changed_arguments(args: TrainingArguments) -> dict[str, Any]:
    """Returns the optimizer arguments that differ from their defaults. Names of optimizers are strings."""
    defaults = {option.name: option.default for option in fields(type(args))}
    values = {name: getattr(args, name) for name in ("optim", "optim_args", *_ARGUMENTS)}
    changed = {name: value for name, value in values.items() if value not in (None, defaults[name])}
    return {name: getattr(value, "value", value) for name, value in changed.items()}


def choose_rule(args: TrainingArguments, fused: FusedConfig | None) -> FusedConfig:
    """Returns `fused` if it names a rule. Otherwise, adds the rule and hyperparameters that the arguments name.

    Raises:
        ConfigError: an argument contradicts `fused`, or has no effect.
        UnsupportedError: the optimizer cannot run fused.
    """
    settings = changed_arguments(args)
    fused = fused or FusedConfig()
    if fused.rule is not None:
        for name, value in settings.items():
            raise ConfigError(
                f"{name}={value!r} has no effect, because fused.rule={resolve(fused.rule).name!r} names the optimizer. "
                f"Omit {name} and set the hyperparameters of the rule in fused, or omit fused.rule"
            )
        return fused
    optim = str(getattr(args.optim, "value", args.optim))
    rule, hyper = _rule_of_optim(args, optim)
    for argument, name in _ARGUMENTS.items():
        if argument in settings and name not in hyper:
            raise ConfigError(f"{argument}={settings[argument]!r} has no effect with optim={optim!r}; omit it")
    for part in filter(None, settings.get("optim_args", "").split(",")):
        if (name := part.partition("=")[0].strip()) not in hyper:
            raise ConfigError(f"optim_args={settings['optim_args']!r}: optim={optim!r} does not take {name!r}")
    if settings.keys() - {"optim"}:
        for name in fused.hyper.keys() & hyper.keys():
            if (value := fused.hyper[name]) != hyper[name]:
                raise ConfigError(f"fused.{name}={value!r} contradicts {name}={hyper[name]!r} in the arguments")
    rate = fused.lr if fused.lr is not None or rule in ("adamw", *_OURS) else args.learning_rate  # some require it
    return replace(fused, rule=rule, lr=rate, hyper={**hyper, **fused.hyper})


def read_optimizer(optimizer: Any, fused: FusedConfig) -> tuple[FusedConfig, list[dict[str, Any]]]:
    """Reads an optimizer that a trainer's class has created. Raises `ConfigError` if it is not an optimizer, or if it
    has hooks, a schedule, states or options that cannot be read.

    Returns:
        `fused`, with the optimizer's class and options if it does not name a rule, and the optimizer's groups, each
        with the options that differ from the defaults and its weight decay (None for 0).
    """
    cls = type(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"this trainer creates {optimizer!r}, which is not a torch.optim.Optimizer")
    defaults = optimizer.defaults
    hyper = {name: defaults[name] for name in inspect.signature(cls).parameters if name in defaults}
    try:
        fresh = cls([nn.Parameter(torch.zeros(2, 2))], **hyper)
    except TypeError as error:  # an option without a default
        raise ConfigError(f"this trainer creates a {cls.__name__}, whose options cannot be read: {error}") from error
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks or "step" in vars(optimizer)
    others = _attributes(optimizer) != _attributes(fresh) or bool(optimizer.state) != bool(fresh.state)
    if hooks or (others and fused.rule is None):
        raise ConfigError(
            f"this trainer creates a {cls.__name__} with hooks around its step, a schedule, states, or options that "
            "are not in its `defaults`, which a fused optimizer does not support. Omit them"
            + ("" if hooks else ", or name the optimizer in fused.rule, with its options in FusedConfig")
        )
    groups = [
        {key: value for key, value in group.items() if key not in defaults or value != defaults[key]}
        | {"weight_decay": group.get("weight_decay") or None}
        for group in optimizer.param_groups
    ]
    if fused.rule is None:
        adamw = cls is torch.optim.AdamW and not (hyper["amsgrad"] or hyper["maximize"])
        names = ("lr", "betas", "eps") if adamw else hyper.keys() - {"weight_decay", "fused"}
        options = {**{name: hyper[name] for name in names}, **fused.given}
        fused = replace(fused, rule="adamw" if adamw else cls, lr=options.pop("lr", None), hyper=options)
    return fused, groups


def parts_by_decay(trainer: Trainer, model: nn.Module) -> list[dict[str, Any]]:
    """Splits the trained parameters as transformers does: matrices with `weight_decay`, norms and biases with None."""
    names = {*trainer.get_decay_parameter_names(model)}
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    return [
        {"params": [param for name, param in trained if (name in names) is decays], "weight_decay": amount}
        for decays, amount in ((True, trainer.args.weight_decay), (False, None))
    ]


def param_groups(fused: FusedConfig, model: nn.Module, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Splits the groups of `fused` by the options of their parameters in `parts`, the result of `read_optimizer` or
    `parts_by_decay`. Raises `UnsupportedError` if the trainer clips and a parameter is only in the model or only in
    `parts`.
    """
    # without the prefix of FSDP's activation checkpointing, so that checkpoints do not depend on it
    names = {param: name.replace("_checkpoint_wrapped_module.", "") for name, param in model.named_parameters()}
    part_of = {param: n for n, part in enumerate(parts) for param in part["params"]}
    outside = {param: f"outside.{n}" for n, param in enumerate(param for param in part_of if param not in names)}
    odd = [name for param, name in names.items() if param.requires_grad and param not in part_of]
    odd += [name for param, name in outside.items() if param.requires_grad]
    if odd and fused.clip_norm is not None:
        raise UnsupportedError(
            f"max_grad_norm={fused.clip_norm}: the trainer clips the gradients of its model, but {odd[0]!r} "
            "is only in the model, or only in the optimizer that the class creates. Set max_grad_norm=0, or "
            "freeze it"
        )
    groups: list[dict[str, Any]] = []
    for group in fused.param_groups((name, param) for param, name in (names | outside).items() if param in part_of):
        options = [_group_options(resolve(fused.rule), part, group) for part in parts]
        split = {repr(values): {**values, "params": []} for values in options}
        for name, param in group["params"]:
            split[repr(options[part_of[param]])]["params"].append((name, param))
        groups += split.values()
    return [group for group in groups if group["params"]]


def _group_options(default: UpdateRule, part: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of parameters in a part and in a group of `fused`. The part's options apply only to the
    default rule, except that a part without weight decay has no weight decay with any rule.
    """
    rule = resolve(group["rule"]) if "rule" in group else default
    options: dict[str, Any] = {}
    amount = part["weight_decay"]
    without = rule.without_decay()
    if rule.name == default.name:
        options = {key: value for key, value in part.items() if key not in ("params", "weight_decay")}
    elif amount is not None:
        amount = rule.defaults.get(rule.decay)
    if rule.decay not in rule.defaults:
        options |= {"weight_decay": amount} if amount else {}  # raises, because the rule does not have it
    elif rule.decay not in group:
        options |= without if amount is None else {rule.decay: amount or without[rule.decay]}
    return options | {key: value for key, value in group.items() if key != "params"}


def _attributes(optimizer: torch.optim.Optimizer) -> str:
    """Returns the attributes of an optimizer, except parameters and states, as a string."""
    attributes = {name: value for name, value in vars(optimizer).items() if name not in ("param_groups", "state")}
    return repr({name: getattr(value, "__dict__", value) for name, value in attributes.items()})


def with_learning_rate(args: TrainingArguments, fused: FusedConfig, model: Any) -> TrainingArguments:
    """Returns arguments with `fused.lr` as their `learning_rate` if it is set. `args` does not change.

    Args:
        model: the model for whose weights errors suggest a rate. It may be a name or None.

    Raises:
        ConfigError: both are set and differ, or neither is set and the default is meant for another rule.
    """
    rule = resolve(fused.rule)
    rate = args.learning_rate
    default = next(option.default for option in fields(type(args)) if option.name == "learning_rate")
    left_alone = rate == default and rule.name not in _ADAMW
    if not left_alone and fused.lr not in (None, rate):
        raise ConfigError(f"fused.lr={fused.lr!r} contradicts learning_rate={rate!r}; set only learning_rate")
    if left_alone and fused.lr is None and rule.usual_lr:
        weights = model.parameters() if isinstance(model, nn.Module) else ()
        raise ConfigError(
            f"learning_rate={rate:g} is the default of {type(args).__name__} for AdamW, but the rule is {rule.name!r}: "
            f"{describe_rates(rule, weights, rate)}. Set another learning_rate, or keep this one with "
            f"fused.lr={rate:g}"
        )
    if fused.lr in (None, rate):
        return args
    changed = copy.copy(args)
    changed.learning_rate = fused.lr
    return changed


def _rule_of_optim(args: TrainingArguments, optim: str) -> tuple[str, dict[str, Any]]:
    """Returns the rule that `optim` names, and its hyperparameters."""
    if optim in _OURS:
        return optim, {}
    if eight := re.fullmatch(r"(?:paged_)?(adamw|lion)(?:_bnb)?_8bit", optim):
        raise UnsupportedError(
            f"optim={optim!r} is not supported. Use lowmem's 8-bit states, which do not require bitsandbytes: omit "
            f"optim and set fused: {{rule: {eight[1]}, state_storage: 8bit}} (Python: FusedConfig(rule={eight[1]!r}, "
            "state_storage='8bit'))"
        )
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
