"""The picture of a run, drawn from its logged metrics."""

import itertools
import math
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lowmem.files import write_file
from lowmem.run.metrics import Record, evaluations, main_metric, series

_STYLE = {
    "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#888888",
    "axes.labelcolor": "#333333", "axes.grid": True, "grid.color": "#e6e6e6", "grid.linewidth": 0.8,
    "axes.axisbelow": True, "axes.titleweight": "bold", "axes.titlesize": 12, "axes.titlelocation": "left",
    "xtick.color": "#555555", "ytick.color": "#555555", "legend.frameon": False, "axes.xmargin": 0.02,
}  # fmt: skip
_BLUE, _PALE, _GREEN, _VIOLET, _EVAL = "#1f5fa8", "#b5cbe6", "#2a8f7c", "#7b5ea7", ("#d1495b", "#e08e2b", "#5b8c2a")

# The panels below the main metric: label, color and style of the line. All but the gradient norm and the learning rate
# are drawn where they were logged.
_PANELS = {
    "loss": ("loss", _BLUE, "default"), "kl": ("KL divergence", _EVAL[1], "default"),
    "rewards/accuracies": ("accuracy", _BLUE, "default"), "rewards/margins": ("reward margin", _BLUE, "default"),
    "accuracy": ("accuracy", _BLUE, "default"), "margin": ("reward margin", _BLUE, "default"),
    "grad_norm": ("gradient norm", _VIOLET, "default"), "learning_rate": ("learning rate", _GREEN, "default"),
    "changed_share": ("weights changed", _BLUE, "default"),
    "clip_coef": ("clip coefficient", _EVAL[1], "default"), "loss_scale": ("loss scale", _BLUE, "steps-post"),
}  # fmt: skip


def draw(folder: Path, records: list[Record]) -> None:
    """Draws loss.png of a run from what it has logged."""
    png = BytesIO()
    with matplotlib.rc_context(_STYLE):
        loss_picture(records, folder.resolve().name).savefig(png, format="png", dpi=150)
    write_file(folder / "loss.png", png.getvalue())


def size(nbytes: float) -> str:
    """An amount of memory as text, such as 1.50 GiB."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.2f} MiB"


def _smoothed(values: list[float]) -> np.ndarray[Any, Any]:
    """A centred Gaussian average, about a twentieth of the run wide; NaNs have no weight."""
    finite = np.isfinite(values)
    width = max(len(values) / 60, 1.5)
    kernel = np.exp(-0.5 * (np.arange(-round(3 * width), round(3 * width) + 1) / width) ** 2)
    total = np.convolve(np.where(finite, values, 0.0), kernel, mode="same")
    weight = np.convolve(finite, kernel, mode="same")
    return np.divide(total, weight, out=np.full_like(total, np.nan), where=weight > 0)


def _point(steps: list[int]) -> str:
    """Returns the marker of a single step, which a line alone would not show."""
    return "o" if len({*steps}) == 1 else ""


def loss_picture(records: list[Record], name: str) -> Figure:
    """The loss, or the reward where it was logged; below it what else was logged of `_PANELS`."""
    main, logged = main_metric(records), {"grad_norm", "learning_rate"}.union(*records)
    panels = [key for key in _PANELS if key in logged and key != main]
    figure = Figure(figsize=(9, 4.2 + 1.4 * len(panels)), layout="constrained")
    loss, *rest = figure.subplots(1 + len(panels), 1, sharex=True, height_ratios=[3.2, *[1] * len(panels)])
    steps, values = series(records, main)
    many = len(values) >= 20
    loss.plot(
        steps, values, color=_PALE if many else _BLUE, lw=1 if many else 2, marker=_point(steps), label="training"
    )
    if many:
        loss.plot(steps, _smoothed(values), color=_BLUE, lw=2, label="training, smoothed")
    for key, color in zip(evaluations(records, main), itertools.cycle(_EVAL)):
        label = key.removeprefix("eval_").removesuffix(main).replace("_", " ").strip()
        loss.plot(*series(records, key), color=color, lw=1.2, marker="o", ms=5, label=f"evaluation {label}".strip())
    loss.set(title=f"{name}: {main}", ylabel=main)
    loss.legend()
    for key, axes in zip(panels, rest, strict=True):
        label, color, style = _PANELS[key]
        steps, values = series(records, key)
        if key == "clip_coef":
            values = [coef or math.nan for coef in values]  # 0 comes from an infinite norm, whose step was skipped
        if key in ("clip_coef", "changed_share", "rewards/accuracies", "accuracy"):
            axes.set_ylim(0, 1.05)
        axes.plot(steps, values, color=color, lw=1.3, marker=_point(steps), drawstyle=style)
        axes.set_ylabel(label)
    norm, rate = (rest[panels.index(key)] for key in ("grad_norm", "learning_rate"))
    positive = [value for value in series(records, "grad_norm")[1] if value > 0]
    if positive and max(positive) > 30 * min(positive):
        norm.set_yscale("log")
    rate.set_ylim(0, None)
    rate.ticklabel_format(axis="y", scilimits=(-2, 3), useMathText=True)
    if "loss_scale" in panels:
        rest[-1].set_yscale("log", base=2)
    rest[-1].set_xlabel("step")
    rest[-1].xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    figure.align_ylabels()
    return figure
