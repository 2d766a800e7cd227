"""Lion: sign of an interpolation of momentum and gradient (Chen et al. 2023, arXiv:2302.06675)."""

from typing import ClassVar

import torch
from torch import Tensor

from lowmem.rules import require
from lowmem.rules.moments import averages
from lowmem.rules.rule import Hyper, ParamSpec, State, StateSpec, UpdateRule, register
from lowmem.tiles.sweep import Sweep
from lowmem.tiles.tile import Tile


def new_values(t: Tile) -> dict[str, Tensor]:
    ahead = t.full.exp_avg * t.scalar.beta1 + t.grad * t.scalar.gain1
    mean = t.full.exp_avg * t.scalar.beta2 + t.grad * t.scalar.gain2
    return {"param": torch.addcmul(t.param * t.scalar.keep, ahead.sign(), t.scalar.step), "exp_avg": mean}


@register("lion")
class Lion(UpdateRule):
    """w ← (1 - lr·weight_decay)·w - lr·sign(β₁m + (1-β₁)g), then m ← β₂m + (1-β₂)g."""

    source = "Chen et al. 2023, arXiv:2302.06675"
    keeps = "mean of g"
    exactness = "its paper's formula, to 1e-6 in float32"
    usual_lr = (1e-5, "measured: docs/how-to/choosing.md")
    states: ClassVar = {"exp_avg": StateSpec("full")}
    elementwise = True
    defaults, checks = require.hyperparameters(
        lr=(1e-4, require.number(">= 0")),
        betas=((0.9, 0.99), require.betas),
        weight_decay=(0.0, require.number(">= 0")),
    )

    def scalars(self, hyper: Hyper, step: int) -> dict[str, float]:
        return averages(*hyper["betas"]) | {"keep": 1.0 - hyper["lr"] * hyper["weight_decay"], "step": -hyper["lr"]}

    def update(self, sweep: Sweep, spec: ParamSpec, state: State) -> None:
        sweep.apply(new_values, full={"exp_avg": state["exp_avg"]})
