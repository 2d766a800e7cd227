"""LOMO: stochastic gradient descent, fused into backward (arXiv:2306.09782)."""

import torch
from torch import Tensor

from lowmem.rules import require
from lowmem.rules.rule import Hyper, ParamSpec, State, UpdateRule, register
from lowmem.tiles.sweep import Sweep
from lowmem.tiles.tile import Tile


def new_values(t: Tile) -> dict[str, Tensor]:
    return {"param": torch.addcmul(t.param * t.scalar.keep, t.grad, t.scalar.step)}


@register("lomo")
class Lomo(UpdateRule):
    """w ← (1 - lr·weight_decay)·w - lr·g, without optimizer states.

    In float32 without weight decay it equals `torch.optim.SGD`, bit for bit on the CPU.
    """

    source = "Lv et al. 2023, arXiv:2306.09782"
    keeps = "none"
    exactness = "torch.optim.SGD without weight decay, bit for bit in float32"
    usual_lr = (1e-2, "with clip_norm=1; its authors use 3e-2: docs/how-to/choosing.md")
    elementwise = True
    defaults, checks = require.hyperparameters(
        lr=(1e-3, require.number(">= 0")),
        weight_decay=(0.0, require.number(">= 0")),
    )

    def scalars(self, hyper: Hyper, step: int) -> dict[str, float]:
        return {"keep": 1.0 - hyper["lr"] * hyper["weight_decay"], "step": -hyper["lr"]}

    def update(self, sweep: Sweep, spec: ParamSpec, state: State) -> None:
        sweep.apply(new_values)
