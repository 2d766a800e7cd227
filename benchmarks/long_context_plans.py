"""Planned peaks of long sequences on a GPU: the first part of `benchmarks.long_context`."""

import itertools
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import reports
from benchmarks.reports import picture, print_table
from benchmarks.runs import configuration, planned

LLAMA = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072}
QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128}
MODELS: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B": {**LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                     "num_attention_heads": 32, "tie_word_embeddings": True},
    "Llama-3.1-8B": {**LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                     "num_attention_heads": 32},
    "Qwen3-14B": {**QWEN3, "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40,
                  "num_attention_heads": 40},
}  # fmt: skip

# Arguments of `configuration` by setting. The first has none of the options.
OFF, DEFAULTS, TILED, HOST, BOTH = "all off", "defaults", "tiled MLP", "offload to the host", "tiled MLP and offload"
TILE = 4096
SETTINGS: dict[str, dict[str, Any]] = {
    OFF: {"layers": {"computed_gradients": False}},
    DEFAULTS: {},
    TILED: {"layers": {"mlp_tile": TILE}},
    HOST: {"offload": True},
    BOTH: {"layers": {"mlp_tile": TILE}, "offload": True},
}
COLORS = dict(zip(SETTINGS, ("#888888", "#1f5fa8", "#2a8f7c", "#e08e2b", "#d1495b"), strict=True))

SHORTEST = 1024
CARDS = (24 << 30, 80 << 30)
RESERVED = 1 << 30  # of a card, for CUDA's context and what is not in tensors

# Models that are also planned with one short sequence.
SHORT_TOKENS = 2048
SHORT = {
    "Qwen3-0.6B": {**QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                   "num_attention_heads": 16, "tie_word_embeddings": True},
    "Llama-3.1-8B": MODELS["Llama-3.1-8B"],
}  # fmt: skip

# Sizes of tiles that are compared, for one model and length.
TILES = (1024, 2048, 4096, 8192, 16384)
TILES_OF, TILES_AT = "Llama-3.1-8B", 32768

# What is planned in full, too.
CHECKED = (
    ("Llama-3.2-1B", 1024, OFF), ("Llama-3.2-1B", 1024, DEFAULTS), ("Llama-3.2-1B", 8192, BOTH),
    ("Llama-3.1-8B", 2048, OFF), ("Llama-3.1-8B", 2048, DEFAULTS), ("Llama-3.1-8B", 2048, HOST),
    ("Qwen3-14B", 4096, TILED),
)  # fmt: skip

# A vocabulary that is at least as long as any block of rows that a head or an embedding computes at a time.
SMALL_VOCABULARY = 8192


def peak(model: Mapping[str, Any], tokens: int, setting: Mapping[str, Any], **changes: Any) -> int:
    """Bytes of tensors at the peak of a planned step on a GPU; `changes` are of the model."""
    return planned(configuration({**model, **changes}, tokens, **setting), "gpu").peak


def weights(model: Mapping[str, Any]) -> int:
    """Bytes of the weights."""
    return planned(configuration(model, 64), "gpu").items["weights"]


@cache
def bytes_per_row(name: str) -> int:
    """What a row of the vocabulary adds to any peak, where the head's and the embedding's gradients are computed."""
    sizes = (SMALL_VOCABULARY, 2 * SMALL_VOCABULARY)
    few, many = (peak(MODELS[name], SHORTEST, {}, num_hidden_layers=1, vocab_size=size) for size in sizes)
    return (many - few) // SMALL_VOCABULARY


@cache
def bytes_per_layer(name: str, offload: bool) -> tuple[int, int]:
    """What a layer adds to any peak: its weights and states, and per token its input, unless that is offloaded."""
    short, long = (
        peak(MODELS[name], tokens, {"offload": offload}, num_hidden_layers=2, vocab_size=SMALL_VOCABULARY)
        - peak(MODELS[name], tokens, {"offload": offload}, num_hidden_layers=1, vocab_size=SMALL_VOCABULARY)
        for tokens in (SHORTEST, 2 * SHORTEST)
    )
    per_token = (long - short) // SHORTEST
    return short - per_token * SHORTEST, per_token


def extrapolated(name: str, tokens: int, setting: str) -> int:
    """The peak of a model, from a plan of its first layer and of a part of its vocabulary.

    The peak is while the last layer or the head computes its gradients: all layers have added their weights, their
    states and their input. So it is affine in the number of layers. Where the head's gradient is computed as it is
    read, only weights and states have the size of the vocabulary, in which the peak is affine too.
    """
    model = MODELS[name]
    rows = model["vocab_size"] if setting == OFF else SMALL_VOCABULARY
    peak_of_one = peak(model, tokens, SETTINGS[setting], num_hidden_layers=1, vocab_size=rows)
    fixed, per_token = bytes_per_layer(name, SETTINGS[setting].get("offload", False))
    layers = (model["num_hidden_layers"] - 1) * (fixed + per_token * tokens)
    return peak_of_one + layers + (model["vocab_size"] - rows) * bytes_per_row(name)


def fits(peaks: Mapping[int, int], memory: int) -> int:
    """The longest sequence that fits, interpolated between planned lengths and rounded down to 1,024 tokens; 0 if the
    shortest does not fit.
    """
    lengths = list(peaks)
    if peaks[lengths[0]] > memory:
        return 0
    for shorter, longer in itertools.pairwise(lengths):
        if peaks[longer] > memory:
            share = (memory - peaks[shorter]) / (peaks[longer] - peaks[shorter])
            return int(shorter + share * (longer - shorter)) // 1024 * 1024
    return lengths[-1]


def run(options: Any) -> None:
    """Plans everything, prints tables, and writes figures and picture."""
    lengths = [SHORTEST << n for n in range(32) if SHORTEST << n <= options.tokens]
    peaks = {
        name: {setting: {n: extrapolated(name, n, setting) for n in lengths} for setting in SETTINGS} for name in MODELS
    }
    fitting = {
        name: {setting: {card >> 30: fits(row, card - RESERVED) for card in CARDS} for setting, row in rows.items()}
        for name, rows in peaks.items()
    }
    checked = [
        {"model": name, "tokens": tokens, "setting": setting, "extrapolated": extrapolated(name, tokens, setting),
         "full": peak(MODELS[name], tokens, SETTINGS[setting])}
        for name, tokens, setting in CHECKED
    ]  # fmt: skip
    one_layer = {"num_hidden_layers": 1, "vocab_size": SMALL_VOCABULARY}
    tiled = {n: peak(MODELS[TILES_OF], TILES_AT, {"layers": {"mlp_tile": n}}, **one_layer) for n in TILES}
    untiled = peak(MODELS[TILES_OF], TILES_AT, {}, **one_layer)
    saved = {n: untiled - needed for n, needed in tiled.items()}
    settings = (OFF, DEFAULTS, HOST)
    short = {
        name: {"weights": weights(model), **{s: peak(model, SHORT_TOKENS, SETTINGS[s]) for s in settings}}
        for name, model in SHORT.items()
    }
    report(peaks, fitting, short)
    equal = sum(row["full"] == row["extrapolated"] for row in checked)
    print(f"\n{equal} of {len(checked)} plans of one layer, extrapolated, are equal to plans of the full model")
    print(
        f"{TILES_OF}, {TILES_AT:,} tokens: GiB that mlp_tile saves:", {n: f"{b / 2**30:.2f}" for n, b in saved.items()}
    )
    reports.save(
        options.out / "long_context_planned.json",
        {"tile": TILE, "reserved": RESERVED, "tiles": [TILES_OF, TILES_AT], "short": SHORT_TOKENS, "models": MODELS},
        **{"peaks": peaks, "fits": fitting, "checked": checked, "saved by tiles": saved, "short": short},
    )
    draw(peaks, options.out / "long_context.png")


def report(
    peaks: Mapping[str, Mapping[str, Mapping[int, int]]],
    fitting: Mapping[str, Mapping[str, Mapping[int, int]]],
    short: Mapping[str, Mapping[str, int]],
) -> None:
    """Prints the peak of each model, setting and length in GiB, and what fits."""
    print("Peak of tensors on a GPU in GiB, planned: one sequence, AdaLomo, bfloat16\n")
    for name, rows in peaks.items():
        lines = [
            (setting, *(f"{needed / 2**30:.2f}" for needed in row.values()),
             *(f"{count:,}" for count in fitting[name][setting].values()))
            for setting, row in rows.items()
        ]  # fmt: skip
        cards = [f"fits {card >> 30} GiB" for card in CARDS]
        print_table((name, *(f"{n // 1024}k" for n in next(iter(rows.values()))), *cards), lines)
        print()

    def cell(row: Mapping[str, int], setting: str) -> str:
        return f"{row[setting] / 2**30:.2f} = {row[setting] / row['weights']:.3f} × weights"

    table: list[Sequence[str]] = [
        (name, f"{row['weights'] / 2**30:.2f}", *(cell(row, setting) for setting in row if setting != "weights"))
        for name, row in short.items()
    ]
    columns = (f"1 × {SHORT_TOKENS:,} tokens", "weights", *(s for s in next(iter(short.values())) if s != "weights"))
    print_table(columns, table)


def draw(peaks: Mapping[str, Mapping[str, Mapping[int, int]]], path: Path) -> None:
    """Draws the peak against the length of the sequence, a panel per model and a line per setting."""
    title = "Peak of a training step on a GPU, planned: one sequence, AdaLomo, bfloat16"
    ticks = (2, 4, 8, 16, 24, 40, 80, 160)
    with picture(path, title, (10, 4.6), len(peaks), sharey=True, sharex=True) as panels:
        for axes, (name, rows) in zip(panels, peaks.items(), strict=True):
            for setting, row in rows.items():
                style = {"color": COLORS[setting], "lw": 1.7, "marker": "o", "ms": 3}
                axes.plot(list(row), [needed / 2**30 for needed in row.values()], label=setting, **style)
            for card in CARDS:
                axes.axhline(card / 2**30, color="#333333", lw=1, ls=(0, (5, 3)))
                axes.text(SHORTEST, card / 2**30 * 0.97, f"{card >> 30} GiB", va="top", fontsize=8, color="#333333")
            axes.set(xscale="log", yscale="log", xlabel="tokens", title=name)
            axes.set_xticks(list(row), [f"{n // 1024}k" for n in row])
            axes.set_yticks(ticks, list(map(str, ticks)))
            axes.minorticks_off()
            axes.grid(color="#eeeeee")
            axes.set_axisbelow(True)
        panels[0].set_ylabel("peak of tensors (GiB)")
        lines = panels[0].get_legend_handles_labels()
        panels[0].figure.legend(*lines, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
