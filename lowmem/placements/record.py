"""A parameter and what the engine knows of it: its place, its hook, what rounding keeps for it."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from lowmem.errors import StepError
from lowmem.rules import Plan
from lowmem.tiles.layout import Layout, Span

# Parameters that are hooked: two optimizers on one would update it twice.
_HOOKED = WeakTensorKeyDictionary()


@dataclass
class ParamRecord:
    """One parameter of a `FusedOptimizer`.

    group: its parameter group, the live one that schedulers edit.  span: which elements of it are here.  plan, layout:
    how it is updated and in which rectangles, once hooked.  alike: equal for parameters that one stack may hold, by
    gradient dtype.  residual: what compensated rounding keeps.  square_sum: of
    its last gradient, a float32 scalar.  measured: what its rule measured in the last update.
    """

    name: str
    param: Tensor
    group: dict[str, Any]
    span: Span
    plan: Plan | None = None
    layout: Layout | None = None
    alike: dict[torch.dtype, int] = field(default_factory=dict)
    handle: RemovableHandle | None = None
    residual: Tensor | None = None
    square_sum: Tensor | None = None
    measured: Mapping[str, Tensor] = field(default_factory=dict)

    def attach(self, hook: Callable[["ParamRecord", Tensor], None]) -> None:
        """Hooks the parameter.

        Raises:
            StepError: another optimizer hooked it, or a gradient is left over in `.grad`.
        """
        if self.param in _HOOKED:
            raise StepError(
                f"parameter {self.name!r} is updated by another FusedOptimizer already, and would be updated twice; "
                "call remove() on that one first"
            )
        _HOOKED[self.param] = True
        self.handle = self.param.register_post_accumulate_grad_hook(functools.partial(hook, self))
        self.refuse_leftover()

    def detach(self) -> None:
        """Takes the hook away."""
        if self.handle is not None:
            self.handle.remove()
            self.handle = None
            del _HOOKED[self.param]

    def refuse_leftover(self) -> None:
        """Raises `StepError` if a hooked parameter holds a gradient that the next one would be added to."""
        if self.handle is not None and self.param.grad is not None:
            raise StepError(
                f"parameter {self.name!r} has a gradient in .grad already, which this step would add to its own. "
                "Call zero_grad() first; nothing can accumulate in .grad, because gradients are freed as they come."
            )


def listed(group: dict[str, Any], first: int) -> dict[str, Any]:
    """A parameter group whose `params` can be read more than once; numbered from `first`, if it has no names."""
    params = group["params"]
    params = [params] if isinstance(params, Tensor) else params if isinstance(params, set) else list(params)
    if "param_names" not in group and not any(isinstance(item, tuple) for item in params):
        params = [(f"param{first + i}", param) for i, param in enumerate(params)]
    return {**group, "params": params}
