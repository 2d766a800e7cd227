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
    """Specification of one optimizer-state tensor of a parameter. The state is zero before the first update.

    Extent `full` has the shape of the parameter. `row`, `col` and `slice` have its batch dimensions, followed by its
    row dimensions, its column dimensions, or nothing. Dtype None is the user's `state_storage` if the extent is `full`,
    and float32 otherwise. If the rule sets a dtype, values are rounded to nearest.
    """

    extent: Extent
    dtype: torch.dtype | Literal["weight"] | None = None  # "weight": the dtype of the weight
    extra: tuple[int, ...] = ()  # additional trailing dimensions
    signed: bool = True  # whether elements may be negative

    @property
    def follows_state_storage(self) -> bool:
        """True if the option `state_storage` applies to this state."""
        return self.extent == "full" and self.dtype is None


@dataclass(frozen=True)
class ParamSpec:
    """Specification of how a rule updates one parameter, fixed before its first update. A rule may add fields."""

    view: View  # the parameter's dimensions as [batch, rows, cols]
    states: Mapping[str, StateSpec] = field(default_factory=dict, hash=False)  # by name
    together: int | None = None  # maximum number of small parameters with equal spec per stack; None: as many as fit
    alike: int = 1  # number of consecutive batch slices whose sums are added


@dataclass(frozen=True)
class GroupNorms:
    """Gradient norms of a parameter group before the first update of a step, for a rule that clips by norm itself."""

    hyper: Hyper  # the parameter group
    norms: Tensor  # of each gradient as the rule would read it, float32 [parameters]; 0 for a missing gradient
    total: Tensor  # norm over all groups, float32 scalar
    states: Sequence[Mapping[str, Any]]  # of each parameter, empty before its first update
    frozen: Sequence[Mapping[str, Any]]  # states of parameters that are now frozen
    memory: Mapping[str, Tensor]  # see `UpdateRule.group_memory`


@dataclass(frozen=True)
class GroupClip:
    """The result of `UpdateRule.clip_by_norm`."""

    coef: Tensor  # clip coefficient of the group, float32 scalar
    by_rule: bool = False  # the rule multiplies gradients by `coef` (`sweep.rule_clip_coef`), instead of the engine
    memory: Mapping[str, Tensor] = field(default_factory=dict)  # the new memory of the group


class UpdateRule(ABC):
    """One optimizer for one parameter, in float32, independent of device, dtype, tile, rank and placement.

    A subclass lists its hyperparameters in `defaults` and is added to the table by `@register`. Small parameters with
    equal spec may be updated as one stack: the batch of `sweep.shape` then concatenates their batches, and states have
    an additional first dimension. A rule computes within each batch slice, or within the groups of slices in its spec.

    Attributes:
        name, source, keeps, exactness, defaults: columns of the table of rules.
        states: states by name, for rules that view every parameter as one row. Other rules override `spec`.
        usual_lr: a learning rate for fine-tuning and its source, or empty.
        relative: (min, max) of a factor f: lr = f · AdamW's lr / rms(weights) matches AdamW. Only for rules whose steps
            are relative to the size of the weights.
        checks: checks of hyperparameters, by name (`lowmem.rules.require`).
        decay: the name of the hyperparameter for weight decay.
        norm_option: the hyperparameter that makes the rule itself clip by norm (`clip_by_norm`), if any.
        elementwise: whether each element is updated independently of the others.
        materializes: whether the rule updates with `Sweep.materialized`, one parameter at a time. Such an update cannot
            be undone on the device, so the host must know before it whether the step is skipped.
        every_parameter: whether a parameter without a gradient is updated as if its gradient were zero.
        norm_before_clip_value: whether clip_norm measures gradients before clip_value clamps them.
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
        """Returns whether another rule with this name gives the same updates."""
        return type(self) is type(other) and vars(self) == vars(other)

    def takes(self, key: str, of_group: bool) -> bool:
        """Returns whether the rule has the hyperparameter `key`. of_group: it is set for one group, not for all."""
        return key in self.defaults

    def check(self, hyper: Hyper) -> None:
        """Raises `ConfigError` for a hyperparameter that is out of range."""
        for option, check in self.checks.items():
            check(option, hyper[option])

    def adopt(self, hyper: Hyper, sharded: bool) -> None:  # noqa: B027 (most rules have nothing to try)
        """Raises `UnsupportedError` if the rule cannot update a new group, or its shards if `sharded`."""

    def rounding(self, hyper: Hyper, dtype: torch.dtype) -> str:
        """Returns the rounding that "auto" selects for weights of a 16-bit dtype."""
        return "stochastic"

    def admit(self, name: str, param: Tensor, hyper: Hyper) -> None:
        """Raises `UnsupportedError` if this rule cannot update the parameter."""
        if param.dtype not in STORED_DTYPES:
            raise UnsupportedError(
                f"is {param.dtype}, but rule {self.name!r} only updates float32, bfloat16 and float16. Convert the "
                "parameter, or use a torch.optim class, which computes in the dtype of the parameter."
            )

    def end(self, hyper: Hyper) -> None:  # noqa: B027 (most rules have nothing to do)
        """Called at the end of every step that is not skipped."""

    def handles_nonfinite(self, hyper: Hyper) -> bool:
        """Returns whether the rule handles Inf and NaN in gradients itself, so that no step is skipped."""
        return False

    def names(self, hyper: Hyper) -> Iterable[str]:
        """Returns the parameter names that the hyperparameters mention. Each of them must exist."""
        return ()

    def needs_norm(self, hyper: Hyper) -> str | None:
        """Returns "option=value" if that option needs the norm over all gradients before the first update, or None."""
        value = hyper.get(self.norm_option)
        return f"{self.norm_option}={value!r}" if value else None

    def clip_by_norm(self, group: GroupNorms) -> GroupClip:
        """Clips a group whose rule `needs_norm`, once per step. The new memory is discarded if the step is skipped."""
        raise AssertionError(f"{self.name} does not clip by norm")

    def group_memory(self, hyper: Hyper) -> dict[str, Tensor]:
        """Returns the initial values of the float32 tensors that `clip_by_norm` stores for a group."""
        return {}

    def without_decay(self) -> dict[str, Any]:
        """Returns the hyperparameters that disable weight decay, for groups such as norms and biases."""
        return {self.decay: 0.0}

    def spec(self, name: str, shape: tuple[int, ...], hyper: Hyper) -> ParamSpec:
        """Returns the spec of the parameter `name` with shape `shape`, which is passed to `update`. Editing the group
        so that the spec would change raises an error.

        Raises:
            ConfigError: the hyperparameters do not cover this parameter, or are invalid for it.
        """
        return ParamSpec(View.vector(len(shape)), self.states)

    def unspecified_state(self, state: str, hyper: Hyper) -> Literal["full", "device", "host"] | None:
        """Returns where a state without a `StateSpec` is stored: sharded like its parameter (`full`), or unsharded on
        the device or the host. Returns None if the rule has no such state.
        """
        return None

    def scalars(self, hyper: Hyper, step: int) -> dict[str, float]:
        """Returns the numbers of a step by name. `update` reads them as `Sweep.scalar`, tile functions as
        `Tile.scalar`. Called once per group and step, before any update. To make a choice for the whole group, include
        or omit a number.

        Args:
            hyper: the parameter group, with the scheduler's current `lr`.
            step: the number of the step, from 1.

        Raises:
            ConfigError: the hyperparameters are invalid for this step.
        """
        return {}

    @abstractmethod
    def update(self, sweep: Sweep, spec: Any, state: State) -> Tensor | None:
        """Updates a parameter with any number of `sweep.reduce` calls and then one `sweep.apply`. Compilation traces it
        once for a kind of parameters and all steps, so it may depend on its arguments only. It may branch on whether a
        number is present. Returns the factors of the gradient norms for `statistics`, float32 [members], or None.
        """

    def statistics(
        self, names: Sequence[str], squares: Tensor, sizes: Tensor, groups: Sequence[tuple[Hyper, Mapping[str, Tensor]]]
    ) -> dict[str, float | str]:
        """Returns metrics of a step for the log.

        Args:
            names: the parameters that were updated.
            squares: squared norms of their unscaled gradients, float64 [parameters].
            sizes: the values that `update` returned for them, float32 [parameters].
            groups: the hyperparameters and the memory of each group.
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
    """Returns {name: hyper[option]} for each name=option whose value is not None."""
    return {name: hyper[option] for name, option in options.items() if hyper[option] is not None}


def describe_rates(rule: UpdateRule, weights: Iterable[Tensor], adamw: float = 2e-5) -> str:
    """Describes learning rates for fine-tuning these weights. adamw: AdamW's learning rate, by default TRL's."""
    usual = "its usual rate is unknown"
    if rule.usual_lr:
        usual = "its usual rate is {:g} ({})".format(*rule.usual_lr)
    if rule.relative is None:
        return usual
    matrices = (w.detach().float() for w in weights if w.ndim > 1 and w.is_floating_point())
    norms = [(float(torch.linalg.vector_norm(w)), w.numel()) for w in matrices]
    size = math.hypot(*(norm for norm, _ in norms)) / math.sqrt(sum(count for _, count in norms) or 1)
    if not size:  # the weights are sharded, or there are none
        return usual
    low, high = (factor * adamw / size for factor in rule.relative)
    corresponds = f"corresponds to about {low:.2g} to {high:.2g} for these weights (rms {size:.2g})"
    return f"{usual}; AdamW's {adamw:g} {corresponds}"
