"""The goals, next to the recorded results: tables for the page of benchmarks. Nothing is measured here.

python -m benchmarks.pages
"""

import json
from typing import Any

from benchmarks.pages import RESULTS, Row, markdown

HOOKS, PEER, WIDE = "AdamW, fused, in hooks", "AdamW(fused=True)", ", float32 weights"
STEP = "step time of a 106M Llama, 1 × 128 tokens"
UPDATE = "update time of 4096 × 4096"
# Description, goal, JSON file, and the two methods whose times are divided
RATIOS = (
    (f"{STEP}: AdaLomo / gradients dropped", 1.12, "step", "lowmem adalomo", "floor"),
    (f"{STEP}: AdaLomo / `AdamW(fused=True)` in hooks", 1.05, "step", "lowmem adalomo", HOOKS),
    (f"{UPDATE}, float32: `adamw` / `AdamW(fused=True)`", 1.15, "update", f"adamw{WIDE}", f"{PEER}{WIDE}"),
    (f"{UPDATE}, bfloat16: `adamw`, bfloat16 states / `AdamW(fused=True)`", 1.5, "update", "adamw, bfloat16 moments",
     PEER),
    (f"{UPDATE}, bfloat16: `adamw`, 8-bit states / `AdamW(fused=True)`", 2.0, "update", "adamw, 8-bit moments", PEER),
    (f"{UPDATE}, bfloat16: AdaLomo / `AdamW(fused=True)`", 0.9, "update", "adalomo", PEER),
    (f"{UPDATE}, float32: AdaLomo / `AdamW(fused=True)`", 0.9, "update", f"adalomo{WIDE}", f"{PEER}{WIDE}"),
    (f"{UPDATE}: AdaLomo, stochastic / nearest rounding", 1.3, "update", "adalomo, stochastic", "adalomo"),
    (f"{UPDATE}: AdaLomo, compensated / nearest rounding", 1.8, "update", "adalomo, compensated", "adalomo"),
)  # fmt: skip


def _read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _row(goal: str, limit: str, measured: float, met: bool) -> dict[str, str]:
    return {"goal": goal, "limit": limit, "measured": f"{measured:.3g}", "met": "yes" if met else "no"}


def _on_cpu() -> list[Row]:
    rows = []
    for what, limit, name, method, base in RATIOS:
        results = _read(name)["results"]
        ratio = results[method]["seconds"] / results[base]["seconds"]
        rows.append({**_row(what, f"≤ {limit}", ratio, ratio <= limit), "command": f"`python -m benchmarks.{name}`"})
    times = _read("dispatch")["milliseconds"]["64"]
    ratio = times["lowmem adalomo"] / times["bare hook"]
    row = _row("backward into 720 tensors of 64 elements: AdaLomo / a bare hook", "≤ 1.6", ratio, ratio <= 1.6)
    return [*rows, {**row, "command": "`python -m benchmarks.dispatch`"}]


def _on_gpu() -> list[Row]:
    """Every goal of `gpu_check`: the unmet ones, then the met ones, where cases of one quantity share a row."""
    parts = [part for part in _read("gpu_check").values() if isinstance(part, dict)]
    measured = [row for part in parts for row in part["rows"] if row.get("met") is not None]
    unmet = [row for row in measured if not row["met"]]
    cases: dict[tuple[str, str], list[Any]] = {}
    for row in measured:
        if row["met"]:
            cases.setdefault((row["what"].rpartition(": ")[2], row["goal"]), []).append(row)
    rows = [_row(_ratio(row["what"]), row["goal"].replace("<=", "≤"), row["measured"], met=False) for row in unmet]
    for (quantity, limit), met in cases.items():
        name = met[0]["what"] if len(met) == 1 else f"{quantity} (largest of {len(met)})"
        rows.append(_row(_ratio(name), limit.replace("<=", "≤"), max(row["measured"] for row in met), met=True))
    return rows


def _ratio(name: str) -> str:
    """The name of a measured quantity, as a ratio where it is one."""
    name = name.replace(": times ", " / ").replace(", times ", " / ").replace(" x ", " × ")
    return name.replace("temporary memory of the parameter's", "temporary memory / the parameter's")


def tables(report: None) -> dict[str, str]:
    return {"": markdown(_on_cpu()), "gpu": markdown(_on_gpu())}
