"""How much loss the formats of weights cost: float32, bfloat16, and integers of 8, 10 or 12 bits.

    python -m benchmarks.weights [--minutes 55] [--only "old text"]

Trains the pretrained Llamas of `benchmarks.finetune`: on the text they were pretrained on, where the loss is near its
optimum and the noise of a rounding shows, and on new text. Runs with the same seed see the same batches, and the loss
of float32 is subtracted seed by seed. Finished runs and the pretrained models are stored in `--work`, so that an
interrupted benchmark continues.
"""

import functools
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
from lowmem.tiles.storage import FLOAT32, Float, Integer, Shown, Uniform, of_weight

LEAST = 0.7  # of what is kept, in the picture
OUTLIER, OUTLIERS = 16.0, 4  # a power of two, so that the model computes the same; one channel of so many blocks


class Unpacked(Integer):
    """`Integer` that holds its multiples as float32 numbers: the same values. Compiled code on a CPU is slow at packing
    bits.
    """

    _low = 0

    @functools.cached_property
    def parts(self) -> tuple[storage.Part, ...]:  # type: ignore[override]
        return storage.Part("codes", torch.float32), storage.Part("unit", torch.bfloat16, self.size)


class Fresh(Unpacked):
    """One whose groups take another unit at each update."""

    def update(self, value: Tensor, uniform: Uniform, stored: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.encode(value, uniform)


class Nearest(Unpacked):
    """One that is rounded to the nearest multiple."""

    def update(self, value: Tensor, uniform: Uniform, stored: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return super().update(value, Uniform.half(value), stored)


@dataclass(frozen=True)
class Upper(Shown):
    """An integer of more than 8 bits whose upper 8 bits are all that the model sees, in the middle of their interval or
    at its lower end.
    """

    middle: bool = True

    def _shown(self, held: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        assert isinstance(self.held, Integer)
        step = 2.0 ** (self.held.bits - 8)
        codes = (held[0] / step).floor() * step + ((step - 1) / 2 if self.middle else 0.0)
        return (codes.unflatten(-1, (-1, self.held.size)) * held[-1].float().unsqueeze(-1)).flatten(-2), *held


STORAGES: dict[str, storage.Maker] = {
    "bfloat16 in float32": lambda dtype, signed: Float(torch.bfloat16, draws=True),
    "int8": lambda dtype, signed: Unpacked(8),
    "int10": lambda dtype, signed: Unpacked(10),
    "int12": lambda dtype, signed: Unpacked(12),
    "int8, to nearest": lambda dtype, signed: Nearest(8),
    "int8, fresh units": lambda dtype, signed: Fresh(8),
    "int10, fresh units": lambda dtype, signed: Fresh(10),
    **{
        f"int{bits}, groups of {size}": lambda dtype, signed, bits=bits, size=size: Unpacked(bits, size)
        for bits, size in itertools.product((8, 10, 12), (32, 128))
    },
    "int10, 8 bits shown": lambda dtype, signed: Upper(dtype, Unpacked(10)),
    "int10, 8 bits shown, low": lambda dtype, signed: Upper(dtype, Unpacked(10), middle=False),
}


@dataclass(frozen=True)
class Format:
    """The roundings of bfloat16 weights: of matrices, of the embedding, which is the head too, and of vectors."""

    matrices: str
    embedding: str = ""
    vectors: str = ""

    def groups(self, model: Any) -> list[dict[str, Any]]:
        """The parameters of a model, a group for each rounding."""
        named: dict[str, list[Any]] = {}
        for name, param in model.named_parameters():
            other = self.vectors if param.dim() == 1 else self.embedding if "embed" in name else ""
            named.setdefault(other or self.matrices, []).append((name, param))
        return [{"params": params, "rounding": rounding} for rounding, params in named.items()]

    @property
    def bytes_per_element(self) -> float:
        """Bytes of an element of a matrix, without what the parameter shows."""
        if self.matrices == "float32":
            return FLOAT32.bytes_per_element
        held = of_weight(self.matrices, torch.bfloat16)
        if isinstance(held, Shown):
            assert isinstance(held.held, Integer)
            held = Integer(held.held.bits, held.held.size)
        return held.bytes_per_element


FORMATS = {
    "float32": Format("float32"),
    "bfloat16": Format("stochastic"),
    "bfloat16, compensated": Format("compensated"),
    **{name: Format(name, vectors="stochastic") for name in STORAGES},
    "int10, vectors to nearest": Format("int10", vectors="nearest"),
    "int10, embedding bfloat16": Format("int10", embedding="stochastic", vectors="stochastic"),
}
MAIN = ("float32", "int8", "int10", "bfloat16", "int12", "int8, fresh units", "bfloat16, compensated")
FEW = ("float32", "bfloat16", "int8", "int10")


@dataclass(frozen=True)
class Setting:
    """A training: its study, rule and learning rate, the formats in the order of their runs, and the model."""

    study: Study
    method: Method
    formats: tuple[str, ...] = FEW
    seeds: int = 3
    size: str = "1M"
    outliers: bool = False


def adalomo(lr: float) -> Method:
    return Method("adalomo", lr, {"compile": True})


OLD = Study(updates=5000, trained="old", looks=(0.1, 0.2, 0.3, 0.5, 1.0))
SHORT = replace(OLD, updates=1000)
INTEGERS = ("int8", "int10", "int12")
WIDE = ("float32", "bfloat16 in float32", *INTEGERS)
GROUPS = (*WIDE, "int8, to nearest", *(f"{name}, groups of {size}" for name in INTEGERS for size in (32, 128)))
VARIANTS = tuple(name for name in FORMATS if name.startswith("int10, "))
# The best learning rate of AdaLomo, AdamW and LOMO on the new text is that of `benchmarks.finetune`.
SETTINGS = {
    "old text": Setting(OLD, adalomo(1e-3), MAIN),
    "new text": Setting(Study(), adalomo(3.2e-2), MAIN),
    "new text, low rate": Setting(Study(), adalomo(6.4e-4), MAIN),
    "old text, 1,000 updates": Setting(SHORT, adalomo(1e-3), ("float32", "int10", *VARIANTS, "bfloat16", "int8")),
    "old text, outliers": Setting(SHORT, adalomo(1e-3), (*FEW, "int12", "int10, groups of 32"), outliers=True),
    "LOMO": Setting(Study(), Method("lomo", 1.0, {"clip_norm": 1.0, "compile": True})),
    "AdamW, 8-bit states": Setting(
        Study(), Method("adamw", 3.2e-3, {**NO_DECAY, "betas": (0.9, 0.95), "state_storage": "8bit", "compile": True})
    ),
    "groups": Setting(replace(SHORT, products="float32"), adalomo(1e-3), GROUPS, seeds=1),
    "5M": Setting(Study(), adalomo(3.2e-2), seeds=1, size="5M"),
    "20M": Setting(replace(Study(), products="float32"), adalomo(3.2e-2), WIDE, seeds=1, size="20M"),
    "old text, 10,000 updates": Setting(
        replace(OLD, updates=10_000), adalomo(1e-3), ("float32", "int10"), seeds=1
    ),
}  # fmt: skip
LOOKS = {
    "float32": "#333333", "bfloat16": "#937860", "bfloat16, compensated": "#999999", "int8": "#c44e52",
    "int8, fresh units": "#dd8452", "int10": "#2a8f7c", "int12": "#4c72b0",
}  # fmt: skip


# -- the runs ----------------------------------------------------------------------------------------------------------


def with_outliers(model: Any) -> None:
    """Makes some input channels of matrices after a norm larger and the norm's gains smaller: the same function."""
    for layer in model.model.layers:
        after = {
            layer.input_layernorm: (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
            layer.post_attention_layernorm: (layer.mlp.gate_proj, layer.mlp.up_proj),
        }
        for norm, modules in after.items():
            channels = slice(5, None, len(norm.weight) // OUTLIERS)
            norm.weight.data[channels] /= OUTLIER
            for module in modules:
                module.weight.data[:, channels] *= OUTLIER


@dataclass(frozen=True)
class Cell:
    """One run: its setting, the format of the weights, and the seed."""

    setting: str
    format: str
    seed: int

    @property
    def study(self) -> Study:
        return SETTINGS[self.setting].study

    @property
    def run(self) -> Run:
        known = SETTINGS[self.setting]
        rounding = FORMATS[self.format].matrices
        return Run(f"{self.setting}: {self.format}", rounding, known.method.lr, known.size, self.seed)

    def train(self, work: Path) -> Result:
        known, form = SETTINGS[self.setting], FORMATS[self.format]
        more: dict[str, Any] = {"prepare": with_outliers} if known.outliers else {}
        torch.compiler.reset()  # there is a limit to how often a model of a class is compiled
        if self.format != "float32" and self.study.products == "bfloat16":
            more["parameters"] = form.groups
        return train(self.run, self.study, work, known.method, compile_model=self.study.updates >= 1000, **more)


def planned(settings: Sequence[str], seeds: int = 3) -> Iterator[Cell]:
    """All runs: of each setting a seed at a time, first one seed of every setting."""
    for seed, setting in itertools.product(range(seeds), settings):
        if seed < SETTINGS[setting].seeds:
            yield from (Cell(setting, name, seed) for name in SETTINGS[setting].formats)


# -- the report --------------------------------------------------------------------------------------------------------


def losses(cell: Cell, result: Result) -> list[float]:
    """The held-out loss of the text it was trained on: before, and at each look."""
    return [point[2 if cell.study.trained == "old" else 1] for point in result.curve]


def table(results: Mapping[Cell, Result]) -> list[dict[str, Any]]:
    """A row per setting and format: the losses, and how they compare with float32 of the same seeds.

    kept: share of what float32 learns.  noise: standard deviation of float32 over its seeds.
    """
    rows = []
    for setting, known in SETTINGS.items():
        curves = {cell: losses(cell, result) for cell, result in results.items() if cell.setting == setting}
        base = {cell.seed: curve for cell, curve in curves.items() if cell.format == "float32"}
        for name in known.formats:
            ours = {cell.seed: curve for cell, curve in curves.items() if cell.format == name and cell.seed in base}
            if not ours:
                continue
            last, theirs = [curve[-1] for curve in base.values()], [base[seed] for seed in ours]
            pairs = list(zip(ours.values(), theirs, strict=True))
            above = [[one - other for one, other in zip(*pair, strict=False)][1:] for pair in pairs]
            kept = [(one[0] - one[-1]) / (other[0] - other[-1]) for one, other in pairs]
            rows.append(
                {
                    "setting": setting,
                    "format": name,
                    "bytes per weight": FORMATS[name].bytes_per_element,
                    "seeds": list(ours),
                    "updates": [round(known.study.updates * share) for share in known.study.looks],
                    "losses": [mean(look) for look in zip(*(curve[1:] for curve in ours.values()), strict=False)],
                    "above": [mean(look) for look in zip(*above, strict=False)],
                    "kept": mean(kept),
                    "kept by seed": kept,
                    **compared([one[-1] for one, _ in pairs], [other[-1] for _, other in pairs], last),
                    "change": mean(results[Cell(setting, name, seed)].change for seed in ours),
                }
            )
    return rows


def report(results: Mapping[Cell, Result], folder: Path) -> None:
    """Prints the tables, and writes the figures and the picture."""
    rows = table(results)
    for setting, known in SETTINGS.items():
        some = [row for row in rows if row["setting"] == setting]
        if some:
            updates = [format(count, ",") for count in some[0]["updates"]]
            print(f"\n{setting}: float32 varies by {formatted(some[0]['noise'], '.4f')} over the seeds\n")
            headings = ("weights", "bytes", *updates, "kept", "less float32", "each seed", "in its spread", "change")
            print_table(headings, [_shown(row, len(known.study.looks)) for row in some])
    seconds = sum(result.seconds for result in results.values())
    print(f"\n{len(results)} runs, {seconds / 60:.0f} minutes of one thread")
    settings = {name: asdict(setting) for name, setting in SETTINGS.items()}
    runs = [{**asdict(cell), **asdict(result)} for cell, result in results.items()]
    reports.save(folder / "weights.json", settings, seconds=seconds, table=rows, runs=runs)
    draw(rows, folder / "weights.png")


def _shown(row: Mapping[str, Any], looks: int) -> tuple[str, ...]:
    return (
        row["format"],
        f"{row['bytes per weight']:.2f}",
        *[f"{loss:.4f}" for loss in row["losses"]],
        *["–"] * (looks - len(row["losses"])),
        f"{row['kept']:.1%}",
        f"{row['difference']:+.4f}",
        ", ".join(f"{difference:+.4f}" for difference in row["differences"]),
        formatted(row["in units of the noise"], "+.2f"),
        f"{row['change']:.3f}",
    )


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the losses above float32 along the updates on the old text, what each format keeps, the variants, and sizes
    of groups.
    """
    title, variants = "Held-out loss by the format of the weights", "old text, 1,000 updates"
    with picture(path, title, (17, 4.6), 4, width_ratios=(1.1, 1.2, 1, 0.6)) as (left, middle, right, last):
        others = [row for row in rows if row["format"] != "float32"]
        main = [row for row in others if row["format"] in LOOKS]
        for row in (row for row in main if row["setting"] == "old text"):
            known = {"color": LOOKS[row["format"]], "marker": "o", "ms": 4, "label": row["format"]}
            left.plot(row["updates"][: len(row["above"])], row["above"], **known)
        left.axhline(0.0, color="#333333", lw=0.8)
        left.set(xlabel="updates on the old text", ylabel="above float32, nats", ylim=(-0.002, 0.03))
        settings = ["old text", "old text, outliers", "new text", "new text, low rate"]
        for row in (row for row in main if row["setting"] in settings):
            place = settings.index(row["setting"]) + 0.12 * (list(LOOKS).index(row["format"]) - 3.5)
            _column(middle, place, row["kept by seed"], LOOKS[row["format"]])
        middle.axhline(1.0, color="#333333", lw=0.8)
        middle.set(ylabel="kept of float32's learning", ylim=(LEAST, 1.02), xlim=(-0.5, 3.5))
        middle.set_xticks(range(len(settings)), [name.replace(", ", "\n") for name in settings])
        some = [row for row in others if row["setting"] == variants]
        for place, row in enumerate(some):
            _column(right, place, row["kept by seed"], LOOKS.get(row["format"], LOOKS["int10"]))
        right.axhline(1.0, color="#333333", lw=0.8)
        right.set(ylim=(LEAST, 1.02), title=variants)
        right.set_xticks(range(len(some)), [row["format"] for row in some], rotation=40, ha="right", fontsize=8)
        kept = {row["format"]: row["kept"] for row in others if row["setting"] == "groups"}
        for name in INTEGERS:
            sizes = {32: f"{name}, groups of 32", 64: name, 128: f"{name}, groups of 128"}
            shares = {str(size): kept[key] for size, key in sizes.items() if key in kept}
            last.plot(list(shares), list(shares.values()), color=LOOKS[name], marker="o", ms=4)
        last.axhline(1.0, color="#333333", lw=0.8)
        last.set(title="size of groups", xlabel="elements, 1,000 updates")
        left.figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)


def _column(axes: Any, place: float, values: Sequence[float], color: str) -> None:
    """The mean and each seed; a number at the lower edge if it is below."""
    if not mean(values) > LEAST:
        axes.annotate(f"{mean(values):.0%}\n↓", (place, LEAST), fontsize=8, ha="center", va="bottom", color=color)
        return
    axes.scatter([place] * len(values), values, s=12, color=color, alpha=0.4, linewidths=0)
    axes.plot(place, mean(values), color=color, marker="D", ms=5)


@command
def main(argv: Sequence[str] | None = None) -> None:
    counts = {"minutes": (600, "no run is begun after this time"), "seeds": (3, "seeds of each setting, at most")}
    parser = reports.make_parser(__doc__, counts, dtype=False, only="setting")
    parser.add_argument("--work", type=Path, default=Path("data/finetune"), metavar="DIR", help="runs and models")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    for name, maker in STORAGES.items():
        if name not in storage.roundings():
            storage.register(name)(maker)
    cells = list(planned(list(select(SETTINGS, options.only)), options.seeds))
    print(f"{len(cells)} runs", file=sys.stderr, flush=True)
    with reports.output(options.out, "weights"):
        results = continue_runs(cells, options.work, "weights", options.minutes)
        report(results, options.out)


if __name__ == "__main__":
    main()
