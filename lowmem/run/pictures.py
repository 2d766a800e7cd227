"""The picture of a run, drawn from its metrics."""

import itertools
import math
import re
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lowmem.files import write_file

# A line of metrics.jsonl.
Record = dict[str, Any]

_STYLE = {
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#888888", "axes.grid": True,
    "grid.color": "#e6e6e6", "axes.axisbelow": True, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "legend.frameon": False, "lines.linewidth": 1.3, "lines.markersize": 5,
}  # fmt: skip
_BLUE, _PALE, _EVAL = "#1f5fa8", "#b5cbe6", ("#d1495b", "#e08e2b", "#5b8c2a")

# The panels below the main metric: metrics, where they were logged, and their labels.
_PANELS = {
    "loss": "loss", "kl": "KL divergence", "rewards/accuracies": "accuracy", "rewards/margins": "reward margin",
    "accuracy": "accuracy", "margin": "reward margin", "grad_norm": "gradient norm", "learning_rate": "learning rate",
    "changed_share": "weights changed", "clip_coef": "clip coefficient", "loss_scale": "loss scale",
}  # fmt: skip
# The panels whose values may differ by orders of magnitude.
_LOGARITHMIC = ("grad_norm", "loss_scale")


def draw(folder: Path, records: list[Record]) -> None:
    """Draws loss.png of a run from its log history."""
    png = BytesIO()
    with matplotlib.rc_context(_STYLE):
        loss_picture(records, folder.resolve().name).savefig(png, format="png", dpi=150)
    write_file(folder / "loss.png", png.getvalue())


def _smoothed(values: list[float]) -> np.ndarray[Any, Any]:
    """A centered Gaussian average, about a twentieth of the run wide, which leaves out NaN."""
    finite = np.isfinite(values)
    width = max(len(values) / 60, 1.5)
    kernel = np.exp(-0.5 * (np.arange(-round(3 * width), round(3 * width) + 1) / width) ** 2)
    total = np.convolve(np.where(finite, values, 0.0), kernel, mode="same")
    weight = np.convolve(finite, kernel, mode="same")
    return np.divide(total, weight, out=np.full_like(total, np.nan), where=weight > 0)


def loss_picture(records: list[Record], name: str) -> Figure:
    """Draws the loss, or the reward where it was logged, and below it what else was logged of `_PANELS`."""
    main, logged = main_metric(records), set[str]().union(*records)
    panels = [key for key in _PANELS if key in logged and key != main]
    figure = Figure(figsize=(9, 4.2 + 1.4 * len(panels)), layout="constrained")
    axes = figure.subplots(1 + len(panels), 1, sharex=True, squeeze=False, height_ratios=[3.2, *[1] * len(panels)])
    loss, *rest = axes[:, 0]
    steps, values = series(records, main)
    many = len(values) >= 20
    loss.plot(steps, values, color=_PALE if many else _BLUE, marker=_point(steps), label="training")
    if many:
        loss.plot(steps, _smoothed(values), color=_BLUE, lw=2, label="training, smoothed")
    for key, color in zip(evaluations(records, main), itertools.cycle(_EVAL)):
        label = key.removeprefix("eval_").removesuffix(main).replace("_", " ").strip()
        loss.plot(*series(records, key), color=color, marker="o", label=f"evaluation {label}".strip())
    loss.set(title=f"{name}: {main}", ylabel=main)
    loss.legend()
    for key, panel in zip(panels, rest, strict=True):
        steps, values = series(records, key)
        panel.plot(steps, values, color=_BLUE, marker=_point(steps))
        panel.set_ylabel(_PANELS[key])
        if key in _LOGARITHMIC and any(value > 0 for value in values):
            panel.set_yscale("log")
    last = axes[-1, 0]
    last.set_xlabel("step")
    last.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    figure.align_ylabels()
    return figure


def series(records: list[Record], key: str) -> tuple[list[int], list[float]]:
    """The steps and values of one metric; a value that was not finite is NaN."""
    rows = [(record["step"], record[key]) for record in records if key in record]
    return [step for step, _ in rows], [math.nan if value is None else value for _, value in rows]


def main_metric(records: Iterable[Record]) -> str:
    """The metric that a run improves: the reward of GRPO and RLOO, whose loss stays near 0, or else the loss."""
    return "reward" if any("reward" in record for record in records) else "loss"


def evaluations(records: list[Record], metric: str) -> list[str]:
    """The keys of a metric in evaluations: one, or one per evaluation dataset."""
    keys = dict.fromkeys(key for record in records for key in record)
    return [key for key in keys if re.fullmatch(rf"eval_(.+_)?(?<!aux_){metric}", key)]


def _point(steps: list[int]) -> str:
    """Returns the marker of a single step, which a line alone would not show."""
    return "o" if len({*steps}) == 1 else ""
