"""Bytes that training with streamed weights moves per step, and from how many tokens on their copies are hidden.

    python -m benchmarks.traffic --out benchmarks/results

Nothing is measured. The numbers of parameters are from the configurations in `configs/models`, and everything else is
arithmetic with the constants below: two copies of the layers to the device per step, except for the two layers that are
still there, and one copy back.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from benchmarks import reports
from benchmarks.fits import MODELS
from benchmarks.pages import ROOT, markdown
from benchmarks.reports import command

# Vendor's figures of dense bfloat16 products with float32 accumulation, in TFLOP/s
CARDS = {"RTX 3090": 71, "RTX 4090": 165, "H100 PCIe": 756}
# Usual speeds of a copy of pinned memory in one direction, in GB/s
LINKS = {"PCIe 3.0 x16": 13, "PCIe 4.0 x16": 26, "PCIe 5.0 x16": 52}
NEWEST = {"RTX 3090": 4, "RTX 4090": 4, "H100 PCIe": 5}  # version of PCIe that the card supports
UTILIZATION = 0.5  # of the card's products in a layer
FORWARD, STEP = 2, 8  # operations per parameter and token: of a forward pass, and of a step with recomputation
# Bytes per weight: bfloat16, or codes with a bfloat16 scale per 64 weights
WEIGHTS = {"bfloat16": 2.0, "int12": 12 / 8 + 2 / 64, "int10": 10 / 8 + 2 / 64}
# Bytes per parameter on the host
HOST = {
    "AdaLomo, int10": WEIGHTS["int10"],
    "AdaLomo, int12": WEIGHTS["int12"],
    "AdaLomo": 2.0,
    "AdamW, 8-bit states": 2 + 2 * (1 + 2 / 32),
    "AdamW, bfloat16 states": 2 + 2 * 2,
    "AdamW, float32 states": 2 + 2 * 4,
    "12 bytes (MegaTrain, SlideFormer)": 12.0,
    "16 bytes (RoundPipe, ZeRO-3 with both offloads)": 16.0,
}
# A solid-state disk of 2 TB: GB/s of its link (PCIe 4.0 x4), and the TB that its vendor warrants
DISK, WARRANTED = 7.0, 1200
GB, DAY = 1e9, 86_400


class Model(NamedTuple):
    """Parameters of a model: all, and of its layers; the number of layers."""

    parameters: int
    in_layers: int
    layers: int

    def up(self, width: float) -> float:
        """Bytes to the device per step. The last two layers of a forward stay for backward, the first two for the next
        step.
        """
        return self.in_layers * width * (2 - 4 / self.layers)

    def down(self, width: float) -> float:
        return self.in_layers * width

    def resident(self, width: float) -> float:
        """Bytes of weights on the device: two layers, and everything else."""
        return (self.parameters - self.in_layers * (1 - 2 / self.layers)) * width


def count(name: str) -> Model:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(ROOT / "configs" / "models" / name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    in_layers = sum(param.numel() for param in model.model.layers.parameters())
    return Model(sum(param.numel() for param in model.parameters()), in_layers, config.num_hidden_layers)


def tokens(card: str, link: str, width: float) -> float:
    """Tokens from which the copies are hidden. A forward pass needs more of them than a backward pass, which computes
    three times as much while it copies as much in each direction.
    """
    return width * CARDS[card] * 1e12 * UTILIZATION / (FORWARD * LINKS[link] * GB)


def tables(report: Any) -> dict[str, str]:
    models = {MODELS[name]: Model(*counts) for name, counts in report["models"].items()}
    return {
        "": markdown([_moved(name, model) for name, model in models.items()]),
        "tokens": markdown([_hidden(card, link) for card in CARDS for link in LINKS if int(link[5]) <= NEWEST[card]]),
        "speed": markdown([_speed(name, model) for name, model in models.items()]),
        "host": markdown([_host(name, models) for name in HOST]),
        "disk": markdown([_worn(name, model) for name, model in models.items()]),
    }


def _moved(name: str, model: Model) -> Mapping[str, str]:
    return {
        "model": name,
        "weights on the device, GB": f"{model.resident(2) / GB:.1f}",
        "to the device, GB": f"{model.up(2) / GB:.0f}",
        "back, GB": f"{model.down(2) / GB:.0f}",
        **{f"{link}, s": f"{model.up(2) / speed / GB:.1f}" for link, speed in LINKS.items()},
    }


def _hidden(card: str, link: str) -> Mapping[str, str]:
    cells = {f"tokens, {name}": f"{tokens(card, link, width):,.0f}" for name, width in WEIGHTS.items()}
    return {"card": f"{card} ({CARDS[card]} TFLOP/s)", "link": f"{link} ({LINKS[link]} GB/s)", **cells}


def _speed(name: str, model: Model) -> Mapping[str, str]:
    speed = {card: peak * 1e12 * UTILIZATION / (STEP * model.parameters) for card, peak in CARDS.items()}
    return {"model": name, **{f"{card}, tokens/s": f"{value:,.0f}" for card, value in speed.items()}}


def _host(name: str, models: Mapping[str, Model]) -> Mapping[str, str]:
    sizes = {f"{model}, GB": f"{each.parameters * HOST[name] / GB:,.0f}" for model, each in models.items()}
    return {"on the host": name, "bytes per parameter": f"{HOST[name]:.3g}", **sizes}


def _worn(name: str, model: Model) -> Mapping[str, str]:
    seconds = (model.up(2) + model.down(2)) / GB / DISK
    return {
        "model": name,
        "written per step, GB": f"{model.down(2) / GB:.0f}",
        "shortest step, s": f"{seconds:.0f}",
        "written per day at most, TB": f"{model.down(2) * DAY / seconds / 1e12:.0f}",
        f"steps until {WARRANTED:,} TB are written": f"{WARRANTED * 1e12 / model.down(2):,.0f}",
    }


@command
def main(argv: Sequence[str] | None = None) -> None:
    out = reports.make_parser(__doc__ or "", {}, dtype=False).parse_args(argv).out
    with reports.output(out):
        reports.publish(out, "traffic", {}, tables, models={name: count(name) for name in MODELS})


if __name__ == "__main__":
    main()
