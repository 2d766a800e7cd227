"""How much loss the formats of AdamW's states and weights cost: float32, bfloat16, and 8 bits.

    python -m benchmarks.states [--minutes 55] [--only "from scratch, β₂ 0.999"]

Each format of the states with each format of the weights, in the fine-tuning of `benchmarks.finetune` and from random
weights. Runs with the same seed see the same batches, and the loss of float32 is subtracted seed by seed. Finished runs
and the pretrained model are stored in `--work`, so that an interrupted benchmark continues.
"""

import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from benchmarks import reports
from benchmarks.baselines import select
from benchmarks.finetune import continue_runs
from benchmarks.finetune_report import compared
from benchmarks.finetune_runs import NO_DECAY, Method, Result, Run, Study, train
from benchmarks.reports import command, formatted, picture, print_table
from lowmem import storage
from lowmem.tiles.storage import of_state, of_weight

LINEAR = "8bit_linear"
EAGER = "float32, eager"  # the same mathematics, not compiled: what a change of last bits does to the loss


@dataclass(frozen=True)
class Linear(storage.Storage):
    """8-bit codes at equal distances, with a scale for every 32 elements of a row: what `8bit` is compared with."""

    dtype: torch.dtype
    signed: bool

    @property
    def parts(self) -> tuple[storage.Part, ...]:  # type: ignore[override]
        codes = torch.int8 if self.signed else torch.uint8
        return storage.Part("", codes), storage.Part("scale", torch.float32, 32)

    @property
    def most(self) -> int:
        return 127 if self.signed else 255

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        code, scale = stored
        return (code.float().unflatten(-1, (-1, 32)) * (scale / self.most).unsqueeze(-1)).flatten(-2)

    def encode(self, value: Tensor, uniform: storage.Uniform) -> tuple[Tensor, ...]:
        groups = value.unflatten(-1, (-1, 32))
        scale = groups.abs().amax(-1)
        return (groups / scale.clamp(min=1e-38).unsqueeze(-1) * self.most).round().flatten(-2), scale


@dataclass(frozen=True)
class Setting:
    """A training: its study, AdamW's learning rate and β₂, the model, and whether updates are compiled."""

    study: Study
    lr: float
    beta2: float
    size: str = "1M"
    compile: bool = True


# The learning rate of fine-tuning is the best one of `benchmarks.finetune`.
SETTINGS = {
    "fine-tuning, β₂ 0.95": Setting(Study(), 3.2e-3, 0.95),
    "fine-tuning, β₂ 0.999": Setting(Study(), 3.2e-3, 0.999),
    "from scratch, β₂ 0.999": Setting(Study(updates=2000, length=64, pretraining=0.0), 2e-3, 0.999, "0.7M"),
}
STATES = ("float32", "bfloat16", "8bit_nearest", "8bit")
WEIGHTS = ("float32", "stochastic", "compensated8")
PAIRS = [*itertools.product(WEIGHTS, STATES), ("float32", EAGER), ("stochastic", LINEAR)]
SEEDS = (0, 1, 2)
LOOKS = {"float32": ("#333333", "o"), "stochastic": ("#2a8f7c", "s"), "compensated8": ("#4c72b0", "D")}


def storage_of(states: str) -> str:
    """The name that `state_storage` takes."""
    return "float32" if states == EAGER else states


# -- the runs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One run: its setting, the formats of the states and of the weights, and the seed."""

    setting: str
    states: str
    weights: str
    seed: int

    @property
    def study(self) -> Study:
        return SETTINGS[self.setting].study

    @property
    def run(self) -> Run:
        known = SETTINGS[self.setting]
        return Run(f"adamw, β₂ {known.beta2:g}, {self.states}", self.weights, known.lr, known.size, self.seed)

    @property
    def method(self) -> Method:
        known = SETTINGS[self.setting]
        options = {**NO_DECAY, "betas": (0.9, known.beta2), "compile": known.compile and self.states != EAGER}
        return Method("adamw", known.lr, {**options, "state_storage": storage_of(self.states)})

    def train(self, work: Path) -> Result:
        return train(self.run, self.study, work, self.method)


def planned(settings: Sequence[str]) -> list[Cell]:
    """All runs, a seed at a time: first every format of the states with stochastic weights, and every format of the
    weights with float32 and 8-bit states, then the rest."""
    cells = [
        Cell(setting, states, weights, seed)
        for seed, setting, (weights, states) in itertools.product(SEEDS, settings, PAIRS)
    ]
    return sorted(
        cells, key=lambda cell: cell.weights != "stochastic" and cell.states not in ("float32", EAGER, "8bit")
    )


# -- the report --------------------------------------------------------------------------------------------------------


def bytes_per_parameter(weights: str, states: str) -> float:
    """Bytes of a weight and its two states."""
    weight = of_weight("nearest", torch.float32) if weights == "float32" else of_weight(weights, torch.bfloat16)
    moments = (of_state(storage_of(states), signed) for signed in (True, False))
    return weight.bytes_per_element + sum(moment.bytes_per_element for moment in moments)


def table(results: Mapping[Cell, Result]) -> list[dict[str, Any]]:
    """A row per setting and formats: the loss on the new text, its difference from that of float32 with the same seed,
    and the mean of those in units of `noise`, the standard deviation of float32 over its seeds."""
    rows = []
    for setting, (weights, states) in itertools.product(SETTINGS, PAIRS):
        seeds = [seed for seed in SEEDS if Cell(setting, states, weights, seed) in results]
        seeds = [seed for seed in seeds if Cell(setting, "float32", "float32", seed) in results]
        if not seeds:
            continue
        found, base = (
            [results[Cell(setting, *formats, seed)] for seed in seeds]
            for formats in ((states, weights), ("float32", "float32"))
        )
        every = [results[cell].new for seed in SEEDS if (cell := Cell(setting, "float32", "float32", seed)) in results]
        codes = [result.codes for result in found if result.codes is not None]
        rows.append(
            {
                "setting": setting,
                "weights": weights,
                "states": states,
                "bytes per parameter": bytes_per_parameter(weights, states),
                "loss": mean(result.new for result in found),
                **compared([result.new for result in found], [result.new for result in base], every),
                "codes changed by the last update": mean(codes) if codes else None,
            }
        )
    return rows


def report(results: Mapping[Cell, Result], folder: Path) -> None:
    """Prints the table, and writes the figures and the picture."""
    rows = table(results)
    for setting in SETTINGS:
        some = [row for row in rows if row["setting"] == setting]
        if some:
            print(f"\n{setting}: float32 varies by {formatted(some[0]['noise'], '.4f')} over the seeds\n")
            headings = (
                "weights",
                "states",
                "bytes per parameter",
                "loss",
                "less float32",
                "each seed",
                "in its spread",
            )
            print_table((*headings, "codes changed"), [_shown(row) for row in some])
    seconds = sum(result.seconds for result in results.values())
    print(f"\n{len(results)} runs, {seconds / 60:.0f} minutes of one thread")
    settings = {name: asdict(setting) for name, setting in SETTINGS.items()}
    runs = [{**asdict(cell), **asdict(result)} for cell, result in results.items()]
    reports.save(folder / "states.json", settings, seconds=seconds, table=rows, runs=runs)
    draw(rows, folder / "states.png")


def _shown(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        row["weights"],
        row["states"],
        f"{row['bytes per parameter']:.2f}",
        f"{row['loss']:.4f}",
        f"{row['difference']:+.4f}",
        ", ".join(f"{difference:+.4f}" for difference in row["differences"]),
        formatted(row["in units of the noise"], "+.2f"),
        formatted(row["codes changed by the last update"], ".0%"),
    )


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the differences from float32, a panel per setting and a color per format of the weights."""
    names = [EAGER, *STATES, LINEAR]
    title, count = "Held-out loss of AdamW by the formats of its states and weights", len(SETTINGS)
    with picture(path, title, (4.4 * count, 4.6), count) as panels:
        for axes, setting in zip(panels, SETTINGS, strict=True):
            some = [row for row in rows if row["setting"] == setting]
            inside = [d for row in some for d in row["differences"] if row["states"] != LINEAR and math.isfinite(d)]
            noise = max([row["noise"] for row in some if row["noise"] is not None], default=0.0)
            top = 1.25 * max([noise, *map(abs, inside)], default=1.0) or 1.0
            axes.axhspan(-noise, noise, color="#eeeeee", zorder=0, label="spread of float32 over the seeds")
            axes.axhline(0.0, color="#bbbbbb", lw=0.8)
            for shift, (weights, (color, marker)) in zip((-0.2, 0.0, 0.2), LOOKS.items(), strict=True):
                for row in some:
                    if row["weights"] == weights:
                        _column(axes, row, names.index(row["states"]) + shift, top, color, marker)
                axes.plot([], [], color=color, marker=marker, ls="", label=_label(weights))
            axes.set(ylim=(-top, top), xlim=(-0.5, len(names) - 0.5))
            labels = [name.replace(", ", ",\n").replace("8bit_", "8bit_\n") for name in names]
            axes.set_xticks(range(len(names)), labels, fontsize=8)
            axes.set_title(setting, fontsize=10)
            axes.set_xlabel("states")
        panels[0].set_ylabel("loss, less that of float32 with the same seed, nats")
        legend = panels[0].get_legend_handles_labels()
        panels[0].figure.legend(*legend, loc="outside lower center", ncols=4, frameon=False, fontsize=9)


def _column(axes: Any, row: Mapping[str, Any], place: float, top: float, color: str, marker: str) -> None:
    """The mean and each seed of one format; a number at the upper edge if it is above."""
    if not row["difference"] < top:
        text = f"{row['difference']:+.2f}" if math.isfinite(row["difference"]) else "diverged"
        axes.annotate(f"↑\n{text}", (place, 0.97 * top), fontsize=8, ha="center", va="top", color=color)
        return
    axes.scatter([place] * len(row["differences"]), row["differences"], s=12, color=color, alpha=0.4, linewidths=0)
    axes.plot(place, row["difference"], color=color, marker=marker, ms=6)


def _label(weights: str) -> str:
    return "float32 weights" if weights == "float32" else f"bfloat16 weights, {weights}"


@command
def main(argv: Sequence[str] | None = None) -> None:
    counts = {"minutes": (600, "no run is begun after this time")}
    parser = reports.make_parser(__doc__, counts, dtype=False, only="setting")
    parser.add_argument("--work", type=Path, default=Path("data/finetune"), metavar="DIR", help="runs and models")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    if LINEAR not in storage.state_storages():
        storage.register(LINEAR)(Linear)
    cells = planned(list(select(SETTINGS, options.only)))
    print(f"{len(cells)} runs: {len(PAIRS)} formats, seeds {SEEDS}", file=sys.stderr, flush=True)
    with reports.output(options.out, "states"):
        report(continue_runs(cells, options.work, "states", options.minutes), options.out)


if __name__ == "__main__":
    main()
