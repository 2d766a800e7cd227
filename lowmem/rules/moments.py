"""Running means of g and g², and the correction of their bias: what Adam and its kin have in common."""

import torch
from torch import Tensor

from lowmem.rules.rule import State, StateSpec
from lowmem.tiles.sweep import Sweep


def averages(beta1: float, beta2: float) -> dict[str, float]:
    """The weights of the old value and of the new one in two running means."""
    return {"beta1": beta1, "gain1": 1.0 - beta1, "beta2": beta2, "gain2": 1.0 - beta2}


def moment_states(mean: str, square: str) -> dict[str, StateSpec]:
    """The states of a running mean of g and one of g², and a count of updates, `step`."""
    return {"step": StateSpec("slice", torch.int64), mean: StateSpec("full"), square: StateSpec("full", signed=False)}


def next_count(sweep: Sweep, state: State) -> Tensor:
    """Counts an update in the state `step` and returns the count with this update, int64 [members].

    The count is on the device: a skipped update does not count, and the host does not wait to know.
    """
    count: Tensor = state["step"] + 1
    sweep.store(state["step"], count)
    return count.view(-1)


def correction(beta: Tensor, count: Tensor) -> Tensor:
    """1 - beta^count in float64, to the bits of Python; torch's vector code rounds differently. beta: a scalar."""
    strided = count.double().unsqueeze(-1).expand(*count.shape, 2).contiguous()[..., 0]
    return 1.0 - torch.pow(beta, strided)
