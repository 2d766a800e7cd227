"""Checks what lowmem compiles for a GPU, on a machine without one. Nothing is run on a GPU, and nothing is timed.

    pip install triton   # the version that torch was built for
    python -m benchmarks.triton_check [--rules adalomo adamw] [--formats nearest]

For each rule, with each rounding and with 8-bit states, Inductor generates the Triton code of an update as it would for
a GPU, of a parameter and of a shard. The kernels that update a 4096 x 4096 bfloat16 matrix are counted, with the bytes
that they read and write. Triton's interpreter runs the same code on a small matrix,
and the results are compared with those of eager code. Rows of other cases stay in the file as they are.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

import lowmem
import lowmem.step.updates
from benchmarks import reports
from benchmarks.engine import update_one
from benchmarks.gpu.kernels import generating
from benchmarks.gpu.pretended import DEVICES, pretend
from benchmarks.pages import markdown
from lowmem.tiles.quantized import QuantizedWeight
from lowmem.tiles.storage import WEIGHT_FORMATS, Held, Integer, part_name

RULES = [row.name for row in lowmem.rules.table()]
ROUNDINGS = ["nearest", "stochastic", "compensated", "compensated8"]
# By name: how states and weights are stored. Roundings come with the states that a rule has by default.
FORMATS: Mapping[str, Mapping[str, str]] = {
    **{rounding: {"rounding": rounding} for rounding in ROUNDINGS},
    "8bit + stochastic": {"state_storage": "8bit", "rounding": "stochastic"},
    "8bit + compensated8": {"state_storage": "8bit", "rounding": "compensated8"},
    **{name: {"weight_format": name} for name in WEIGHT_FORMATS},
}
IN_8_BITS = ["adamw", "lion"]  # rules whose updates are checked with 8-bit states too
PLACES = ["parameter", "shard"]
MATRIX = 4096, 4096
INTERPRETED = 48, 96  # the interpreter takes a tenth of a millisecond for an operation of a block

NOTE = "Nothing was run or timed on a GPU: kernels were counted, and interpreted on a CPU."

Tensors = dict[str, Tensor]
Case = tuple[str, str, str]


def cases_of(rules: Sequence[str], formats: Sequence[str] = tuple(FORMATS)) -> list[Case]:
    """Rule, format and place of everything that is checked."""
    return [
        (rule, name, place)
        for rule in rules
        for name in formats
        if rule in IN_8_BITS or "state_storage" not in FORMATS[name]
        for place in PLACES
        if place == "parameter" or "weight_format" not in FORMATS[name]
    ]


class Updated(NamedTuple):
    """A parameter after some updates.

    Attributes:
        param: the stored weight, or its codes.  kept: what is stored for it besides, by name.
        full: names of the tensors among these with a value for each element or group of elements.
        weight, states: the float32 values that the stored tensors stand for.
    """

    param: Tensor
    kept: Tensors
    full: list[str]
    weight: Tensor
    states: Tensors


def initial(size: tuple[int, int]) -> Tensor:
    """The weight before its first update, after which gradients are drawn."""
    torch.manual_seed(0)
    return torch.randn(size).bfloat16()


def updated(rule: str, name: str, size: tuple[int, int], steps: int, compile: bool) -> Updated:
    """Updates a weight a few times, in the format of this name."""
    weight, options = initial(size), dict(FORMATS[name])
    if (bits := WEIGHT_FORMATS.get(options.pop("weight_format", ""))) is not None:
        weight = QuantizedWeight.of(weight, Integer(bits, 64 if size == MATRIX else 32))
    param = torch.nn.Parameter(weight)
    opt = lowmem.FusedOptimizer([param], rule=rule, lr=1e-2, batching=False, compile=compile, **options)
    with torch.no_grad():
        for _ in range(steps):
            update_one(opt, param, torch.randn(size).bfloat16())
    record, states = opt._records[param], dict(opt._updates.state[param])
    program, (first, *extra) = record.program, record.weight(param.detach())
    kept = dict(zip(program.extra_names[-len(extra) :], extra, strict=True) if extra else ()) | states
    full = [name for name, each in program.kept.items() if each.extent == "full" and name in kept]
    for state, storage in program.states.items():
        parts = tuple(states.pop(part_name(state, part.name)) for part in storage.parts)
        states[state] = Held(storage, parts).decode()
    return Updated(first, kept, full, Held(program.weight, (first, *extra)).decode(), states)


# -- kernels -----------------------------------------------------------------------------------------------------------


def count(rule: str, name: str, place: str) -> dict[str, Any]:
    """The kernels of an update, and what they move.

    calls: of compiled functions. That of a shard is cut where sums over ranks are taken.
    floor_bytes: what is kept and the gradient read once, and what is kept written once.  passes_bytes: with what each
    pass of the rule reads.  allocated: bytes of all buffers of the compiled functions.
    """
    with generating(interpreted=False, sharded=place == "shard") as generated:
        param, kept, names, *_ = updated(rule, name, MATRIX, 1, compile=True)
    gradient = 2 * MATRIX[0] * MATRIX[1]
    written = param.nbytes + sum(tensor.nbytes for tensor in kept.values())
    full = param.nbytes + sum(kept[name].nbytes for name in names)
    moved = sum(launch.moved for launch in generated.launches)
    passes = int(generated.read * MATRIX[0] * MATRIX[1]) + full
    floor = 2 * written + gradient
    return {
        "calls": generated.calls,
        "kernels": len(generated.launches),
        "bytes": moved,
        "floor_bytes": floor,
        "over_floor": moved / floor,
        "passes_bytes": passes,
        "over_passes": moved / passes,
        "allocated": generated.allocated,
        "launches": [{"name": launch.kernel.fn.__name__, "bytes": launch.moved} for launch in generated.launches],
    }


# -- results -----------------------------------------------------------------------------------------------------------


def interpret(rule: str, name: str, place: str) -> dict[str, Any]:
    """Compares two updates by interpreted kernels with two eager ones.

    weights: largest difference of weights, over the largest change of a weight (compensated ones in float32).
    differ: share of the weights that differ as they are stored.  states: largest difference of a state, over the
    largest of its values.
    """
    with mock.patch.object(lowmem.step.updates, "SMALL", 0):
        with generating(interpreted=True, sharded=place == "shard"):
            ours = updated(rule, name, INTERPRETED, 2, compile=True)
        eager = updated(rule, name, INTERPRETED, 2, compile=False)
    differences = [
        float((state.double() - other.double()).abs().max() / other.double().abs().max().clamp(min=1e-30))
        for state, other in zip(ours.states.values(), eager.states.values(), strict=True)
    ]
    change = (eager.weight - initial(INTERPRETED).float()).abs().max()
    return {
        "weights": float((ours.weight - eager.weight).abs().max() / change),
        "differ": float((ours.param != eager.param).float().mean()),
        "states": max(differences, default=0.0),
    }


def attempt(check: Callable[..., dict[str, Any]], *case: str) -> dict[str, Any]:
    """What a check returns, or its error."""
    try:
        return check(*case)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".split("\n")[0]}


# -- the command -------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = reports.make_parser(__doc__, {}, dtype=False)
    parser.add_argument("--rules", nargs="+", choices=RULES, default=RULES)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--interpret", action="store_true", help=argparse.SUPPRESS)  # what the second process is for
    options = parser.parse_args()
    pretend(next(iter(DEVICES)))
    logging.basicConfig(level=logging.INFO)  # says why an update is not traced as a whole
    cases = cases_of(options.rules, options.formats)
    if options.interpret:
        for case in cases:
            print(json.dumps(attempt(interpret, *case)), flush=True)
        return
    # Triton decides when it is imported whether kernels are compiled or interpreted
    command = [sys.executable, "-m", "benchmarks.triton_check", "--interpret"]
    command += ["--rules", *options.rules, "--formats", *options.formats]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    interpreter = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert interpreter.stdout is not None
    settings, file = {"matrix": MATRIX, "interpreted": INTERPRETED, "note": NOTE}, options.out / "triton_check.json"
    rows = json.loads(file.read_text())["updates"] if file.exists() else {}
    with reports.output(options.out):
        for case in cases:
            name = ", ".join(case)
            rows[name] = attempt(count, *case)
            rows[name]["interpreted"] = json.loads(interpreter.stdout.readline())
            reports.save(file, settings, updates=rows)
            print(name, file=sys.stderr)
        interpreter.wait()
        reports.publish(options.out, "triton_check", settings, tables, updates=rows)


def tables(report: Any) -> dict[str, str]:
    """A row for each rule and format, but for stochastic rounding, which takes one kernel more than nearest."""
    rows = []
    for name, row in report["updates"].items():
        case, _, place = name.rpartition(", ")
        if place == "shard" or case.endswith(", stochastic") or "error" in row:
            continue
        shard = report["updates"].get(f"{case}, shard", {})
        columns = {
            "rule, format": case, "kernels": str(row["kernels"]), "MiB": f"{row['bytes'] / 2**20:.0f}",
            "× floor": f"{row['over_floor']:.2f}", "× passes": f"{row['over_passes']:.2f}",
            "buffers, MiB": f"{row['allocated'] / 2**20:.1f}",
            "shard: kernels in calls": f"{shard['kernels']} in {shard['calls']}" if shard else "",
            "MiB of a shard": f"{shard['bytes'] / 2**20:.0f}" if shard else "",
        }  # fmt: skip
        rows.append(columns)
    return {"": markdown(rows)}


if __name__ == "__main__":
    main()
