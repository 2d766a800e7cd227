"""What a rule is: the mathematics of one optimizer for one parameter."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from lowmem.errors import ConfigError, UnsupportedError
from lowmem.tiles.layout import Extent, View
from lowmem.tiles.storage import STORED_DTYPES
from lowmem.tiles.sweep import Sweep

Hyper = Mapping[str, Any]
State = dict[str, Any]


@dataclass(frozen=True)
class StateSpec:
    """One state of a parameter, zero before its first update.

    extent: `full` has an element for each of the parameter's; `row`, `col` and `slice` have the parameter's batch
    dimensions and, in this order, its row dimensions, its column dimensions, or none.
    dtype: None for the weight's own.  extra: dimensions after those.
    master: a float32 copy of the weight, which is kept only where that is stored in fewer bits.
    """

    extent: Extent
    dtype: torch.dtype | None = torch.float32
    extra: tuple[int, ...] = ()
    master: bool = False


@dataclass(frozen=True)
class Plan:
    """What is settled for a parameter before its first update; a rule may add to it what it knows by name.

    view: its dimensions as [batch, rows, cols].  states: name → what is kept.
    together: at most so many small parameters of equal plan are updated as one stack; None: as many as fit.
    """

    view: View
    states: Mapping[str, StateSpec] = field(default_factory=dict, hash=False)
    together: int | None = None


@dataclass(frozen=True)
class GroupNorms:
    """What a rule's own clipping by norm may know of a parameter group, before the first update of a step.

    states: of each parameter, empty before its first update.  norms: 2-norm of each gradient as the rule would see it,
    float32 [parameters], 0 where there is none.  total: the 2-norm over all groups, a scalar.
    kept: what `OwnClip.kept` was in the step before.
    """

    hyper: Hyper
    norms: Tensor
    total: Tensor
    states: Sequence[Mapping[str, Any]]
    kept: Mapping[str, Tensor]


@dataclass(frozen=True)
class OwnClip:
    """What a rule's own clipping by norm says of a step.

    factor: float32 scalar that the engine multiplies gradients with; None: with nothing.  apart: float32 scalar that
    updates read as `sweep.own_clip`, and do with as they like.  kept: what is kept for the group.  before: what it was,
    or would have been, before this step.
    """

    factor: Tensor | None = None
    apart: Tensor | None = None
    kept: Mapping[str, Tensor] = field(default_factory=dict)
    before: Mapping[str, Tensor] = field(default_factory=dict)


class UpdateRule(ABC):
    """One optimizer, for one parameter, in float32. It never learns device, dtype, tile, rank or placement.

    A subclass names its hyperparameters in `defaults` and is entered into the table by `@register`.

    Small parameters of equal plan may come as one stack: `sweep.shape` then has the batches of all, one after the
    other, and states have a leading dimension. What a rule computes, it computes for each slice of the batch by itself,
    or within the groups of slices that its plan knows.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    keeps: ClassVar[str]
    exactness: ClassVar[str] = "not said"  # of what it is the equal, and to how much
    defaults: ClassVar[dict[str, Any]]
    decay: ClassVar[str] = "weight_decay"  # what its weight decay is called, if it has one
    open_ended: ClassVar[bool] = False  # takes hyperparameters beyond `defaults`
    stackable: ClassVar[bool] = True  # small parameters of equal plan may be updated as one stack
    every_parameter: ClassVar[bool] = False  # one that gets no gradient is updated as if it were zero
    norm_before_clip_value: ClassVar[bool] = False  # clip_norm measures gradients before clip_value clamps them
    can_be_held_back: ClassVar[bool] = True  # an update can be undone on the device, before anybody knows

    @abstractmethod
    def check(self, hyper: Hyper) -> None:
        """Raises `ConfigError` for a hyperparameter outside its range."""

    def admit(self, param: Tensor, hyper: Hyper) -> None:
        """Raises `UnsupportedError` for a parameter that this rule cannot update."""
        if param.dtype not in STORED_DTYPES:
            raise UnsupportedError(
                f"is {param.dtype}; rule {self.name!r} updates float32, bfloat16 and float16. Convert the parameter, "
                "or use a torch.optim class, which steps in the parameter's own dtype."
            )

    def begin(self, hyper: Hyper, step: int) -> None:  # noqa: B027 (most have nothing against any step)
        """Raises `ConfigError` for hyperparameters that do not fit the step that begins; nothing has moved yet."""

    def names(self, hyper: Hyper) -> Iterable[str]:
        """The parameters that hyperparameters name; each has to exist."""
        return ()

    def needs_norm(self, hyper: Hyper) -> str | None:
        """The hyperparameter, with its value, that needs the norm of the whole gradient before the first update."""
        return None

    def clip_by_norm(self, group: GroupNorms) -> OwnClip:
        """The rule's own clipping of a group that `needs_norm`, once a step."""
        raise AssertionError(f"{self.name} needs no norm")

    def group_kept(self, hyper: Hyper) -> Mapping[str, tuple[int, ...]]:
        """Shapes of what `clip_by_norm` keeps for a group, float32, by name."""
        return {}

    def without_decay(self) -> dict[str, Any]:
        """The hyperparameters of a group whose weights are not to decay, as norms and biases."""
        return {self.decay: 0.0}

    @abstractmethod
    def plan(self, name: str, shape: tuple[int, ...], hyper: Hyper) -> Plan:
        """How the parameter `name` of `shape` is updated; `update` is given it.

        Raises:
            ConfigError: the hyperparameters say nothing, or something impossible, for this parameter.
        """

    def is_full(self, state: str, plan: Any) -> bool:
        """Whether a state has an element for each of its parameter's."""
        return state in plan.states and plan.states[state].extent == "full"

    def refuse_pieces(self, hyper: Hyper) -> None:  # noqa: B027 (what is written as reduce and apply updates any piece)
        """Raises `UnsupportedError` if ranks that hold a piece of a parameter each cannot update it."""

    @abstractmethod
    def update(self, sweep: Sweep, plan: Any, state: State, hyper: Hyper, step: int) -> Mapping[str, Tensor] | None:
        """One update. `step` counts from 1; `hyper` is the parameter group, its `lr` as the scheduler left it.

        Returns:
            Measurements of each stacked parameter, float32 [members] by name, for `statistics`; None for none.
        """

    def statistics(
        self, names: Sequence[str], measured: Mapping[str, Tensor], kept: Sequence[Mapping[str, Tensor]]
    ) -> dict[str, float | str]:
        """What the log says of a step.

        Args:
            names, measured: what `update` returned, [parameters], in the order of `names`.
            kept: what `clip_by_norm` has kept for each group that it clips.
        """
        return {}


RuleClass = TypeVar("RuleClass", bound=type[UpdateRule])
TABLE: dict[str, type[UpdateRule]] = {}


def register(name: str) -> Callable[[RuleClass], RuleClass]:
    """Enters a rule into the table under `name`; raises `ConfigError` if the name is taken."""

    def enter(cls: RuleClass) -> RuleClass:
        if name in TABLE:
            raise ConfigError(f"rule {name!r} is registered already, by {TABLE[name].__module__}; take another name")
        cls.name = name
        TABLE[name] = cls
        return cls

    return enter


def rms(square_sum: Tensor, count: int) -> Tensor:
    """Root of the mean square of `count` elements."""
    return (square_sum / count).sqrt()


def next_count(sweep: Sweep, state: State) -> Tensor:
    """Counts an update in the state `step` and returns the count, this update included, int64 [members].

    It is kept on the device: an update that the guard holds back does not count, and nobody has to wait to know.
    """
    count: Tensor = state["step"] + 1
    sweep.store(state["step"], count)
    return count.view(-1)


def power(base: float, exponent: Tensor) -> Tensor:
    """base^exponent in float64, the same bits for each element as Python's own, however many there are.

    torch computes contiguous tensors on a CPU with vector instructions, which round otherwise, but for the last few.
    """
    apart = exponent.double().unsqueeze(-1).expand(*exponent.shape, 2).contiguous()[..., 0]
    return torch.pow(base, apart)
