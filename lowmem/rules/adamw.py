"""AdamW: Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101)."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from lowmem.rules import require
from lowmem.rules.rule import Hyper, ParamSpec, State, StateSpec, UpdateRule, next_count, power, register
from lowmem.tiles.layout import View
from lowmem.tiles.sweep import Sweep
from lowmem.tiles.tile import Tile


def moved(t: Tile) -> dict[str, Tensor]:
    mean = torch.lerp(t.full.exp_avg, t.grad, t.scalar.gain1)
    square = torch.addcmul(t.full.exp_avg_sq * t.scalar.beta2, t.grad * t.scalar.gain2, t.grad)
    scale = square.sqrt() / t.scalar.root_correction2 + t.scalar.eps
    param = torch.addcdiv(t.param * t.scalar.keep, mean * t.scalar.step, scale)
    return {"param": param, "exp_avg": mean, "exp_avg_sq": square}


@register("adamw")
class AdamW(UpdateRule):
    """m ← β₁m + (1-β₁)g, v ← β₂v + (1-β₂)g²; w ← (1 - lr·weight_decay)·w - lr·m̂ / (√v̂ + eps), with m̂ = m/(1-β₁^t) and
    v̂ = v/(1-β₂^t), t counting the parameter's own updates.

    In float32 this is `torch.optim.AdamW(foreach=False)`, bit for bit on the CPU where the sweep is not compiled.

    Options: `betas` in [0, 1), `eps` ≥ 0, `weight_decay` ≥ 0.
    """

    source = "Loshchilov and Hutter 2019, arXiv:1711.05101"
    keeps = "means of g and g²"
    exactness = "torch.optim.AdamW(foreach=False), bit for bit in float32"
    defaults: ClassVar[dict[str, Any]] = {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.01,
    }

    def check(self, hyper: Hyper) -> None:
        require.number("lr", hyper["lr"], least=0)
        require.betas("betas", hyper["betas"])
        require.number("eps", hyper["eps"], least=0)
        require.number("weight_decay", hyper["weight_decay"], least=0)

    def spec(self, name: str, shape: tuple[int, ...], hyper: Hyper) -> ParamSpec:
        states = {
            "step": StateSpec("slice", torch.int64),
            "exp_avg": StateSpec("full"),
            "exp_avg_sq": StateSpec("full", signed=False),
        }
        return ParamSpec(View.vector(len(shape)), states)

    def update(self, sweep: Sweep, spec: ParamSpec, state: State, hyper: Hyper, step: int) -> None:
        beta1, beta2 = hyper["betas"]
        lr = hyper["lr"]
        count = next_count(sweep, state)
        scalar = {
            "gain1": 1.0 - beta1,
            "beta2": beta2,
            "gain2": 1.0 - beta2,
            "root_correction2": (1.0 - power(beta2, count)).sqrt().float(),
            "eps": hyper["eps"],
            "keep": 1.0 - lr * hyper["weight_decay"],
            "step": (-lr / (1.0 - power(beta1, count))).float(),
        }
        full = {name: state[name] for name in ("exp_avg", "exp_avg_sq")}
        sweep.apply(moved, full=full, scalar=scalar)
