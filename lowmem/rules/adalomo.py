"""AdaLomo: a factored second moment, grouped update normalisation and a step relative to the weight's own size.

Lv et al. 2023, arXiv:2310.10195, algorithm 1.
"""

from typing import Any, ClassVar

from torch import Tensor

from lowmem.rules.rule import Hyper, State, StateSpec, UpdateRule, register, require, require_number, rms
from lowmem.sweep import Sums, Sweep, Tile


def moments(t: Tile) -> Sums:
    square = t.grad_square
    return Sums(
        row={"square": square.sum(-1)},
        col={"square": square.sum(-2)},
        scalar={"param": t.param.square().sum((-2, -1))},
    )


def change(t: Tile) -> Tensor:
    return t.grad * t.row.r * t.col.c


def change_square(t: Tile) -> Sums:
    return Sums(scalar={"change": change(t).square().sum((-2, -1))})


def moved(t: Tile) -> dict[str, Tensor]:
    return {"param": t.param * t.scalar.keep - change(t) * t.scalar.step}


def second_moment(t: Tile) -> Tensor:
    return t.full.exp_avg_sq * t.scalar.beta2 + (t.grad_square + t.scalar.eps) * t.scalar.gain


def vector_change(t: Tile) -> Tensor:
    return second_moment(t).rsqrt() * t.grad


def vector_squares(t: Tile) -> Sums:
    return Sums(
        scalar={"change": vector_change(t).square().sum((-2, -1)), "param": t.param.square().sum((-2, -1))},
    )


def vector_moved(t: Tile) -> dict[str, Tensor]:
    return {
        "param": t.param * t.scalar.keep - vector_change(t) * t.scalar.step,
        "exp_avg_sq": second_moment(t),
    }


@register("adalomo")
class AdaLomo(UpdateRule):
    """v ← β₂v + (1-β₂)(g² + ε₁) as the outer product of its row and column means, β₂ = 1 - step^decay_rate;
    u = g/√v, divided by max(1, rms(u)/clip_threshold); w ← (1 - α·weight_decay)w - αu with α = lr·max(ε₂, rms(w)).

    Matrices keep `exp_avg_sq_row` [rows] and `exp_avg_sq_col` [cols] in float32, 0-D and 1-D parameters `exp_avg_sq` in
    their own shape. A 3-D parameter is a stack of matrices (experts), each factored and normalised as if it were a
    parameter of its own. With more dimensions it is a convolution, the matrix [out, in * kernel].

    Differs from its source where that fails: the clip factor of an earlier step is never used again, and 0-D and
    3-D and larger parameters work.

    Options: `eps` (ε₁ > 0 added to g², ε₂ ≥ 0 the least scale of a step), `decay_rate` < 0, `clip_threshold` > 0,
    `weight_decay` ≥ 0 (decoupled, follows the step's scale).
    """

    source = "Lv et al. 2023, arXiv:2310.10195"
    keeps = "row and column means of g², float32"
    defaults: ClassVar[dict[str, Any]] = {
        "lr": 1e-3,
        "eps": (1e-30, 1e-3),
        "decay_rate": -0.8,
        "clip_threshold": 1.0,
        "weight_decay": 0.0,
    }

    def check(self, hyper: Hyper) -> None:
        eps = hyper["eps"]
        require(isinstance(eps, tuple | list) and len(eps) == 2, "eps", eps, "two numbers, added to g² and least scale")
        require_number("eps[0]", eps[0], above=0)
        require_number("eps[1]", eps[1], least=0)
        require_number("lr", hyper["lr"], least=0)
        require_number("decay_rate", hyper["decay_rate"])
        require(hyper["decay_rate"] < 0, "decay_rate", hyper["decay_rate"], "a number < 0")
        require_number("clip_threshold", hyper["clip_threshold"], above=0)
        require_number("weight_decay", hyper["weight_decay"], least=0)

    def states(self, shape: tuple[int, ...], hyper: Hyper) -> dict[str, StateSpec]:
        if len(shape) < 2:
            return {"exp_avg_sq": StateSpec("full", shape)}
        stack = shape[:1] if len(shape) == 3 else ()
        rows, cols = shape[len(stack)], shape[len(stack) + 1 :]
        return {
            "exp_avg_sq_row": StateSpec("row", (*stack, rows)),
            "exp_avg_sq_col": StateSpec("col", (*stack, *cols)),
        }

    def update(self, sweep: Sweep, state: State, hyper: Hyper, step: int) -> None:
        gain = step ** hyper["decay_rate"]
        eps = hyper["eps"][0]
        if "exp_avg_sq" in state:
            full = {"exp_avg_sq": state["exp_avg_sq"]}
            scalar = {"beta2": 1.0 - gain, "gain": gain, "eps": eps}
            sums = sweep.reduce(vector_squares, full=full, scalar=scalar).scalar
            size = step_size(sums["change"], sums["param"], sweep.count, hyper)
            sweep.apply(vector_moved, full=full, scalar=scalar | size)
            return
        seen = sweep.reduce(moments)
        batch, rows, cols = sweep.shape
        row, col = state["exp_avg_sq_row"], state["exp_avg_sq_col"]
        row_mean = (seen.row["square"] / cols + eps).view_as(row)
        col_mean = (seen.col["square"] / rows + eps).view_as(col)
        row = sweep.store(row, row * (1.0 - gain) + row_mean * gain).view(batch, rows)
        col = sweep.store(col, col * (1.0 - gain) + col_mean * gain)
        factors = {"row": {"r": (row / row.mean(-1, keepdim=True)).rsqrt()}, "col": {"c": col.rsqrt()}}
        square = sweep.reduce(change_square, **factors).scalar["change"]
        sweep.apply(moved, **factors, scalar=step_size(square, seen.scalar["param"], sweep.count, hyper))


def step_size(change: Tensor, param: Tensor, count: int, hyper: Hyper) -> dict[str, Tensor]:
    """What the weight and the change are multiplied with, from their sums of squares over `count` elements, [batch]."""
    scale = hyper["lr"] * rms(param, count).clamp(min=hyper["eps"][1])
    shrink = (rms(change, count) / hyper["clip_threshold"]).clamp(min=1.0)
    return {"keep": 1.0 - scale * hyper["weight_decay"], "step": scale / shrink}
