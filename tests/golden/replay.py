"""Replays golden trajectories through the real `lowmem.FusedOptimizer`.

    python tests/golden/replay.py FOLDER [--optimizer NAME] [--json]

A line a case: how far parameters and states are from the recorded ones, and how far they may be. Cases that the package
refuses are listed as skipped, with the reason. Exits with 1 if a case is over its tolerance, 2 on a wrong argument.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lowmem
from lowmem.errors import did_you_mean

sys.path.insert(0, str(Path(__file__).parent))
from load_golden import FORMAT, Case, iter_cases, manifest


class NotReplayed(Exception):
    """A case that records what the package deliberately does otherwise, or cannot do yet."""


@dataclass(frozen=True)
class Adapter:
    """How one recorded optimizer is played by lowmem.

    arguments: a case → arguments of `FusedOptimizer` besides the parameters; raises `NotReplayed`.
    states: recorded state name → lowmem's, where they differ.
    """

    arguments: Callable[[Case], dict[str, Any]]
    states: Mapping[str, str]


def adalomo(case: Case) -> dict[str, Any]:
    hyper = dict(case.hyper)
    clip_norm, clip_value = hyper.pop("clip_grad_norm"), hyper.pop("clip_grad_value")
    if clip_norm is not None and len(case.entry["two_pass_steps"]) < case.steps:
        raise NotReplayed("reuses the clip factor of an earlier step, which lowmem never does")
    return {
        **hyper,
        "rule": "adalomo",
        "clip_norm": clip_norm,
        "clip_value": clip_value if clip_value is not None and clip_value > 0 else None,
    }


ADAPTERS = {"adalomo": Adapter(adalomo, {})}


@dataclass(frozen=True)
class Result:
    """A replayed case: worst deviations over its recorded steps. `ok` is None for a case that was skipped."""

    name: str
    param: float | None = None
    state: float | None = None
    ok: bool | None = None
    reason: str | None = None


def replay(case: Case) -> Result:
    """Drives the fused optimizer through a case and measures both deviations."""
    adapter = ADAPTERS.get(case.optimizer)
    if adapter is None:
        return Result(case.name, reason=f"lowmem has no rule for {case.optimizer!r} yet")
    params = {name: torch.nn.Parameter(value) for name, value in case.init().items()}
    try:
        opt = lowmem.FusedOptimizer(params.items(), **adapter.arguments(case))
    except (NotReplayed, lowmem.LowmemError) as error:
        return Result(case.name, reason=str(error))
    try:
        return measure(case, opt, params, adapter.states)
    except lowmem.LowmemError as error:
        return Result(case.name, ok=False, reason=str(error))


def measure(case: Case, opt: lowmem.FusedOptimizer, params: Mapping[str, Tensor], renamed: Mapping[str, str]) -> Result:
    """Takes every step of a case and compares wherever it was recorded."""
    opt.load_state_dict({**opt.state_dict(), "step": case.entry["initial_step"]})
    param, state, faults = 0.0, 0.0, []
    differing, elements = 0, 0
    for step in range(1, case.steps + 1):
        lr = case.lr(step)
        for group in opt.param_groups if lr is not None else []:
            group["lr"] = lr
        opt.backward(loss_with_gradients(params, case.grads(step), opt.loss_scale or 1.0))
        if step not in case.recorded:
            continue
        param = max(param, *case.compare(step, params).values())
        state = max(state, *case.compare_state(step, states(case, step, opt, renamed)).values(), 0.0)
        for name, reference in case.params_after(step).items():
            if reference.dtype != torch.float32:
                ulps = (ordered(params[name].detach()) - ordered(reference)).abs()
                differing += int((ulps > 0).sum())
                elements += ulps.numel()
                if ulps.max() > 1:
                    faults.append(f"{name} is {int(ulps.max())} ulp off after step {step}")

    allowed = case.tolerance.get("elements_off_by_one_ulp_allowed", 0.0)
    if differing > allowed * elements:
        faults.append(f"{differing} of {elements} 16-bit elements differ")
    if param > case.tolerance["param"]:
        faults.append("parameters are over their tolerance")
    if state > case.tolerance["state"]:
        faults.append("states are over their tolerance")
    return Result(case.name, param, state, not faults, "; ".join(faults) or None)


def loss_with_gradients(params: Mapping[str, Tensor], grads: Mapping[str, Tensor | None], scale: float) -> Tensor:
    """A loss that, multiplied with `scale`, gives just these gradients; None leaves the parameter out of it."""
    terms = [(params[name] * (grad / scale)).sum() for name, grad in grads.items() if grad is not None]
    return torch.stack([term.float() for term in terms]).sum()


def states(case: Case, step: int, opt: lowmem.FusedOptimizer, renamed: Mapping[str, str]) -> dict[str, Tensor]:
    """lowmem's states under their recorded names; zero, as they begin, before a parameter's first gradient."""
    kept = opt.state_dict()["state"]
    found = {}
    for key, reference in case.state_after(step).items():
        param, name = key.rsplit("/", 1)
        found[key] = kept[param][renamed.get(name, name)] if param in kept else torch.zeros_like(reference)
    return found


def ordered(x: Tensor) -> Tensor:
    """16-bit floats as integers in the order of their values: neighbours differ by one, -0 and 0 by none."""
    bits = x.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def text(case: Case, result: Result) -> str:
    """A result as a line for people."""
    if result.ok is None:
        return f"{result.name:32} skipped: {result.reason}"
    if result.param is None or result.state is None:
        return f"{result.name:32} FAILED: {result.reason}"
    numbers = f"param {result.param:.1e} / {case.tolerance['param']:.0e}  state {result.state:.1e} / "
    verdict = "ok" if result.ok else f"OVER: {result.reason}"
    return f"{result.name:32} {numbers}{case.tolerance['state']:.0e}  {verdict}"


def as_json(result: Result) -> str:
    """A result as a JSON object; a deviation that is not finite (NaN or Inf in the wrong place) is null."""
    found = {key: None if value in (math.inf, None) else value for key, value in vars(result).items()}
    if result.reason is None:
        del found["reason"]
    return json.dumps(found)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="a folder with manifest.json and its cases")
    parser.add_argument("--optimizer", help="replay the cases of this optimizer alone")
    parser.add_argument("--json", action="store_true", help="print a JSON object a line")
    options = parser.parse_args(arguments)

    results = []
    try:
        contents = manifest(options.folder)
        if contents.get("format") != FORMAT:
            parser.error(f"{options.folder} has format {contents.get('format')!r}; this reads {FORMAT!r}")
        known = sorted({entry["optimizer"] for entry in contents["cases"]})
        if options.optimizer not in (None, *known):
            close = did_you_mean(options.optimizer, known)
            parser.error(f"no case is of optimizer {options.optimizer!r}.{close} There are {', '.join(known)}")
        for case in iter_cases(options.folder, options.optimizer):
            results.append(replay(case))
            print(as_json(results[-1]) if options.json else text(case, results[-1]), flush=True)
    except (OSError, json.JSONDecodeError) as error:
        parser.error(f"{options.folder} is no folder of golden trajectories: {error}")
    return int(any(result.ok is False for result in results))


if __name__ == "__main__":
    sys.exit(main())
