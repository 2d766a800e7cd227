"""Tables and the figure of the recorded runs."""

import itertools
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.pages import markdown, panels
from benchmarks.reports import formatted
from studies.formats import format_of
from studies.grid import Results, Run, run_of
from studies.tasks import METHODS, MOMENTUM, TASKS

SCORES = ("loss", "old", "mrr", "old mrr", "exact")
MAIN = ("adamw", "adalomo", MOMENTUM)
ROUNDINGS = ("stochastic", "nearest", "int12", "int10", "stochastic, 8bit states")
ONE_TASK = ("search", "chats", "docstrings")
Row = dict[str, str]


def tables(report: Any) -> dict[str, str]:
    """Returns the tables in Markdown by name. Tables without rows are omitted."""
    results = Results(report["runs"])
    tables = {
        **{task: _methods(results, task) for task in ONE_TASK},
        "shares": _shares(results),
        "batch": _methods(results, "docstrings", *(task for task in TASKS if task.startswith("docstrings, batch"))),
    }  # fmt: skip
    return {name: markdown(rows) for name, rows in tables.items() if rows}


# -- rules -------------------------------------------------------------------------------------------------------------


def _methods(results: Results, *tasks: str) -> list[Row]:
    """Returns a row per method at its best learning rate, with means and standard deviations over seeds. The last
    column has the paired differences from AdamW.
    """
    rows: list[tuple[int, float, Row]] = []
    for (place, task), name in itertools.product(enumerate(tasks), METHODS if len(tasks) == 1 else MAIN[:2]):
        runs = max((_seeds(results, run_of(task, name, form)) for form in ("float32", "stochastic")), key=len)
        if runs.empty:
            continue
        weights = runs.format.iloc[0]
        above = (runs.loss - _seeds(results, run_of(task, "adamw", weights)).loss).dropna()
        scores = {score: _summary(runs[score]) for score in SCORES if score in runs and runs[score].notna().all()}
        row = {"method": name, "weights": weights, "best lr": f"{runs.lr.iloc[0]:.2g}", **scores}
        row["over AdamW"] = _summary(above, "+") if len(above) and name != "adamw" else "–"
        rows.append((place, above.mean() if len(above) else np.inf, {"task": task, **row} if len(tasks) > 1 else row))
    return [row for *_, row in sorted(rows, key=lambda row: row[:2])]


def _seeds(results: Results, run: Run) -> pd.DataFrame:
    """Returns the runs of all seeds at the first seed's best learning rate."""
    best = results.best(run)
    return results.rows[:0] if best is None else results.along("seed", best)


def _summary(values: pd.Series, sign: str = "") -> str:
    deviation = f" ± {values.std():.3f}" if len(values) > 1 else ""
    return f"{values.mean():{sign}.3f}{deviation}"


def _shares(results: Results) -> list[Row]:
    """Returns the share of the loss reduction with float32 that other formats reach at the same learning rate."""
    rows = []
    for task, name in itertools.product(TASKS, MAIN):
        exact = results.along("lr", run_of(task, name))
        others = {form: results.losses(run_of(task, name, form)) for form in ROUNDINGS}
        for lr, run in exact.iterrows():
            start = run.curve[0][1]
            gain = start - run.loss
            shares = {form: (start - losses[lr]) / gain for form, losses in others.items() if lr in losses.index}
            if len(shares) > 1 and gain > 0.02:
                row = {"task": task, "method": name, "lr": f"{lr:.2g}", "size of an update": f"{100 * run.step:.2g} %"}
                rows.append(row | {form: formatted(shares.get(form), ".0%") for form in others})
    return rows


# -- the figure --------------------------------------------------------------------------------------------------------

COLORS = {
    "adamw": "#444444", "adalomo": "#2a8f7c", MOMENTUM: "#c47f2a", "lion": "#8a6bb1", "lomo": "#c44e52",
}  # fmt: skip
MARKERS = {
    "float32": "o", "stochastic": "s", "nearest": "x", "stochastic, 8bit states": "D", "int12": "^", "int10": "v",
}  # fmt: skip


def draw(report: Any) -> Any:
    """Draws two panels per task: the loss by learning rate, and the best loss minus AdamW's by bytes, for one seed."""
    results = Results(report["runs"])
    tasks = [task for task in ONE_TASK if task in set(results.rows.task)]
    title = "Held-out loss after fine-tuning, in nats, first seed"
    figure, rows = panels(title, (4 * len(tasks) + 2, 7), len(tasks), 2, squeeze=False)
    for below in rows[1, 1:]:
        below.sharey(rows[1, 0])
    for task, (above, below) in zip(tasks, rows.T, strict=True):
        for name, color in COLORS.items():
            losses, best = results.losses(run_of(task, name)), results.best(run_of(task, name))
            above.plot(losses.index, losses, color=color, marker="o", ms=3, label=name)
            for form, marker in MARKERS.items() if best else ():
                size = format_of(form).bytes_per_element(METHODS[name].states)
                seeds = results.along("seed", {**best, "format": form}).loss
                difference = (seeds - _seeds(results, run_of(task, "adamw")).loss).dropna()
                first, bars = difference[:1], difference.std()  # over all seeds
                below.errorbar([size] * len(first), first, bars, color=color, marker=marker, ms=5)
        above.set(xscale="log", xlabel="learning rate", title=task)
        below.axhline(0, color="#777777", linewidth=1, linestyle="--", zorder=0)
        below.set(xlabel="bytes of a weight and its states", xlim=(0, 13))
    for form, marker in MARKERS.items():
        rows[1, -1].scatter([], [], color="#444444", marker=marker, label=form)
    rows[0, 0].set_ylabel("loss with float32 weights")
    rows[1, 0].set_ylabel("best loss minus AdamW's in float32")
    for axes in rows[:, -1]:
        axes.legend(fontsize=9, frameon=False, loc="center left", bbox_to_anchor=(1.02, 0.5))
    return figure


PICTURES = {"studies": draw}
