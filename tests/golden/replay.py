"""Replays golden trajectories through the real `lowmem.FusedOptimizer` and measures how far it is from them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from golden.load_golden import Case
from torch import Tensor

import lowmem


class NotReplayed(Exception):
    """A case that records what the package deliberately does otherwise, or cannot do yet."""


def adalomo(case: Case) -> dict[str, Any]:
    hyper = dict(case.hyper)
    clip_norm, clip_value = hyper.pop("clip_grad_norm"), hyper.pop("clip_grad_value")
    if clip_norm is not None and len(case.entry["two_pass_steps"]) < case.steps:
        raise NotReplayed("reuses the clip factor of an earlier step, which lowmem never does")
    return {
        **hyper,
        "rule": "adalomo",
        "rounding": "nearest",
        "clip_norm": clip_norm,
        "clip_value": clip_value if clip_value is not None and clip_value > 0 else None,
    }


def scaled_adam(case: Case) -> dict[str, Any]:
    return {**case.hyper, "rule": "scaled_adam", "clip_update": False}


def t2t_adafactor(case: Case) -> dict[str, Any]:
    hyper = dict(case.hyper)
    lr, decay = hyper.pop("learning_rate"), hyper.pop("decay_rate")
    if decay["kind"] == "const":
        options = {"decay_rate": next(value for value in decay.values() if isinstance(value, float))}
    else:
        option = {"pow": ("memory_exponent", "exponent"), "adam": ("beta2", "beta2")}[decay["kind"]]
        options = {"decay_type": decay["kind"], option[0]: decay[option[1]]}
    rate = None if isinstance(lr, str) else lr
    return {**hyper, **options, "rule": "adafactor_t2t", "lr": rate, "factor_stacks": False}


def lans(case: Case) -> dict[str, Any]:
    hyper = dict(case.hyper)
    lr = hyper.pop("learning_rate")
    if case.entry["expect_nonfinite"]:
        raise NotReplayed("a gradient of zeros makes it NaN for ever; in lowmem it stays a gradient of zeros")
    return {**hyper, "rule": "lans", "lr": lr, "variant": case.entry["variant"]}


def t5x_adafactor(case: Case) -> dict[str, Any]:
    hyper = dict(case.hyper)
    lr = hyper.pop("learning_rate")
    hyper.pop("param_logical_axes", None)
    if hyper.pop(
        "logical_factor_rules", None
    ):  # lowmem does not have T5X's names of axes: the recorded roles, by parameter
        hyper["factor_map"] = [(f"^{name}$", roles) for name, roles in case.entry["resolved_factor_map"].items()]
    rate = 1.0 if isinstance(lr, str) else lr  # each step has its own
    return {**hyper, "rule": "adafactor", "lr": rate, "variant": case.entry["variant"] or "op_by_op"}


# Recorded optimizer → arguments of `FusedOptimizer` that play a case of it; they raise `NotReplayed`.
ADAPTERS: dict[str, Callable[[Case], dict[str, Any]]] = {
    "adalomo": adalomo,
    "scaled_adam": scaled_adam,
    "t2t_adafactor": t2t_adafactor,
    "lans": lans,
    "t5x_adafactor": t5x_adafactor,
}


@dataclass(frozen=True)
class Result:
    """A replayed case: worst deviations over its recorded steps. `ok` is None for a case that was skipped."""

    name: str
    param: float | None = None
    state: float | None = None
    ok: bool | None = None
    reason: str | None = None


def replay(case: Case, **settings: Any) -> Result:
    """Drives the fused optimizer, with further `settings` of it, through a case and measures both deviations."""
    params = {name: torch.nn.Parameter(value) for name, value in case.init().items()}
    try:
        options = {**ADAPTERS[case.optimizer](case), "state_storage": "float32", **settings}
        opt = lowmem.FusedOptimizer(groups(case, params), **options)
    except (NotReplayed, lowmem.LowmemError) as error:
        return Result(case.name, reason=str(error))
    try:
        return measure(case, opt, params)
    except lowmem.LowmemError as error:
        return Result(case.name, ok=False, reason=str(error))


def groups(case: Case, params: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """The parameters in their groups, with the settings of each."""
    settings_of_groups = case.entry.get("param_groups") or [{}]
    members: list[list[tuple[str, Tensor]]] = [[] for _ in settings_of_groups]
    for entry in case.entry["params"]:
        members[entry.get("group") or 0].append((entry["name"], params[entry["name"]]))
    return [{**settings, "params": pairs} for settings, pairs in zip(settings_of_groups, members, strict=True)]


def measure(case: Case, opt: lowmem.FusedOptimizer, params: Mapping[str, Tensor]) -> Result:
    """Takes every step of a case and compares wherever it was recorded."""
    opt.load_named_state_dict({**opt.named_state_dict(), "step": case.entry["initial_step"]})
    param, state, faults = 0.0, 0.0, []
    tally = Tally()
    for step in range(1, case.steps + 1):
        lr = case.lr(step)
        changed = {"lr": lr} if lr is not None else {}
        for group in opt.param_groups:
            group.update({**changed, **case.entry.get("hyper_schedule", {}).get(str(step), {})})
        opt.backward(loss_with_gradients(params, case.grads(step), opt.loss_scale or 1.0))
        if step not in case.recorded:
            continue
        param = max(param, *case.compare(step, excused(case, step, params, tally)).values())
        state = max(state, *case.compare_state(step, states(case, step, opt)).values(), 0.0)
    allowed = max(case.tolerance.get(f"elements_off_by_one_{unit}_allowed", 0.0) for unit in ("ulp", "quantum"))
    if tally.differing > allowed * tally.elements:
        faults.append(f"{tally.differing} of {tally.elements} rounded elements differ")
    if tally.too_far:
        faults.append(f"{tally.too_far} rounded elements are off by more than one unit")
    if param > case.tolerance["param"]:
        faults.append("parameters are over their tolerance")
    if state > case.tolerance["state"]:
        faults.append("states are over their tolerance")
    return Result(case.name, param, state, not faults, "; ".join(faults) or None)


def loss_with_gradients(params: Mapping[str, Tensor], grads: Mapping[str, Tensor | None], scale: float) -> Tensor:
    """A loss that, multiplied with `scale`, gives just these gradients; None leaves the parameter out of it."""
    terms = [(params[name] * (grad / scale)).sum() for name, grad in grads.items() if grad is not None]
    return torch.stack([term.float() for term in terms]).sum()


@dataclass
class Tally:
    """Counts of rounded elements: compared, different, and different by more than one unit."""

    elements: int = 0
    differing: int = 0
    too_far: int = 0

    def add(self, units: Tensor) -> None:
        self.elements += units.numel()
        self.differing += int((units > 0).sum())
        self.too_far += int((units > 1).sum())


def excused(case: Case, step: int, params: Mapping[str, Tensor], tally: Tally) -> dict[str, Tensor]:
    """Parameters as they are compared with the recorded ones.

    Rounded elements are counted; quantized ones that are off by one quantum are left out of the comparison.
    """
    bits = case.hyper.get("simulated_quantize_bits")
    found = {}
    for name, reference in case.params_after(step).items():
        found[name] = value = params[name].detach()
        if reference.dtype != torch.float32:
            tally.add((ordered(value) - ordered(reference)).abs())
        elif bits and reference.ndim >= 2 and reference.shape[-1] > 1:
            quantum = (reference.abs().amax(-1, keepdim=True) + 1e-9) / (2 ** (bits - 1) - 1)
            off = ((value - reference).abs() / quantum).round()
            tally.add(off)
            found[name] = torch.where(off == 1, reference, value)
    return found


def states(case: Case, step: int, opt: lowmem.FusedOptimizer) -> dict[str, Tensor]:
    """lowmem's states under their recorded names, in the order of the parameter's dimensions.

    Before a parameter's first gradient they are zero, as they begin; statistics of a group that does not clip are NaN.
    """
    kept = opt.named_state_dict()["state"]
    group_of = {name: group for group in opt.param_groups for name in group["param_names"]}
    found = {}
    for key, reference in case.state_after(step).items():
        param, name = key.rsplit("/", 1)
        if param.startswith("_group") and param in kept:
            found[key] = kept[param][name]
        elif param in kept:
            group = group_of[param]
            spec = lowmem.rules.resolve(group["rule"]).spec(param, shape_of(case, param), group)
            found[key] = in_order(spec, name, kept[param][name])
        else:
            found[key] = torch.full_like(reference, math.nan if param.startswith("_group") else 0.0)
    return found


def shape_of(case: Case, param: str) -> tuple[int, ...]:
    return next(tuple(entry["shape"]) for entry in case.entry["params"] if entry["name"] == param)


def in_order(spec: lowmem.rules.ParamSpec, name: str, state: Tensor) -> Tensor:
    """A state with its dimensions in the order that they have in the parameter."""
    extent = spec.states[name].extent if name in spec.states else "full"  # what a storage holds beside the weight
    if extent not in ("row", "col"):
        return state
    dims = spec.view.batch + (spec.view.rows if extent == "row" else spec.view.cols)
    return state.permute(sorted(range(len(dims)), key=dims.__getitem__))


def ordered(x: Tensor) -> Tensor:
    """16-bit floats as integers in the order of their values: neighbours differ by one, -0 and 0 by none."""
    bits = x.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)
