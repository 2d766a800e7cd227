"""The memory of fine-tuning an 8B model, as bars: AdamW as it is usually run, and lowmem.

    python -m benchmarks.memory_bars --out benchmarks/results

The bars of lowmem are `lowmem plan` of one step of Llama-3.1-8B on a GPU: bfloat16 weights, 1 × 2,048 tokens,
activation checkpointing. For the other two, weights, gradients and optimizer states are bytes per parameter times the
number of parameters, and activations are assumed to be those of the plan.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.reports import command, output, picture, print_table, save

CONFIG, MODEL = "configs/llama3_8b_chat_24gb.yaml", "configs/models/llama-3.1-8b"
LOWMEM = {
    "lowmem adalomo": ["--fused.rule", "adalomo"],
    "lowmem adamw, bfloat16 states": ["--fused.rule", "adamw", "--fused.state_storage", "bfloat16"],
    "lowmem adamw": ["--fused.rule", "adamw"],
}
# Bytes per parameter. The second is a Trainer with bf16=True: float32 weights, a model that computes in bfloat16.
ORDINARY = {
    "AdamW, everything in bfloat16": {"weights": 2, "gradients": 2, "optimizer states": 4},
    "AdamW, mixed precision": {"weights": 4, "gradients": 4, "optimizer states": 8},
}
COLORS = {"weights": "#1f5fa8", "gradients": "#d1495b", "optimizer states": "#e08e2b", "activations": "#2a8f7c"}
CARDS = (24, 80)  # GiB
GIB = 1 << 30


def planned(options: Sequence[str]) -> dict[str, float]:
    """Bytes by kind at the peak of a planned step; what is neither of the first three kinds counts as activations."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        plan = ["lowmem", "plan", "sft", "--config", CONFIG, "--model_name_or_path", MODEL, "--json", str(file)]
        subprocess.run([sys.executable, "-m", *plan, *options], check=True, stdout=subprocess.DEVNULL)
        items = json.loads(file.read_text())["items"]
    first = {kind: items[kind] for kind in COLORS if kind != "activations"}
    return {**first, "activations": sum(items.values()) - sum(first.values())}


def bars() -> dict[str, dict[str, float]]:
    """Method → bytes by kind, the smallest first."""
    ours = {name: planned(options) for name, options in LOWMEM.items()}
    plan = ours["lowmem adalomo"]
    parameters = plan["weights"] / 2
    ordinary = {
        name: {**{kind: size * parameters for kind, size in sizes.items()}, "activations": plan["activations"]}
        for name, sizes in ORDINARY.items()
    }
    return dict(sorted((ours | ordinary).items(), key=lambda item: sum(item[1].values())))


def draw(path: Path, methods: Mapping[str, Mapping[str, float]]) -> None:
    title = "Fine-tuning all weights of Llama-3.1-8B: memory of a step"
    with picture(path, title, (9, 3.6), 1) as axis:
        names = list(methods)[::-1]
        left = [0.0] * len(names)
        for kind, color in COLORS.items():
            width = [methods[name][kind] / GIB for name in names]
            axis.barh(names, width, left=left, color=color, label=kind, height=0.62)
            left = [a + b for a, b in zip(left, width, strict=True)]
        for place, total in enumerate(left):
            paper = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
            axis.text(total + 1.2, place, f"{total:.0f} GiB", va="center", fontsize=10, color="#333333", bbox=paper)
        for card in CARDS:
            axis.axvline(card, color="#777777", linewidth=1, linestyle="--", zorder=0)
            axis.text(card + 0.6, len(names) - 0.45, f"{card} GiB card", fontsize=8.5, color="#555555")
        axis.set_xlim(0, max(left) * 1.1)
        axis.set_ylim(-0.55, len(names) - 0.15)
        axis.set_xlabel("GiB on the device")
        axis.legend(loc="upper right", bbox_to_anchor=(1.0, 0.93), fontsize=9, frameon=False)


@command
def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), metavar="DIR")
    out = parser.parse_args(argv).out
    methods = bars()
    print_table(
        ["method", *COLORS, "GiB in all"],
        [[name, *(f"{items[kind] / GIB:.1f}" for kind in COLORS), f"{sum(items.values()) / GIB:.1f}"]
         for name, items in methods.items()],
    )  # fmt: skip
    with output(out, "memory_bars"):
        draw(out / "memory_bars.png", methods)
        save(out / "memory_bars.json", {"config": CONFIG, "model": MODEL}, bytes=methods)


if __name__ == "__main__":
    main()
