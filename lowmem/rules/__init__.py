"""The table of rules, returned by `lowmem.rules.table()`. `@lowmem.rules.register("name")` adds a rule to it."""

import contextlib

import torch

from lowmem.errors import ConfigError, did_you_mean
from lowmem.rules.adafactor import Adafactor as Adafactor
from lowmem.rules.adafactor_t2t import AdafactorT2T as AdafactorT2T
from lowmem.rules.adalomo import AdaLomo as AdaLomo
from lowmem.rules.adamw import AdamW as AdamW
from lowmem.rules.foreign import ForeignRule as ForeignRule
from lowmem.rules.foreign import import_optimizer
from lowmem.rules.lans import Lans as Lans
from lowmem.rules.lion import Lion as Lion
from lowmem.rules.lomo import Lomo as Lomo
from lowmem.rules.rule import ENGINE_KEYS as ENGINE_KEYS
from lowmem.rules.rule import TABLE
from lowmem.rules.rule import GroupClip as GroupClip
from lowmem.rules.rule import GroupNorms as GroupNorms
from lowmem.rules.rule import ParamSpec as ParamSpec
from lowmem.rules.rule import StateSpec as StateSpec
from lowmem.rules.rule import UpdateRule as UpdateRule
from lowmem.rules.rule import register as register
from lowmem.rules.scaled_adam import ScaledAdam as ScaledAdam


def resolve(rule: str | UpdateRule | type | None) -> UpdateRule:
    """Returns a rule, given a name, an `UpdateRule` instance or class, an import path or a `torch.optim.Optimizer`.

    Raises:
        ConfigError: the rule does not exist.
        UnsupportedError: the optimizer cannot run inside backward.
    """
    if isinstance(rule, UpdateRule):
        return rule
    if isinstance(rule, str):
        if rule in TABLE:
            return resolve(TABLE[rule])
        if "." not in rule:
            raise ConfigError(
                f"rule {rule!r} is unknown.{did_you_mean(rule, TABLE)} Choose from {', '.join(sorted(TABLE))}, or the "
                "import path of any torch.optim.Optimizer, such as torch.optim.AdamW."
            )
        return resolve(import_optimizer(rule))
    if isinstance(rule, type) and issubclass(rule, UpdateRule):
        try:
            return rule()
        except TypeError as error:
            raise ConfigError(f"{rule.__name__} needs arguments: {error}. Pass an instance as the rule") from error
    if isinstance(rule, type) and issubclass(rule, torch.optim.Optimizer):
        return ForeignRule(rule)
    raise ConfigError(f"rule {rule!r} is neither a name, an UpdateRule nor a torch.optim.Optimizer class")


def table() -> list[UpdateRule]:
    """Returns all registered rules, sorted by name, except rules that need arguments."""
    rules = []
    for name in sorted(TABLE):
        with contextlib.suppress(ConfigError):
            rules.append(resolve(name))
    return rules
