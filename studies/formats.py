"""How much loss the formats of weights and of AdamW's states cost: float32, bfloat16, and integers of 8, 10 or 12 bits.

Trains the Llamas of `studies.llamas`: on the text they were pretrained on, where the loss is near its optimum and the
noise of a rounding shows, on new text, from random weights, and long at low rates. Runs with the same seed see the same
batches, and the loss of float32 is subtracted seed by seed.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.pages import markdown
from lowmem import storage
from lowmem.tiles.storage import FLOAT32, Integer, Shown, Uniform, of_state, of_weight
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


@dataclass(frozen=True)
class Linear(storage.Storage):
    """8-bit integers at equal distances, with a scale for every 32 elements of a row: what `8bit` is compared with."""

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


BITS = {"int8": 8, "int10": 10, "int12": 12}
STORAGES: dict[str, storage.Maker] = {
    "8bit_linear": Linear,
    **{name: lambda dtype, signed, bits=bits: Unpacked(bits) for name, bits in BITS.items()},
    "int8, fresh units": lambda dtype, signed: Fresh(8),
    "int10, fresh units": lambda dtype, signed: Fresh(10),
    **{
        f"{name}, groups of {size}": lambda dtype, signed, bits=bits, size=size: Unpacked(bits, size)
        for (name, bits), size in itertools.product(BITS.items(), (32, 128))
    },
}


class Format(NamedTuple):
    """How weights and states are stored.

    Attributes:
        matrices: the rounding of bfloat16 weights.
        embedding, vectors: another rounding of the embedding, which is the head too, and of vectors.
        states: the `state_storage`.
        compiled: whether updates are.
    """

    matrices: str
    embedding: str = ""
    vectors: str = ""
    states: str = "float32"
    compiled: bool = True

    def groups(self, model: Any) -> list[dict[str, Any]]:
        """The parameters of a model, a group for each rounding."""
        named: dict[str, list[Any]] = {}
        for name, param in model.named_parameters():
            other = self.vectors if param.dim() == 1 else self.embedding if "embed" in name else ""
            named.setdefault(other or self.matrices, []).append((name, param))
        return [{"params": params, "rounding": rounding} for rounding, params in named.items()]

    def bytes_per_element(self, states: int = 0) -> float:
        """Bytes of an element of a matrix, without what the parameter shows, and of so many states."""
        moments = sum(of_state(self.states, signed=not place).bytes_per_element for place in range(states))
        if self.matrices == "float32":
            return FLOAT32.bytes_per_element + moments
        held = of_weight(self.matrices, torch.bfloat16)
        if isinstance(held, Shown):
            assert isinstance(held.held, Integer)
            held = Integer(held.held.bits, held.held.size)
        return held.bytes_per_element + moments


NEAR = {
    "float32": Format("float32"),
    "bfloat16": Format("stochastic"),
    "bfloat16, compensated8": Format("compensated8"),
}
FORMATS = {
    **NEAR,
    "bfloat16, to nearest": Format("nearest"),
    "bfloat16, compensated": Format("compensated"),
    **{name: Format(name, vectors="stochastic") for name in STORAGES if name != "8bit_linear"},
    "int10, vectors to nearest": Format("int10", vectors="nearest"),
    "int10, embedding bfloat16": Format("int10", embedding="stochastic", vectors="stochastic"),
    "float32, not compiled": Format("float32", compiled=False),
    **{
        f"{name}, {states} states": form._replace(states=states)
        for states in ("bfloat16", "8bit_nearest", "8bit")
        for name, form in NEAR.items()
    },
    "bfloat16, 8bit_linear states": Format("stochastic", states="8bit_linear"),
}


def register() -> None:
    for name, maker in STORAGES.items():
        if name not in (*storage.roundings(), *storage.state_storages()):
            storage.register(name)(maker)


# -- what is run -------------------------------------------------------------------------------------------------------

FEW = ("float32", "bfloat16", "int8", "int10")
MAIN = (*FEW, "int12", "int8, fresh units", "bfloat16, compensated")
VARIANTS = tuple(name for name in FORMATS if name.startswith("int10, "))
LOW = ("float32", *(name for name in FORMATS if name.startswith("bfloat16") and "states" not in name), "int12", "int10")
STATES = tuple(name for name, form in FORMATS.items() if name in NEAR or form.states != "float32" or not form.compiled)


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
SCRATCH = LlamaTask(size="0.7M", updates=2000, length=64, pretrained=False)
LONG = LlamaTask(updates=10_000, batch=1, looks=(0.1, 0.2, 0.5, 1.0))
BETAS = {beta2: {**NO_DECAY, "betas": (0.9, beta2)} for beta2 in (0.95, 0.999)}
# The best learning rates on the new text come from `studies.rules`.
SETTINGS_OF = {
    "old text": Setting(OLD, 1e-3, MAIN),
    "new text": Setting(NEW, 3.2e-2, MAIN),
    "new text, low rate": Setting(NEW, 6.4e-4, MAIN),
    "fine-tuning, β₂ 0.95": Setting(NEW, 3.2e-3, STATES, rule="adamw", options=BETAS[0.95]),
    "fine-tuning, β₂ 0.999": Setting(NEW, 3.2e-3, STATES, rule="adamw", options=BETAS[0.999]),
    "from scratch, β₂ 0.999": Setting(SCRATCH, 2e-3, STATES, rule="adamw", options=BETAS[0.999]),
    **{f"10,000 updates at {lr:g}": Setting(LONG, lr, LOW, 1, "adamw", BETAS[0.999]) for lr in (1e-6, 5e-6)},
    "old text, 1,000 updates": Setting(SHORT, 1e-3, ("float32", "int10", *VARIANTS, "bfloat16", "int8")),
    "old text, outliers": Setting(SHORT, 1e-3, (*FEW, "int12", "int10, groups of 32"), outliers=True),
    "LOMO": Setting(NEW, 1.0, rule="lomo", options=CLIPPED),
    "AdamW, 8-bit states": Setting(NEW, 3.2e-3, rule="adamw", options={**BETAS[0.95], "state_storage": "8bit"}),
    "5M": Setting(replace(NEW, size="5M"), 3.2e-2, seeds=1),
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
    if form.matrices != "float32":
        more["parameters"] = form.groups
    torch.compiler.reset()  # there is a limit to how often a model of a class is compiled
    options = {"compile": form.compiled, "state_storage": form.states, **setting.options}
    return training.train(
        setting.task, setting.rule, setting.lr, options, weights=form.matrices, seed=run["seed"],
        compile_model=setting.task.updates >= 1000, end=lambda model: _way(run, setting.task, model), **more,
    )  # fmt: skip


def _way(run: dict[str, Any], task: LlamaTask, model: Any) -> dict[str, float]:
    """`way`: how far the weights went along the way of float32, as a share. `drift`: how far from it, by its norm."""
    first = task.model(run["seed"])
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
        self.runs = [run for run in report["runs"] if run["setting"] == setting]
        for run in self.runs:
            self.curves.setdefault(run["format"], {})[run["seed"]] = [point[1] for point in run["curve"]]
        self.exact = self.curves.get("float32", {})

    def above(self, form: str, look: int = -1) -> list[float]:
        """Difference to the loss of float32, by seed; infinite if a run diverged."""
        curves = {seed: losses for seed, losses in self.curves.get(form, {}).items() if seed in self.exact}
        lengths = {seed: len(losses) for seed, losses in self.exact.items()}
        return [
            losses[look] - self.exact[seed][look] if len(losses) == lengths[seed] else float("inf")
            for seed, losses in curves.items()
        ]

    def kept(self, form: str) -> float:
        """The share of what float32 learns, the mean over the seeds."""
        curves = self.curves[form].items()
        return mean((one[0] - one[-1]) / (self.exact[seed][0] - self.exact[seed][-1]) for seed, one in curves)

    def cell(self, form: str) -> str:
        above = self.above(form)
        if not above or form == "float32":
            return f"0 ({mean(curve[-1] for curve in self.exact.values()):.4f})" if above else "–"
        fewer = "" if len(above) == len(self.exact) else f" ({len(above)} seed{'s' * (len(above) > 1)})"
        return "diverged" if mean(above) == float("inf") else f"{mean(above):+.4f}{fewer}"


def tables(report: Any) -> dict[str, str]:
    """The cost of formats of weights on each text, of states, along the updates, long at low rates; and of variants."""
    register()
    every = {setting: Losses(report, setting) for setting in SETTINGS_OF}
    old, found = every["old text"], {}

    def table(settings: Iterable[str], forms: Iterable[str], states: int = 0, *, share: bool = False) -> list[Any]:
        shown = [setting for setting in settings if setting in every and every[setting].curves]
        rows: list[dict[str, str]] = []
        for form in sorted(forms if shown else (), key=lambda form: -FORMATS[form].bytes_per_element(states)):
            row = {"format": form.replace("fresh units", "scales recomputed at every update")}
            row["bytes"] = f"{FORMATS[form].bytes_per_element(states):.4g}"
            row |= {setting: every[setting].cell(form) for setting in shown}
            if share and form in every[shown[0]].curves:
                row["share of float32's improvement"] = f"{every[shown[0]].kept(form):.0%}"
            rows.append(row)
        spreads = {setting: every[setting].exact.values() for setting in shown}
        if all(len(curves) > 1 for curves in spreads.values()) and rows:
            spread = {name: f"{stdev(curve[-1] for curve in curves):.4f}" for name, curves in spreads.items()}
            rows.append({**dict.fromkeys(rows[0], ""), "format": "spread of float32", **spread})
        return rows

    found[""] = table(("old text", "new text", "new text, low rate"), MAIN, share=True)
    adamw = [setting for setting in SETTINGS_OF if "β₂" in setting]
    found["states"] = table(adamw, STATES, 2)
    found["states, short"] = table(adamw, [name for name in STATES if " 8bit" in name or name in NEAR], 2)
    looks = {f"{round(OLD.updates * share):,}": look + 1 for look, share in enumerate(OLD.looks)}
    found["along"] = [
        {"format": form, **{updates: f"{mean(old.above(form, look)):+.4f}" for updates, look in looks.items()}}
        | {"each seed": ", ".join(f"{above:+.4f}" for above in old.above(form))}
        for form in MAIN[1:] if form in old.curves
    ]  # fmt: skip
    shown = {"variants": "old text, 1,000 updates", "outliers": "old text, outliers"}
    for name, setting in shown.items():
        forms = [form for form in FORMATS if setting in every and form in every[setting].curves]
        found[name] = table([setting], forms, share=True)
    found["long"] = [
        {"training": setting, "format": run["format"], "share of the way": f"{run['way']:.1%}"}
        | {"drift": f"{run['drift']:.2f}", "above float32": every[setting].cell(run["format"])}
        | {"share of float32's improvement": f"{every[setting].kept(run['format']):.0%}"}
        for setting in SETTINGS_OF if "updates at" in setting for run in every[setting].runs
    ]  # fmt: skip
    return {name: markdown(rows) for name, rows in found.items() if rows}
