"""Plans the memory of full fine-tuning by method, number of GPUs and sequence length.

    python -m benchmarks.memory [--only llama-3.1-8b] [--out benchmarks/results]

`lowmem plan sft` predicts every number for a GPU, including CUDA's reserve. Its arguments are `CONFIG` (bfloat16
weights, 1 × 2,048 tokens, activation checkpointing) without evaluation, and the key of the plan in the JSON file. On
several GPUs, FSDP2 shards the weights. For AdamW without lowmem, weights, gradients and optimizer states are computed
from bytes per parameter, and activations and reserve are AdaLomo's.

`--only TEXT` recomputes the plans whose arguments contain TEXT. The JSON file provides the others.
"""

import json
import multiprocessing
import os
import shlex
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from benchmarks import reports
from benchmarks.pages import Row, markdown, panels
from benchmarks.reports import command
from lowmem.run.plan import plan
from lowmem.run.recipe import parse

CONFIG = "configs/llama3_8b_chat_24gb.yaml"
GIB = 1 << 30

# Directory in configs/models → name
MODELS = {
    "llama-3.2-1b": "Llama-3.2-1B", "qwen3-4b": "Qwen3-4B", "llama-3.1-8b": "Llama-3.1-8B", "qwen3-14b": "Qwen3-14B",
    "qwen3-32b": "Qwen3-32B", "llama-3.1-70b": "Llama-3.1-70B",
}  # fmt: skip
EIGHT_BILLION = "llama-3.1-8b"
EIGHT_BITS = "--fused.rule adamw --fused.state_storage 8bit"
MOMENTUM = "--fused.rule adafactor --fused.beta1 0.9 --fused.state_storage 8bit"
# Name of a method → command-line arguments
METHODS = {
    "adalomo": "--fused.rule adalomo",
    "adalomo, int12": "--fused.rule adalomo --fused.weight_format int12",
    "adalomo, int10": "--fused.rule adalomo --fused.weight_format int10",
    "adalomo, int8": "--fused.rule adalomo --fused.weight_format int8",
    "adamw": "--fused.rule adamw",
    "adamw, float32 states": "--fused.rule adamw --fused.state_storage float32",
    "adamw, 8-bit states": EIGHT_BITS,
    "adamw, 8-bit states, compensated8": f"{EIGHT_BITS} --fused.rounding compensated8",
    "adafactor, 8-bit momentum": MOMENTUM,
    "adafactor, 8-bit momentum, int12": f"{MOMENTUM} --fused.weight_format int12",
    "lion": "--fused.rule lion",
    "lomo, clipped": "--fused.rule lomo --max_grad_norm 1",
}

# Methods in the tables of weight formats and of optimizer states, by model
FORMATS = {
    "llama-3.1-8b": ("adalomo", "adalomo, int12", "adalomo, int10", "adalomo, int8"),
    "qwen3-14b": ("adalomo", "adalomo, int12", "adalomo, int10"),
    "qwen3-32b": ("adalomo", "adalomo, int10"),
}
OF_FORMATS = dict(zip(("bfloat16", "`int12`", "`int10`", "`int8`"), FORMATS["llama-3.1-8b"], strict=True))
OF_STATES = {
    "`adamw`, `8bit`, `compensated8`": "adamw, 8-bit states, compensated8",
    "`adamw`, `8bit`": "adamw, 8-bit states",
    "`adafactor` with momentum, `8bit`": "adafactor, 8-bit momentum",
    "with `int12`": "adafactor, 8-bit momentum, int12",
}
STATES = dict.fromkeys(("llama-3.1-8b", "qwen3-4b", "llama-3.2-1b"), tuple(OF_STATES.values()))

# Models, numbers of GPUs and rules in the table of sharded plans
SHARDED = ("llama-3.1-8b", "qwen3-14b", "qwen3-32b", "llama-3.1-70b")
RANKS = (1, 2, 4, 8)
RULES = {"AdaLomo": "adalomo", "AdamW": "adamw"}
# Size of a card in GB → free memory in GiB, and the color of plans that fit. Free memory is less than the nominal size
# (an RTX 5090 with 32 GB reports 31.8 GiB), and the driver uses some of it.
CARDS = {
    16: (15.5, "#cfe8d5"), 24: (23.0, "#a9d3e8"), 32: (31.3, "#c9c3e6"), 48: (47.4, "#f3d9a4"), 80: (79.1, "#efb49b"),
}  # fmt: skip
TOO_LARGE = "#e6e6e6"

# Long sequences
TOKENS = (8_192, 32_768, 131_072)
OFFLOADED = """--gradient_checkpointing_kwargs '{"offload": true}'"""
OPTIONS = {
    "default": "",
    "tiled MLP": "--layers.mlp_tile 4096",
    "offload to the host": OFFLOADED,
    "tiled MLP and offload": f"--layers.mlp_tile 4096 {OFFLOADED}",
}

# Colors of the kinds of memory in the bar chart
COLORS = {
    "weights": "#1f5fa8", "gradients": "#d1495b", "optimizer states": "#e08e2b", "activations": "#2a8f7c",
    "reserve": "#999999",
}  # fmt: skip
# Bytes per parameter of AdamW without lowmem. The second entry is a Trainer with bf16=True: float32 weights that are
# cast to bfloat16.
ORDINARY = {
    "AdamW, all in bfloat16": {"weights": 2, "gradients": 2, "optimizer states": 4},
    "AdamW, mixed precision": {"weights": 4, "gradients": 4, "optimizer states": 8},
}
GROUPS = {
    "AdaLomo": ("adalomo",),
    "AdamW, bfloat16 states": ("adamw", "AdamW, all in bfloat16"),
    "AdamW, float32 states": ("adamw, float32 states", "AdamW, mixed precision"),
}
# Backgrounds of text: a title that overlaps the line of a card, and a total inside its bar
BACKGROUND = {"facecolor": "white", "edgecolor": "none", "pad": 1}
TOTAL = {"facecolor": COLORS["weights"], "edgecolor": "none", "pad": 1}

Plans = dict[str, dict[str, int]]  # arguments → kind of memory → bytes


def arguments_of(model: str, method: str = "adalomo", ranks: int = 1, tokens: int = 0, options: str = "") -> str:
    """Returns the arguments of a plan. The last one is the number of ranks."""
    parts = [f"--model_name_or_path configs/models/{model}", METHODS[method], options]
    if tokens:
        parts.append(f"--max_length {tokens}")
    if ranks > 1:
        parts.append(f"--fsdp --ranks {ranks}")
    return " ".join(filter(None, parts))


def all_arguments() -> list[str]:
    """Returns the arguments of all plans, without duplicates."""
    plans = [arguments_of(EIGHT_BILLION, method) for method in METHODS]
    plans += [arguments_of(model, method) for table in (FORMATS, STATES) for model in table for method in table[model]]
    plans += [arguments_of(EIGHT_BILLION, tokens=n, options=words) for n in TOKENS for words in OPTIONS.values()]
    plans += [arguments_of(model, rule, n) for model in SHARDED for rule in RULES.values() for n in RANKS]
    return list(dict.fromkeys(plans))


def planned(arguments: str) -> dict[str, int]:
    """Returns the planned bytes by kind. Kinds without a color are counted as activations."""
    run, _, ranks = arguments.partition(" --ranks ")
    recipe = parse("sft", ["--config", CONFIG, "--eval_strategy", "no", *shlex.split(run)], device="gpu")
    result = plan(recipe, int(ranks or 1))
    items = {kind: result.step.items[kind] for kind in COLORS if kind in result.step.items and kind != "activations"}
    rest = {"activations": result.step.peak - sum(items.values()), "reserve": result.needed - result.step.peak}
    return {**items, **rest}


# -- tables ------------------------------------------------------------------------------------------------------------


def gib(sizes: dict[str, int]) -> float:
    return sum(sizes.values()) / GIB


def bars(plans: Plans) -> dict[str, dict[str, int]]:
    """Returns the bytes by kind for each method of `GROUPS`, in order."""
    sizes = {method: plans[arguments_of(EIGHT_BILLION, method)] for method in METHODS}
    parameters = sizes["adalomo"]["weights"] // 2
    rest = {kind: sizes["adalomo"][kind] for kind in ("activations", "reserve")}
    for name, widths in ORDINARY.items():
        sizes[name] = {**{kind: width * parameters for kind, width in widths.items()}, **rest}
    return {name: sizes[name] for names in GROUPS.values() for name in names}


def title(name: str) -> str:
    """Returns the label of a bar, which says whether its numbers are planned or computed."""
    return f"PyTorch, {name.partition(', ')[2]} (computed)" if name in ORDINARY else "lowmem (planned)"


def card(sizes: dict[str, int]) -> int | None:
    """Returns the size in GB of the smallest card with enough free memory, or None."""
    return next((size for size, (free, _) in CARDS.items() if sum(sizes.values()) <= free * GIB), None)


def tables(report: Any) -> dict[str, str]:
    plans = report["plans"]
    return {
        "": markdown(_by_kind(plans)),
        "formats": markdown(_by_method(plans, FORMATS, OF_FORMATS)),
        "states": markdown(_by_method(plans, STATES, OF_STATES)),
        "fits": markdown(_by_ranks(plans)),
        "lengths": markdown(_by_length(plans)),
    }


def _by_kind(plans: Plans) -> list[Row]:
    sizes = bars(plans)
    return [
        {
            "optimizer": group,
            "method": title(name),
            **{kind: f"{sizes[name][kind] / GIB:.1f}" for kind in COLORS},
            "GiB in total": f"{gib(sizes[name]):.1f}",
        }
        for group, names in GROUPS.items()
        for name in names
    ]


def _by_method(plans: Plans, methods: dict[str, tuple[str, ...]], columns: dict[str, str]) -> list[Row]:
    def cell(model: str, method: str) -> str:
        return f"{gib(plans[arguments_of(model, method)]):.1f} GiB" if method in methods[model] else ""

    return [
        {"model": MODELS[model], **{column: cell(model, method) for column, method in columns.items()}}
        for model in methods
    ]


def _by_ranks(plans: Plans) -> list[Row]:
    def cell(model: str, rule: str, ranks: int) -> str:
        sizes = plans[arguments_of(model, RULES[rule], ranks)]
        size = card(sizes)
        return f"{gib(sizes):.1f}" + (f" ({size} GB)" if size else "")

    names = {n: f"{n} GPU{'s' if n > 1 else ''}, GiB" for n in RANKS}
    return [
        {"model": MODELS[model], "rule": rule, **{name: cell(model, rule, n) for n, name in names.items()}}
        for model in SHARDED
        for rule in RULES
    ]


def _by_length(plans: Plans) -> list[Row]:
    def cell(tokens: int, options: str) -> str:
        return f"{gib(plans[arguments_of(EIGHT_BILLION, tokens=tokens, options=options)]):.1f} GiB"

    return [{"tokens": f"{n:,}", **{name: cell(n, words) for name, words in OPTIONS.items()}} for n in TOKENS]


# -- pictures ----------------------------------------------------------------------------------------------------------


def draw_bars(report: Any) -> Any:
    """Draws a bar of bytes by kind for each method of `GROUPS`. Computed bytes are hatched."""
    sizes = bars(report["plans"])
    figure, axes = panels("GPU memory for fine-tuning all weights of Llama-3.1-8B", (9, 4.2), 1)
    height = 0.0
    rows: list[tuple[float, str]] = []
    for group, names in GROUPS.items():
        axes.text(1, height + 0.62, group, fontsize=9.5, fontweight="bold", va="center", bbox=BACKGROUND)
        for name in names:
            left = 0.0
            style = {"hatch": "///" if name in ORDINARY else None, "edgecolor": "white", "linewidth": 0}
            for kind, color in COLORS.items():
                axes.barh(height, sizes[name][kind] / GIB, left=left, color=color, height=0.62, **style)
                left += sizes[name][kind] / GIB
            axes.text(1, height, f"{left:.0f} GiB", color="white", va="center", bbox=TOTAL)
            rows.append((height, title(name)))
            height -= 0.85
        height -= 0.75
    for size in (24, 80):
        free, _ = CARDS[size]
        axes.axvline(free, color="#777777", linewidth=1, linestyle="--", zorder=0)
        axes.text(free, 1.05, f"{size} GB card ({free:g} GiB free)", fontsize=8.5, color="#555555", ha="center")
    axes.set_yticks(*zip(*rows, strict=True))
    limits = {"xlim": (0, max(map(gib, sizes.values())) * 1.15), "ylim": (rows[-1][0] - 0.5, 1.0)}
    axes.set(**limits, xlabel="GiB on the GPU")
    for kind, color in COLORS.items():
        axes.bar(0, 0, color=color, label="reserve for CUDA" if kind == "reserve" else kind)
    axes.bar(0, 0, color="#bbbbbb", hatch="///", edgecolor="white", label="hatched: computed")
    axes.legend(loc="upper right", bbox_to_anchor=(1.0, 0.93), fontsize=9, frameon=False)
    return figure


def draw_fits(report: Any) -> Any:
    """Draws a panel for each rule: GiB by model and number of GPUs, in the color of the smallest card."""
    name = "Planned GiB per GPU for training all weights, and the smallest card with enough memory"
    figure, columns = panels(name, (9, 3.4), len(RULES), sharey=True)
    for axes, (rule, method) in zip(columns, RULES.items(), strict=True):
        for row, model in enumerate(SHARDED):
            for column, ranks in enumerate(RANKS):
                sizes = report["plans"][arguments_of(model, method, ranks)]
                color = CARDS[size][1] if (size := card(sizes)) else TOO_LARGE
                axes.barh(row, 1, left=column, height=1, color=color, edgecolor="white", linewidth=2)
                text = f"{gib(sizes):.1f}" + (f"\n{size} GB" if size else "")
                axes.text(column + 0.5, row, text, ha="center", va="center", fontsize=9)
        axes.set_yticks(range(len(SHARDED)), [MODELS[model] for model in SHARDED])
        axes.set_xticks([column + 0.5 for column in range(len(RANKS))], RANKS)
        axes.set(xlim=(0, len(RANKS)), ylim=(len(SHARDED) - 0.5, -0.5))
        axes.set_xlabel("number of GPUs (FSDP2 for more than one)")
        axes.set_title(f"{rule}, bfloat16 weights{'' if rule == 'AdaLomo' else ' and states'}", fontsize=10)
    for size, (_, color) in CARDS.items():
        columns[-1].bar(0, 0, color=color, label=f"{size} GB card")
    columns[-1].bar(0, 0, color=TOO_LARGE, label="larger")
    columns[-1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize=9, frameon=False)
    return figure


def draw_lengths(report: Any) -> Any:
    """Draws GiB by number of tokens, with a curve for each of the `OPTIONS`."""
    figure, axes = panels("GPU memory of Llama-3.1-8B with AdaLomo, one sequence per step (planned)", (7, 3.6), 1)
    for option, arguments in OPTIONS.items():
        sizes = [gib(report["plans"][arguments_of(EIGHT_BILLION, tokens=n, options=arguments)]) for n in TOKENS]
        axes.plot(TOKENS, sizes, marker="o", markersize=4, label=option)
    for size in (24, 80):
        free, _ = CARDS[size]
        axes.axhline(free, color="#777777", linewidth=1, linestyle="--", zorder=0)
        axes.text(65_536, free - 1, f"{size} GB card ({free:g} GiB free)", fontsize=8.5, color="#555555", va="top")
    axes.set_xticks(TOKENS, [f"{n // 1024}k" for n in TOKENS])
    axes.set(xlabel="tokens in the sequence", ylabel="GiB on the GPU", ylim=(0, 100))
    axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize=9, frameon=False)
    return figure


PICTURES = {"memory_bars": draw_bars, "fits": draw_fits, "long_context": draw_lengths}


@command
def main(argv: Sequence[str] | None = None) -> None:
    options = reports.make_parser(__doc__ or "", {}, dtype=False, only="part of a plan's arguments").parse_args(argv)
    file = options.out / "memory.json"
    known = json.loads(file.read_text())["plans"] if options.only and file.exists() else {}
    chosen = [words for words in all_arguments() if not options.only or any(text in words for text in options.only)]
    with reports.output(options.out):
        with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as processes:
            for arguments, sizes in zip(chosen, processes.map(planned, chosen), strict=True):
                known[arguments] = sizes
                reports.save(file, {"config": CONFIG}, plans=known)
                print(f"{arguments}: {gib(sizes):.1f} GiB", flush=True)
        reports.publish(options.out, "memory", {"config": CONFIG}, tables, PICTURES, plans=known)


if __name__ == "__main__":
    main()
