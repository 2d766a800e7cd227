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

# Keys of a parameter group that are not hyperparameters: those of torch, of its schedulers and of this package.
GROUP_KEYS = frozenset(("params", "param_names", "name", "initial_lr", "max_lr", "min_lr", *ENGINE_KEYS))


@dataclass(frozen=True)
class StateSpec:
    """One state of a parameter; it is zero before the first update.

    extent: `full` has an element per element of the parameter; `row`, `col` and `slice` have the parameter's batch
    dimensions and, in this order, its row dimensions, its column dimensions, or none.
    dtype: None is the user's `state_storage` where the extent is `full`, else float32. A dtype is part of the rule,
    rounded to the nearest value; "weight" is the dtype of the weight.
    extra: dimensions after those of the extent.  signed: whether elements may be negative.
    """

    extent: Extent
    dtype: torch.dtype | Literal["weight"] | None = None
    extra: tuple[int, ...] = ()
    signed: bool = True

    @property
    def held_as_asked(self) -> bool:
        """Returns whether the user's `state_storage` holds it."""
        return self.extent == "full" and self.dtype is None


@dataclass(frozen=True)
class ParamSpec:
    """The decisions of a rule about a parameter before its first update. A rule may add fields.

    view: its dimensions as [batch, rows, cols].  states: by name.
    together: the most small parameters of equal spec that are updated as one stack; None: as many as fit.
    """

    view: View
    states: Mapping[str, StateSpec] = field(default_factory=dict, hash=False)
    together: int | None = None


@dataclass(frozen=True)
class GroupNorms:
    """The gradients of a parameter group before the first update of a step, for a rule that clips by norm itself.

    norms: 2-norm of each gradient as the rule would read it, float32 [parameters], 0 where there is none.
    total: the 2-norm over all groups, float32 scalar.  states: of each parameter, empty before its first update.
    frozen: the states of parameters that are frozen by now.  memory: see `UpdateRule.group_memory`.
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

    coef: float32 scalar that gradients of the group are multiplied by.  by_rule: it does not multiply gradients, and
    updates read it as `sweep.rule_clip_coef`.  memory: the new one of the group.
    """

    coef: Tensor
    by_rule: bool = False
    memory: Mapping[str, Tensor] = field(default_factory=dict)


class UpdateRule(ABC):
    """One optimizer, for one parameter, in float32, whatever the device, dtype, tile, rank and placement.

    A subclass names its hyperparameters in `defaults` and is added to the table by `@register`. Small parameters of
    equal spec may be updated as one stack: `sweep.shape` then has the batches of all of them, one after the other, and
    states have a leading dimension. A rule computes within each slice of the batch, or groups of slices by its spec.

    Attributes:
        name, source, keeps, exactness, defaults: for the table of rules.
        states: by name, the same for each parameter, which is one row; a rule with others overrides `spec`.
        usual_lr: a learning rate for fine-tuning, and where it is from; empty if none is usual.
        relative: where its steps are relative to the size of the weights, the range of its rate that gives what AdamW's
            gives, times the rms of the weights and over AdamW's rate.
        checks: of hyperparameters, by name (`lowmem.rules.require`).
        decay: the name of its weight decay, if it has one.
        norm_option: the name of the hyperparameter that makes it clip by norm itself (`clip_by_norm`), if it has one.
        elementwise: its update of a shard takes nothing that is summed over elements.
        materializes: it updates by `Sweep.materialized`, one parameter at a time, and in a way that cannot be undone on
            the device: the host has to know before that the step is not skipped.
        every_parameter: a parameter without gradient is updated as if its gradient were zero.
        norm_before_clip_value: clip_norm measures gradients before clip_value clamps them.
        sums_squares: its states are of no use once squares of the gradient, or their sum, overflow float32 (a norm of
            9e18). A parameter with such a gradient is left as it is.
        needs_dense_gradient: it reads the gradient as one tensor, or after it has written the parameter. Others can
            read one that is computed, block by block, in every pass.
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
    sums_squares: ClassVar[bool] = False
    needs_dense_gradient: ClassVar[bool] = False

    @property
    def state_bytes(self) -> float:
        """Bytes of the states of its spec per element of a 4096 × 4096 bfloat16 parameter, with its defaults."""
        shape, nbytes = (4096, 4096), 0
        spec = self.spec("", shape, {**self.defaults, "rounding": "auto"})
        for state in spec.states.values():
            dtype = torch.bfloat16 if state.dtype == "weight" else state.dtype or torch.float32
            nbytes += math.prod(spec.view.state_shape(state.extent, shape) + state.extra) * dtype.itemsize
        return nbytes / math.prod(shape)

    def equals(self, other: "UpdateRule") -> bool:
        """Returns whether a rule of this name updates as this one does."""
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
        """The rounding of weights of a 16-bit `dtype` where that of the group is "auto"."""
        return "stochastic"

    def rates(self, weights: Iterable[Tensor], adamw: float = 2e-5) -> str:
        """Learning rates for fine-tuning these weights, where AdamW would be given `adamw`, as by TRL; in words."""
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
        """A step has ended that was not skipped."""

    def takes_nonfinite(self, hyper: Hyper) -> bool:
        """Returns whether it says itself what Inf and NaN in a gradient do, so that they skip neither parameter nor
        step.
        """
        return False

    def names(self, hyper: Hyper) -> Iterable[str]:
        """Names of parameters in the hyperparameters; each has to exist."""
        return ()

    def needs_norm(self, hyper: Hyper) -> str | None:
        """The hyperparameter, with its value, that needs the norm over all gradients before the first update."""
        value = hyper.get(self.norm_option)
        return f"{self.norm_option}={value!r}" if value else None

    def clip_by_norm(self, group: GroupNorms) -> GroupClip:
        """Clips a group that `needs_norm`, once per step. The memory of a skipped step is dropped."""
        raise AssertionError(f"{self.name} needs no norm")

    def group_memory(self, hyper: Hyper) -> dict[str, Tensor]:
        """Tensors that `clip_by_norm` keeps for a group, float32, as they are before the first step."""
        return {}

    def without_decay(self) -> dict[str, Any]:
        """The hyperparameters of a group whose weights do not decay, such as norms and biases."""
        return {self.decay: 0.0}

    def spec(self, name: str, shape: tuple[int, ...], hyper: Hyper) -> ParamSpec:
        """Decides how the parameter `name` of `shape` is updated; `update` receives it. Edits of the group that would
        change it are refused.

        Raises:
            ConfigError: the hyperparameters do not cover this parameter, or are impossible for it.
        """
        return ParamSpec(View.vector(len(shape)), self.states)

    def unspecified_state(self, state: str, hyper: Hyper) -> Literal["full", "device", "host"] | None:
        """Where a state that no `StateSpec` names is held: sharded as its parameter is (`full`), or as it is, on the
        device or on the host. None: there is no such state.
        """
        return None

    def scalars(self, hyper: Hyper, step: int) -> dict[str, float]:
        """The numbers of a step, by the names under which `update` and tile functions read them (`Sweep.scalar`,
        `Tile.scalar`). It is called once per group and step, before anything is updated. A choice for the whole group
        is a number that is there or not.

        Args:
            hyper: the parameter group, with `lr` as the scheduler left it.
            step: counts from 1.

        Raises:
            ConfigError: the hyperparameters do not fit this step.
        """
        return {}

    @abstractmethod
    def update(self, sweep: Sweep, spec: Any, state: State) -> Tensor | None:
        """One update, by the numbers that `scalars` returned. Where code is compiled it is traced once, for all
        parameters of a kind and all steps, so it depends on its arguments alone; it may ask which numbers there are.

        Returns:
            For a rule with `statistics`, the size that the norm of each stacked gradient is weighted by, float32
            [members]; else None.
        """

    def statistics(
        self, names: Sequence[str], squares: Tensor, sizes: Tensor, groups: Sequence[tuple[Hyper, Mapping[str, Tensor]]]
    ) -> dict[str, float | str]:
        """Metrics of a step for the log.

        Args:
            names: the parameters that were updated.
            squares: of the norms of their unscaled gradients, float32 [parameters].
            sizes: what `update` returned for them, float32 [parameters].
            groups: hyperparameters and memory of each group.
        """
        return {}


class Watched(dict[str, Any]):
    """A parameter group that notes which of its keys are read."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        super().__init__(items)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


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
    """The hyperparameters among these that are not None, by other names."""
    return {name: hyper[option] for name, option in options.items() if hyper[option] is not None}
