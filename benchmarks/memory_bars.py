"""The planned memory of fine-tuning a model, by method: as bars for Llama-3.1-8B, next to AdamW as it is usually run.

    python -m benchmarks.memory_bars --out benchmarks/results

All figures of lowmem are `lowmem plan` of one step on a GPU: bfloat16 weights, 1 × 2,048 tokens, activation
checkpointing. For AdamW without lowmem, weights, gradients and optimizer states are bytes per parameter times the
number of parameters, and activations are taken from the plan.
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

ADALOMO, ADAMW, CLIPPED = ("--fused.rule", "adalomo"), ("--fused.rule", "adamw"), ("--max_grad_norm", "1")
FORMATS = {f"adalomo, {name}": (*ADALOMO, "--fused.weight_format", name) for name in ("int12", "int10", "int8")}
EIGHT_BITS = (*ADAMW, "--fused.state_storage", "8bit", *CLIPPED)
COMPENSATED = "adamw, 8bit states, compensated8, clipped"
STOCHASTIC = "adamw, 8bit states, clipped"
MOMENTUM = "adafactor, 8bit momentum"
STATES = {
    COMPENSATED: (*EIGHT_BITS, "--fused.rounding", "compensated8"), STOCHASTIC: EIGHT_BITS,
    MOMENTUM: ("--fused.rule", "adafactor", "--fused.beta1", "0.9", "--fused.state_storage", "8bit"),
}  # fmt: skip
# Folder of configs/models → arguments by the name of the method
PLANS = {
    MODEL: {
        "adalomo": ADALOMO,
        **FORMATS,
        "adamw": (*ADAMW, "--fused.state_storage", "float32"),
        "adamw, bfloat16 states": ADAMW,
        "lion": ("--fused.rule", "lion"),
        "lomo, clipped": ("--fused.rule", "lomo", *CLIPPED),
        **STATES,
        f"{MOMENTUM}, int12": (*STATES[MOMENTUM], "--fused.weight_format", "int12"),
    },
    "qwen3-14b": {name: FORMATS[name] for name in ("adalomo, int12", "adalomo, int10")},
    "qwen3-32b": {name: FORMATS[name] for name in ("adalomo, int10",)},
    "qwen3-4b": STATES,
    "llama-3.2-1b": STATES,
}
NAMES = {MODEL: "Llama-3.1-8B", "qwen3-14b": "Qwen3-14B", "qwen3-32b": "Qwen3-32B", "qwen3-4b": "Qwen3-4B",
         "llama-3.2-1b": "Llama-3.2-1B"}  # fmt: skip
# Bytes per parameter of AdamW without lowmem. The second is a Trainer with bf16=True: float32 weights, and a model that
# computes in bfloat16.
ORDINARY = {
    "AdamW, all in bfloat16": {"weights": 2, "gradients": 2, "optimizer states": 4},
    "AdamW, mixed precision": {"weights": 4, "gradients": 4, "optimizer states": 8},
}
# Methods of the figure, in groups that are compared with each other: states of equal dtypes. The others are plans.
GROUPS = {
    "AdaLomo": ("adalomo",),
    "AdamW, bfloat16 states": ("adamw, bfloat16 states", "AdamW, all in bfloat16"),
    "AdamW, float32 states": ("adamw", "AdamW, mixed precision"),
}
COLORS = {"weights": "#1f5fa8", "gradients": "#d1495b", "optimizer states": "#e08e2b", "activations": "#2a8f7c"}
CARDS = (24, 80)  # GiB
BEHIND = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # text, over the line of a card
HATCH = {True: "///"}  # of bars that are computed and not planned
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
    """Method → bytes by kind, in the order of `GROUPS`."""
    plans = report["planned"][MODEL]
    parameters, activations = plans["adalomo"]["weights"] / 2, plans["adalomo"]["activations"]
    computed = {
        name: {**{kind: size * parameters for kind, size in sizes.items()}, "activations": activations}
        for name, sizes in ORDINARY.items()
    }
    return {name: {**plans, **computed}[name] for names in GROUPS.values() for name in names}


def title(name: str) -> str:
    """The name of a bar, which says where its figures come from."""
    return f"{name} (computed)" if name in ORDINARY else f"lowmem {name.partition(',')[0]} (planned)"


def tables(report: Any) -> dict[str, str]:
    """The bars, and what models need with weights of fewer bits and with 8-bit states."""

    def total(model: str, name: str) -> str:
        items = report["planned"][model].get(name)
        return "" if items is None else f"{sum(items.values()) / GIB:.1f} GiB"

    sizes = bars(report)
    shown = [
        {
            "optimizer": group,
            "method": title(name),
            **{kind: f"{sizes[name][kind] / GIB:.1f}" for kind in COLORS},
            "GiB in total": f"{sum(sizes[name].values()) / GIB:.1f}",
        }
        for group, names in GROUPS.items()
        for name in names
    ]
    columns = {"bfloat16": "adalomo", **{f"`{name[9:]}`": name for name in FORMATS}}
    formats = [
        {"model": NAMES[model], **{column: total(model, name) for column, name in columns.items()}}
        for model in (MODEL, "qwen3-14b", "qwen3-32b")
    ]
    columns = {"`adamw`, 5.13 bytes": COMPENSATED, "`adamw`, 4.13 bytes": STOCHASTIC}
    columns |= {"`adafactor` with momentum, 3.07 bytes": MOMENTUM, "with `int12`": f"{MOMENTUM}, int12"}
    states = [
        {"model": NAMES[model], **{column: total(model, name) for column, name in columns.items()}}
        for model in (MODEL, "qwen3-4b", "llama-3.2-1b")
    ]
    return {"": markdown(shown), "formats": markdown(formats), "states": markdown(states)}


def draw(report: Any, path: Path) -> None:
    sizes, place = bars(report), 0.0
    places, labels = [], []
    with picture(path, "Fine-tuning all weights of Llama-3.1-8B: memory of a step", (9, 4.2), 1) as axes:
        for group, names in GROUPS.items():
            axes.text(1, place + 0.62, group, fontsize=9.5, fontweight="bold", va="center", bbox=BEHIND)
            for name in names:
                left = 0.0
                for kind, color in COLORS.items():
                    width = sizes[name][kind] / GIB
                    axes.barh(place, width, left=left, color=color, height=0.62, hatch=HATCH.get(name in ORDINARY),
                              edgecolor="white", linewidth=0)  # fmt: skip
                    left += width
                axes.text(left + 1, place, f"{left:.0f} GiB", fontsize=9.5, va="center", bbox=BEHIND)
                places.append(place)
                labels.append(title(name))
                place -= 0.85
            place -= 0.75
        for card in CARDS:
            axes.axvline(card, color="#777777", linewidth=1, linestyle="--", zorder=0)
            axes.text(card, 1.05, f"{card} GiB card", fontsize=8.5, color="#555555", ha="center")
        axes.set_yticks(places, labels)
        axes.set(xlim=(0, left * 1.1), ylim=(places[-1] - 0.5, 1.0), xlabel="GiB on the device")
        for kind, color in COLORS.items():
            axes.bar(0, 0, color=color, label=kind)
        axes.legend(loc="upper right", bbox_to_anchor=(1.0, 0.93), fontsize=9, frameon=False)


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
