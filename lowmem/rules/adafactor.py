"""T5X's Adafactor: factored along dimensions that are selected by parameter name (its `adafactor.py`)."""

from typing import Any

import torch
from torch import Tensor

from lowmem.errors import ConfigError
from lowmem.rules import factored, require
from lowmem.rules.factor_rules import dimensions, factor_map, first_match, flag_by_name
from lowmem.rules.factored import FactoredSpec, exactly, moment_scalars, precondition
from lowmem.rules.rule import GroupClip, GroupNorms, Hyper, State, StateSpec, UpdateRule, numbers, register
from lowmem.tiles.layout import View
from lowmem.tiles.rounding import nearest_number
from lowmem.tiles.sweep import Sweep
from lowmem.tiles.tile import Tile


def new_values(t: Tile) -> dict[str, Tensor]:
    """Like `factored.new_values`. With the number `skip_nan`, elements that would become NaN do not change."""
    new = factored.new_values(t, t.stored if "as_stored" in t.scalar else exactly)
    if "skip_nan" not in t.scalar:
        return new
    old = {name: t.param if name == "param" else getattr(t.full, name) for name in new}
    return {name: torch.where(value.isnan(), old[name], value) for name, value in new.items()}


@register("adafactor")
class Adafactor(UpdateRule):
    """v ← β₂v + (1-β₂)(g² + ε₁), factored into `v_row` and `v_col` if the dimensions allow it, β₂ = 1 -
    t^-decay_rate with t = step - step_offset; u = g/√v, divided by max(1, rms(u)/clipping_threshold); with s =
    lr·clip(rms(w), ε₂, max_parameter_scale), or lr: w ← (1 - weight_decay_rate)·w - s·u, or with `beta1` the running
    mean of s·u instead.

    Factored dimensions: `factor_map` is a list of (regular expression, rule). The first expression found in a
    parameter's name applies. A rule is None (unfactored), "HEURISTIC", or the role of each dimension. ROW and
    COLUMN dimensions are factored. Slices of BATCH and NONE dimensions are updated as separate parameters, but slices
    of NONE dimensions share scale and clipping. As in the source, vectors and matrices follow the heuristic unless
    their rule has BATCH: a matrix is factored if both dimensions are at least `min_dim_size_to_factor`. A 3-D parameter
    without a rule is a stack of matrices (experts), each of which follows the heuristic. A parameter with more
    dimensions needs a rule.

    States: `v_row` with the BATCH, NONE and ROW dimensions, in this order, and `v_col` likewise; or `v` if unfactored.
    If `beta1` is set (even to 0.0), also `m`, in `dtype_momentum`, or if that is None, in `state_storage`.

    As in the source, weight decay is not multiplied by lr. With `weight_decay_rate_lr_exponent`, it is
    (weight_decay_rate or 1)·lr^exponent. With `skip_nan_updates`, elements that would become NaN do not change, and
    only a dynamic loss scale skips the step. With `global_norm_clip_threshold`, a NaN makes all gradients NaN, and an
    Inf makes finite elements 0. 16-bit momentum is multiplied by beta1 rounded to 16 bits. `variant`: "jit" rounds the
    results; "op_by_op" rounds each operation on a 16-bit weight or momentum, as the source does if it is not compiled.

    Difference from the source: dimensions are not selected by the names of logical axes, only by parameter name.

    Options: `multiply_by_parameter_scale`: True, False, or a list of (regular expression, bool). `epsilon1` (ε₁) and
    `epsilon2` (ε₂, the minimum scale). `global_norm_clip_threshold`: clips by the norm of all gradients.
    """

    source = "Shazeer and Stern 2018, arXiv:1804.04235; T5X"
    keeps = "row and column means of g²"
    exactness = "trajectories recorded from its source, weights to 1e-6"
    usual_lr = (1e-3, "measured: docs/how-to/choosing.md")
    relative = (0.9, 1.3)
    decay = "weight_decay_rate"
    norm_option = "global_norm_clip_threshold"
    defaults, checks = require.hyperparameters(
        lr=(1e-3, require.number(">= 0")),
        factored=(True, require.flag),
        multiply_by_parameter_scale=(True, flag_by_name),
        beta1=(None, require.number(">= 0", "< 1", optional=True)),
        decay_rate=(0.8, require.number("> 0")),
        step_offset=(0, require.number(">= 0", whole=True)),
        clipping_threshold=(1.0, require.number("> 0", optional=True)),
        weight_decay_rate=(None, require.number(">= 0", optional=True)),
        min_dim_size_to_factor=(128, require.number(">= 0", whole=True)),
        epsilon1=(1e-30, require.number(">= 0")),
        epsilon2=(1e-3, require.number(">= 0")),
        dtype_momentum=(None, require.dtype(none="state_storage")),
        factor_map=(None, factor_map),
        weight_decay_rate_lr_exponent=(None, require.number(">= 0", optional=True)),
        global_norm_clip_threshold=(None, require.number(">= 0", optional=True)),
        max_parameter_scale=(None, require.number("> 0", optional=True)),
        skip_nan_updates=(False, require.flag),
        variant=("jit", require.one_of("jit", "op_by_op")),
    )

    def check(self, hyper: Hyper) -> None:
        super().check(hyper)
        read = hyper["factored"] or hyper["factor_map"] is None
        require.that(read, "factor_map", hyper["factor_map"], "None where factored=False")

    def scalars(self, hyper: Hyper, step: int) -> dict[str, float]:
        if step <= hyper["step_offset"]:
            raise ConfigError(
                f"step_offset={hyper['step_offset']}, but this is step {step}. step_offset is the step at which "
                "fine-tuning starts in a run that resumes from a checkpoint. Omit it in a new run"
            )
        lr = hyper["lr"]
        wd = hyper["weight_decay_rate"]
        if hyper["weight_decay_rate_lr_exponent"]:
            wd = (wd or 1.0) * lr ** hyper["weight_decay_rate_lr_exponent"]
        gain = (step - hyper["step_offset"]) ** -hyper["decay_rate"]
        scalars = {"lr": lr, "undecayed": 1.0 - (wd or 0.0)}
        scalars |= moment_scalars(gain, hyper["epsilon1"], hyper["epsilon2"])
        scalars |= numbers(hyper, threshold="clipping_threshold", max_scale="max_parameter_scale")
        if hyper["beta1"] is not None:
            dtype = require.dtype_of(hyper["dtype_momentum"]) or torch.float32
            scalars |= {"beta1": nearest_number(hyper["beta1"], dtype), "gain1": 1.0 - hyper["beta1"]}
        if hyper["variant"] == "op_by_op":
            scalars["as_stored"] = 1.0
        if hyper["skip_nan_updates"]:
            scalars["skip_nan"] = 1.0
        return scalars

    def without_decay(self) -> dict[str, Any]:
        return {"weight_decay_rate": None, "weight_decay_rate_lr_exponent": None}  # an exponent replaces 0.0 by 1.0

    def handles_nonfinite(self, hyper: Hyper) -> bool:
        return bool(hyper["skip_nan_updates"])

    def clip_by_norm(self, group: GroupNorms) -> GroupClip:
        threshold = group.hyper["global_norm_clip_threshold"]
        return GroupClip(threshold * (1.0 / group.total).clamp(max=1.0 / threshold))

    def spec(self, name: str, shape: tuple[int, ...], hyper: Hyper) -> FactoredSpec:
        scaled = hyper["multiply_by_parameter_scale"]
        if not isinstance(scaled, bool):
            where = f"parameter {name!r} of shape {list(shape)}"
            scaled = first_match("multiply_by_parameter_scale", scaled, name, where)
        momentum = {}
        if hyper["beta1"] is not None:
            momentum["m"] = StateSpec("full", require.dtype_of(hyper["dtype_momentum"]))
        batch, none, rows, cols = dimensions(name, shape, hyper)
        if not rows and not cols:
            states = {"v": StateSpec("full", signed=False), **momentum}
            return FactoredSpec(View(batch, (), none), states, scaled=scaled)
        alike = View(none).sizes(shape)[0]
        if max(rows, default=-1) > max(cols, default=-1):  # the rows of a view are the dimensions with larger strides
            states = {"v_col": StateSpec("row"), "v_row": StateSpec("col"), **momentum}
            view = View(batch + none, cols, rows)
            return FactoredSpec(view, states, normalized="col", alike=alike, scaled=scaled)
        states = {"v_row": StateSpec("row"), "v_col": StateSpec("col"), **momentum}
        return FactoredSpec(View(batch + none, rows, cols), states, alike=alike, scaled=scaled)

    def update(self, sweep: Sweep, spec: FactoredSpec, state: State) -> None:
        number = sweep.scalar
        if "skip_nan" in number:
            sweep.allow_nonfinite()
        change = precondition(sweep, spec, state)
        scale = number.lr
        rounded = sweep.stored if "as_stored" in number else exactly
        if spec.scaled:
            scale = rounded(change.size * rounded(scale))
        scalar = {"keep": rounded(number.undecayed), "step": scale / change.divisor}
        sweep.apply(new_values, **change.vectors, scalar=scalar)
