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
    clip_factor: what `clip_norm` multiplied every gradient with, a float32 scalar; None if nothing is clipped so.
    replay: what the second pass of `two_pass` was: "graph" or "forward".
    """

    step: int
    policy: str
    norms: Tensor
    names: tuple[str, ...]
    clip_factor: Tensor | None = None
    replay: str | None = None
    _scale: Tensor | None = None
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
    def loss_scale(self) -> float | None:
        """What its loss was multiplied with; None if there is no scaling."""
        return None if self._scale is None else float(self._scale)

    @property
    def nonfinite(self) -> list[str]:
        """Parameters whose gradient held Inf or NaN."""
        return [name for name, norm in zip(self.names, self.norms.tolist(), strict=True) if not math.isfinite(norm)]

    @property
    def held_back(self) -> bool:
        """Whether the step was left out as a whole, as an overflow does under `two_pass` and `deferred`."""
        return self.policy != "immediate" and bool(self.nonfinite)

    @property
    def skipped(self) -> int:
        """How many parameters were left untouched: all, or, under `immediate`, those that `nonfinite` names."""
        return len(self.names) if self.held_back else len(self.nonfinite)
