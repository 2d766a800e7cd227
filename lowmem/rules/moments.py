"""Running means of g and g² with bias correction, for Adam and similar rules."""

import torch
from torch import Tensor

from lowmem.rules.rule import State, StateSpec
from lowmem.tiles.sweep import Sweep


def averages(beta1: float, beta2: float) -> dict[str, float]:
    """Returns the coefficients of the old and the new value in two running means."""
    return {"beta1": beta1, "gain1": 1.0 - beta1, "beta2": beta2, "gain2": 1.0 - beta2}


def moment_states(mean: str, square: str) -> dict[str, StateSpec]:
    """Returns the specs of the running means of g and g², and of `step`, which counts updates."""
    return {"step": StateSpec("slice", torch.int64), mean: StateSpec("full"), square: StateSpec("full", signed=False)}


def next_count(sweep: Sweep, state: State) -> Tensor:
    """Increments the state `step` and returns the count of updates including this one, int64 [members].

    Skipped updates are not counted. The count stays on the device, so the host does not synchronize.
    """
    count: Tensor = state["step"] + 1
    sweep.store(state["step"], count)
    return count.view(-1)


def correction(beta: Tensor, count: Tensor) -> Tensor:
    """Returns 1 - beta^count in float64, equal to Python's pow bit for bit. beta: scalar.  count: int64 [members]."""
    # torch's vectorized pow rounds differently
    strided = count.double().unsqueeze(-1).expand(*count.shape, 2).contiguous()[..., 0]
    return 1.0 - torch.pow(beta, strided)
