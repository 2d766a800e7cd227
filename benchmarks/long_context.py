"""Long sequences: the memory that each option of layers saves on a GPU, planned.

    python -m benchmarks.long_context [--tokens 131072]

The peak is while the last layer or the head computes its gradients: all layers have added their weights, their states
and their input. So it is affine in the number of layers. One layer is planned, and the others are added; `CHECKED` is
planned in full, too.
"""

import itertools
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import reports
from benchmarks.pages import markdown
from benchmarks.reports import command, picture
from lowmem.run.plan import StepMemory, plan
from lowmem.run.recipe import parse

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
# Planned with one short sequence.
SHORT_TOKENS = 2048
SHORT = {
    "Qwen3-0.6B": {**QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                   "num_attention_heads": 16, "tie_word_embeddings": True},
    "Llama-3.1-8B": MODELS["Llama-3.1-8B"],
}  # fmt: skip

# Arguments of `planned` by setting. The first has none of the options.
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
CARDS = (24, 80)  # GiB, of which 1 is left for CUDA's context and what is not in tensors
TILES_OF, TILES_AT, TILES = "Llama-3.1-8B", 32768, (1024, 2048, 4096, 8192, 16384)  # sizes of tiles that are compared
CHECKED = (("Llama-3.2-1B", 1024, OFF), ("Llama-3.1-8B", 2048, HOST), ("Qwen3-14B", 4096, TILED))

# Rows of a vocabulary that does not matter for a difference.
SMALL_VOCABULARY = 8192


def planned(
    model: Mapping[str, Any], tokens: int, layers: Mapping[str, Any] | None = None, offload: bool = False
) -> StepMemory:
    """Plans a step of AdaLomo on a GPU with one sequence, bfloat16 weights and activation checkpointing.

    Args:
        layers: options of `LayersConfig`.
        offload: checkpointed layers move their inputs to the host.
    """
    arguments = {
        "dtype": "bfloat16", "max_length": tokens, "learning_rate": 1e-4, "max_grad_norm": 0, "max_steps": 1,
        "per_device_train_batch_size": 1, "loss_type": "nll", "bf16": False, "report_to": "none",
        "fused.rule": "adalomo", "fused.rounding": "stochastic",
        **{f"layers.{name}": value for name, value in (layers or {}).items()},
        **({"activation_checkpointing_kwargs": {"offload": True}} if offload else {}),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model))
        words = [f"--output_dir={folder}", f"--model_name_or_path={folder}"]
        for name, value in arguments.items():
            words.append(f"--{name}={value if isinstance(value, str) else json.dumps(value)}")
        return plan(parse("sft", words, device="gpu")).step


def peak(model: Mapping[str, Any], tokens: int, setting: Mapping[str, Any], **changes: Any) -> int:
    """Bytes of tensors at the peak of a planned step; `changes` are of the model."""
    return planned({**model, **changes}, tokens, **setting).peak


@cache
def bytes_per_layer(name: str, offload: bool) -> tuple[int, int]:
    """Bytes that a layer adds to any peak: weights and states, and per token its input, unless it is offloaded."""

    def layers(count: int, tokens: int) -> int:
        changes = {"num_hidden_layers": count, "vocab_size": SMALL_VOCABULARY}
        return peak(MODELS[name], tokens, {"offload": offload}, **changes)

    short, long = (layers(2, tokens) - layers(1, tokens) for tokens in (SHORTEST, 2 * SHORTEST))
    per_token = (long - short) // SHORTEST
    return short - per_token * SHORTEST, per_token


def extrapolated(name: str, tokens: int, setting: str) -> int:
    """The peak of a model, from a plan of its first layer."""
    model = MODELS[name]
    peak_of_one = peak(model, tokens, SETTINGS[setting], num_hidden_layers=1)
    fixed, per_token = bytes_per_layer(name, SETTINGS[setting].get("offload", False))
    return peak_of_one + (model["num_hidden_layers"] - 1) * (fixed + per_token * tokens)


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


def reached(report: Any) -> Iterator[tuple[str, int, dict[str, str]]]:
    """Model, card, and the longest sequence by setting, where the settings differ: 31k, ≥ 128k, or – if none fits."""
    for name, settings in report["peaks"].items():
        longest = int(list(settings[DEFAULTS])[-1])
        for card in CARDS:
            reach = {each: report["fits"][name][each][str(card)] for each in settings}
            if set(reach.values()) not in ({0}, {longest}):
                cells = {each: f"{'≥ ' * (n == longest)}{n // 1024}k" if n else "–" for each, n in reach.items()}
                yield name, card, cells


def tables(report: Any) -> dict[str, str]:
    """The longest sequence by model and card; and the memory of a short one."""
    rows = [{"model": name, "card": f"{card} GiB", **cells} for name, card, cells in reached(report)]
    short = [
        {
            "model": name,
            **{
                key: f"{size / 2**30:.2f} GiB" + (f" = {size / row['weights']:.3f} ×" if key != "weights" else "")
                for key, size in row.items()
            },
        }
        for name, row in report["short"].items()
    ]
    return {"": markdown(rows), "short": markdown(short)}


def draw(report: Any, path: Path) -> None:
    """Draws the longest sequence that fits: a panel per model and card, a bar per setting."""
    title, rows = "Longest sequence that fits on one GPU (planned; AdaLomo, bfloat16)", [*reached(report)]
    with picture(path, title, (10, 2.6), len(rows), sharey=True, sharex=True) as panels:
        for axes, (name, card, cells) in zip(panels, rows, strict=True):
            reach = report["fits"][name]
            for place, (setting, cell) in enumerate(cells.items()):
                tokens = reach[setting][str(card)] / 1024
                axes.barh(place, tokens, color=COLORS[setting], height=0.7)
                axes.text(tokens + 3, place, cell, fontsize=9, va="center")
            axes.set_title(f"{name}, {card} GiB", fontsize=10)
            axes.set_yticks(range(len(cells)), list(cells))
            axes.set(xlabel="thousand tokens", xlim=(0, 178), xticks=(0, 32, 64, 96, 128))
        panels[0].invert_yaxis()


@command
def main(argv: Sequence[str] | None = None) -> None:
    options = reports.make_parser(__doc__, {"tokens": (131072, "longest sequence")}, dtype=False).parse_args(argv)
    lengths = [SHORTEST << n for n in range(32) if SHORTEST << n <= options.tokens]
    with reports.output(options.out):
        peaks = {
            name: {each: {n: extrapolated(name, n, each) for n in lengths} for each in SETTINGS} for name in MODELS
        }
        fitting = {
            name: {each: {card: fits(row, (card - 1) << 30) for card in CARDS} for each, row in rows.items()}
            for name, rows in peaks.items()
        }
        checked = [
            {"model": name, "tokens": tokens, "setting": setting, "extrapolated": extrapolated(name, tokens, setting),
             "full": peak(MODELS[name], tokens, SETTINGS[setting])}
            for name, tokens, setting in CHECKED
        ]  # fmt: skip
        short = {}
        for name, model in SHORT.items():
            weights = planned(model, 64).items["weights"]
            settings = {setting: peak(model, SHORT_TOKENS, SETTINGS[setting]) for setting in (OFF, DEFAULTS, HOST)}
            short[name] = {"weights": weights, **settings}
        one_layer = {"num_hidden_layers": 1, "vocab_size": SMALL_VOCABULARY}
        untiled, *tiled = (
            peak(MODELS[TILES_OF], TILES_AT, {"layers": {"mlp_tile": n} if n else {}}, **one_layer) for n in (0, *TILES)
        )
        saved = {n: untiled - needed for n, needed in zip(TILES, tiled, strict=True)}
        parts = {"peaks": peaks, "fits": fitting, "checked": checked, "saved by tiles": saved, "short": short}
        reports.publish(options.out, "long_context", {"tile": TILE, "models": MODELS}, tables, draw, **parts)


if __name__ == "__main__":
    main()
