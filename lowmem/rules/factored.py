"""What the factored rules share: a second moment kept as row and column means, and the size of a step.

Shazeer and Stern 2018, arXiv:1804.04235 (Adafactor). Tile functions read the gradient's square root of the second
moment either as `row.r` and `col.c`, or as the unfactored state `full.v`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowmem.rules.rule import ParamSpec
from lowmem.tiles.sweep import Sweep
from lowmem.tiles.tile import ReduceFn, Sums, Tile


def moments(t: Tile) -> Sums:
    """Of g² by row and column, and of w²."""
    return _moments(t, t.param.square())


def moments_as_stored(t: Tile) -> Sums:
    """`moments` with w² in the weight's own dtype."""
    return _moments(t, t.stored(t.param.square()))


def _moments(t: Tile, param_square: Tensor) -> Sums:
    return Sums(row={"square": t.grad_square}, col={"square": t.grad_square}, scalar={"param": param_square})


def second_moment(t: Tile) -> Tensor:
    """The unfactored v ← β₂v + (1-β₂)(g² + ε)."""
    return t.full.v * t.scalar.beta2 + (t.grad_square + t.scalar.eps) * t.scalar.gain


def change(t: Tile) -> Tensor:
    """g / √v."""
    if "v" in t.full:
        return second_moment(t).rsqrt() * t.grad
    return t.grad * t.row.r * t.col.c


def change_square(t: Tile) -> Sums:
    """Of `change` squared."""
    return Sums(scalar={"change": change(t).square()})


def squares(t: Tile) -> Sums:
    """Of `change` and of w, squared."""
    return Sums(scalar={**change_square(t).scalar, "param": t.param.square()})


def squares_as_stored(t: Tile) -> Sums:
    """`squares` with w² in the weight's own dtype."""
    return Sums(scalar={**change_square(t).scalar, "param": t.stored(t.param.square())})


def results(t: Tile, decayed: Tensor, change: Tensor) -> dict[str, Tensor]:
    """The new weight, and the second moment where it is unfactored."""
    moment = {"v": second_moment(t)} if "v" in t.full else {}
    return {"param": decayed - change, **moment}


def moved(t: Tile) -> dict[str, Tensor]:
    """w ← keep·w - step·change, or less the running mean of the latter, where momentum `m` is kept."""
    step = change(t) * t.scalar.step
    if "m" not in t.full:
        return results(t, t.param * t.scalar.keep, step)
    momentum = t.full.m * t.scalar.beta1 + step * t.scalar.gain1
    return {**results(t, t.param * t.scalar.keep, momentum), "m": momentum}


@dataclass(frozen=True, kw_only=True)
class FactoredSpec(ParamSpec):
    """factored: v is kept as `row` and `col` states, else whole.  alike: so many slices of the batch, one after the
    other, share their scale and clip.  scaled: steps are relative to the weight's own size.
    """

    factored: bool
    alike: int = 1
    scaled: bool = True


@dataclass(frozen=True)
class Preconditioned:
    """A gradient divided by the root of its second moment, of which the sweep knows how to compute it again.

    vectors: what tile functions that use `change` are to be handed.  change, param: sums of squares of the change and
    of the weight, float32 [batch].
    """

    vectors: Mapping[str, Mapping[str, Any]]
    change: Tensor
    param: Tensor

    def handed(self, **scalar: Tensor | float) -> dict[str, Any]:
        """Arguments of `Sweep.apply` and `Sweep.reduce`: the vectors, and scalars beside them."""
        return {**self.vectors, "scalar": {**self.vectors.get("scalar", {}), **scalar}}


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
    """Takes g into the second moment and measures the change that it gives: one pass unfactored, two factored.

    Args:
        moment: the states, under `row` and `col`, or unfactored under `v`.
        gain: 1-β₂ of this step.
        eps: what is added to g².
        normalised: of which of the two factors the mean is divided out.
        as_stored: squares of weights are rounded to the weight's own dtype.
        skip_nan: elements of `row` and `col` that would become NaN are kept as they are.
    """
    vectors: dict[str, dict[str, Any]]
    if "v" in moment:
        vectors = {"full": {"v": moment["v"]}, "scalar": {"beta2": 1.0 - gain, "gain": gain, "eps": eps}}
        sums = sweep.reduce(squares_as_stored if as_stored else squares, **vectors).scalar
        return Preconditioned(vectors, sums["change"], sums["param"])
    fn: ReduceFn = moments_as_stored if as_stored else moments
    seen = sweep.reduce(fn)
    _, rows, cols = sweep.shape
    factors = {}
    for side, total, count in (("row", seen.row, cols), ("col", seen.col, rows)):
        mean = total["square"] / count + eps
        old = moment[side].view_as(mean)
        new = old * (1.0 - gain) + mean * gain
        sweep.store(moment[side], torch.where(new.isnan(), old, new) if skip_nan else new)
        factors[side] = (new / new.mean(-1, keepdim=True) if side == normalised else new).rsqrt()
    vectors = {"row": {"r": factors["row"]}, "col": {"c": factors["col"]}}
    return Preconditioned(vectors, sweep.reduce(change_square, **vectors).scalar["change"], seen.scalar["param"])


def mean_alike(square_sum: Tensor, count: int, alike: int) -> Tensor:
    """The mean square of slices of `count` elements, over each `alike` of them that belong together, [batch]."""
    if alike == 1:
        return square_sum / count
    together = square_sum.view(-1, alike).sum(-1) / (count * alike)
    return together.repeat_interleave(alike, output_size=square_sum.shape[0])


def shrinking(change_rms: Tensor, threshold: float | None) -> Tensor | float:
    """Update clipping: what the change is divided by so that its root mean square is at most `threshold`."""
    return 1.0 if threshold is None else (change_rms / threshold).clamp(min=1.0)
