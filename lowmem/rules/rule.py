"""What a rule is: the mathematics of one optimizer for one parameter."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from lowmem.errors import ConfigError, UnsupportedError
from lowmem.rounding import STORED_DTYPES
from lowmem.sweep import Sweep

Hyper = Mapping[str, Any]
State = dict[str, Any]


@dataclass(frozen=True)
class StateSpec:
    """One state of a parameter seen as [batch, rows, cols].

    extent: `full` has an element for each of the parameter's, `row` one for each of [batch, rows], `col` one for each
    of [batch, cols].  shape: the logical shape it is kept and saved in.
    """

    extent: Literal["full", "row", "col"]
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


class UpdateRule(ABC):
    """One optimizer, for one parameter, in float32. It never learns device, dtype, tile, rank or placement.

    A subclass names its hyperparameters in `defaults` and is entered into the table by `@register`.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    keeps: ClassVar[str]
    defaults: ClassVar[dict[str, Any]]
    open_ended: ClassVar[bool] = False  # takes hyperparameters beyond `defaults`

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

    def view(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """A parameter's shape as [batch, rows, cols].

        A vector is one row, three dimensions are a stack of matrices (experts), and a convolution is the matrix that it
        multiplies its patches with, [out, in * kernel].
        """
        if len(shape) < 2:
            return 1, 1, math.prod(shape)
        if len(shape) == 3:
            return shape[0], shape[1], shape[2]
        return 1, shape[0], math.prod(shape[1:])

    @abstractmethod
    def states(self, shape: tuple[int, ...], hyper: Hyper) -> dict[str, StateSpec]:
        """The states of a parameter of `shape`, all zero before its first update."""

    @abstractmethod
    def update(self, sweep: Sweep, state: State, hyper: Hyper, step: int) -> None:
        """One update. `step` counts from 1; `hyper` is the parameter group, its `lr` as the scheduler left it."""


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


def require(condition: bool, option: str, value: object, allowed: str) -> None:
    """Raises `ConfigError` naming the hyperparameter, its value and what is allowed, unless `condition` holds."""
    if not condition:
        raise ConfigError(f"{option}={value!r} is out of range; allowed: {allowed}")


def require_number(option: str, value: object, *, above: float | None = None, least: float | None = None) -> None:
    """`require` for a finite number, greater than `above` or at least `least`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    bound = f"a number > {above}" if above is not None else f"a number >= {least}" if least is not None else "a number"
    require(is_number, option, value, bound)
    assert isinstance(value, int | float)
    require((above is None or value > above) and (least is None or value >= least), option, value, bound)


def rms(square_sum: Tensor, count: int) -> Tensor:
    """Root of the mean square of `count` elements."""
    return (square_sum / count).sqrt()
