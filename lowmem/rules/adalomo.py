"""AdaLomo: a factored second moment, grouped update normalisation and a step relative to the weight's own size.

Lv et al. 2023, arXiv:2310.10195, algorithm 1.
"""

from typing import Any, ClassVar

from lowmem.rules import require
from lowmem.rules.factored import FactoredSpec, moved, precondition, shrinking
from lowmem.rules.rule import Hyper, State, StateSpec, UpdateRule, register, rms
from lowmem.tiles.layout import View
from lowmem.tiles.sweep import Sweep


@register("adalomo")
class AdaLomo(UpdateRule):
    """v ← β₂v + (1-β₂)(g² + ε₁) as the outer product of its row and column means, β₂ = 1 - step^decay_rate;
    u = g/√v, divided by max(1, rms(u)/clip_threshold); w ← (1 - α·weight_decay)w - αu with α = lr·max(ε₂, rms(w)).

    Matrices keep `exp_avg_sq_row` [rows] and `exp_avg_sq_col` [cols] in float32, 0-D and 1-D parameters `exp_avg_sq` in
    their own shape. A 3-D parameter is a stack of matrices (experts), each factored and normalised as if it were a
    parameter of its own. With more dimensions it is a convolution, the matrix [out, in * kernel].

    Differs from its source where that fails: the clip factor of an earlier step is never used again, and 0-D and
    3-D and larger parameters work. As there, `clip_norm` measures gradients before `clip_value` clamps them.

    Options: `eps` (ε₁ > 0 added to g², ε₂ ≥ 0 the least scale of a step), `decay_rate` < 0, `clip_threshold` > 0,
    `weight_decay` ≥ 0 (decoupled, follows the step's scale).
    """

    source = "Lv et al. 2023, arXiv:2310.10195"
    keeps = "row and column means of g², float32"
    exactness = "trajectories recorded from its source, weights to 1e-6"
    norm_before_clip_value = True
    defaults: ClassVar[dict[str, Any]] = {
        "lr": 1e-3,
        "eps": (1e-30, 1e-3),
        "decay_rate": -0.8,
        "clip_threshold": 1.0,
        "weight_decay": 0.0,
    }

    def check(self, hyper: Hyper) -> None:
        eps = hyper["eps"]
        require.that(
            isinstance(eps, tuple | list) and len(eps) == 2, "eps", eps, "two numbers, added to g² and least scale"
        )
        require.number("eps[0]", eps[0], above=0)
        require.number("eps[1]", eps[1], least=0)
        require.number("lr", hyper["lr"], least=0)
        require.number("decay_rate", hyper["decay_rate"], below=0)
        require.number("clip_threshold", hyper["clip_threshold"], above=0)
        require.number("weight_decay", hyper["weight_decay"], least=0)

    def spec(self, name: str, shape: tuple[int, ...], hyper: Hyper) -> FactoredSpec:
        view = View.matrix(len(shape))
        if len(shape) < 2:
            return FactoredSpec(view, {"exp_avg_sq": StateSpec("full", signed=False)}, factored=False)
        states = {"exp_avg_sq_row": StateSpec("row"), "exp_avg_sq_col": StateSpec("col")}
        return FactoredSpec(view, states, factored=True)

    def update(self, sweep: Sweep, spec: FactoredSpec, state: State, hyper: Hyper, step: int) -> None:
        if spec.factored:
            moment = {"row": state["exp_avg_sq_row"], "col": state["exp_avg_sq_col"]}
        else:
            moment = {"v": state["exp_avg_sq"]}
        done = precondition(sweep, moment, gain=step ** hyper["decay_rate"], eps=hyper["eps"][0])
        scale = hyper["lr"] * rms(done.param, sweep.count).clamp(min=hyper["eps"][1])
        shrink = shrinking(rms(done.change, sweep.count), hyper["clip_threshold"])
        sweep.apply(moved, **done.handed(keep=1.0 - scale * hyper["weight_decay"], step=scale / shrink))
