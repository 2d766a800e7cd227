"""The table of rules, `lowmem.rules.table()`; `@lowmem.rules.register("name")` adds a rule to it."""

import math
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class RuleInfo:
    """A row of the table; `state_bytes` is the size of its states per element of a 4096 × 4096 bfloat16 parameter."""

    name: str
    state_bytes: float
    keeps: str
    exactness: str
    defaults: dict[str, object]
    source: str
    usual_lr: tuple[Any, ...]


def resolve(rule: str | UpdateRule | type | None) -> UpdateRule:
    """A rule from its name, an instance or class of `UpdateRule`, a `torch.optim.Optimizer` class, or an import path.

    Raises:
        ConfigError: there is no such rule.
        UnsupportedError: the optimizer cannot run fused.
    """
    if isinstance(rule, UpdateRule):
        return rule
    if isinstance(rule, str):
        if rule in TABLE:
            return resolve(TABLE[rule])
        if "." not in rule:
            raise ConfigError(
                f"rule {rule!r} is unknown.{did_you_mean(rule, TABLE)} Known are {', '.join(sorted(TABLE))}, and the "
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


def table() -> list[RuleInfo]:
    """The rules of this package and those registered from outside, by name, except for those that need arguments."""
    rows, shape = [], (4096, 4096)
    for name in sorted(TABLE):
        try:
            rule = resolve(name)
        except ConfigError:
            continue
        spec = rule.spec("", shape, {**rule.defaults, "rounding": "auto"})
        nbytes = 0.0
        for state in spec.states.values():
            dtype = torch.bfloat16 if state.dtype == "weight" else state.dtype or torch.float32
            nbytes += math.prod(spec.view.state_shape(state.extent, shape) + state.extra) * dtype.itemsize
        size = nbytes / math.prod(shape)
        rows.append(RuleInfo(name, size, rule.keeps, rule.exactness, dict(rule.defaults), rule.source, rule.usual_lr))
    return rows
