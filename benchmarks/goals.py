"""The goals, next to what the recorded results say: a table for the page of benchmarks. Nothing is measured here.

python -m benchmarks.pages
"""

import json
from typing import Any

from benchmarks.pages import RESULTS, markdown

HOOKS, PEER, WIDE = "AdamW, fused, in hooks", "AdamW(fused=True)", ", float32 weights"
STEP = "a step of a 106M Llama, 1 × 128 tokens"
UPDATE = "an update of 4096 × 4096"
# What, the goal, the JSON file, and the two methods whose ratio it is
RATIOS = (
    (f"{STEP}, AdaLomo, × the step that drops its gradients", 1.12, "step", "lowmem adalomo", "floor"),
    ("the same, × `AdamW(fused=True)` in hooks", 1.05, "step", "lowmem adalomo", HOOKS),
    (f"{UPDATE}, `adamw`, × `AdamW(fused=True)`, float32", 1.15, "update", f"adamw{WIDE}", f"{PEER}{WIDE}"),
    ("the same, bfloat16 weights and states", 1.5, "update", "adamw, bfloat16 moments", PEER),
    ("the same, bfloat16 weights, 8-bit states", 2.0, "update", "adamw, 8-bit moments", PEER),
    (f"{UPDATE}, AdaLomo, × `AdamW(fused=True)`, bfloat16", 0.9, "update", "adalomo", PEER),
    ("the same, float32", 0.9, "update", f"adalomo{WIDE}", f"{PEER}{WIDE}"),
    (f"{UPDATE}, AdaLomo, stochastic rounding × nearest", 1.3, "update", "adalomo, stochastic", "adalomo"),
    ("the same, compensated rounding × nearest", 1.8, "update", "adalomo, compensated", "adalomo"),
)
GPU = (
    "update, adalomo: times AdamW",
    "update, adamw, 8-bit states: times",
    "adalomo: times gradients",
    "8B",
    "tensors",
)


def _read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _row(what: str, goal: str, measured: float, met: bool, command: str) -> dict[str, str]:
    cells = {"goal": goal, "measured": f"{measured:.2f}", "met": "yes" if met else "no"}
    return {"what": what, **cells, "command": f"`python -m benchmarks.{command}`"}


def tables(report: None) -> dict[str, str]:
    rows = []
    for what, goal, name, method, base in RATIOS:
        results = _read(name)["results"]
        ratio = results[method]["seconds"] / results[base]["seconds"]
        rows.append(_row(what, f"≤ {goal}", ratio, ratio <= goal, name))
    times = _read("dispatch")["milliseconds"]["64"]
    hooks = times["lowmem adalomo"] / times["bare hook"]
    rows.append(_row("720 tensors of 64 elements, AdaLomo, × a bare hook", "≤ 1.6", hooks, hooks <= 1.6, "dispatch"))
    for part in _read("gpu_check").values():
        for row in part["rows"] if isinstance(part, dict) else ():
            if row.get("met") is not None and any(name in row["what"] for name in GPU):
                what = f"GPU: {row['what'].replace(': times', ', ×').replace(': peak', ', peak')}"
                rows.append(_row(what, row["goal"].replace("<=", "≤"), row["measured"], row["met"], "gpu_check"))
    return {"": markdown(rows)}
