"""A second moment kept as row and column means, and clipping of the update: Shazeer and Stern 2018, arXiv:1804.04235.

Tile functions read the inverse root of the second moment as `row.r` and `col.c`, or the unfactored state `full.v`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowmem.rules.rule import ParamSpec
from lowmem.tiles.sweep import Sweep
from lowmem.tiles.tile import ReduceFn, Sums, Tile


def moments(t: Tile, param_square: Tensor | None = None) -> Sums:
    """Sums of g² by row and column, and of w²."""
    param_square = t.param.square() if param_square is None else param_square
    return Sums(row={"square": t.grad_square}, col={"square": t.grad_square}, scalar={"param": param_square})


def moments_as_stored(t: Tile) -> Sums:
    """`moments` with w² in the weight's dtype."""
    return moments(t, t.stored(t.param.square()))


def second_moment(t: Tile) -> Tensor:
    """The unfactored v ← β₂v + (1-β₂)(g² + ε)."""
    return t.full.v * t.scalar.beta2 + (t.grad_square + t.scalar.eps) * t.scalar.gain


def change(t: Tile) -> Tensor:
    """g / √v."""
    if "v" in t.full:
        return second_moment(t).rsqrt() * t.grad
    return t.grad * t.row.r * t.col.c


def change_square(t: Tile) -> Sums:
    """Sum of `change` squared."""
    return Sums(scalar={"change": change(t).square()})


def squares(t: Tile) -> Sums:
    """Sums of `change` squared and of w²."""
    return Sums(scalar={**change_square(t).scalar, "param": t.param.square()})


def squares_as_stored(t: Tile) -> Sums:
    """`squares` with w² in the weight's dtype."""
    return Sums(scalar={**change_square(t).scalar, "param": t.stored(t.param.square())})


def results(t: Tile, decayed: Tensor, change: Tensor) -> dict[str, Tensor]:
    """The new weight, and the second moment if it is unfactored."""
    moment = {"v": second_moment(t)} if "v" in t.full else {}
    return {"param": decayed - change, **moment}


def moved(t: Tile) -> dict[str, Tensor]:
    """w ← keep·w - step·change, or minus the running mean of step·change if there is momentum `m`."""
    step = change(t) * t.scalar.step
    if "m" not in t.full:
        return results(t, t.param * t.scalar.keep, step)
    momentum = t.full.m * t.scalar.beta1 + step * t.scalar.gain1
    return {**results(t, t.param * t.scalar.keep, momentum), "m": momentum}


@dataclass(frozen=True, kw_only=True)
class FactoredSpec(ParamSpec):
    """factored: v is kept as row and column means.  alike: this many consecutive slices of the batch share their scale
    and clipping.  scaled: steps are relative to the weight's own size.
    """

    factored: bool
    alike: int = 1
    scaled: bool = True


@dataclass(frozen=True)
class Preconditioned:
    """A gradient divided by the root of its second moment, which each pass of the sweep computes again.

    vectors: arguments of the sweep for tile functions that use `change`.  square, param: sums of squares of the change
    and of the weight, float32 [batch].
    """

    vectors: Mapping[str, dict[str, Any]]
    square: Tensor
    param: Tensor

    def arguments(self, *, momentum: Any = None, **scalar: Tensor | float) -> dict[str, dict[str, Any]]:
        """Arguments of `Sweep.apply` and `Sweep.reduce`: the vectors, with more scalars and the state `m`."""
        arguments = {**self.vectors, "scalar": {**self.vectors.get("scalar", {}), **scalar}}
        if momentum is not None:
            arguments["full"] = {**self.vectors.get("full", {}), "m": momentum}
        return arguments


def second_moments(state: Mapping[str, Any], row: str, col: str, full: str) -> dict[str, Any]:
    """The states that hold the second moment, for `precondition`, from their names."""
    return {"v": state[full]} if full in state else {"row": state[row], "col": state[col]}


def precondition(
    sweep: Sweep,
    moment: Mapping[str, Tensor],
    *,
    gain: float,
    eps: float,
    normalised: str = "row",
    as_stored: bool = False,
    skip_nan: bool = False,
) -> Preconditioned:
    """Updates the second moment and measures the change that results: one pass unfactored, two factored.

    Args:
        moment: the states, see `second_moments`.
        gain: 1-β₂ of this step.
        eps: added to g².
        normalised: the factor that is divided by its mean.
        as_stored: squares of weights are rounded to the weight's dtype.
        skip_nan: elements of `row` and `col` that would become NaN stay as they are.
    """
    vectors: dict[str, dict[str, Any]]
    if "v" in moment:
        vectors = {"full": {"v": moment["v"]}, "scalar": {"beta2": 1.0 - gain, "gain": gain, "eps": eps}}
        scalar = sweep.reduce(squares_as_stored if as_stored else squares, **vectors).scalar
        return Preconditioned(vectors, scalar["change"], scalar["param"])
    fn: ReduceFn = moments_as_stored if as_stored else moments
    sums = sweep.reduce(fn)
    _, rows, cols = sweep.shape
    factors = {}
    for side, total, count in (("row", sums.row, cols), ("col", sums.col, rows)):
        mean = total["square"] / count + eps
        old = moment[side].view_as(mean)
        new = old * (1.0 - gain) + mean * gain
        sweep.store(moment[side], torch.where(new.isnan(), old, new) if skip_nan else new)
        factors[side] = (new / new.mean(-1, keepdim=True) if side == normalised else new).rsqrt()
    vectors = {"row": {"r": factors["row"]}, "col": {"c": factors["col"]}}
    return Preconditioned(vectors, sweep.reduce(change_square, **vectors).scalar["change"], sums.scalar["param"])


def mean_alike(square_sum: Tensor, count: int, alike: int) -> Tensor:
    """The mean square of slices of `count` elements, averaged over every `alike` consecutive slices, [batch]."""
    if alike == 1:
        return square_sum / count
    together = square_sum.view(-1, alike).sum(-1) / (count * alike)
    return together.repeat_interleave(alike, output_size=square_sum.shape[0])


def clip_divisor(change_rms: Tensor, threshold: float | None) -> Tensor | float:
    """Update clipping: the change divided by this has a root mean square of at most `threshold`."""
    return 1.0 if threshold is None else (change_rms / threshold).clamp(min=1.0)
