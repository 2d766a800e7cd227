"""The memory per GPU of full fine-tuning by model, number of GPUs and rule, as a picture of what fits.

    python -m benchmarks.fits --out benchmarks/results

Every figure is `lowmem plan` on a GPU: bfloat16 weights, 1 × 2,048 tokens per GPU, activation checkpointing, default
options, and the reserve for CUDA. Several GPUs share the weights by FSDP2.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import reports
from benchmarks.memory_bars import CONFIG, GIB
from benchmarks.pages import markdown
from benchmarks.reports import command, picture
from lowmem.run.plan import plan
from lowmem.run.recipe import parse

MODELS = {"llama-3.1-8b": "8B", "qwen3-14b": "14B", "qwen3-32b": "32B", "llama-3.1-70b": "70B"}
RANKS = (1, 2, 4, 8)
RULES = {"AdaLomo": ("adalomo", "1e-3"), "AdamW": ("adamw", "2e-5")}
# Size of a card in GB → GiB that are free on it, and the color of what fits
CARDS = {16: (15.5, "#cfe8d5"), 24: (23.5, "#a9d3e8"), 48: (47.4, "#f3d9a4"), 80: (79.1, "#efb49b")}
TOO_LARGE = "#e6e6e6"


def needed(model: str, ranks: int, rule: str) -> dict[str, float]:
    """The bytes that each GPU needs, with the reserve, and the seconds that the plan took."""
    name, rate = RULES[rule]
    words = ["--config", CONFIG, "--model_name_or_path", f"configs/models/{model}", "--eval_strategy", "no"]
    words += ["--fused.rule", name, "--learning_rate", rate]
    words += ["--fsdp"] if ranks > 1 else []
    start = time.perf_counter()
    nbytes = plan(parse("sft", words, device="gpu"), ranks).needed
    return {"needed": nbytes, "seconds": time.perf_counter() - start}


def card(nbytes: float) -> int | None:
    """The smallest card on which so many bytes are free, in GB."""
    return next((size for size, (free, _) in CARDS.items() if nbytes <= free * GIB), None)


def tables(report: Any) -> dict[str, str]:
    def cell(model: str, ranks: int, rule: str) -> str:
        nbytes = report["plans"][rule][model][str(ranks)]["needed"]
        size = card(nbytes)
        return f"{nbytes / GIB:.1f}" + (f" ({size} GB)" if size else "")

    return {
        "": markdown(
            [
                {
                    "model": name, "rule": rule,
                    **{f"{n} GPU{'s' if n > 1 else ''}, GiB": cell(model, n, rule) for n in RANKS},
                }
                for model, name in MODELS.items()
                for rule in RULES
            ]
        )
    }  # fmt: skip


def draw(report: Any, path: Path) -> None:
    title = "Full fine-tuning: GiB per GPU, and the smallest card that has them"
    with picture(path, title, (9, 3.4), len(RULES)) as panels:
        for axes, rule in zip(panels, RULES, strict=True):
            for row, model in enumerate(MODELS):
                for column, ranks in enumerate(RANKS):
                    nbytes = report["plans"][rule][model][str(ranks)]["needed"]
                    size = card(nbytes)
                    color = TOO_LARGE if size is None else CARDS[size][1]
                    axes.barh(row, 1, left=column, height=1, color=color, edgecolor="white", linewidth=2)
                    axes.text(column + 0.5, row, f"{nbytes / GIB:.0f}", ha="center", va="center", fontsize=10)
            axes.set_yticks(range(len(MODELS)), MODELS.values())
            axes.set_xticks([column + 0.5 for column in range(len(RANKS))], RANKS)
            axes.set(xlim=(0, len(RANKS)), ylim=(len(MODELS) - 0.5, -0.5), xlabel="GPUs")
            axes.set_title(f"{rule}, bfloat16 weights{'' if rule == 'AdaLomo' else ' and states'}", fontsize=10)
            axes.tick_params(length=0)
        for size, (_, color) in CARDS.items():
            panels[-1].bar(0, 0, color=color, label=f"{size} GB card")
        panels[-1].bar(0, 0, color=TOO_LARGE, label="none of them")
        panels[-1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize=9, frameon=False)


@command
def main(argv: Sequence[str] | None = None) -> None:
    out = reports.make_parser(__doc__, {}, dtype=False).parse_args(argv).out
    with reports.output(out):
        plans: dict[str, dict[str, dict[int, dict[str, float]]]] = {}
        for rule in RULES:
            for model in MODELS:
                for ranks in RANKS:
                    print(f"{rule}, {model} on {ranks}", flush=True)
                    plans.setdefault(rule, {}).setdefault(model, {})[ranks] = needed(model, ranks, rule)
        reports.publish(out, "fits", {"config": CONFIG}, tables, draw, plans=plans)


if __name__ == "__main__":
    main()
