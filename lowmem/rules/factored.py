"""Factored second moment and update clipping (Adafactor: Shazeer and Stern 2018, arXiv:1804.04235).

Tile functions read the inverse root of the second moment as `row.r` and `col.c`, or the unfactored state `full.v`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lowmem.rules.rule import ParamSpec, State
from lowmem.tiles.sweep import Sweep
from lowmem.tiles.tile import Sums, Tile


def exactly(value: Tensor, like: str = "param") -> Tensor:
    """Returns `value` unchanged: replaces `Tile.stored` or `Sweep.stored` for arithmetic in float32."""
    return value


def param_square(t: Tile) -> Tensor:
    """Returns w², computed in the weight's dtype if the rule has a number `as_stored`."""
    square = t.param.square()
    return t.stored(square) if "as_stored" in t.scalar else square


def moments(t: Tile) -> Sums:
    """Returns the row sums and column sums of g², and the sum of w²."""
    return Sums(row={"square": t.grad_square}, col={"square": t.grad_square}, scalar={"param": param_square(t)})


def second_moment(t: Tile) -> Tensor:
    """Returns the unfactored v ← β₂v + (1-β₂)(g² + ε)."""
    return t.full.v * t.scalar.beta2 + (t.grad_square + t.scalar.eps) * t.scalar.gain


def change(t: Tile) -> Tensor:
    """Returns g / √v."""
    if "v" in t.full:
        return second_moment(t).rsqrt() * t.grad
    return t.grad * t.row.r * t.col.c


def change_square(t: Tile) -> Sums:
    """Returns the sum of squares of `change`."""
    return Sums(scalar={"change": change(t).square()})


def squares(t: Tile) -> Sums:
    """Returns the sums of squares of `change` and of w."""
    return Sums(scalar={**change_square(t).scalar, "param": param_square(t)})


def new_values(t: Tile, rounded: Callable[..., Tensor] = exactly) -> dict[str, Tensor]:
    """Returns w ← keep·w - step·change, where with momentum `m` a running mean replaces step·change, and v if it is
    unfactored. rounded: a function applied to products with a stored tensor, see `Tile.stored`.
    """
    new = {}
    step = change(t) * t.scalar.step
    if "m" in t.full:
        step = new["m"] = rounded(t.full.m * t.scalar.beta1, "m") + step * t.scalar.gain1
    if "v" in t.full:
        new["v"] = second_moment(t)
    return {"param": rounded(t.param * t.scalar.keep) - step, **new}


@dataclass(frozen=True, kw_only=True)
class FactoredSpec(ParamSpec):
    """Spec with the state v or its row and column means, and the state `m` if the rule uses momentum.

    Slices that are `alike` share scale and clipping.
    """

    normalized: Literal["row", "col"] = "row"  # the factor that is divided by its mean
    scaled: bool = True  # whether steps are relative to the rms of the weight


class Change(NamedTuple):
    """A gradient divided by the root of its second moment. Each pass of the sweep computes it again.

    Dividing the change by `divisor` limits the root mean square of the change to the number `threshold`. Without such a
    number, the divisor is 1.
    """

    vectors: dict[str, Any]  # arguments of the sweep for tile functions that use `change`
    size: Tensor  # root mean square of the weight, at least the number `min_scale`, float32 [B]
    divisor: Tensor | float  # float32 [B]


def moment_scalars(gain: float, eps: float, min_scale: float) -> dict[str, float]:
    """Returns the numbers for `precondition`: gain is 1-β₂, eps is added to g², and steps have this minimum scale."""
    return {"gain": gain, "beta2": 1.0 - gain, "eps": eps, "min_scale": min_scale}


def precondition(sweep: Sweep, spec: FactoredSpec, state: State) -> Change:
    """Updates the second moment and measures the resulting change, in one pass (unfactored) or two (factored).

    Reads `moment_scalars` and these optional numbers: `threshold`, see `Change`; `max_scale`, the maximum scale of a
    step; `as_stored`: the squares and the size of the weight are computed in its dtype; `skip_nan`: elements of row and
    column means that would become NaN do not change.
    """
    _, rows, cols = sweep.shape
    number = sweep.scalar
    names = {each.extent: name for name, each in spec.states.items() if name != "m"}
    full = {}
    if "full" in names:
        full["v"] = state[names["full"]]
    if "m" in state:
        full["m"] = state["m"]
    vectors: dict[str, Any] = {"full": full}
    if "v" in full:
        sums = sweep.reduce(squares, **vectors).scalar
    else:
        factors = {}
        totals = sweep.reduce(moments)
        for side, total, count in (("row", totals.row, cols), ("col", totals.col, rows)):
            mean = total["square"] / count + number.eps
            stored = state[names[side]]  # type: ignore[index]
            old = stored.view_as(mean)
            new = old * number.beta2 + mean * number.gain
            sweep.store(stored, torch.where(new.isnan(), old, new) if "skip_nan" in number else new)
            if side == spec.normalized:
                new = new / new.mean(-1, keepdim=True)
            factors[side] = new.rsqrt()
        vectors |= {"row": {"r": factors["row"]}, "col": {"c": factors["col"]}}
        sums = {**totals.scalar, **sweep.reduce(change_square, **vectors).scalar}

    def mean_square(square_sum: Tensor) -> Tensor:
        if spec.alike == 1:
            return square_sum / sweep.count
        together = square_sum.view(-1, spec.alike).sum(-1) / (sweep.count * spec.alike)
        return together.repeat_interleave(spec.alike, output_size=square_sum.shape[0])

    rounded: Callable[[Tensor], Tensor] = sweep.stored if "as_stored" in number else exactly
    size = rounded(rounded(mean_square(sums["param"])).sqrt()).clamp(min=rounded(number.min_scale))
    if "max_scale" in number:
        size = size.clamp(max=rounded(number.max_scale))
    divisor: Tensor | float = 1.0
    if "threshold" in number:
        divisor = (mean_square(sums["change"]).sqrt() / number.threshold).clamp(min=1.0)
    return Change(vectors, size, divisor)
