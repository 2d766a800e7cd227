"""Tensor2Tensor's Adafactor: schedules, unbiased bfloat16 rounding, simulated quantization (its `adafactor.py`)."""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lowmem.errors import UnsupportedError
from lowmem.rules import require
from lowmem.rules.factored import FactoredSpec, moment_scalars, new_values, precondition
from lowmem.rules.rule import Hyper, State, StateSpec, UpdateRule, numbers, register
from lowmem.tiles.layout import View
from lowmem.tiles.rounding import nearest_number, spacing
from lowmem.tiles.sweep import Sweep
from lowmem.tiles.tile import Sums, Tile


def largest(t: Tile) -> Sums:
    """Returns the largest magnitude in each row of the new weight."""
    return Sums(row_max={"size": new_values(t)["param"].abs()})


def new_values_quantized(t: Tile) -> dict[str, Tensor]:
    """Like `new_values`, with the new weight rounded down to multiples of `quantum` after the noise is added."""
    new = new_values(t)
    return {**new, "param": (new["param"] / t.row.quantum + t.scalar.noise).floor() * t.row.quantum}


def new_values_rounded(t: Tile) -> dict[str, Tensor]:
    """Like `new_values`, with the new weight rounded to bfloat16 using the noise of the step."""
    new = new_values(t)
    return {**new, "param": round_to_bfloat16(new["param"], t.scalar.noise)}


def round_to_bfloat16(value: Tensor, threshold: Tensor) -> Tensor:
    """Rounds a float32 tile to bfloat16: to the nearest number, or to the other neighbour if the distance from the
    nearest, as a fraction of the spacing, exceeds `threshold`.

    The mean over thresholds spaced evenly in [0, 1) equals the value, as in Tensor2Tensor's `adafactor.py`.
    """
    size = value.abs() + 1e-30
    gap = spacing(size, torch.bfloat16)
    scaled = size / gap
    low = scaled.floor()
    part = scaled - low
    from_low = torch.where(part > threshold, low + 1.0, low)
    from_high = torch.where(1.0 - part <= threshold, low + 1.0, low)
    return torch.where(scaled.round() == low, from_low, from_high) * gap * value.sign()


@functools.lru_cache(maxsize=1)
def golden_ratio_noise(step: int) -> float:
    """Returns (step · golden ratio) mod 1 in float32, summed over the bits of `step` exactly as Tensor2Tensor does."""
    phi = (5**0.5 - 1) / 2
    noise = 0.0
    for i in range(30):
        part = nearest_number((phi * 2**i) % 1.0, torch.float32)
        noise = nearest_number(noise + part * (step >> i & 1), torch.float32)
    return noise % 1.0


@dataclass(frozen=True, kw_only=True)
class QuantizedSpec(FactoredSpec):
    """Spec with `quantized`: whether the weight is rounded to `simulated_quantize_bits`."""

    quantized: bool


@register("adafactor_t2t")
class AdafactorT2T(UpdateRule):
    """v ← β₂v + (1-β₂)(g² + 1e-30), factored for matrices; u = g/√v, divided by max(1, rms(u)/clipping_threshold);
    w ← w - s·u with s = lr·max(rms(w), 1e-3), or lr, or with `beta1` the running mean of s·u instead.

    β₂ is `decay_rate` if set, else 1 - t^-memory_exponent with `decay_type` "pow" and β(1-β^(t-1))/(1-β^t) for β =
    `beta2` with "adam", at step t ≥ 1. The default `lr` is min(1/√t, 0.01), times 0.05 if steps are not relative.

    With rounding "auto", bfloat16 weights are rounded as in the source: up or down in magnitude by one threshold per
    step, (step · golden ratio) mod 1, see `round_to_bfloat16`. `simulated_quantize_bits` rounds rows of float32 weights
    (last dimension, more than one element) down to multiples of q = largest magnitude / (2^(bits-1) - 1), after adding
    threshold · q.

    `factor_stacks`: a 3-D parameter is a stack of matrices (experts), each factored, scaled and clipped as a separate
    parameter. With False it is not factored, as in the source. Momentum is stored in `dtype_momentum`, or in the
    weight's dtype, as in the source.

    Difference from the source: it adds mean(g²)·1e-30 to prevent a compiler optimization, which matters only for
    gradients above 1e11. That term is omitted.
    """

    source = "Shazeer and Stern 2018, arXiv:1804.04235; Tensor2Tensor"
    keeps = "row and column means of g²"
    exactness = "trajectories recorded from its source, weights to 2e-5"
    usual_lr = (1e-3, "measured: docs/how-to/choosing.md")
    relative = (0.9, 1.3)
    defaults, checks = require.hyperparameters(
        lr=(None, require.number(">= 0", optional=True)),
        multiply_by_parameter_scale=(True, require.flag),
        decay_type=("pow", require.one_of("pow", "adam")),
        memory_exponent=(0.8, require.number("> 0", "<= 1")),
        beta2=(0.999, require.number("> 0", "< 1")),
        decay_rate=(None, require.number(">= 0", "< 1", optional=True)),
        beta1=(0.0, require.rate),
        clipping_threshold=(1.0, require.number("> 0", optional=True)),
        factored=(True, require.flag),
        factor_stacks=(True, require.flag),
        simulated_quantize_bits=(None, require.number(">= 2", "<= 22", whole=True, optional=True)),
        dtype_momentum=(None, require.dtype(none="the weight's dtype")),
    )

    def admit(self, name: str, param: Tensor, hyper: Hyper) -> None:
        super().admit(name, param, hyper)
        if hyper["simulated_quantize_bits"] is not None and param.dtype != torch.float32:
            raise UnsupportedError(
                f"is {param.dtype}, but simulated_quantize_bits needs float32 weights. Convert the parameter, or omit "
                "simulated_quantize_bits."
            )

    def rounding(self, hyper: Hyper, dtype: torch.dtype) -> str:
        return "golden_ratio" if dtype == torch.bfloat16 else super().rounding(hyper, dtype)

    def spec(self, name: str, shape: tuple[int, ...], hyper: Hyper) -> QuantizedSpec:
        ndim = len(shape)
        stack = ndim == 3 and hyper["factored"] and hyper["factor_stacks"]
        dims = tuple(range(ndim))
        states = {"v": StateSpec("full", signed=False)}
        if stack or (ndim == 2 and hyper["factored"]):
            states = {"vr": StateSpec("row"), "vc": StateSpec("col")}
        if hyper["beta1"]:
            states["m"] = StateSpec("full", require.dtype_of(hyper["dtype_momentum"]) or "weight")
        return QuantizedSpec(
            View.matrix(ndim) if stack else View((), dims[:-1], dims[-1:]),
            states,
            scaled=hyper["multiply_by_parameter_scale"],
            quantized=hyper["simulated_quantize_bits"] is not None and ndim >= 2 and shape[-1] > 1,
        )

    def scalars(self, hyper: Hyper, step: int) -> dict[str, float]:
        beta1 = hyper["beta1"]
        bits = hyper["simulated_quantize_bits"]
        scalars = moment_scalars(1.0 - decay(step, hyper), 1e-30, 1e-3) | numbers(hyper, threshold="clipping_threshold")
        scalars |= {"lr": learning_rate(step, hyper), "keep": 1.0, "beta1": beta1, "gain1": 1.0 - beta1}
        # as in the source, squares are computed in the weight's dtype
        scalars |= {"noise": golden_ratio_noise(step), "as_stored": 1.0}
        if bits is not None:
            scalars["levels"] = 2 ** (bits - 1) - 1
        if hyper.get("rounding", "auto") == "auto":
            scalars["round_by_step"] = 1.0
        return scalars

    def update(self, sweep: Sweep, spec: QuantizedSpec, state: State) -> None:
        number = sweep.scalar
        change = precondition(sweep, spec, state)
        step = number.lr * (change.size if spec.scaled else 1.0) / change.divisor
        vectors = {**change.vectors, "scalar": {"step": step}}
        if spec.quantized:
            size = sweep.reduce(largest, **vectors).row_max["size"]
            vectors["row"] = {**vectors.get("row", {}), "quantum": (size + 1e-9) / number.levels}
            sweep.apply(new_values_quantized, **vectors)
        elif "round_by_step" in number and sweep.dtype == torch.bfloat16:
            sweep.apply(new_values_rounded, **vectors)
        else:
            sweep.apply(new_values, **vectors)


def decay(step: int, hyper: Hyper) -> float:
    """Returns β₂ for a step."""
    if hyper["decay_rate"] is not None:
        return float(hyper["decay_rate"])
    if hyper["decay_type"] == "adam":
        beta2 = hyper["beta2"]
        return float(beta2 * (1.0 - beta2 ** (step - 1)) / (1.0 - beta2**step))
    return float(1.0 - step ** -hyper["memory_exponent"])


def learning_rate(step: int, hyper: Hyper) -> float:
    """Returns the learning rate of a step: `lr`, or the rule's default schedule."""
    if hyper["lr"] is not None:
        return float(hyper["lr"])
    rate = min(1.0 / math.sqrt(step), 0.01)
    return rate if hyper["multiply_by_parameter_scale"] else rate * 0.05
