"""AdamW: Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowmem.errors import CheckpointError
from lowmem.rules import require
from lowmem.rules.moments import averages, correction, moment_states, next_count
from lowmem.rules.rule import Hyper, ParamSpec, State, UpdateRule, register
from lowmem.tiles.storage import STORED_DTYPES
from lowmem.tiles.sweep import Sweep
from lowmem.tiles.tile import Tile


def new_values(t: Tile) -> dict[str, Tensor]:
    mean = torch.lerp(t.full.exp_avg, t.grad, t.scalar.gain1)
    square = torch.addcmul(t.full.exp_avg_sq * t.scalar.beta2, t.grad * t.scalar.gain2, t.grad)
    scale = square.sqrt() / t.scalar.root_correction2 + t.scalar.eps
    param = torch.addcdiv(t.param * t.scalar.keep, mean * t.scalar.step, scale)
    return {"param": param, "exp_avg": mean, "exp_avg_sq": square}


@register("adamw")
class AdamW(UpdateRule):
    """m ← β₁m + (1-β₁)g, v ← β₂v + (1-β₂)g²; w ← (1 - lr·weight_decay)·w - lr·m̂ / (√v̂ + eps), with m̂ = m/(1-β₁^t) and
    v̂ = v/(1-β₂^t), where t is the number of updates of the parameter.

    In float32 it equals `torch.optim.AdamW(foreach=False)`, bit for bit on the CPU if the sweep is not compiled.
    """

    source = "Loshchilov and Hutter 2019, arXiv:1711.05101"
    keeps = "means of g and g²"
    exactness = "torch.optim.AdamW(foreach=False), bit for bit in float32 on a CPU, unless compiled"
    usual_lr = (2e-5, "the default of TRL for SFT")
    states = moment_states("exp_avg", "exp_avg_sq")
    elementwise = True
    defaults, checks = require.hyperparameters(
        lr=(1e-3, require.number(">= 0")),
        betas=((0.9, 0.999), require.betas),
        eps=(1e-8, require.number(">= 0")),
        weight_decay=(0.01, require.number(">= 0")),
    )

    def scalars(self, hyper: Hyper, step: int) -> dict[str, float]:
        scalars = {"eps": hyper["eps"], "lr": hyper["lr"], "keep": 1.0 - hyper["lr"] * hyper["weight_decay"]}
        return averages(*hyper["betas"]) | scalars

    def update(self, sweep: Sweep, spec: ParamSpec, state: State) -> None:
        double = sweep.double
        count = next_count(sweep, state)
        scalar = {
            "root_correction2": correction(double.beta2, count).sqrt().float(),
            "step": (correction(double.beta1, count).reciprocal() * -double.lr).float(),
        }
        sweep.apply(new_values, full={name: state[name] for name in ("exp_avg", "exp_avg_sq")}, scalar=scalar)


def of_torch(
    groups: Sequence[Mapping[str, Any]], states: Mapping[Any, Mapping[str, Tensor]], own: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], dict[Any, dict[str, Tensor]]]:
    """Converts the groups and states of a saved `torch.optim.AdamW` for rule "adamw".

    Args:
        groups: the saved parameter groups.
        states: the saved states, by the keys in `params` of the groups.
        own: the parameter groups to load into.

    Raises:
        CheckpointError: the optimizer used an option that the rule does not support, or different parameter names.
    """
    converted, loaded = [], dict[Any, dict[str, Tensor]]()
    for n, (group, ours) in enumerate(zip(groups, own, strict=True)):
        coupled = group["weight_decay"] != 0 and not group.get("decoupled_weight_decay", True)
        options = {"amsgrad": group["amsgrad"], "maximize": group.get("maximize"), "coupled weight_decay": coupled}
        if used := [option for option, value in options.items() if value]:
            raise CheckpointError(f"group {n} of the saved torch optimizer has {used[0]}, which 'adamw' does not have")
        if group.get("param_names", ours["param_names"]) != ours["param_names"]:
            raise CheckpointError(f"group {n} of the saved torch optimizer has other parameters or a different order")
        hyper = {key: group[key] for key in ours.keys() & group.keys()}
        own_states = {key: states[key] for key in group["params"] if key in states}
        # torch.optim.AdamW stores 16-bit states for 16-bit weights
        dtypes = {value.dtype for state in own_states.values() for name, value in state.items() if name != "step"}
        keeps_dtype = ours["state_storage"] == "auto" and len(dtypes) == 1 and dtypes <= {*STORED_DTYPES}
        dtype = dtypes.pop() if keeps_dtype else torch.float32
        stored = str(dtype).removeprefix("torch.")
        converted.append({**ours, **hyper, "lr": float(group["lr"]), "rule": "adamw", "state_storage": stored})
        for key, state in own_states.items():
            loaded[key] = {name: value.long() if name == "step" else value.to(dtype) for name, value in state.items()}
    return converted, loaded
