"""LANS: normalized gradients and two trust ratios (Zheng et al. 2020, arXiv:2006.13484; MXNet's `lans.py`)."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowmem.rules import require
from lowmem.rules.moments import averages, correction, moment_states, next_count
from lowmem.rules.rule import Hyper, ParamSpec, State, UpdateRule, numbers, register
from lowmem.tiles.layout import View
from lowmem.tiles.sweep import Sweep
from lowmem.tiles.tile import Sums, Tile

# Squares of gradients below 1e-19 underflow in float32, so gradients are multiplied by this first.
_MAGNIFIED = 2.0**64


def norms(t: Tile) -> Sums:
    """Returns the sums of squares of the gradient, the magnified gradient, the weight and the stored weight."""
    grads = {"grad": t.grad_square, "magnified": (t.grad * _MAGNIFIED).square()}
    return Sums(scalar={**grads, "weight": t.param.square(), "stored": t.stored(t.param).square()})


def step_of(t: Tile) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the new moments of a tile, and the momentum term and gradient term of the step without weight decay."""
    grad = t.grad * t.scalar.inverse_norm
    if "clip" in t.scalar:
        grad = grad.clamp(-t.scalar.clip, t.scalar.clip)
    mean = t.full.mean * t.scalar.beta1 + grad * t.scalar.gain1
    var = t.full.var * t.scalar.beta2 + grad * grad * t.scalar.gain2
    scale = (var / t.scalar.correction2).sqrt() + t.scalar.epsilon
    return mean, var, mean / t.scalar.correction1 / scale, grad / scale


def after_momentum(t: Tile, m: Tensor) -> Tensor:
    """Returns the weight after the momentum term of the step."""
    return t.param - (m + t.param * t.scalar.wd) * t.scalar.step_m


def both_squares(t: Tile) -> Sums:
    """Returns the sums of squares of both terms of the step, with weight decay of the weight before the step."""
    _, _, m, g = step_of(t)
    decay = t.param * t.scalar.wd
    return Sums(scalar={"m": (m + decay).square(), "g": (g + decay).square()})


def second_square(t: Tile) -> Sums:
    """Returns the sum of squares of the gradient term, with weight decay of the weight after the momentum term."""
    _, _, m, g = step_of(t)
    return Sums(scalar={"g": (g + after_momentum(t, m) * t.scalar.wd).square()})


def new_values_step(t: Tile) -> dict[str, Tensor]:
    mean, var, m, g = step_of(t)
    first = after_momentum(t, m)
    new = first - (g + first * t.scalar.wd) * t.scalar.step_g
    return {"param": new, "mean": mean, "var": var}


def new_values_fused(t: Tile) -> dict[str, Tensor]:
    mean, var, m, g = step_of(t)
    decay = t.param * t.scalar.wd
    new = t.param - ((m + decay) * t.scalar.step_m + (g + decay) * t.scalar.step_g)
    return {"param": new, "mean": mean, "var": var}


def multipliers(option: str, value: Any) -> None:
    """Allows None, or a dict from parameter name to number."""
    require.that(isinstance(value or {}, dict), option, value, "parameter name → a number, or None")
    for name, multiplier in (value or {}).items():
        require.number(">= 0")(f"{option}[{name!r}]", multiplier)


@dataclass(frozen=True, kw_only=True)
class LansSpec(ParamSpec):
    """Spec with the multipliers of a parameter's learning rate and weight decay. master: see `multi_precision`."""

    lr_mult: float
    wd_mult: float
    master: bool


@register("lans")
class Lans(UpdateRule):
    """g ← g·rescale_grad/‖g·rescale_grad‖, clipped to ±clip_gradient; m, v and their bias corrections as in Adam;
    w ← w - lr·β₁·φ/‖p‖·p - lr·(1-β₁)·φ/‖q‖·q, with p = m̂/(√v̂ + ε) + wd·w, q = g/(√v̂ + ε) + wd·w and φ = ‖w‖ within
    [lower_bound, upper_bound]. A ratio that is 0 or not finite is replaced by 1.

    `variant` selects one of the source's two code paths. For q, "fused" computes wd·w before the step by p, and "step"
    after it. With a master copy, "fused" computes ‖w‖ from the stored weight, and "step" from the copy.

    Differences from the source: with an `epsilon`, a gradient that is zero, or whose squares underflow in float32,
    does not become NaN. An option of 0.0 means 0.0 in both variants. Negative bounds and clips raise an error.

    Options: `rescale_grad`: only its sign has an effect. `lr_mult`, `wd_mult`: parameter name → multiplier.
    `begin_num_update`: initial value of a parameter's update count. `multi_precision`: a float32 master copy of
    16-bit weights, as rounding "master". `aggregate_num`: maximum number of small parameters that are updated together.
    """

    source = "Zheng et al. 2020, arXiv:2006.13484"
    keeps = "means of g and g²"
    exactness = "trajectories recorded from its source, weights to 1e-6"
    usual_lr = (4e-4, "measured: docs/how-to/choosing.md")
    relative = (0.4, 0.7)
    decay = "wd"
    defaults, checks = require.hyperparameters(
        lr=(1e-3, require.number(">= 0")),
        beta1=(0.9, require.rate),
        beta2=(0.999, require.rate),
        epsilon=(1e-6, require.number(">= 0")),
        wd=(0.0, require.number(">= 0")),
        lower_bound=(None, require.number(">= 0", optional=True)),
        upper_bound=(None, require.number(">= 0", optional=True)),
        clip_gradient=(None, require.number(">= 0", optional=True)),
        rescale_grad=(1.0, require.number()),
        lr_mult=(None, multipliers),
        wd_mult=(None, multipliers),
        begin_num_update=(0, require.number(">= 0", whole=True)),
        multi_precision=(False, require.flag),
        aggregate_num=(None, require.number(">= 1", "<= 45", whole=True, optional=True)),
        variant=("fused", require.one_of("fused", "step")),
    )

    def rounding(self, hyper: Hyper, dtype: torch.dtype) -> str:
        return "master" if hyper["multi_precision"] else super().rounding(hyper, dtype)

    def names(self, hyper: Hyper) -> Iterable[str]:
        return (*(hyper["lr_mult"] or {}), *(hyper["wd_mult"] or {}))

    def spec(self, name: str, shape: tuple[int, ...], hyper: Hyper) -> LansSpec:
        return LansSpec(
            View.vector(len(shape)),
            moment_states("mean", "var"),
            hyper["aggregate_num"],
            lr_mult=(hyper["lr_mult"] or {}).get(name, 1.0),
            wd_mult=(hyper["wd_mult"] or {}).get(name, 1.0),
            master=hyper["multi_precision"],
        )

    def scalars(self, hyper: Hyper, step: int) -> dict[str, float]:
        scalars = averages(hyper["beta1"], hyper["beta2"]) | {name: hyper[name] for name in ("epsilon", "wd", "lr")}
        scalars |= {"sign": float((hyper["rescale_grad"] > 0) - (hyper["rescale_grad"] < 0))}
        scalars["begun"] = hyper["begin_num_update"]
        if hyper["variant"] == "fused":
            scalars["fused"] = 1.0
        return scalars | numbers(hyper, clip="clip_gradient", lower="lower_bound", upper="upper_bound")

    def update(self, sweep: Sweep, spec: LansSpec, state: State) -> None:
        number = sweep.scalar
        double = sweep.double
        fused = "fused" in number
        full = {name: state[name] for name in ("mean", "var")}
        sums = sweep.reduce(norms).scalar
        count = next_count(sweep, state) + double.begun
        scalar = {
            "wd": (double.wd * spec.wd_mult).float(),
            "inverse_norm": inverse_norm(sums, number.sign),
            "correction1": correction(double.beta1, count).float(),
            "correction2": correction(double.beta2, count).float(),
        }
        size = (sums["stored"] if fused else sums["weight"]).sqrt()
        if "lower" in number or "upper" in number:
            size = size.clamp(number.get("lower"), number.get("upper"))
        squares = sweep.reduce(both_squares, full=full, scalar=scalar).scalar
        lr = double.lr * spec.lr_mult
        scalar["step_m"] = (lr * double.beta1).float() * trust(size, squares["m"])
        if not fused:
            squares = sweep.reduce(second_square, full=full, scalar=scalar).scalar
        scalar["step_g"] = (lr * double.gain1).float() * trust(size, squares["g"])
        sweep.apply(new_values_fused if fused else new_values_step, full=full, scalar=scalar)


def inverse_norm(sums: dict[str, Tensor], sign: Tensor) -> Tensor:
    """Returns `sign` / norm of the gradient, or 0 if the gradient is zero."""
    tiny = sums["magnified"].sqrt() / _MAGNIFIED
    norm = torch.where(sums["magnified"].isfinite(), tiny, sums["grad"].double().sqrt().float())
    return torch.where(norm > 0, sign / norm, 0.0)


def trust(size: Tensor, square: Tensor) -> Tensor:
    """Returns the trust ratio, or 1 where it is 0 or not finite."""
    ratio = size / square.sqrt()
    return torch.where((ratio > 0) & ratio.isfinite(), ratio, 1.0)
