"""Draws the metrics that a run has logged."""

import math
import re
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lowmem.files import write_file

# A line of metrics.jsonl.
Record = dict[str, Any]

# Metrics with a panel, from top to bottom. The metrics of evaluations are in the same panel.
_PANELS = (
    "reward", "loss", "kl", "rewards/accuracies", "rewards/margins", "accuracy", "margin", "grad_norm", "learning_rate",
    "changed_share", "clip_coef", "loss_scale",
)  # fmt: skip


def draw(folder: Path, records: list[Record]) -> None:
    """Draws loss.png from the log history of a run."""
    png = BytesIO()
    loss_picture(records, folder.resolve().name).savefig(png, format="png", dpi=150)
    write_file(folder / "loss.png", png.getvalue())


def loss_picture(records: list[Record], name: str) -> Figure:
    """Draws the logged metrics of `_PANELS`, each with its values in evaluations."""
    logged = dict.fromkeys(key for record in records for key in record)
    panels = [key for key in _PANELS if key in logged] or ["loss"]
    figure = Figure(figsize=(9, 3 + 1.4 * len(panels)), layout="constrained")
    ratios = [3, *[1] * (len(panels) - 1)]
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    for metric, panel in zip(panels, axes, strict=True):
        for key in (key for key in logged if key == metric or re.fullmatch(rf"eval_(.+_)?(?<!aux_){metric}", key)):
            rows = [(row["step"], math.nan if row[key] is None else row[key]) for row in records if key in row]
            panel.plot(*zip(*rows, strict=True), label=key, lw=1.3, marker="o" if len(rows) < 20 else "")
        panel.set_ylabel(metric.replace("_", " "))
        panel.grid(alpha=0.3)
    axes[0].set_title(name)
    if axes[0].lines:
        axes[0].legend()
    axes[-1].set_xlabel("step")
    axes[-1].xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    return figure
