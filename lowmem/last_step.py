"""What a step was: its norms, what was skipped, what the rule says of it. Nothing leaves the device until asked for."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LastStep:
    """What the last step was. The numbers stay on the device until they are asked for.

    norms: the 2-norm of each parameter's unscaled, unclipped gradient, float32 [parameters], in parameter order.
    names: the parameters that got a gradient, in the same order.
    """

    step: int
    policy: str
    loss_scale: float | None
    norms: Tensor
    names: tuple[str, ...]
    _describe: Callable[[], dict[str, float | str]] = dict

    @property
    def statistics(self) -> dict[str, float | str]:
        """What the rule itself has to say of the step, for the log; empty for most rules."""
        return self._describe()

    @property
    def grad_norm(self) -> Tensor:
        """The 2-norm over all gradients, a float32 scalar."""
        return torch.linalg.vector_norm(self.norms)

    @property
    def nonfinite(self) -> list[str]:
        """Parameters whose gradient held Inf or NaN. A rule of this package left them untouched."""
        return [name for name, norm in zip(self.names, self.norms.tolist(), strict=True) if not math.isfinite(norm)]

    @property
    def skipped(self) -> int:
        """How many parameters `nonfinite` names."""
        return len(self.nonfinite)
