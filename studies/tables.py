"""Tables and the picture of the studies."""

import itertools
from collections.abc import Iterable
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.pages import markdown
from benchmarks.reports import formatted, picture
from studies.formats import format_of
from studies.grid import Done, Run, like
from studies.methods import METHODS, MOMENTUM_NAME
from studies.plans import MAIN, MANY, OLD, PLANS, ROUNDINGS, STATES, usual

SCORES = ("loss", "old", "new", "mrr", "old mrr", "exact", "preferred")
SHARE = "share of float32's improvement"
Row = dict[str, str]


def tables(report: Any) -> dict[str, str]:
    done = Done(report["runs"])
    of_states = [task for task in PLANS if "β₂" in task]
    short = [form for form in STATES if not form.endswith("bfloat16 states") and "compiled" not in form]
    rows = {
        **{task: _methods(done, task) for task, plan in PLANS.items() if not plan.rates},
        "rates": _rates(done), "shares": _shares(done),
        "batch": _methods(done, "docstrings", *(task for task in PLANS if task.startswith("docstrings, batch"))),
        "sizes": _methods(done, "docstrings", *(task for task in PLANS if task.endswith("M"))),
        "formats": _costs(done, ["old text", "new text", "new text, low rate"], MANY, share=True),
        "formats, states": _costs(done, of_states, STATES),
        "formats, states, short": _costs(done, of_states, short),
        **{f"formats, {task}": _costs(done, [task], PLANS[task].formats, share=True)
           for task in PLANS if task.startswith("old text, ")},
        "along": _along(done, "old text", MANY), "long": _long(done),
    }  # fmt: skip
    return {name: markdown(some) for name, some in rows.items() if some}


# -- rules -------------------------------------------------------------------------------------------------------------


def _methods(done: Done, *tasks: str) -> list[Row]:
    """Each method at its best learning rate, the lowest loss first; with the mean and the spread over its seeds."""
    rows: list[tuple[int, float, Row]] = []
    for (place, task), name in itertools.product(enumerate(tasks), METHODS if len(tasks) == 1 else MAIN[:2]):
        runs = max((_seeds(done, like(task, name, form)) for form in ("float32", "stochastic")), key=len)
        if runs.empty:
            continue
        adamw = _seeds(done, like(task, "adamw", runs.format.iloc[0])).loss
        above = (runs.loss - adamw).dropna()
        spread = f" ({above.mean() / adamw.std():+.1f})" if len(adamw) > 1 else ""
        scores = {score: _mean(runs[score]) for score in SCORES if score in runs and runs[score].notna().all()}
        over = f"{above.mean():+.3f}{spread}" if len(above) else "–"
        row = {"method": name, "best lr": f"{runs.lr.iloc[0]:.2g}", **scores, "over AdamW (in spreads)": over}
        rows.append((place, runs.loss.mean(), {"task": task, **row} if len(tasks) > 1 else row))
    return [row for *_, row in sorted(rows, key=lambda row: row[:2])]


def _seeds(done: Done, run: Run) -> pd.DataFrame:
    """The runs of all seeds at the best learning rate of the first."""
    best = done.best(run)
    return done.rows[:0] if best is None else done.along("seed", best)


def _mean(values: pd.Series) -> str:
    return f"{values.mean():.3f} ± {values.std():.3f}" if len(values) > 1 else f"{values.mean():.3f}"


def _rates(done: Done) -> list[Row]:
    """The rate that follows from the weights, next to the one that ends at AdamW's loss, and to the best one."""
    rows = []
    for (task, plan), name in itertools.product(PLANS.items(), MAIN[1:]):
        adamw, losses = done.losses(like(task, "adamw")), done.losses(like(task, name))
        if plan.usual is None or plan.usual[0] not in adamw.index or len(losses) < 3:
            continue
        (lr,), (start, rms) = usual(plan, name), plan.usual
        falling = losses[: losses.idxmin()]
        equal = float(np.exp(np.interp(-adamw[start], -falling, np.log(falling.index))))
        there = float(np.interp(np.log(lr), np.log(falling.index), falling))
        best = (done.best(like(task, each)) for each in (name, "adamw"))
        rows.append(
            {
                "task": task, "method": name, "rms(w)": f"{rms:.3f}", f"AdamW at {start:g}": f"{adamw[start]:.3f}",
                "lr from the weights": f"{lr:.2g}", "over AdamW there": f"{there - adamw[start]:+.3f}",
                "lr with AdamW's loss": f"{equal:.2g}", "the second / the first": f"{equal / lr:.2f}",
                **{what: f"{run['lr']:.2g}" for what, run in zip(("best lr", "AdamW's"), best, strict=True) if run},
            }
        )  # fmt: skip
    return rows


def _shares(done: Done) -> list[Row]:
    """The share of float32's improvement at the same learning rate that other formats reach."""
    rows = []
    for task, name in itertools.product((task for task, plan in PLANS.items() if not plan.rates), MAIN):
        exact = done.along("lr", like(task, name))
        others = {form: done.losses(like(task, name, form)) for form in (*ROUNDINGS, "stochastic, 8bit states")}
        for lr, run in exact.iterrows():
            start = run.curve[0][1]
            learned = {form: (start - of[lr]) / (start - run.loss) for form, of in others.items() if lr in of.index}
            if len(learned) > 1 and start - run.loss > 0.02:
                row = {"task": task, "method": name, "lr": f"{lr:.2g}", "size of an update": f"{100 * run.step:.2g} %"}
                rows.append(row | {form: formatted(learned.get(form), ".0%") for form in others})
    return rows


# -- formats, at the rates of a plan -----------------------------------------------------------------------------------


def _runs(done: Done, task: str, form: str) -> pd.DataFrame:
    ((name, lr),) = PLANS[task].rates.items()
    return done.along("seed", like(task, name, form, lr=lr))


def _looks(done: Done, task: str, form: str) -> dict[int, list[float]]:
    """Held-out losses before and at each look, by seed; infinite after the run diverged."""
    length = 1 + len(PLANS[task].task.looks)
    curves = {} if (runs := _runs(done, task, form)).empty else runs.curve
    return {seed: [*(point[1] for point in curve), *[float("inf")] * length][:length] for seed, curve in curves.items()}


def _above(done: Done, task: str, form: str, look: int = -1) -> list[float]:
    """Differences to the loss of float32, by seed."""
    exact = _looks(done, task, "float32")
    return [losses[look] - exact[seed][look] for seed, losses in _looks(done, task, form).items() if seed in exact]


def _share(done: Done, task: str, form: str) -> str:
    exact, curves = _looks(done, task, "float32"), _looks(done, task, form)
    shares = [(one[0] - one[-1]) / (exact[seed][0] - exact[seed][-1]) for seed, one in curves.items()]
    return f"{mean(shares):.0%}" if shares else ""


def _cost(done: Done, task: str, form: str) -> str:
    above, exact = _above(done, task, form), _looks(done, task, "float32")
    if not above or form == "float32":
        return f"0 ({mean(losses[-1] for losses in exact.values()):.4f})" if above else "–"
    fewer = "" if len(above) == len(exact) else f" ({len(above)} seed{'s' * (len(above) > 1)})"
    return "diverged" if mean(above) == float("inf") else f"{mean(above):+.4f}{fewer}"


def _costs(done: Done, tasks: Iterable[str], forms: Iterable[str], *, share: bool = False) -> list[Row]:
    """Mean differences to the loss of float32 with the same seeds, and the spread of these losses."""
    tasks = [task for task in tasks if task in PLANS and _looks(done, task, "float32")]
    states = METHODS[next(iter(PLANS[tasks[0]].rates))].states if tasks else 0
    sizes = {form: format_of(form).bytes_per_element(states) for form in forms} if tasks else {}
    rows = []
    for form in sorted(sizes, key=lambda form: -sizes[form]):
        row = {
            "format": form.replace("fresh units", "scales recomputed at every update"),
            "bytes": f"{sizes[form]:.4g}",
        }
        row |= {task: _cost(done, task, form) for task in tasks}
        rows.append(row | ({SHARE: _share(done, tasks[0], form)} if share else {}))
    exact = {task: [losses[-1] for losses in _looks(done, task, "float32").values()] for task in tasks}
    if rows and min(map(len, exact.values())) > 1:
        spreads = {task: f"{np.std(losses, ddof=1):.4f}" for task, losses in exact.items()}
        rows.append({**dict.fromkeys(rows[0], ""), "format": "spread of float32", **spreads})
    return rows


def _along(done: Done, task: str, forms: Iterable[str]) -> list[Row]:
    """The differences after so many updates, and at the end for each seed."""
    looks = {f"{round(OLD.updates * share):,}": look + 1 for look, share in enumerate(OLD.looks)}
    return [
        {"format": form, **{updates: f"{mean(_above(done, task, form, look)):+.4f}" for updates, look in looks.items()}}
        | {"each seed": ", ".join(f"{above:+.4f}" for above in _above(done, task, form))}
        for form in forms if form != "float32" and task in PLANS and _above(done, task, form)
    ]  # fmt: skip


def _long(done: Done) -> list[Row]:
    """How far runs at low rates went along the way of float32, how far from it, and what they learned."""
    return [
        {"training": task, "format": form, "share of the way": f"{run.way:.1%}", "drift": f"{run.drift:.2f}"}
        | {"above float32": _cost(done, task, form), SHARE: _share(done, task, form)}
        for task in PLANS if ", lr " in task for form in PLANS[task].formats
        for _, run in _runs(done, task, form).iterrows() if pd.notna(run.way)
    ]  # fmt: skip


# -- the picture -------------------------------------------------------------------------------------------------------

SHOWN = ("search", "chats", "docstrings")
COLORS = {
    "adamw": "#444444", "adalomo": "#2a8f7c", MOMENTUM_NAME: "#c47f2a", "lion": "#8a6bb1", "lomo": "#c44e52",
    "lora": "#4a7fb5",
}  # fmt: skip
MARKERS = {
    "float32": "o", "stochastic": "s", "nearest": "x", "stochastic, 8bit states": "D", "int12": "^", "int10": "v",
}  # fmt: skip


def draw(report: Any, path: Path) -> None:
    """Draws the held-out loss by learning rate, one curve per method, and by the bytes of a weight and its states."""
    done = Done(report["runs"])
    tasks = [task for task in SHOWN if task in set(done.rows.task)]
    with picture(path, "Held-out loss after fine-tuning", (4 * len(tasks), 8), len(tasks), 2, squeeze=False) as panels:
        for task, (above, below) in zip(tasks, panels.T, strict=True):
            every = done.rows[done.rows.task == task]
            start, least = every.curve.iloc[0][0][1], every.loss.min()
            for name, color in COLORS.items():
                losses = done.losses(like(task, name))
                above.plot(losses.index, losses, color=color, marker="o", ms=3, label=name)
                for form, marker in MARKERS.items():
                    size = format_of(form).bytes_per_element(METHODS[name].states)
                    lowest = done.losses(like(task, name, form)).nsmallest(1)
                    below.scatter([size] * len(lowest), lowest, color=color, marker=marker)
            learned = start - least
            above.set(xscale="log", xlabel="learning rate, float32 weights", title=task)
            below.set(xlabel="bytes of a weight and its states", ylim=(least - 0.02 * learned, least + 0.3 * learned))
        for form, marker in MARKERS.items():
            panels[1, -1].scatter([], [], color="#444444", marker=marker, label=form)
        for axes, text in zip(panels, ("held-out loss", "held-out loss at the best learning rate"), strict=True):
            axes[0].set_ylabel(text)
            axes[-1].legend(fontsize=8, frameon=False, loc="upper right")
