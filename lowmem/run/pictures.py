"""Draws the pictures of a run: its loss and other metrics, and the memory of its steps."""

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
from lowmem.run.memory import ACTIVATIONS, BUFFERS, GRADIENTS, STATES, TEMPORARIES, WEIGHTS, Timeline

# A line of metrics.jsonl.
Record = dict[str, Any]

_STYLE = {
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#888888", "axes.grid": True,
    "grid.color": "#e6e6e6", "axes.axisbelow": True, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "legend.frameon": False, "lines.linewidth": 1.3, "lines.markersize": 5,
}  # fmt: skip
_BLUE, _PALE, _EVAL = "#1f5fa8", "#b5cbe6", ("#d1495b", "#e08e2b", "#5b8c2a")

# The color of each kind of memory, and the maximum number of moments to draw.
_KINDS = {
    WEIGHTS: "#1f5fa8", STATES: "#5b8c2a", BUFFERS: "#9aa3b0", GRADIENTS: "#d1495b", ACTIVATIONS: "#b5cbe6",
    TEMPORARIES: "#e7b55a",
}  # fmt: skip
_COLUMNS = 1500

# The panels below the main metric: logged metrics, and their labels.
_PANELS = {
    "loss": "loss", "kl": "KL divergence", "rewards/accuracies": "accuracy", "rewards/margins": "reward margin",
    "accuracy": "accuracy", "margin": "reward margin", "grad_norm": "gradient norm", "learning_rate": "learning rate",
    "changed_share": "weights changed", "clip_coef": "clip coefficient", "loss_scale": "loss scale",
}  # fmt: skip
# Panels whose values may differ by orders of magnitude.
_LOGARITHMIC = ("grad_norm", "loss_scale")


def draw(folder: Path, records: list[Record]) -> None:
    """Draws loss.png from the log history of a run."""
    write(loss_picture(records, folder.resolve().name), folder / "loss.png")


def write(figure: Figure, path: Path) -> None:
    """Writes a figure as PNG."""
    png = BytesIO()
    figure.savefig(png, format="png", dpi=150)
    write_file(path, png.getvalue())


def _smoothed(values: list[float]) -> np.ndarray[Any, Any]:
    """Returns a centered Gaussian average with a width of about a twentieth of the run. It ignores NaN."""
    finite = np.isfinite(values)
    width = max(len(values) / 60, 1.5)
    kernel = np.exp(-0.5 * (np.arange(-round(3 * width), round(3 * width) + 1) / width) ** 2)
    total = np.convolve(np.where(finite, values, 0.0), kernel, mode="same")
    weight = np.convolve(finite, kernel, mode="same")
    return np.divide(total, weight, out=np.full_like(total, np.nan), where=weight > 0)


@matplotlib.rc_context(_STYLE)
def loss_picture(records: list[Record], name: str) -> Figure:
    """Draws the loss, or the reward if it was logged, and below it the other logged metrics of `_PANELS`."""
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
    """Returns the steps and values of a metric. Non-finite values are NaN."""
    rows = [(record["step"], record[key]) for record in records if key in record]
    return [step for step, _ in rows], [math.nan if value is None else value for _, value in rows]


def main_metric(records: Iterable[Record]) -> str:
    """Returns the metric that a run improves: the reward for GRPO and RLOO, whose loss stays near 0, or the loss."""
    return "reward" if any("reward" in record for record in records) else "loss"


def evaluations(records: list[Record], metric: str) -> list[str]:
    """Returns the keys of a metric in evaluations, one per evaluation dataset."""
    keys = dict.fromkeys(key for record in records for key in record)
    return [key for key in keys if re.fullmatch(rf"eval_(.+_)?(?<!aux_){metric}", key)]


@matplotlib.rc_context(_STYLE)
def memory_picture(timeline: Timeline, planned: int | None, title: str) -> Figure:
    """Draws the bytes of tensors over time by kind, and the planned peak. A pixel column shows its largest total.
    Backwards are shaded.
    """
    total = sum(timeline.live.values())
    unit, name = (2**30, "GiB") if max(total) >= 2**30 else (2**20, "MiB")
    starts = np.unique(np.linspace(0, len(total), _COLUMNS, endpoint=False, dtype=np.int64))
    shown = [start + int(part.argmax()) for start, part in zip(starts, np.split(total, starts[1:]), strict=True)]
    seconds = timeline.seconds - timeline.seconds[0]
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.subplots()
    kinds = [kind for kind, live in timeline.live.items() if live.any()]
    layers = [timeline.live[kind][shown] / unit for kind in kinds]
    axes.stackplot(seconds[shown], layers, labels=kinds, colors=[_KINDS[kind] for kind in kinds], step="post", lw=0)
    parts = {"backward": timeline.backwards, "evaluation": [(timeline.end, len(total) - 1)]}
    for (part, spans), color in zip(parts.items(), ("#e9e9e9", "#f6e7d3"), strict=True):
        for first, last in spans:
            label = part if last > first and (first, last) == spans[0] else None
            axes.axvspan(seconds[first], seconds[last], color=color, lw=0, zorder=0, label=label)
    if planned is not None:
        axes.axhline(planned / unit, color="black", ls="--", label=f"planned peak, {planned / unit:.2f} {name}")
    axes.set(title=title, xlabel="seconds", ylabel=name, xlim=(0, seconds[-1]))
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _point(steps: list[int]) -> str:
    """Returns the marker for a single step, which would not be visible as a line."""
    return "o" if len({*steps}) == 1 else ""
