"""Rules: the mathematics of one optimizer for one parameter."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from lowmem.errors import ConfigError, UnsupportedError
from lowmem.rules.require import Check
from lowmem.tiles.layout import Extent, View
from lowmem.tiles.storage import STORED_DTYPES
from lowmem.tiles.sweep import Sweep

Hyper = Mapping[str, Any]
State = dict[str, Any]

# Keys of a parameter group that are options of the engine, not hyperparameters of a rule.
ENGINE_KEYS = ("rule", "rounding", "state_storage")

# Keys of a parameter group that are not hyperparameters, from torch, its schedulers and this package.
GROUP_KEYS = frozenset(("params", "param_names", "name", "initial_lr", "max_lr", "min_lr", *ENGINE_KEYS))


@dataclass(frozen=True)
class StateSpec:
    """One state of a parameter. It is zero before the first update.

    extent: `full` has the shape of the parameter. `row`, `col` and `slice` have its batch dimensions, followed by its
    row dimensions, its column dimensions, or nothing.
    dtype: None uses the user's `state_storage` if the extent is `full`, else float32. A dtype is part of the rule, and
    values are rounded to nearest; "weight" is the dtype of the weight.
    extra: additional last dimensions.  signed: whether elements may be negative.
    """

    extent: Extent
    dtype: torch.dtype | Literal["weight"] | None = None
    extra: tuple[int, ...] = ()
    signed: bool = True

    @property
    def held_as_asked(self) -> bool:
        """Returns whether it is stored as the user's `state_storage` says."""
        return self.extent == "full" and self.dtype is None


@dataclass(frozen=True)
class ParamSpec:
    """The decisions of a rule about a parameter before its first update. A rule may add fields.

    view: its dimensions as [batch, rows, cols].  states: by name.
    together: maximum number of small parameters of equal spec per stack; None: as many as fit.
    alike: number of consecutive slices of the batch whose sums are added.
    """

    view: View
    states: Mapping[str, StateSpec] = field(default_factory=dict, hash=False)
    together: int | None = None
    alike: int = 1


@dataclass(frozen=True)
class GroupNorms:
    """The gradients of a parameter group before the first update of a step, for a rule that clips by norm itself.

    norms: 2-norm of each gradient as the rule would read it, float32 [parameters], 0 for a missing gradient.
    total: the 2-norm over all groups, float32 scalar.  states: of each parameter, empty before its first update.
    frozen: the states of parameters that are now frozen.  memory: see `UpdateRule.group_memory`.
    """

    hyper: Hyper
    norms: Tensor
    total: Tensor
    states: Sequence[Mapping[str, Any]]
    frozen: Sequence[Mapping[str, Any]]
    memory: Mapping[str, Tensor]


@dataclass(frozen=True)
class GroupClip:
    """The result of `UpdateRule.clip_by_norm`.

    coef: float32 scalar that gradients of the group are multiplied by.  by_rule: updates read it as
    `sweep.rule_clip_coef` instead.  memory: the new memory of the group.
    """

    coef: Tensor
    by_rule: bool = False
    memory: Mapping[str, Tensor] = field(default_factory=dict)


class UpdateRule(ABC):
    """One optimizer, for one parameter, in float32, independent of device, dtype, tile, rank and placement.

    A subclass names its hyperparameters in `defaults` and is added to the table by `@register`. Small parameters of
    equal spec may be updated as one stack. The batch of `sweep.shape` then concatenates their batches, and states have
    an additional first dimension. A rule computes within each slice of the batch, or groups of slices by its spec.

    Attributes:
        name, source, keeps, exactness, defaults: for the table of rules.
        states: by name, for rules that view every parameter as one row. Other rules override `spec`.
        usual_lr: a learning rate for fine-tuning and its source, or empty.
        relative: for rules whose steps are relative to the size of the weights, the range of (learning rate · rms of
            the weights / AdamW's learning rate) that trains as AdamW does.
        checks: of hyperparameters, by name (`lowmem.rules.require`).
        decay: the name of its weight decay, if any.
        norm_option: the hyperparameter that makes the rule itself clip by norm (`clip_by_norm`), if any.
        elementwise: its update uses no sums over elements.
        materializes: it updates by `Sweep.materialized`, one parameter at a time. The device cannot undo such an
            update, so the host has to know before it whether the step is skipped.
        every_parameter: a parameter without gradient is updated as if its gradient were zero.
        norm_before_clip_value: clip_norm measures gradients before clip_value clamps them.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    keeps: ClassVar[str]
    exactness: ClassVar[str] = "not stated"
    usual_lr: ClassVar[tuple[Any, ...]] = ()
    relative: ClassVar[tuple[float, float] | None] = None
    defaults: ClassVar[dict[str, Any]]
    states: ClassVar[Mapping[str, StateSpec]] = {}
    checks: ClassVar[Mapping[str, Check]] = {}
    decay: ClassVar[str] = "weight_decay"
    norm_option: ClassVar[str] = ""
    elementwise: ClassVar[bool] = False
    materializes: ClassVar[bool] = False
    every_parameter: ClassVar[bool] = False
    norm_before_clip_value: ClassVar[bool] = False

    def equals(self, other: "UpdateRule") -> bool:
        """Returns whether another rule of this name gives the same updates."""
        return type(self) is type(other) and vars(self) == vars(other)

    def takes(self, key: str, of_group: bool) -> bool:
        """Returns whether it takes the hyperparameter `key`. of_group: of one group, not of all groups."""
        return key in self.defaults

    def check(self, hyper: Hyper) -> None:
        """Raises `ConfigError` for a hyperparameter that is out of range."""
        for option, check in self.checks.items():
            check(option, hyper[option])

    def adopt(self, hyper: Hyper, sharded: bool) -> None:  # noqa: B027 (most rules have nothing to try)
        """Raises `UnsupportedError` if it cannot update a new group of an optimizer, or shards of it if `sharded`."""

    def rounding(self, hyper: Hyper, dtype: torch.dtype) -> str:
        """Returns the rounding that "auto" stands for, for weights of a 16-bit dtype."""
        return "stochastic"

    def rates(self, weights: Iterable[Tensor], adamw: float = 2e-5) -> str:
        """Describes learning rates for fine-tuning these weights. adamw: AdamW's learning rate, by default TRL's."""
        words = "its usual rate is {:g} ({})".format(*self.usual_lr) if self.usual_lr else "its usual rate is unknown"
        if self.relative is None:
            return words
        matrices = (w.detach().float() for w in weights if w.ndim > 1 and w.is_floating_point())
        norms = [(float(torch.linalg.vector_norm(w)), w.numel()) for w in matrices]
        size = math.hypot(*(norm for norm, _ in norms)) / math.sqrt(sum(count for _, count in norms) or 1)
        if not size:  # the weights are sharded, or there are none
            return words
        least, most = (factor * adamw / size for factor in self.relative)
        return (
            f"{words}; AdamW's {adamw:g} corresponds to about {least:.2g} to {most:.2g} for weights with rms "
            f"{size:.2g}, as here"
        )

    def admit(self, name: str, param: Tensor, hyper: Hyper) -> None:
        """Raises `UnsupportedError` for a parameter that this rule cannot update."""
        if param.dtype not in STORED_DTYPES:
            raise UnsupportedError(
                f"is {param.dtype}, but rule {self.name!r} updates float32, bfloat16 and float16. Convert the "
                "parameter, or use a torch.optim class, which steps in the parameter's own dtype."
            )

    def end(self, hyper: Hyper) -> None:  # noqa: B027 (most rules keep nothing of a step)
        """Is called at the end of a step that was not skipped."""

    def takes_nonfinite(self, hyper: Hyper) -> bool:
        """Returns whether the rule itself handles Inf and NaN in a gradient, so that nothing is skipped."""
        return False

    def names(self, hyper: Hyper) -> Iterable[str]:
        """Returns the names of parameters in the hyperparameters. Each of them has to exist."""
        return ()

    def needs_norm(self, hyper: Hyper) -> str | None:
        """Returns the hyperparameter that needs the norm over all gradients before the first update, with its value."""
        value = hyper.get(self.norm_option)
        return f"{self.norm_option}={value!r}" if value else None

    def clip_by_norm(self, group: GroupNorms) -> GroupClip:
        """Clips a group that `needs_norm`, once per step. The new memory is discarded if the step is skipped."""
        raise AssertionError(f"{self.name} needs no norm")

    def group_memory(self, hyper: Hyper) -> dict[str, Tensor]:
        """Returns the initial float32 tensors that `clip_by_norm` stores for a group."""
        return {}

    def without_decay(self) -> dict[str, Any]:
        """Returns the hyperparameters of a group without weight decay, such as norms and biases."""
        return {self.decay: 0.0}

    def spec(self, name: str, shape: tuple[int, ...], hyper: Hyper) -> ParamSpec:
        """Returns the spec of the parameter `name` of `shape`, for `update`. Edits of the group that would change it
        raise an error.

        Raises:
            ConfigError: the hyperparameters do not cover this parameter, or are invalid for it.
        """
        return ParamSpec(View.vector(len(shape)), self.states)

    def unspecified_state(self, state: str, hyper: Hyper) -> Literal["full", "device", "host"] | None:
        """Returns the location of a state without a `StateSpec`: sharded like its parameter (`full`), or unsharded on
        the device or the host. None: the rule has no such state.
        """
        return None

    def scalars(self, hyper: Hyper, step: int) -> dict[str, float]:
        """Returns the numbers of a step, by the names under which `update` and tile functions read them
        (`Sweep.scalar`, `Tile.scalar`). It is called once per group and step, before anything is updated. A choice for
        the whole group is expressed by the presence of a number.

        Args:
            hyper: the parameter group, with `lr` as the scheduler left it.
            step: counts from 1.

        Raises:
            ConfigError: the hyperparameters do not fit this step.
        """
        return {}

    @abstractmethod
    def update(self, sweep: Sweep, spec: Any, state: State) -> Tensor | None:
        """Updates a parameter: any number of `sweep.reduce`, then a `sweep.apply`. Compiling traces it once for a kind
        of parameters and all steps, so it must depend on its arguments alone. It may branch on the presence of numbers.

        Returns:
            For a rule with `statistics`, the weights of the norms of gradients, float32 [members]; else None.
        """

    def statistics(
        self, names: Sequence[str], squares: Tensor, sizes: Tensor, groups: Sequence[tuple[Hyper, Mapping[str, Tensor]]]
    ) -> dict[str, float | str]:
        """Returns metrics of a step for the log.

        Args:
            names: the parameters that were updated.
            squares: squared norms of their unscaled gradients, float64 [parameters].
            sizes: results of `update` for them, float32 [parameters].
            groups: hyperparameters and memory of each group.
        """
        return {}


RuleClass = TypeVar("RuleClass", bound=type[UpdateRule])
TABLE: dict[str, type[UpdateRule]] = {}


def register(name: str) -> Callable[[RuleClass], RuleClass]:
    """Adds a rule to the table under `name`; raises `ConfigError` if the name is taken."""

    def enter(cls: RuleClass) -> RuleClass:
        if name in TABLE:
            raise ConfigError(f"rule {name!r} is already registered by {TABLE[name].__module__}. Choose another name")
        cls.name = name
        TABLE[name] = cls
        return cls

    return enter


def numbers(hyper: Hyper, **options: str) -> dict[str, float]:
    """Returns the hyperparameters that are not None, from name=option, by these names."""
    return {name: hyper[option] for name, option in options.items() if hyper[option] is not None}
