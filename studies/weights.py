"""How much loss the formats of weights cost: float32, bfloat16, and integers of 8, 10 or 12 bits.

Trains the pretrained Llamas of `studies.finetune`: on the text they were pretrained on, where the loss is near its
optimum and the noise of a rounding shows, and on new text. Runs with the same seed see the same batches, and the loss
of float32 is subtracted seed by seed.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.pages import markdown
from lowmem import storage
from lowmem.tiles.storage import FLOAT32, Float, Integer, Shown, Uniform, of_weight
from studies import training
from studies.llamas import LlamaTask
from studies.methods import CLIPPED, NO_DECAY
from studies.training import matrices, norm

KEYS, SCORES = ("setting", "format", "seed"), ("loss", "old", "new")
OUTLIER, OUTLIERS = 16.0, 4  # a power of two, so that the model computes the same; one channel of so many blocks


# -- formats -----------------------------------------------------------------------------------------------------------


class Unpacked(Integer):
    """`Integer` that holds its multiples as float32 numbers: the same values. Compiled code on a CPU is slow at packing
    bits.
    """

    _low = 0

    @functools.cached_property
    def parts(self) -> tuple[storage.Part, ...]:  # type: ignore[override]
        return storage.Part("codes", torch.float32), storage.Part("unit", torch.bfloat16, self.size)


class Fresh(Unpacked):
    """One whose groups take another scale at each update."""

    def update(self, value: Tensor, uniform: Uniform, stored: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.encode(value, uniform)


class Nearest(Unpacked):
    """One that is rounded to the nearest multiple."""

    def update(self, value: Tensor, uniform: Uniform, stored: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return super().update(value, Uniform.half(value), stored)


BITS = {"int8": 8, "int10": 10, "int12": 12}
STORAGES: dict[str, storage.Maker] = {
    "bfloat16 in float32": lambda dtype, signed: Float(torch.bfloat16, draws=True),
    **{name: lambda dtype, signed, bits=bits: Unpacked(bits) for name, bits in BITS.items()},
    "int8, to nearest": lambda dtype, signed: Nearest(8),
    "int8, fresh units": lambda dtype, signed: Fresh(8),
    "int10, fresh units": lambda dtype, signed: Fresh(10),
    **{
        f"{name}, groups of {size}": lambda dtype, signed, bits=bits, size=size: Unpacked(bits, size)
        for (name, bits), size in itertools.product(BITS.items(), (32, 128))
    },
}


class Format(NamedTuple):
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
    "bfloat16, to nearest": Format("nearest"),
    "bfloat16, compensated": Format("compensated"),
    "bfloat16, compensated8": Format("compensated8"),
    **{name: Format(name, vectors="stochastic") for name in STORAGES},
    "int10, vectors to nearest": Format("int10", vectors="nearest"),
    "int10, embedding bfloat16": Format("int10", embedding="stochastic", vectors="stochastic"),
}


def register() -> None:
    for name, maker in STORAGES.items():
        if name not in storage.roundings():
            storage.register(name)(maker)


# -- what is run -------------------------------------------------------------------------------------------------------

FEW = ("float32", "bfloat16", "int8", "int10")
SHARE = "share of float32's improvement"
MAIN = (*FEW, "int12", "int8, fresh units", "bfloat16, compensated")
WIDE = ("float32", "bfloat16 in float32", *BITS)
GROUPS = (*WIDE, "int8, to nearest", *(f"{name}, groups of {size}" for name in BITS for size in (32, 128)))
NEAR = [name for name in FORMATS if name.startswith("bfloat16") and "float32" not in name]
ALL = ("float32", *NEAR, "int12", "int10")
VARIANTS = tuple(name for name in FORMATS if name.startswith("int10, "))


class Setting(NamedTuple):
    """A training: its task, learning rate, formats in the order of their runs, rule and its options."""

    task: LlamaTask
    lr: float
    formats: tuple[str, ...] = FEW
    seeds: int = 3
    rule: str = "adalomo"
    options: dict[str, Any] = {}  # noqa: RUF012
    outliers: bool = False


NEW, OLD = LlamaTask(), LlamaTask(updates=5000, trained="old", looks=(0.1, 0.2, 0.3, 0.5, 1.0))
SHORT = replace(OLD, updates=1000)
LOW = LlamaTask(updates=10_000, batch=1, looks=(0.1, 0.2, 0.5, 1.0))  # at rates as of preference optimization
EIGHT_BITS = {**NO_DECAY, "betas": (0.9, 0.95), "state_storage": "8bit"}
# The best learning rate of AdaLomo, AdamW and LOMO on the new text comes from `studies.finetune`.
SETTINGS_OF = {
    "old text": Setting(OLD, 1e-3, MAIN),
    "new text": Setting(NEW, 3.2e-2, MAIN),
    "new text, low rate": Setting(NEW, 6.4e-4, MAIN),
    "old text, 1,000 updates": Setting(SHORT, 1e-3, ("float32", "int10", *VARIANTS, "bfloat16", "int8")),
    "old text, outliers": Setting(SHORT, 1e-3, (*FEW, "int12", "int10, groups of 32"), outliers=True),
    "LOMO": Setting(NEW, 1.0, rule="lomo", options=CLIPPED),
    "AdamW, 8-bit states": Setting(NEW, 3.2e-3, rule="adamw", options=EIGHT_BITS),
    "groups": Setting(replace(SHORT, products="float32"), 1e-3, GROUPS, seeds=1),
    "5M": Setting(replace(NEW, size="5M"), 3.2e-2, seeds=1),
    "20M": Setting(replace(NEW, size="20M", products="float32"), 3.2e-2, WIDE, seeds=1),
    **{f"AdamW at {lr:g}": Setting(LOW, lr, ALL, seeds=1, rule="adamw", options=NO_DECAY) for lr in (1e-6, 5e-6)},
    "old text, 10,000 updates": Setting(replace(OLD, updates=10_000), 1e-3, ("float32", "int10"), seeds=1),
}
SETTINGS = {name: {**setting._asdict(), "task": asdict(setting.task)} for name, setting in SETTINGS_OF.items()}


def runs(done: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Of each setting a seed at a time, first one seed of every setting, and float32 before the formats."""
    known = {(run["setting"], run["seed"]) for run in done if run["format"] == "float32"}
    for seed, (name, setting) in itertools.product(range(3), SETTINGS_OF.items()):
        if seed < setting.seeds:
            formats = setting.formats if (name, seed) in known else ("float32",)
            yield from ({"setting": name, "format": each, "seed": seed} for each in formats)


def with_outliers(model: Any) -> Any:
    """Makes some input channels of matrices after a norm larger and the norm's gains smaller: the same function."""
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        after = {
            layer.input_layernorm: (attention.q_proj, attention.k_proj, attention.v_proj),
            layer.post_attention_layernorm: (mlp.gate_proj, mlp.up_proj),
        }
        for before, linears in after.items():
            channels = slice(5, None, len(before.weight) // OUTLIERS)
            before.weight.data[channels] /= OUTLIER
            for linear in linears:
                linear.weight.data[:, channels] *= OUTLIER
    return model


def train(run: dict[str, Any]) -> dict[str, Any]:
    register()
    setting, form = SETTINGS_OF[run["setting"]], FORMATS[run["format"]]
    more: dict[str, Any] = {"prepare": with_outliers} if setting.outliers else {}
    if run["format"] != "float32" and setting.task.products == "bfloat16":
        more["parameters"] = form.groups
    torch.compiler.reset()  # there is a limit to how often a model of a class is compiled
    return training.train(
        setting.task, setting.rule, setting.lr, {"compile": True, **setting.options}, weights=form.matrices,
        seed=run["seed"], compile_model=setting.task.updates >= 1000, end=lambda model: _way(run, setting.task, model),
        **more,
    )  # fmt: skip


def _way(run: dict[str, Any], task: LlamaTask, model: Any) -> dict[str, float]:
    """`way`: how far the weights went along the way of float32, as a share. `drift`: how far from it, by its norm."""
    first = task.model(0 if task.pretrained else run["seed"])
    change = [ours.float() - theirs for ours, theirs in zip(matrices(model), matrices(first), strict=True)]
    path = training.WORK / f"{run['setting']}-{run['seed']}.pt"
    if run["format"] == "float32":
        torch.save(change, path)
    exact = torch.load(path)
    way = sum((a * b).sum().item() for a, b in zip(change, exact, strict=True)) / norm(exact) ** 2
    return {"way": way, "drift": norm(a - way * b for a, b in zip(change, exact, strict=True)) / norm(exact)}


# -- tables ------------------------------------------------------------------------------------------------------------


class Losses:
    """Of one setting: the held-out loss by format and seed, before and at each look."""

    def __init__(self, report: Any, setting: str) -> None:
        self.curves: dict[str, dict[int, list[float]]] = {}
        for run in report["runs"]:
            if run["setting"] == setting:
                self.curves.setdefault(run["format"], {})[run["seed"]] = [point[1] for point in run["curve"]]
        self.exact = self.curves.get("float32", {})

    def above(self, form: str, look: int = -1) -> list[float]:
        """Difference to the loss of float32, by seed."""
        curves = {seed: losses for seed, losses in self.curves.get(form, {}).items() if seed in self.exact}
        return [losses[look] - self.exact[seed][look] for seed, losses in curves.items()]

    def kept(self, form: str) -> float:
        """The share of what float32 learns, the mean over the seeds."""
        curves = self.curves[form].items()
        return mean((one[0] - one[-1]) / (self.exact[seed][0] - self.exact[seed][-1]) for seed, one in curves)

    @property
    def spread(self) -> float:
        return stdev(losses[-1] for losses in self.exact.values())


def _cell(losses: Losses, form: str) -> str:
    above = losses.above(form)
    if not above:
        return "–"
    fewer = "" if len(above) == len(losses.exact) else f" ({len(above)} seed{'s' * (len(above) > 1)})"
    return "0" if form == "float32" else f"{mean(above):+.4f}{fewer}"


def tables(report: Any) -> dict[str, str]:
    """The cost of formats in each setting: in short; along the updates; variants; outliers; and sizes of groups."""
    register()
    every = {setting: Losses(report, setting) for setting in SETTINGS_OF}
    old = every["old text"]
    order = sorted(MAIN, key=lambda form: (form != "float32", mean(old.above(form) or [9.0])))

    def size(form: str) -> dict[str, str]:
        name = form.replace("fresh units", "scales recomputed at every update")
        return {"weights": name, "bytes": f"{FORMATS[form].bytes_per_element:.2f}"}

    def learned(losses: Losses, form: str) -> dict[str, str]:
        return {"above float32": _cell(losses, form), SHARE: f"{losses.kept(form):.0%}"}

    settings = ("old text", "new text", "new text, low rate")
    short = [
        {**size(form), SHARE: f"{old.kept(form):.0%}"} | {setting: _cell(every[setting], form) for setting in settings}
        for form in order
    ]
    spread = {setting: f"{every[setting].spread:.4f}" for setting in settings}
    short.append({"weights": "spread of float32", "bytes": "", SHARE: "", **spread})
    looks = {f"{round(OLD.updates * share):,}": look + 1 for look, share in enumerate(OLD.looks)}
    along = [
        {**size(form), **{updates: f"{mean(old.above(form, look)):+.4f}" for updates, look in looks.items()}}
        | {"each seed": ", ".join(f"{above:+.4f}" for above in old.above(form))}
        for form in order[1:]
    ]
    tables = {"": short, "along": along}
    shown = {"variants": "old text, 1,000 updates", "outliers": "old text, outliers", "groups": "groups"}
    for name, setting in shown.items():
        losses = every[setting]
        tables[name] = [
            {**size(form), **learned(losses, form)} for form in FORMATS if form in losses.curves and form != "float32"
        ]
    return {name: markdown(rows) for name, rows in tables.items() if rows}
