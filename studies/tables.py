"""Tables and the picture of the studies."""

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.pages import markdown, panels
from benchmarks.reports import formatted
from studies.formats import format_of
from studies.grid import Done, Run, like
from studies.methods import METHODS, MOMENTUM_NAME
from studies.plans import EIGHT_BITS, MAIN, MANY, PLANS, ROUNDINGS, STATES, usual

SCORES = ("loss", "old", "new", "mrr", "old mrr", "exact", "preferred", "answers")
SHARE = "share of float32's improvement"
Row = dict[str, str]


def tables(report: Any) -> dict[str, str]:
    done = Done(report["runs"])
    rows = {
        **{task: _methods(done, task) for task, plan in PLANS.items() if plan.fine or plan.coarse},
        **{task: _every(done, task, plan.usual[0]) for task, plan in PLANS.items() if plan.usual and not plan.fine},
        "rates": _rates(done), "shares": _shares(done),
        "batch": _methods(done, "docstrings", *(task for task in PLANS if task.startswith("docstrings, batch"))),
        "sizes": _methods(done, "docstrings", *(task for task in PLANS if task.endswith("M"))),
        "formats": _costs(done, ["old text", "new text", "new text, low rate"], MANY, share=True),
        "formats, states": _costs(done, [task for task in PLANS if "β₂" in task], STATES),
        "long": _long(done),
    }  # fmt: skip
    return {name: markdown(some) for name, some in rows.items() if some}


# -- rules -------------------------------------------------------------------------------------------------------------


def _methods(done: Done, *tasks: str) -> list[Row]:
    """Each method at its best learning rate; with means and standard deviations over its seeds. The last column is of
    the paired differences.
    """
    rows: list[tuple[int, float, Row]] = []
    for (place, task), name in itertools.product(enumerate(tasks), METHODS if len(tasks) == 1 else MAIN[:2]):
        runs = max((_seeds(done, like(task, name, form)) for form in ("float32", "stochastic")), key=len)
        if runs.empty:
            continue
        weights = runs.format.iloc[0]
        above = (runs.loss - _seeds(done, like(task, "adamw", weights)).loss).dropna()
        scores = {score: _mean(runs[score]) for score in SCORES if score in runs and runs[score].notna().all()}
        row = {"method": name, "weights": weights, "best lr": f"{runs.lr.iloc[0]:.2g}", **scores}
        row["over AdamW"] = _mean(above, "+") if len(above) and name != "adamw" else "–"
        rows.append((place, above.mean() if len(above) else np.inf, {"task": task, **row} if len(tasks) > 1 else row))
    return [row for *_, row in sorted(rows, key=lambda row: row[:2])]


def _seeds(done: Done, run: Run) -> pd.DataFrame:
    """The runs of all seeds at the best learning rate of the first."""
    best = done.best(run)
    return done.rows[:0] if best is None else done.along("seed", best)


def _every(done: Done, task: str, rate: float) -> list[Row]:
    """Each method at each learning rate. The last column is of the differences to AdamW at `rate`."""
    rows, last = done.rows[done.rows.task == task].dropna(axis=1), f"over AdamW at {rate:g}"
    adamw = done.along("seed", like(task, "adamw", lr=rate)).loss
    return [
        {"method": name, "lr": f"{lr:.2g}", **{score: _mean(runs[score]) for score in SCORES if score in runs}}
        | {last: "–" if (above := (runs.loss - adamw).dropna()).eq(0).all() else _mean(above, "+")}
        for name in METHODS for lr, runs in rows[rows.method == name].set_index("seed").groupby("lr")
    ]  # fmt: skip


def _mean(values: pd.Series, sign: str = "", digits: int = 3) -> str:
    spread = f" ± {values.std():.{digits}f}" if len(values) > 1 else ""
    return f"{values.mean():{sign}.{digits}f}{spread}"


def _rates(done: Done) -> list[Row]:
    """The rate that follows from the weights, next to the one that ends at AdamW's loss."""
    rows = []
    for (task, plan), name in itertools.product(PLANS.items(), MAIN[1:]):
        adamw, losses = done.losses(like(task, "adamw")), done.losses(like(task, name))
        if plan.usual is None or plan.usual[0] not in adamw.index or len(losses) < 3:
            continue
        (lr,), (start, rms) = usual(plan, name), plan.usual
        falling = losses[: losses.idxmin()]
        equal = float(np.exp(np.interp(-adamw[start], -falling, np.log(falling.index))))
        there = float(np.interp(np.log(lr), np.log(falling.index), falling))
        rows.append(
            {
                "task": task, "method": name, "rms(w)": f"{rms:.3f}", "AdamW's lr": f"{start:g}",
                "its loss": f"{adamw[start]:.3f}", "lr from the weights": f"{lr:.2g}",
                "over AdamW": f"{there - adamw[start]:+.3f}", "lr with equal loss": f"{equal:.2g} (× {equal / lr:.2f})",
            }
        )  # fmt: skip
    return rows


def _shares(done: Done) -> list[Row]:
    """The share of float32's improvement at the same learning rate that other formats reach."""
    rows = []
    for task, name in itertools.product((task for task, plan in PLANS.items() if not plan.rates), MAIN):
        exact = done.along("lr", like(task, name))
        others = {form: done.losses(like(task, name, form)) for form in (*ROUNDINGS, EIGHT_BITS)}
        for lr, run in exact.iterrows():
            start = run.curve[0][1]
            learned = {form: (start - of[lr]) / (start - run.loss) for form, of in others.items() if lr in of.index}
            if len(learned) > 1 and start - run.loss > 0.02:
                row = {"task": task, "method": name, "lr": f"{lr:.2g}", "size of an update": f"{100 * run.step:.2g} %"}
                rows.append(row | {form: formatted(learned.get(form), ".0%") for form in others})
    return rows


# -- formats, at the rates of a plan -----------------------------------------------------------------------------------


def _runs(done: Done, task: str, score: str = "loss") -> pd.DataFrame:
    """A score of the runs at the rates of a plan, by seed and format. `learned`: the decrease of the loss."""
    ((name, lr),) = PLANS[task].rates.items()
    rows = done.rows[(done.rows[["task", "method", "lr"]] == [task, name, lr]).all(axis=1)]
    learned = [curve[0][1] - loss for curve, loss in zip(rows.curve, rows.loss, strict=True)]
    return rows.assign(learned=learned).pivot(index="seed", columns="format", values=score)


def _share(learned: pd.DataFrame, form: str) -> str:
    return f"{(learned[form] / learned.float32).mean():.0%}" if form in learned else ""


def _cost(losses: pd.DataFrame, form: str) -> str:
    above = (losses[form] - losses.float32).dropna() if form in losses else ()
    if not len(above) or form == "float32":
        return f"0 ({_mean(losses.float32, digits=4)})" if len(above) else "–"
    fewer = "" if len(above) == len(losses) else f" ({len(above)} seed{'s' * (len(above) > 1)})"
    return "diverged" if np.isinf(above).any() else f"{_mean(above, '+', 4)}{fewer}"


def _costs(done: Done, tasks: Iterable[str], forms: Iterable[str], *, share: bool = False) -> list[Row]:
    """Means and standard deviations of the differences to the loss of float32 with the same seeds."""
    ends = {task: losses for task in tasks if task in PLANS and "float32" in (losses := _runs(done, task))}
    rows, first = [], next(iter(ends), "")
    states = METHODS[next(iter(PLANS[first].rates))].states if first else 0
    learned = _runs(done, first, "learned") if share and first else pd.DataFrame()
    sizes = {form: format_of(form).bytes_per_element(states) for form in forms if first}
    for form, size in sorted(sizes.items(), key=lambda item: -item[1]):
        shown = form.replace("fresh units", "scales recomputed at every update")
        row = {"format": shown, "bytes": f"{size:.4g}"}
        row |= {task: _cost(losses, form) for task, losses in ends.items()}
        rows.append(row | ({SHARE: _share(learned, form)} if share else {}))
    return rows


def _long(done: Done) -> list[Row]:
    """How far runs at low rates went along the way of float32, how far from it, and what they learned."""
    return [
        {"training": task, "format": form, "share of the way": f"{run.way:.1%}", "drift": f"{run.drift:.2f}"}
        | {"above float32": _cost(_runs(done, task), form), SHARE: _share(_runs(done, task, "learned"), form)}
        for task, plan in PLANS.items() if ", lr " in task for form in plan.formats for name, lr in plan.rates.items()
        for _, run in done.along("seed", like(task, name, form, lr=lr)).iterrows() if pd.notna(run.way)
    ]  # fmt: skip


# -- the picture -------------------------------------------------------------------------------------------------------

COLORS = {
    "adamw": "#444444", "adalomo": "#2a8f7c", MOMENTUM_NAME: "#c47f2a", "lion": "#8a6bb1", "lomo": "#c44e52",
    "lora": "#4a7fb5",
}  # fmt: skip
MARKERS = {
    "float32": "o", "stochastic": "s", "nearest": "x", EIGHT_BITS: "D", "int12": "^", "int10": "v",
}  # fmt: skip


def draw(report: Any) -> Any:
    """Draws the held-out loss by learning rate, one curve per method, and by the bytes of a weight and its states."""
    done = Done(report["runs"])
    tasks = [task for task in ("search", "chats", "docstrings") if task in set(done.rows.task)]
    figure, rows = panels("Held-out loss after fine-tuning", (4 * len(tasks), 8), len(tasks), 2, squeeze=False)
    for task, (above, below) in zip(tasks, rows.T, strict=True):
        for name, color in COLORS.items():
            losses, best = done.losses(like(task, name)), done.best(like(task, name))
            above.plot(losses.index, losses, color=color, marker="o", ms=3, label=name)
            for form, marker in MARKERS.items() if best else ():
                size = format_of(form).bytes_per_element(METHODS[name].states)
                if share := METHODS[name].adapters:  # the frozen weights are bfloat16 numbers
                    size = 2 + 12 * share
                there = done.along("seed", {**best, "format": form}).loss[:1]
                below.scatter([size] * len(there), there, color=color, marker=marker)
        above.set(xscale="log", xlabel="learning rate, float32 weights", title=task)
        below.set(xlabel="bytes of a weight and its states", ylim=above.get_ylim())
    for form, marker in MARKERS.items():
        rows[1, -1].scatter([], [], color="#444444", marker=marker, label=form)
    for axes, text in zip(rows, ("held-out loss", "held-out loss at the best learning rate"), strict=True):
        axes[0].set_ylabel(text)
        axes[-1].legend(fontsize=8, frameon=False, loc="upper right")
    return figure


PICTURES = {"studies": draw}
