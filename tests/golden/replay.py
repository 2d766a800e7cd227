"""Replays golden trajectories with `lowmem.FusedOptimizer` and measures its deviations from the recorded values."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from golden.load_golden import Case
from torch import Tensor

import lowmem


class NotReplayed(Exception):
    """Raised for a case that lowmem deliberately does not reproduce."""


def adalomo(case: Case) -> dict[str, Any]:
    hyper = dict(case.hyper)
    clip_norm, clip_value = hyper.pop("clip_grad_norm"), hyper.pop("clip_grad_value")
    if clip_norm is not None and len(case.entry["two_pass_steps"]) < case.steps:
        raise NotReplayed("the source reuses the clip factor of an earlier step, and lowmem does not")
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
        raise NotReplayed("a gradient of zeros makes the source's results NaN permanently; in lowmem it remains zero")
    return {**hyper, "rule": "lans", "lr": lr, "variant": case.entry["variant"]}


def t5x_adafactor(case: Case) -> dict[str, Any]:
    hyper = dict(case.hyper)
    lr = hyper.pop("learning_rate")
    hyper.pop("param_logical_axes", None)
    if hyper.pop("logical_factor_rules", None):
        # lowmem does not support T5X's axis names, so the recorded roles of each parameter's dimensions are used
        hyper["factor_map"] = [(f"^{name}$", roles) for name, roles in case.entry["resolved_factor_map"].items()]
    rate = 1.0 if isinstance(lr, str) else lr  # if a schedule is recorded, `measure` sets the rate of each step
    return {**hyper, "rule": "adafactor", "lr": rate, "variant": case.entry["variant"] or "op_by_op"}


# Recorded optimizer → function that returns the arguments of `FusedOptimizer` for a case, or raises `NotReplayed`.
ADAPTERS: dict[str, Callable[[Case], dict[str, Any]]] = {
    "adalomo": adalomo,
    "scaled_adam": scaled_adam,
    "t2t_adafactor": t2t_adafactor,
    "lans": lans,
    "t5x_adafactor": t5x_adafactor,
}


@dataclass(frozen=True)
class Result:
    """The largest deviations of a case over its recorded steps. `ok` is None if the case was skipped."""

    name: str
    param: float | None = None
    state: float | None = None
    ok: bool | None = None
    reason: str | None = None


def replay(case: Case, **settings: Any) -> Result:
    """Replays a case and returns its deviations. settings: additional arguments of `FusedOptimizer`."""
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
    """Returns the parameter groups of a case, each with its settings."""
    group_settings = case.entry.get("param_groups") or [{}]
    members: list[list[tuple[str, Tensor]]] = [[] for _ in group_settings]
    for entry in case.entry["params"]:
        members[entry.get("group") or 0].append((entry["name"], params[entry["name"]]))
    return [{**settings, "params": pairs} for settings, pairs in zip(group_settings, members, strict=True)]


def measure(case: Case, opt: lowmem.FusedOptimizer, params: Mapping[str, Tensor]) -> Result:
    """Runs all steps of a case and compares the results of recorded steps."""
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
        param = max(param, *case.compare(step, compared_params(case, step, params, tally)).values())
        state = max(state, *case.compare_state(step, named_states(case, step, opt)).values(), 0.0)
    allowed = max(case.tolerance.get(f"elements_off_by_one_{unit}_allowed", 0.0) for unit in ("ulp", "quantum"))
    if tally.differing > allowed * tally.elements:
        faults.append(f"{tally.differing} of {tally.elements} rounded elements differ")
    if tally.several_units:
        faults.append(f"{tally.several_units} rounded elements differ by more than one unit")
    if param > case.tolerance["param"]:
        faults.append("parameters exceed their tolerance")
    if state > case.tolerance["state"]:
        faults.append("states exceed their tolerance")
    return Result(case.name, param, state, not faults, "; ".join(faults) or None)


def loss_with_gradients(params: Mapping[str, Tensor], grads: Mapping[str, Tensor | None], scale: float) -> Tensor:
    """Returns a loss whose product with `scale` has the gradients `grads`. Parameters with None are not used."""
    terms = [(params[name] * (grad / scale)).sum() for name, grad in grads.items() if grad is not None]
    return torch.stack([term.float() for term in terms]).sum()


@dataclass
class Tally:
    """Numbers of rounded elements that were compared, that differ, and that differ by more than one unit."""

    elements: int = 0
    differing: int = 0
    several_units: int = 0

    def add(self, units: Tensor) -> None:
        self.elements += units.numel()
        self.differing += int((units > 0).sum())
        self.several_units += int((units > 1).sum())


def compared_params(case: Case, step: int, params: Mapping[str, Tensor], tally: Tally) -> dict[str, Tensor]:
    """Returns the parameters to compare with the recorded ones, and counts rounded elements in `tally`.

    Quantized elements that differ by one quantum are replaced by the recorded value, so they are only counted.
    """
    bits = case.hyper.get("simulated_quantize_bits")
    compared = {}
    for name, reference in case.params_after(step).items():
        compared[name] = value = params[name].detach()
        if reference.dtype != torch.float32:
            tally.add((ordered(value) - ordered(reference)).abs())
        elif bits and reference.ndim >= 2 and reference.shape[-1] > 1:
            quantum = (reference.abs().amax(-1, keepdim=True) + 1e-9) / (2 ** (bits - 1) - 1)
            off = ((value - reference).abs() / quantum).round()
            tally.add(off)
            compared[name] = torch.where(off == 1, reference, value)
    return compared


def named_states(case: Case, step: int, opt: lowmem.FusedOptimizer) -> dict[str, Tensor]:
    """Returns the optimizer's states by recorded name, with dimensions in the order of the parameter's dimensions.

    States of a parameter that had no gradient yet are zeros, and clipping statistics of a group without clipping NaN.
    """
    states = opt.named_state_dict()["state"]
    group_of = {name: group for group in opt.param_groups for name in group["param_names"]}
    named = {}
    for key, reference in case.state_after(step).items():
        param, name = key.rsplit("/", 1)
        if param.startswith("_group") and param in states:
            named[key] = states[param][name]
        elif param in states:
            group = group_of[param]
            spec = lowmem.rules.resolve(group["rule"]).spec(param, shape_of(case, param), group)
            named[key] = in_order(spec, name, states[param][name])
        else:
            named[key] = torch.full_like(reference, math.nan if param.startswith("_group") else 0.0)
    return named


def shape_of(case: Case, param: str) -> tuple[int, ...]:
    return next(tuple(entry["shape"]) for entry in case.entry["params"] if entry["name"] == param)


def in_order(spec: lowmem.rules.ParamSpec, name: str, state: Tensor) -> Tensor:
    """Returns a state with its dimensions in the order of the parameter's dimensions."""
    extent = spec.states[name].extent if name in spec.states else "full"  # e.g. LANS's `weight32`
    if extent not in ("row", "col"):
        return state
    dims = spec.view.batch + (spec.view.rows if extent == "row" else spec.view.cols)
    return state.permute(sorted(range(len(dims)), key=dims.__getitem__))


def ordered(x: Tensor) -> Tensor:
    """Converts 16-bit floats to integers in the same order. Adjacent floats differ by 1, and -0 equals 0."""
    bits = x.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)
