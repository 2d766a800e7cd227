"""The planned memory of fine-tuning a model, by method: as bars for Llama-3.1-8B, next to AdamW as it is usually run.

    python -m benchmarks.memory_bars --out benchmarks/results

All figures of lowmem are `lowmem plan` of one step on a GPU: bfloat16 weights, 1 × 2,048 tokens, activation
checkpointing. For AdamW without lowmem, weights, gradients and optimizer states are bytes per parameter times the
number of parameters, and activations are assumed to be those of the plan.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import reports
from benchmarks.pages import markdown
from benchmarks.reports import command, picture

CONFIG = "configs/llama3_8b_chat_24gb.yaml"
MODEL = "llama-3.1-8b"
SHOWN = ("adalomo", "adamw, bfloat16 states", "adamw")  # as bars

ADALOMO, ADAMW, CLIPPED = ("--fused.rule", "adalomo"), ("--fused.rule", "adamw"), ("--max_grad_norm", "1")
FORMATS = {f"adalomo, {name}": (*ADALOMO, "--fused.weight_format", name) for name in ("int12", "int10", "int8")}
EIGHT_BITS = (*ADAMW, "--fused.state_storage", "8bit", *CLIPPED)
COMPENSATED = "adamw, 8bit states, compensated8, clipped"
STOCHASTIC = "adamw, 8bit states, clipped"
STATES = {COMPENSATED: (*EIGHT_BITS, "--fused.rounding", "compensated8"), STOCHASTIC: EIGHT_BITS}
# Folder of configs/models → arguments by the name of the method
PLANS = {
    MODEL: {
        "adalomo": ADALOMO,
        **FORMATS,
        "adamw": ADAMW,
        "adamw, bfloat16 states": (*ADAMW, "--fused.state_storage", "bfloat16"),
        "lion": ("--fused.rule", "lion"),
        "lomo, clipped": ("--fused.rule", "lomo", *CLIPPED),
        **STATES,
    },
    "qwen3-14b": {name: FORMATS[name] for name in ("adalomo, int12", "adalomo, int10")},
    "qwen3-32b": {name: FORMATS[name] for name in ("adalomo, int10",)},
    "qwen3-4b": STATES,
    "llama-3.2-1b": STATES,
}
NAMES = {MODEL: "Llama-3.1-8B", "qwen3-14b": "Qwen3-14B", "qwen3-32b": "Qwen3-32B", "qwen3-4b": "Qwen3-4B",
         "llama-3.2-1b": "Llama-3.2-1B"}  # fmt: skip
# Bytes per parameter. The second is a Trainer with bf16=True: float32 weights, a model that computes in bfloat16.
ORDINARY = {
    "AdamW, everything in bfloat16": {"weights": 2, "gradients": 2, "optimizer states": 4},
    "AdamW, mixed precision": {"weights": 4, "gradients": 4, "optimizer states": 8},
}
COLORS = {"weights": "#1f5fa8", "gradients": "#d1495b", "optimizer states": "#e08e2b", "activations": "#2a8f7c"}
CARDS = (24, 80)  # GiB
GIB = 1 << 30


def planned(model: str, options: Sequence[str]) -> dict[str, float]:
    """Bytes by kind at the peak of a planned step; what is neither of the first three kinds counts as activations."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        plan = ["plan", "sft", "--config", CONFIG, "--model_name_or_path", f"configs/models/{model}"]
        words = [sys.executable, "-m", "lowmem", *plan, "--json", str(file), *options]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        items = json.loads(file.read_text())["items"]
    first = {kind: items[kind] for kind in COLORS if kind != "activations"}
    return {**first, "activations": sum(items.values()) - sum(first.values())}


def bars(report: Any) -> dict[str, dict[str, float]]:
    """Method → bytes by kind, the smallest first."""
    plans = report["planned"][MODEL]
    parameters, activations = plans["adalomo"]["weights"] / 2, plans["adalomo"]["activations"]
    every = {f"lowmem {name}": plans[name] for name in SHOWN}
    for name, sizes in ORDINARY.items():
        every[name] = {**{kind: size * parameters for kind, size in sizes.items()}, "activations": activations}
    return dict(sorted(every.items(), key=lambda item: sum(item[1].values())))


def tables(report: Any) -> dict[str, str]:
    """The bars, and what models need with weights of fewer bits and with 8-bit states."""

    def total(model: str, name: str) -> str:
        found = report["planned"][model].get(name)
        return "" if found is None else f"{sum(found.values()) / GIB:.1f} GiB"

    shown = [
        {
            "method": name,
            **{kind: f"{items[kind] / GIB:.1f}" for kind in COLORS},
            "GiB in all": f"{sum(items.values()) / GIB:.1f}",
        }
        for name, items in bars(report).items()
    ]
    columns = {"bfloat16": "adalomo", **{f"`{name[9:]}`": name for name in FORMATS}}
    formats = [
        {"model": NAMES[model], **{column: total(model, name) for column, name in columns.items()}}
        for model in (MODEL, "qwen3-14b", "qwen3-32b")
    ]
    states = [
        {"model": NAMES[model], "5.13 bytes": total(model, COMPENSATED), "4.13 bytes": total(model, STOCHASTIC)}
        for model in (MODEL, "qwen3-4b", "llama-3.2-1b")
    ]
    return {"": markdown(shown), "formats": markdown(formats), "states": markdown(states)}


def draw(report: Any, path: Path) -> None:
    with picture(path, "Fine-tuning all weights of Llama-3.1-8B: memory of a step", (9, 3.6), 1) as axes:
        methods = {
            f"{name}: {sum(items.values()) / GIB:.0f} GiB": items for name, items in reversed(bars(report).items())
        }
        left = [0.0] * len(methods)
        for kind, color in COLORS.items():
            width = [items[kind] / GIB for items in methods.values()]
            axes.barh(list(methods), width, left=left, color=color, label=kind, height=0.62)
            left = [a + b for a, b in zip(left, width, strict=True)]
        for card in CARDS:
            axes.axvline(card, color="#777777", linewidth=1, linestyle="--", zorder=0)
            axes.text(card + 0.6, len(methods) - 0.45, f"{card} GiB card", fontsize=8.5, color="#555555")
        axes.set(xlim=(0, max(left) * 1.02), ylim=(-0.55, len(methods) - 0.15), xlabel="GiB on the device")
        axes.legend(loc="upper right", bbox_to_anchor=(1.0, 0.95), fontsize=9, frameon=False)


@command
def main(argv: Sequence[str] | None = None) -> None:
    out = reports.make_parser(__doc__, {}, dtype=False).parse_args(argv).out
    with reports.output(out):
        plans = {
            model: {name: planned(model, options) for name, options in methods.items()}
            for model, methods in PLANS.items()
        }
        reports.publish(out, "memory_bars", {"config": CONFIG}, tables, draw, planned=plans)


if __name__ == "__main__":
    main()
