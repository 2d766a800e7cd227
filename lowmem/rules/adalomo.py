"""AdaLomo: factored second moment, steps relative to the rms of the weight (arXiv:2310.10195, algorithm 1)."""

from lowmem.rules import require
from lowmem.rules.factored import FactoredSpec, moment_scalars, new_values, precondition
from lowmem.rules.rule import Hyper, State, StateSpec, UpdateRule, register
from lowmem.tiles.layout import View
from lowmem.tiles.sweep import Sweep


@register("adalomo")
class AdaLomo(UpdateRule):
    """v ← β₂v + (1-β₂)(g² + ε₁) as the outer product of its row and column means, β₂ = 1 - step^decay_rate;
    u = g/√v, divided by max(1, rms(u)/clip_threshold); w ← (1 - α·weight_decay)w - αu with α = lr·max(ε₂, rms(w)).

    Matrices have the states `exp_avg_sq_row` [rows] and `exp_avg_sq_col` [cols] in float32. 0-D and 1-D parameters have
    `exp_avg_sq` in their own shape. A 3-D parameter is a stack of matrices (experts), each factored and normalized like
    a separate parameter. A parameter with more dimensions (a convolution) is viewed as the matrix [out, in * kernel].

    Two cases that fail in the source work here: parameters with 0, 3 or more dimensions, and steps after a clipped one,
    whose clip coefficient is not reused. As in the source, `clip_norm` measures gradients before `clip_value` clamps
    them.

    Options: `eps`: ε₁, added to g², and ε₂, the minimum scale of a step. `weight_decay`: decoupled, multiplied by α.
    """

    source = "Lv et al. 2023, arXiv:2310.10195"
    keeps = "row and column means of g², float32"
    exactness = "trajectories recorded from its source, weights to 1e-6"
    usual_lr = (1e-3, "measured: docs/how-to/choosing.md")
    relative = (0.9, 1.3)
    norm_before_clip_value = True
    defaults, checks = require.hyperparameters(
        lr=(1e-3, require.number(">= 0")),
        eps=(
            (1e-30, 1e-3),
            require.pair("two numbers (added to g², minimum scale)", require.number("> 0"), require.number(">= 0")),
        ),
        decay_rate=(-0.8, require.number("< 0")),
        clip_threshold=(1.0, require.number("> 0")),
        weight_decay=(0.0, require.number(">= 0")),
    )

    def spec(self, name: str, shape: tuple[int, ...], hyper: Hyper) -> FactoredSpec:
        states = {"exp_avg_sq_row": StateSpec("row"), "exp_avg_sq_col": StateSpec("col")}
        if len(shape) < 2:
            states = {"exp_avg_sq": StateSpec("full", signed=False)}
        return FactoredSpec(View.matrix(len(shape)), states)

    def scalars(self, hyper: Hyper, step: int) -> dict[str, float]:
        eps, min_scale = hyper["eps"]
        numbers = {"lr": hyper["lr"], "weight_decay": hyper["weight_decay"], "threshold": hyper["clip_threshold"]}
        return {**moment_scalars(step ** hyper["decay_rate"], eps, min_scale), **numbers}

    def update(self, sweep: Sweep, spec: FactoredSpec, state: State) -> None:
        change = precondition(sweep, spec, state)
        scale = sweep.scalar.lr * change.size
        scalar = {"keep": 1.0 - scale * sweep.scalar.weight_decay, "step": scale / change.divisor}
        sweep.apply(new_values, **change.vectors, scalar=scalar)
