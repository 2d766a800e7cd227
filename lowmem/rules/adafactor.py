"""Adafactor as T5X has it: factored along dimensions that are chosen by parameter name (its `adafactor.py`)."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowmem.errors import ConfigError
from lowmem.rules import require
from lowmem.rules.factor_rules import check_factor_rules, dimensions, first_match, flag_by_name
from lowmem.rules.factored import FactoredSpec, change, clip_divisor, mean_alike, precondition, results, second_moments
from lowmem.rules.factored import moved as moved_jitted
from lowmem.rules.rule import GroupClip, GroupNorms, Hyper, State, StateSpec, UpdateRule, register
from lowmem.tiles.layout import View
from lowmem.tiles.storage import nearest_number
from lowmem.tiles.sweep import Sweep
from lowmem.tiles.tile import ApplyFn, Tile


def moved_op_by_op(t: Tile) -> dict[str, Tensor]:
    """As `moved`, with each operation on a stored tensor rounded to its dtype."""
    step, decayed = change(t) * t.scalar.step, t.stored(t.param * t.scalar.keep)
    if "m" not in t.full:
        return results(t, decayed, step)
    momentum = t.stored(t.full.m * t.scalar.beta1, like="m") + step * t.scalar.gain1
    return {**results(t, decayed, momentum), "m": momentum}


def _but_nan(t: Tile, new: Mapping[str, Tensor]) -> dict[str, Tensor]:
    old = {name: t.param if name == "param" else getattr(t.full, name) for name in new}
    return {name: torch.where(value.isnan(), old[name], value) for name, value in new.items()}


def moved_jitted_but_nan(t: Tile) -> dict[str, Tensor]:
    return _but_nan(t, moved_jitted(t))


def moved_op_by_op_but_nan(t: Tile) -> dict[str, Tensor]:
    return _but_nan(t, moved_op_by_op(t))


# By variant and by `skip_nan_updates`.
MOVED: dict[str, tuple[ApplyFn, ApplyFn]] = {
    "jit": (moved_jitted, moved_jitted_but_nan),
    "op_by_op": (moved_op_by_op, moved_op_by_op_but_nan),
}


@dataclass(frozen=True, kw_only=True)
class AdafactorSpec(FactoredSpec):
    """swapped: rows of the view are the source's columns, which lie further apart in memory than its rows."""

    swapped: bool = False


@register("adafactor")
class Adafactor(UpdateRule):
    """v ← β₂v + (1-β₂)(g² + ε₁), factored into `v_row` and `v_col` where there are dimensions for it, β₂ = 1 -
    t^-decay_rate with t = step - step_offset; u = g/√v, divided by max(1, rms(u)/clipping_threshold); with s =
    lr·clip(rms(w), ε₂, max_parameter_scale), or lr: w ← (1 - weight_decay_rate)·w - s·u, or with `beta1` the running
    mean of s·u instead.

    Which dimensions are factored: `factor_map` is a list of (regular expression, rule), of which the first expression
    found in a parameter's name counts. `logical_factor_rules` ("standard", or axis name → role) is about the axes in
    `param_logical_axes` (parameter name → axis names), and comes before `factor_map`. A rule is None (unfactored),
    "HEURISTIC", or the role of each dimension: ROW and COLUMN dimensions are factored, each slice of BATCH dimensions
    is updated as a parameter of its own, and so are slices of NONE ones, except that they share scale and clipping. As
    in the source, vectors and matrices follow the heuristic unless their rule has BATCH: a matrix is factored if both
    dimensions are at least `min_dim_size_to_factor`. A 3-D parameter without a rule is a stack of matrices (experts),
    each of which follows the heuristic; more dimensions need a rule.

    States: `v_row` with the BATCH, NONE and ROW dimensions, in this order, and `v_col` likewise; or `v`; with `beta1`
    (also 0.0) `m`, in `dtype_momentum`.

    As in the source: weight decay is not multiplied by lr, unless `weight_decay_rate_lr_exponent` is set, which makes
    it (weight_decay_rate or 1)·lr^exponent. With `skip_nan_updates` single elements that would become NaN stay as they
    are, and neither the parameter nor the step is skipped, unless by a dynamic loss scale; with
    `global_norm_clip_threshold` a NaN makes all gradients NaN, and an Inf makes them 0. Momentum in 16 bits is
    multiplied by beta1 rounded to them. `variant`: "jit" rounds final results, "op_by_op" each operation on a 16-bit
    weight or momentum, as the source does when not compiled.

    Options: `multiply_by_parameter_scale`: True, False, or a list of (regular expression, bool). `epsilon1` (ε₁) and
    `epsilon2` (ε₂, the least scale). `global_norm_clip_threshold`: clips by the norm of all gradients.
    """

    source = "Shazeer and Stern 2018, arXiv:1804.04235; T5X"
    keeps = "row and column means of g²"
    exactness = "trajectories recorded from its source, weights to 1e-6"
    usual_lr = (1e-3, "measured: docs/choosing.md")
    relative = (0.9, 1.3)
    decay = "weight_decay_rate"
    sums_squares = True
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
        dtype_momentum=("float32", require.dtype(optional=False)),
        factor_map=(None, require.anything),
        logical_factor_rules=(None, require.anything),
        param_logical_axes=(None, require.anything),
        weight_decay_rate_lr_exponent=(None, require.number(">= 0", optional=True)),
        global_norm_clip_threshold=(None, require.number(">= 0", optional=True)),
        max_parameter_scale=(None, require.number("> 0", optional=True)),
        skip_nan_updates=(False, require.flag),
        variant=("jit", require.one_of("jit", "op_by_op")),
    )

    def check(self, hyper: Hyper) -> None:
        super().check(hyper)
        check_factor_rules(hyper)

    def begin(self, hyper: Hyper, step: int) -> None:
        if step <= hyper["step_offset"]:
            raise ConfigError(
                f"step_offset={hyper['step_offset']}, but this is step {step}: it is the step at which fine-tuning "
                "begins in a run that resumes from a checkpoint; omit it in a new run"
            )

    def names(self, hyper: Hyper) -> Iterable[str]:
        return hyper["param_logical_axes"] or ()

    def without_decay(self) -> dict[str, Any]:
        return {"weight_decay_rate": None, "weight_decay_rate_lr_exponent": None}  # with an exponent 0.0 is 1.0

    def takes_nonfinite(self, hyper: Hyper) -> bool:
        return bool(hyper["skip_nan_updates"])

    def needs_norm(self, hyper: Hyper) -> str | None:
        threshold = hyper["global_norm_clip_threshold"]
        return f"global_norm_clip_threshold={threshold!r}" if threshold else None

    def clip_by_norm(self, group: GroupNorms) -> GroupClip:
        threshold = group.hyper["global_norm_clip_threshold"]
        return GroupClip(threshold * (1.0 / group.total).clamp(max=1.0 / threshold))

    def spec(self, name: str, shape: tuple[int, ...], hyper: Hyper) -> AdafactorSpec:
        scaled = hyper["multiply_by_parameter_scale"]
        if not isinstance(scaled, bool):
            where = f"parameter {name!r} of shape {list(shape)}"
            scaled = first_match("multiply_by_parameter_scale", scaled, name, where)
        momentum = {}
        if hyper["beta1"] is not None:
            momentum["m"] = StateSpec("full", require.dtype_of(hyper["dtype_momentum"]))
        batch, none, rows, cols = dimensions(name, shape, hyper)
        if not rows and not cols:
            view = View(batch, (), none)
            states = {"v": StateSpec("full", signed=False), **momentum}
            return AdafactorSpec(view, states, factored=False, scaled=scaled)
        swapped = max(rows, default=-1) > max(cols, default=-1)
        alike = View(none).sizes(shape)[0]
        if swapped:
            rows, cols = cols, rows
        row, col = StateSpec("row"), StateSpec("col")
        states = {"v_row": col if swapped else row, "v_col": row if swapped else col, **momentum}
        view = View(batch + none, rows, cols)
        return AdafactorSpec(view, states, factored=True, alike=alike, scaled=scaled, swapped=swapped)

    def update(self, sweep: Sweep, spec: AdafactorSpec, state: State, hyper: Hyper, step: int) -> None:
        lr, wd, skip_nan = hyper["lr"], hyper["weight_decay_rate"], hyper["skip_nan_updates"]
        if hyper["weight_decay_rate_lr_exponent"]:
            wd = (wd or 1.0) * lr ** hyper["weight_decay_rate_lr_exponent"]
        if skip_nan:
            sweep.pass_nonfinite()
        op_by_op = hyper["variant"] == "op_by_op"
        row, col = ("v_col", "v_row") if spec.swapped else ("v_row", "v_col")
        moment, side = second_moments(state, row, col, "v"), "col" if spec.swapped else "row"
        gain = (step - hyper["step_offset"]) ** -hyper["decay_rate"]
        measured = precondition(
            sweep, moment, gain=gain, eps=hyper["epsilon1"], normalised=side, as_stored=op_by_op, skip_nan=skip_nan
        )
        rounded: Callable[[Tensor], Tensor] = sweep.stored if op_by_op else lambda value: value
        scale = sweep.scalar(lr)
        if spec.scaled:
            size = rounded(rounded(mean_alike(measured.param, sweep.count, spec.alike)).sqrt())
            size = size.clamp(min=rounded(sweep.scalar(hyper["epsilon2"])))
            if hyper["max_parameter_scale"] is not None:
                size = size.clamp(max=rounded(sweep.scalar(hyper["max_parameter_scale"])))
            scale = rounded(size * rounded(scale))
        change_rms = mean_alike(measured.square, sweep.count, spec.alike).sqrt()
        step_size = scale / clip_divisor(change_rms, hyper["clipping_threshold"])
        keep = rounded(sweep.scalar(1.0 - (wd or 0.0)))
        arguments = measured.arguments(momentum=state.get("m"), keep=keep, step=step_size)
        if "m" in state:
            beta1 = nearest_number(hyper["beta1"], state["m"].dtype)
            arguments["scalar"] |= {"beta1": beta1, "gain1": 1.0 - hyper["beta1"]}
        sweep.apply(MOVED[hyper["variant"]][skip_nan], **arguments)
