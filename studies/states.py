"""How much loss the formats of AdamW's states and weights cost: float32, bfloat16, and 8 bits.

Each format of the states with each format of the weights, in the fine-tuning of `studies.finetune` and from random
weights. Runs with the same seed see the same batches, and the loss of float32 is subtracted seed by seed.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.pages import markdown
from lowmem import storage
from lowmem.tiles.storage import of_state, of_weight
from studies import training
from studies.llamas import LlamaTask
from studies.methods import NO_DECAY

KEYS, SCORES = ("setting", "weights", "states", "seed"), ("loss", "old")
LINEAR = "8bit_linear"
EAGER = "float32, eager"  # the same mathematics, not compiled: what a change of last bits does to the loss


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


class Setting(NamedTuple):
    task: LlamaTask
    lr: float
    beta2: float


FINETUNING = LlamaTask()
# The learning rate of fine-tuning is the best one of `studies.finetune`.
SETTINGS_OF = {
    "fine-tuning, β₂ 0.95": Setting(FINETUNING, 3.2e-3, 0.95),
    "fine-tuning, β₂ 0.999": Setting(FINETUNING, 3.2e-3, 0.999),
    "from scratch, β₂ 0.999": Setting(LlamaTask(size="0.7M", updates=2000, length=64, pretrained=False), 2e-3, 0.999),
}
SETTINGS = {name: {**setting._asdict(), "task": asdict(setting.task)} for name, setting in SETTINGS_OF.items()}
STATES = ("float32", "bfloat16", "8bit_nearest", "8bit")
WEIGHTS = ("float32", "stochastic", "compensated8")
PAIRS = [*itertools.product(WEIGHTS, STATES), ("float32", EAGER), ("stochastic", LINEAR)]


def runs(done: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """A seed at a time."""
    for seed, setting, (weights, states) in itertools.product(range(3), SETTINGS_OF, PAIRS):
        yield {"setting": setting, "weights": weights, "states": states, "seed": seed}


def stored_as(states: str) -> str:
    """The name that `state_storage` takes."""
    if states == LINEAR and LINEAR not in storage.state_storages():
        storage.register(LINEAR)(Linear)
    return "float32" if states == EAGER else states


def train(run: dict[str, Any]) -> dict[str, Any]:
    task, lr, beta2 = SETTINGS_OF[run["setting"]]
    options = {**NO_DECAY, "betas": (0.9, beta2), "compile": run["states"] != EAGER}
    options["state_storage"] = stored_as(run["states"])
    return training.train(task, "adamw", lr, options, weights=run["weights"], seed=run["seed"])


def bytes_per_parameter(weights: str, states: str) -> float:
    """Bytes of a weight and its two states."""
    weight = of_weight("nearest", torch.float32) if weights == "float32" else of_weight(weights, torch.bfloat16)
    moments = (of_state(stored_as(states), signed) for signed in (True, False))
    return weight.bytes_per_element + sum(moment.bytes_per_element for moment in moments)


def tables(report: Any) -> dict[str, str]:
    """Mean difference to the loss of float32 weights and states with the same seeds, and the spread of these losses."""
    losses: dict[tuple[str, str, str], dict[int, float]] = {}
    for run in report["runs"]:
        losses.setdefault((run["setting"], run["weights"], run["states"]), {})[run["seed"]] = run["loss"]
    exact = {setting: losses[setting, "float32", "float32"] for setting in SETTINGS_OF}

    def cell(setting: str, pair: tuple[str, str]) -> str:
        by_seed = losses.get((setting, *pair), {})
        if not by_seed:
            return "–"
        if pair == ("float32", "float32"):
            return f"0 ({mean(by_seed.values()):.4f})"
        above = mean(loss - exact[setting][seed] for seed, loss in by_seed.items())
        fewer = "" if len(by_seed) == len(exact[setting]) else f" ({len(by_seed)} seeds)"
        return "diverged" if above == float("inf") else f"{above:+.4f}{fewer}"

    rows = []
    for weights, states in sorted(PAIRS, key=lambda pair: (WEIGHTS.index(pair[0]), -bytes_per_parameter(*pair))):
        name = weights if weights == "float32" else f"bfloat16, {weights}"
        stored = "`float32`, not compiled" if states == EAGER else f"`{states}`"
        row = {"weights": name, "states": stored, "bytes per parameter": f"{bytes_per_parameter(weights, states):.4g}"}
        rows.append({**row, **{setting: cell(setting, (weights, states)) for setting in SETTINGS_OF}})
    spread = {setting: f"{stdev(by_seed.values()):.4f}" for setting, by_seed in exact.items()}
    rows.append({"weights": "spread of float32", "states": "", "bytes per parameter": "", **spread})
    short = [row for row in rows if row["states"] == "`float32`" or row["weights"] != "float32"]
    return {"": markdown(rows), "short": markdown([row for row in short if "seeds" not in "".join(row.values())])}
