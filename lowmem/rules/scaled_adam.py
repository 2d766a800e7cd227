"""ScaledAdam: Adam with steps relative to the rms of the weight, which is also learned (icefall's `optim.py`)."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lowmem.errors import ConfigError
from lowmem.rules import require
from lowmem.rules.moments import averages, correction, moment_states, next_count
from lowmem.rules.rule import GroupClip, GroupNorms, Hyper, ParamSpec, State, StateSpec, UpdateRule, register
from lowmem.tiles.layout import View
from lowmem.tiles.sweep import Sweep
from lowmem.tiles.tile import Sums, Tile

# Tensors of `group_memory`.
_MEMORY = ("steps", "model_norms", "model_norm_threshold", "num_clipped", "percent_clipped")


def size_gradient(t: Tile) -> Sums:
    """Returns the sum of g·w, the gradient with respect to the logarithm of the weight's rms, and the sum of w²."""
    return Sums(scalar={"grad": t.param * t.grad, "param": t.param.square()})


def new_values(t: Tile) -> dict[str, Tensor]:
    square = t.full.exp_avg_sq * t.scalar.beta2 + t.grad_square * t.scalar.gain2
    change = t.grad / ((square * t.scalar.correction2).sqrt() + t.scalar.eps)
    delta = t.full.delta * t.scalar.beta1
    if "grow" in t.scalar:
        delta = delta + t.param * t.scalar.grow + change * t.scalar.step
        return {"param": t.param + delta, "delta": delta, "exp_avg_sq": square}
    delta = delta + change * t.scalar.single_step
    limited = t.param.clamp(-t.scalar.scalar_max, t.scalar.scalar_max)
    return {"param": limited + delta, "delta": delta, "exp_avg_sq": square}


@register("scaled_adam")
class ScaledAdam(UpdateRule):
    """delta ← β₁·delta - (1-β₁)·lr·rms(w)·g/(√v̂ + eps), w ← w + delta. Every `size_update_period` steps,
    rms(w) is measured, and Adam on log(rms(w)) with learning rate lr·scalar_lr_scale scales w. For a parameter with one
    element, lr·scalar_lr_scale replaces lr·rms(w). As in the source, a parameter without a gradient is updated as if
    its gradient were zero, unless it is frozen.

    Options: `param_min_rms`: a weight with a smaller rms stops shrinking, and its steps use this value as rms(w).
    `param_max_rms`: a weight with a larger rms is shrunk. `scalar_max`: a single element is clamped to it before its
    update. `clipping_scale` clips the norm of g·rms(w) over the group to clipping_scale times the median of the last
    `clipping_update_period` norms. `clip_update`: True clips the update, as the source documents; False clips only the
    gradient of rms(w), as the source does. `show_dominant_parameters`: logs the parameter that dominates the norm.

    As in the source, the bias of v is corrected while it exceeds 1 %, and the bias of delta is not corrected. Each
    group clips by its norms. Nothing is clipped in the first `clipping_update_period` steps, and the "median" is
    sorted[(period // 4) * 2]. `last_step.statistics` contains the model norm and, with clipping, the quartiles of the
    last norms, the threshold, and the percentage of steps clipped in the last period.
    """

    source = "Povey et al. (icefall), Yao et al. 2023, arXiv:2310.11230"
    keeps = "delta and mean of g²; the weight's rms, updated every few steps"
    exactness = "trajectories recorded from its source, weights to 1e-6"
    usual_lr = (1e-3, "measured: docs/how-to/choosing.md")
    relative = (0.9, 1.3)
    norm_option = "clipping_scale"
    every_parameter = True
    defaults, checks = require.hyperparameters(
        lr=(3e-2, require.number(">= 0")),
        clipping_scale=(None, require.number("> 0", optional=True)),
        betas=((0.9, 0.98), require.betas),
        scalar_lr_scale=(0.1, require.number(">= 0")),
        eps=(1e-8, require.number(">= 0")),
        param_min_rms=(1e-5, require.number(">= 0")),
        param_max_rms=(3.0, require.number("> 0")),
        scalar_max=(10.0, require.number("> 0")),
        size_update_period=(4, require.number(">= 1", whole=True)),
        clipping_update_period=(100, require.number(">= 1", whole=True)),
        clip_update=(True, require.flag),
        show_dominant_parameters=(True, require.flag),
    )

    def group_memory(self, hyper: Hyper) -> dict[str, Tensor]:
        if hyper["clipping_scale"] is None:
            return {}
        norms = torch.zeros(hyper["clipping_update_period"])
        unknown = torch.full((), math.nan)
        return dict(zip(_MEMORY, (torch.zeros(()), norms, unknown, unknown, torch.zeros(())), strict=True))

    def clip_by_norm(self, group: GroupNorms) -> GroupClip:
        period = group.hyper["clipping_update_period"]
        scale = group.hyper["clipping_scale"]
        memory = group.memory
        zero = torch.zeros_like(group.total)
        if (steps := len(memory["model_norms"])) != period:
            known = f"but the norms of the last {steps} steps are stored"
            raise ConfigError(f"clipping_update_period={period}, {known}. The period cannot change during training")
        sizes = [state["param_rms"].to(zero.device) if "param_rms" in state else zero + 1.0 for state in group.states]
        norm = torch.linalg.vector_norm(group.norms * torch.stack(sizes))
        # counts from the first step of any parameter, even if clipping was enabled later or the parameter is now frozen
        counts = [state["step"].to(zero.device) for state in (*group.states, *group.frozen) if state]
        done = torch.stack([memory["steps"], *(count.float() for count in counts)]).max()

        here = torch.arange(period, device=zero.device) == done % period
        norms = torch.where(here & (done > 0), norm, memory["model_norms"])
        due = (done % period == 0) & (done > 0)
        threshold = torch.where(due, scale * norms.sort().values[period // 4 * 2], memory["model_norm_threshold"])
        clipped = memory["num_clipped"]
        percent = torch.where(due, clipped.nan_to_num(0.0) * (100.0 / period), memory["percent_clipped"])
        coef = (threshold / (norm + 1e-20)).clamp(max=1.0)
        coef = torch.where(coef.isnan(), 1.0, coef)  # NaN: no threshold has been computed yet
        clipped = torch.where(due, zero, clipped) + (coef < 1.0)
        new = dict(zip(_MEMORY, (done + 1, norms, threshold, clipped, percent), strict=True))
        return GroupClip(coef, by_rule=not group.hyper["clip_update"], memory=new)

    def spec(self, name: str, shape: tuple[int, ...], hyper: Hyper) -> ParamSpec:
        states = moment_states("delta", "exp_avg_sq")
        if math.prod(shape) != 1:  # the rms of a single element is not learned
            states["param_rms"] = states["scale_exp_avg_sq"] = StateSpec("slice")
            states["scale_grads"] = StateSpec("slice", extra=(hyper["size_update_period"],))
        return ParamSpec(View.vector(len(shape)), states)

    def scalars(self, hyper: Hyper, step: int) -> dict[str, float]:
        lr = hyper["lr"]
        period = hyper["size_update_period"]
        size_lr = lr * hyper["scalar_lr_scale"]
        size_beta2 = hyper["betas"][1] ** period
        scalars = averages(*hyper["betas"])
        return {
            **scalars,
            "eps": hyper["eps"],
            "relative_step": -lr * scalars["gain1"],
            "single_step": -size_lr * scalars["gain1"],
            "scalar_max": hyper["scalar_max"],
            "min_rms": hyper["param_min_rms"],
            "max_rms": hyper["param_max_rms"],
            "shrink": -size_lr * period,
            "size_lr": size_lr,
            "size_beta2": size_beta2,
            "size_gain2": 1.0 - size_beta2,
        }

    def update(self, sweep: Sweep, spec: ParamSpec, state: State) -> Tensor:
        number = sweep.scalar
        scalar = {}
        single = "scale_grads" not in spec.states
        sums = {} if single else sweep.reduce(size_gradient).scalar
        count = next_count(sweep, state)
        bias2 = correction(sweep.double.beta2, count)
        if single:
            size = torch.ones_like(bias2, dtype=torch.float32)
        else:
            bias2 = torch.where(bias2 < 0.99, bias2, 1.0)
            (period,) = spec.states["scale_grads"].extra
            size, new_size, scale_step = self._learn_size(sweep, state, period, count, sums)
            step_size = number.relative_step * new_size.clamp(min=number.min_rms)
            scalar = {"step": step_size, "grow": scale_step * number.gain1}
        scalar["correction2"] = (1.0 / bias2).float()
        sweep.apply(new_values, full={name: state[name] for name in ("delta", "exp_avg_sq")}, scalar=scalar)
        return size

    def _learn_size(
        self, sweep: Sweep, state: State, period: int, count: Tensor, sums: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the previous and the new value of the stored rms, and the weight's growth, each float32 [members]."""
        number = sweep.scalar
        if sweep.rule_clip_coef is not None:
            sums["grad"] = sums["grad"] * sweep.rule_clip_coef
        done = count - 1  # completed updates
        turn = done % period
        measured = (sums["param"] / sweep.count).sqrt()
        before = torch.where(done == 0, measured, state["param_rms"].view(-1))
        size = torch.where(turn == period - 1, measured, before)
        due = (turn == period - 1) & (done > 0)

        grads = state["scale_grads"].view(-1, period)
        here = torch.arange(period, device=grads.device) == turn[:, None]
        grads = torch.where(here, sums["grad"][:, None], grads)
        square = state["scale_exp_avg_sq"].view(-1)
        square = torch.where(due, square * number.size_beta2 + grads.square().mean(-1) * number.size_gain2, square)

        root_correction2 = correction(sweep.double.size_beta2, count // period).sqrt().float()
        scale_step = -number.size_lr * root_correction2 * grads.sum(-1) / (square.sqrt() + number.eps)
        scale_step = torch.where(size < number.min_rms, 0.0, scale_step)
        scale_step = torch.where(size > number.max_rms, number.shrink, scale_step)
        sweep.store(state["param_rms"], size)
        sweep.store(state["scale_grads"], grads)
        sweep.store(state["scale_exp_avg_sq"], square)
        return before, size, torch.where(due, scale_step, 0.0)

    def statistics(
        self, names: Sequence[str], squares: Tensor, sizes: Tensor, groups: Sequence[tuple[Hyper, Mapping[str, Tensor]]]
    ) -> dict[str, float | str]:
        weighted = (squares * sizes.square()).tolist()
        total = sum(weighted)
        values: dict[str, float | str] = {"model_norm": math.sqrt(total)}
        clipped = [memory for _, memory in groups if memory]
        for n, memory in enumerate(clipped):
            suffix = f"_group{n}" if len(clipped) > 1 else ""
            norms = memory["model_norms"].sort().values.tolist()
            for quarter in range(5):
                values[f"model_norm_quartile{quarter}{suffix}"] = norms[min(len(norms) - 1, len(norms) // 4 * quarter)]
            values[f"model_norm_threshold{suffix}"] = float(memory["model_norm_threshold"])
            values[f"percent_clipped{suffix}"] = float(memory["percent_clipped"])
        if any(hyper["show_dominant_parameters"] for hyper, _ in groups) and total != 0:
            dominant = max(range(len(names)), key=lambda i: weighted[i] if math.isfinite(weighted[i]) else math.inf)
            proportion = weighted[dominant] / total if math.isfinite(total) else 1.0
            values |= {"dominant_parameter": names[dominant], "dominant_proportion": proportion}
            values["dominant_rms"] = float(sizes[dominant])
        return values
