"""Adafactor as Tensor2Tensor has it: own schedules, unbiased bfloat16, simulated quantisation (its `adafactor.py`)."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lowmem.errors import UnsupportedError
from lowmem.rules import require
from lowmem.rules.factored import FactoredSpec, moved, precondition, shrinking
from lowmem.rules.rule import Hyper, State, StateSpec, UpdateRule, register, rms
from lowmem.tiles.layout import View
from lowmem.tiles.storage import golden_ratio_noise
from lowmem.tiles.sweep import Sweep
from lowmem.tiles.tile import Sums, Tile


def largest(t: Tile) -> Sums:
    """The magnitude of the new weight, of which the largest of each row is wanted."""
    return Sums(row_max={"size": moved(t)["param"].abs()})


def quantised(t: Tile) -> dict[str, Tensor]:
    """The new weight in whole multiples of `quantum`, rounded down after the noise is added."""
    new = moved(t)
    return {**new, "param": (new["param"] / t.row.quantum + t.scalar.noise).floor() * t.row.quantum}


@dataclass(frozen=True, kw_only=True)
class QuantisedSpec(FactoredSpec):
    """quantised: the weight is rounded to `simulated_quantize_bits`."""

    quantised: bool


@register("adafactor_t2t")
class AdafactorT2T(UpdateRule):
    """v ← β₂v + (1-β₂)(g² + 1e-30), factored for matrices; u = g/√v, divided by max(1, rms(u)/clipping_threshold);
    w ← w - s·u with s = lr·max(rms(w), 1e-3), or lr, or with `beta1` the running mean of s·u instead.

    β₂: with `decay_type` "pow" 1 - t^-memory_exponent, with "adam" β(1-β^(t-1))/(1-β^t) for β = `beta2`, or the number
    `decay_rate`, t counting steps from 1. Without `lr` it is min(1/√t, 0.01), times 0.05 if steps are not relative.

    bfloat16 weights, with rounding "nearest", are rounded as the source does: away from zero where the part of the
    spacing that would be cut off is larger than a noise that is the same for all and runs evenly through [0, 1) with
    the golden ratio. `simulated_quantize_bits` rounds rows of float32 weights (last dimension, more than one element)
    down to multiples of their largest magnitude over 2^(bits-1) - 1, after adding that noise in multiples.

    `factor_stacks`: a 3-D parameter is a stack of matrices (experts), each factored, scaled and clipped as if it were a
    parameter of its own. False: it is unfactored, as everything but matrices is in the source. Momentum is kept in the
    weight's own dtype, as in the source, unless `dtype_momentum` says otherwise.

    Differs from its source, on purpose: the term mean(g²)·1e-30 is left out, which is there to confound a compiler and
    changes numbers for gradients above 1e11 only.

    Options: `lr` ≥ 0 or None, `multiply_by_parameter_scale`, `memory_exponent` in (0, 1], `beta2` in (0, 1),
    `decay_rate` in [0, 1) or None, `beta1` in [0, 1) (0: no momentum), `clipping_threshold` > 0 or None, `factored`,
    `simulated_quantize_bits` in [2, 22] or None.
    """

    source = "Shazeer and Stern 2018, arXiv:1804.04235; Tensor2Tensor"
    keeps = "row and column means of g²"
    exactness = "trajectories recorded from its source, weights to 2e-5"
    defaults: ClassVar[dict[str, Any]] = {
        "lr": None,
        "multiply_by_parameter_scale": True,
        "decay_type": "pow",
        "memory_exponent": 0.8,
        "beta2": 0.999,
        "decay_rate": None,
        "beta1": 0.0,
        "clipping_threshold": 1.0,
        "factored": True,
        "factor_stacks": True,
        "simulated_quantize_bits": None,
        "dtype_momentum": None,
    }

    def check(self, hyper: Hyper) -> None:
        require.number("lr", hyper["lr"], least=0, optional=True)
        for option in ("multiply_by_parameter_scale", "factored", "factor_stacks"):
            require.flag(option, hyper[option])
        require.that(hyper["decay_type"] in ("pow", "adam"), "decay_type", hyper["decay_type"], "'pow' or 'adam'")
        require.number("memory_exponent", hyper["memory_exponent"], above=0, most=1)
        require.number("beta2", hyper["beta2"], above=0, below=1)
        require.number("decay_rate", hyper["decay_rate"], least=0, below=1, optional=True)
        require.number("beta1", hyper["beta1"], least=0, below=1)
        require.number("clipping_threshold", hyper["clipping_threshold"], above=0, optional=True)
        if hyper["simulated_quantize_bits"] is not None:
            require.count("simulated_quantize_bits", hyper["simulated_quantize_bits"], least=2, most=22)
        require.dtype("dtype_momentum", hyper["dtype_momentum"])

    def admit(self, param: Tensor, hyper: Hyper) -> None:
        super().admit(param, hyper)
        if hyper["simulated_quantize_bits"] is not None and param.dtype != torch.float32:
            raise UnsupportedError(
                f"is {param.dtype}; simulated_quantize_bits rounds float32 weights. Convert it, or leave that out."
            )

    def rounding(self, hyper: Hyper) -> str:
        return "golden_ratio"

    def spec(self, name: str, shape: tuple[int, ...], hyper: Hyper) -> QuantisedSpec:
        ndim = len(shape)
        stack = ndim == 3 and hyper["factored"] and hyper["factor_stacks"]
        factored = stack or (ndim == 2 and hyper["factored"])
        dims = tuple(range(ndim))
        view = View.matrix(ndim) if stack else View((), dims[:-1], dims[-1:])
        states = (
            {"vr": StateSpec("row"), "vc": StateSpec("col")} if factored else {"v": StateSpec("full", signed=False)}
        )
        if hyper["beta1"]:
            states["m"] = StateSpec("full", require.dtype("dtype_momentum", hyper["dtype_momentum"]) or "weight")
        bits = hyper["simulated_quantize_bits"] is not None and ndim >= 2 and shape[-1] > 1
        scaled = hyper["multiply_by_parameter_scale"]
        return QuantisedSpec(view, states, factored=factored, scaled=scaled, quantised=bits)

    def update(self, sweep: Sweep, spec: QuantisedSpec, state: State, hyper: Hyper, step: int) -> None:
        moment = {"row": state["vr"], "col": state["vc"]} if spec.factored else {"v": state["v"]}
        done = precondition(sweep, moment, gain=1.0 - decay(step, hyper), eps=1e-30, as_stored=True)
        scale = sweep.scalar(learning_rate(step, hyper))
        if spec.scaled:  # in the weight's own dtype, as the source computes it
            size = sweep.stored(sweep.stored(done.param / sweep.count).sqrt())
            scale = scale * size.clamp(min=sweep.stored(sweep.scalar(1e-3)))
        shrink = shrinking(rms(done.change, sweep.count), hyper["clipping_threshold"])
        handed = done.handed(keep=1.0, step=scale / shrink)
        if "m" in state:
            handed["full"] = {**handed.get("full", {}), "m": state["m"]}
            handed["scalar"] |= {"beta1": hyper["beta1"], "gain1": 1.0 - hyper["beta1"]}
        if not spec.quantised:
            sweep.apply(moved, **handed)
            return
        size = sweep.reduce(largest, **handed).row_max["size"]
        quantum = (size + 1e-9) / (2 ** (hyper["simulated_quantize_bits"] - 1) - 1)
        handed["row"] = {**handed.get("row", {}), "quantum": quantum}
        handed["scalar"]["noise"] = golden_ratio_noise(step)
        sweep.apply(quantised, **handed)


def decay(step: int, hyper: Hyper) -> float:
    """β₂ of a step."""
    if hyper["decay_rate"] is not None:
        return float(hyper["decay_rate"])
    if hyper["decay_type"] == "adam":
        beta2 = hyper["beta2"]
        return float(beta2 * (1.0 - beta2 ** (step - 1)) / (1.0 - beta2**step))
    return float(1.0 - step ** -hyper["memory_exponent"])


def learning_rate(step: int, hyper: Hyper) -> float:
    """The learning rate of a step: the one given, or the rule's own schedule."""
    if hyper["lr"] is not None:
        return float(hyper["lr"])
    return min(1.0 / math.sqrt(step), 0.01) * (1.0 if hyper["multiply_by_parameter_scale"] else 0.05)
