"""Which rule, learning rate and rounding to fine-tune with, on several tasks.

On every task each method searches for its best learning rate with float32 weights; then usual rates, other seeds, and
formats of the weights.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from benchmarks.pages import markdown
from benchmarks.reports import formatted, picture
from studies import formats, training
from studies.chat import Chat, Preference
from studies.grid import Done, Run, at
from studies.llamas import LlamaTask
from studies.methods import METHODS, MOMENTUM_RULE, THREE_BYTES, Method
from studies.search import Search
from studies.training import Task

KEYS = ("task", "method", "rounding", "lr", "seed")
SCORES = ("loss", "old", "mrr", "exact", "preferred")
MAIN = ("adamw", "adalomo", MOMENTUM_RULE)
FORMATS = ("stochastic", "nearest", "int12", "int10")
CALLED = {"AdamW": "adamw", "AdaLomo": "adalomo"}
SAME = {THREE_BYTES: MOMENTUM_RULE, "adamw, 8-bit states": "adamw"}  # with other states, at the same learning rate


class Plan(NamedTuple):
    """The runs of a task.

    Attributes:
        lower: learning rates are so much lower than the ones of `METHODS`.
        fine: methods that search on the fine grid, and are repeated with other seeds.
        coarse: methods that search on the coarse grid.
        roundings: of `fine` methods at usual rates and at the best one.
        usual: learning rate of AdamW, and root mean square of the weights, from which usual rates follow.
    """

    task: Task
    lower: float = 1.0
    fine: tuple[str, ...] = MAIN
    coarse: tuple[str, ...] = ()
    roundings: tuple[str, ...] = ()
    usual: tuple[float, float] | None = None


VARIANTS = tuple(name for name, method in METHODS.items() if method.variant and name not in SAME)
RULES = tuple(name for name, method in METHODS.items() if not (method.variant or method.adapters or name in SAME))
LIKE_ADAMW = tuple(name for name in VARIANTS if MOMENTUM_RULE in name)
LLAMA = LlamaTask()
SCRATCH = LlamaTask(size="0.7M", updates=2000, length=64, pretrained=False)
PLANS = {
    "search": Plan(Search(), 30, MAIN, ("lion", "lomo", "lans", "scaled_adam", *LIKE_ADAMW), FORMATS, (2e-5, 0.058)),
    "search, 3,000 updates": Plan(Search(updates=3000, looks=(0.1, 0.3, 0.5, 1.0)), 30, (), usual=(2e-5, 0.058)),
    "search, batch 32": Plan(Search(updates=100, batch=32), 30, (), MAIN[:2]),
    "docstrings": Plan(LLAMA, 1, MAIN, (*RULES, *VARIANTS), FORMATS, (2e-5, 0.099)),
    "chats": Plan(Chat(), 30, (*MAIN, "lora"), ("lomo",), FORMATS, (2e-5, 0.18)),
    "preferences": Plan(Preference(), 300, (), ("adamw", "adalomo", "lora")),
    "scratch": Plan(SCRATCH, 1, (), (*MAIN, "adamw, β₂ 0.95", *LIKE_ADAMW)),
    "docstrings, 5M": Plan(replace(LLAMA, size="5M"), 2, (), MAIN, FORMATS[:2], (2e-5, 0.038)),
    "docstrings, 20M": Plan(replace(LLAMA, size="20M"), 3, (), MAIN, FORMATS[:2], (2e-5, 0.023)),
    **{
        f"docstrings, batch {size}": Plan(replace(LLAMA, batch=size, updates=600 // size), 1, (), MAIN[:2])
        for size in (1, 16, 64)
    },
}
BATCHES, SIZES = (["docstrings", *(task for task in PLANS if what in task)] for what in ("docstrings, batch", "M"))
SETTINGS = {name: asdict(plan.task) for name, plan in PLANS.items()}


def like(task: str, method: str, rounding: str = "float32", seed: int = 0, lr: float = 0.0) -> Run:
    return {"task": task, "method": method, "rounding": rounding, "lr": lr, "seed": seed}


def usual(plan: Plan, method: Method) -> list[float]:
    """The rates that correspond to AdamW's usual one."""
    if plan.usual is None or method.adapters:
        return []
    adamw, rms = plan.usual
    return [float(f"{adamw / (rms if method.relative else 1.0):.2g}")]


def runs(rows: Sequence[Run]) -> Iterator[Run]:
    """Yields the runs to do, in order; searches, and runs that depend on them, add more as runs are finished."""
    done = Done(rows, KEYS)
    for task, plan in PLANS.items():
        for name in plan.fine:
            yield from done.search(like(task, name), METHODS[name].lr / plan.lower, fine=True)
        for name in plan.fine and MAIN:
            yield from at(like(task, name), *usual(plan, METHODS[name]))
    for task, plan in PLANS.items():
        for name in plan.fine:
            yield from done.again(like(task, name))
        for name, other in SAME.items():
            yield from ({**run, "method": name} for run in done.again(like(task, other)) if other in plan.fine)
    for task, plan in PLANS.items():
        for name in plan.coarse:
            yield from done.search(like(task, name), METHODS[name].lr / plan.lower)
    for task, plan in PLANS.items():
        for name, rounding in itertools.product(plan.fine, plan.roundings):
            best = done.best(like(task, name))
            yield from at(like(task, name, rounding), *usual(plan, METHODS[name]), *([best] if best else []))
    for task, plan in PLANS.items():
        for name in MAIN:
            yield from at(like(task, name), *usual(plan, METHODS[name]))


def with_adapters(model: Any, rank: int) -> Any:
    """Low-rank adapters [Hu et al. 2021, arXiv:2106.09685] in float32 beside all linear layers."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))


def train(run: Run) -> Run:
    formats.register()
    method, task, rounding = METHODS[run["method"]], PLANS[run["task"]].task, run["rounding"]
    options: dict[str, Any] = {}
    if rounding in formats.BITS:
        options["parameters"] = formats.FORMATS[rounding].groups
    if method.adapters:
        options["prepare"] = lambda model: with_adapters(model, method.adapters)
        options["parameters"] = lambda model: [pair for pair in model.named_parameters() if pair[1].requires_grad]
    return training.train(task, method.rule, run["lr"], method.options, weights=rounding, seed=run["seed"], **options)


# -- tables ------------------------------------------------------------------------------------------------------------


def tables(report: Any) -> dict[str, str]:
    done = Done(report["runs"], KEYS)
    found = {task: _methods(done, task) for task in PLANS}
    found |= {
        "rates": _rates(done),
        "formats": _formats(done),
        "batch": _few(done, BATCHES),
        "sizes": _few(done, SIZES),
    }
    return {name: markdown(rows) for name, rows in found.items() if rows}


def _methods(done: Done, task: str) -> list[dict[str, str]]:
    """Each method at its best learning rate, the lowest loss first; with the mean and the spread over its seeds."""
    rows = []
    for name in METHODS:
        seeds = _seeds(done, task, name)
        if seeds is None:
            continue
        known = [score for score in SCORES if score in seeds and seeds[score].notna().all()]
        row = {"method": name, "best lr": f"{seeds.lr.iloc[0]:.2g}"}
        rows.append(
            (seeds.loss.mean(), row | {score: _mean(seeds[score]) for score in known} | _over(done, task, seeds))
        )
    return [row for _, row in sorted(rows, key=lambda pair: pair[0])]


def _seeds(done: Done, task: str, name: str) -> pd.DataFrame | None:
    """The runs of a method at its best learning rate: with float32 weights, or with others if those have more seeds."""
    found = [done.seeds(like(task, name, rounding)) for rounding in ("float32", "stochastic")]
    best = max(found, key=len)
    return None if best.empty else best


def _mean(values: pd.Series) -> str:
    return f"{values.mean():.3f} ± {values.std():.3f}" if len(values) > 1 else f"{values.mean():.3f}"


def _over(done: Done, task: str, seeds: pd.DataFrame) -> dict[str, str]:
    """The difference to AdamW's loss with the same seeds and weights, also in units of the spread of AdamW's."""
    adamw = done.seeds(like(task, "adamw", seeds.rounding.iloc[0]))
    above = (seeds.loss - adamw.loss).dropna()
    spread = f" ({above.mean() / adamw.loss.std():+.1f})" if len(adamw) > 1 else ""
    return {"over AdamW (in spreads)": f"{above.mean():+.3f}{spread}" if len(above) else "–"}


def _few(done: Done, tasks: Sequence[str]) -> list[dict[str, str]]:
    """AdamW and AdaLomo at their best learning rates on several tasks; with stochastic rounding and the first seed."""
    rows = []
    for task in tasks:
        runs = {called: done.best_run(like(task, name, "stochastic")) for called, name in CALLED.items()}
        cells = {called: {"best lr": f"{run['lr']:.2g}", "loss": f"{run['loss']:.3f}", "old": f"{run['old']:.3f}"}
                 for called, run in runs.items() if run is not None}  # fmt: skip
        named = {f"{called}: {what}": cell for called, row in cells.items() for what, cell in row.items()}
        rows += [{"task": task, **named}] if len(cells) == len(CALLED) else []
    return rows


def _rates(done: Done) -> list[dict[str, str]]:
    """The rate that follows from the weights, next to the one that ends at AdamW's loss, and to the best one."""
    rows = []
    for (task, plan), name in itertools.product(PLANS.items(), MAIN[1:]):
        adamw, losses = done.losses(like(task, "adamw")), done.losses(like(task, name))
        if plan.usual is None or plan.usual[0] not in adamw.index or losses.empty:
            continue
        (lr,), (start, rms) = usual(plan, METHODS[name]), plan.usual
        falling = losses[: losses.idxmin()]
        equal = float(np.exp(np.interp(-adamw[start], -falling, np.log(falling.index))))
        there = float(np.interp(np.log(lr), np.log(falling.index), falling))
        rows.append(
            {
                "task": task, "method": name, "rms(w)": f"{rms:.3f}", f"AdamW at {start:g}": f"{adamw[start]:.3f}",
                "lr from the weights": f"{lr:.2g}", "over AdamW there": f"{there - adamw[start]:+.3f}",
                "lr with AdamW's loss": f"{equal:.2g}", "the second / the first": f"{equal / lr:.2f}",
                "best lr": f"{done.best(like(task, name)):.2g}", "AdamW's": f"{done.best(like(task, 'adamw')):.2g}",
            }
        )  # fmt: skip
    return rows


def _formats(done: Done) -> list[dict[str, str]]:
    """The share of float32's improvement at the same learning rate that other weights reach."""
    rows = []
    for task, name in itertools.product(PLANS, MAIN):
        exact = done.losses(like(task, name))
        for lr, loss in exact.items():
            found = {form: done.losses(like(task, name, form)) for form in FORMATS}
            cells = {form: losses[lr] for form, losses in found.items() if lr in losses.index}
            if len(cells) < 2:
                continue
            run = done.series(like(task, name)).loc[lr]
            learned = {form: (run.curve[0][1] - cell) / (run.curve[0][1] - loss) for form, cell in cells.items()}
            row = {"task": task, "method": name, "lr": f"{lr:.2g}", "size of an update": f"{100 * run.step:.2g} %"}
            rows.append(row | {form: formatted(learned.get(form), ".0%") for form in FORMATS})
    return rows


# -- the picture -------------------------------------------------------------------------------------------------------

COLORS = {
    "adamw": "#444444", "adalomo": "#2a8f7c", MOMENTUM_RULE: "#c47f2a", "lion": "#8a6bb1", "lomo": "#c44e52",
    "lora": "#4a7fb5",
}  # fmt: skip


NAMES = {"stochastic": "bfloat16", "nearest": "bfloat16, to nearest"}  # in `studies.formats`
MARKERS = {"float32": "o", "stochastic": "s", "nearest": "x", "int12": "^", "int10": "v"}


def draw(report: Any, path: Path) -> None:
    """Draws the held-out loss by learning rate, one curve per method, and by the bytes of a weight and its states."""
    formats.register()
    done = Done(report["runs"], KEYS)
    tasks = [task for task in ("search", "chats", "docstrings") if task in set(done.rows.task)]
    with picture(path, "Held-out loss after fine-tuning", (4 * len(tasks), 8), len(tasks), 2, squeeze=False) as panels:
        for task, (above, below) in zip(tasks, panels.T, strict=True):
            start = done.rows[done.rows.task == task].curve.iloc[0][0][1]
            for name, color in COLORS.items():
                losses = done.losses(like(task, name))
                above.plot(losses.index, losses, color=color, marker="o", ms=3, label=name)
                for rounding, marker in MARKERS.items():
                    losses = done.losses(like(task, name, rounding))
                    size = formats.FORMATS[NAMES.get(rounding, rounding)].bytes_per_element() + METHODS[name].states
                    below.scatter([size] * bool(len(losses)), losses.nsmallest(1), color=color, marker=marker)
            above.set(xscale="log", xlabel="learning rate, float32 weights", title=task)
            least = done.rows[done.rows.task == task].loss.min()
            learned = start - least
            above.set_ylim(least - 0.03 * learned, start + 0.03 * learned)
            below.set(xlabel="bytes of a weight and its states", ylim=(least - 0.02 * learned, least + 0.3 * learned))
        for rounding, marker in MARKERS.items():
            panels[1, 0].scatter([], [], color="#444444", marker=marker, label=rounding)
        for axes, text in zip(panels[:, 0], ("held-out loss", "held-out loss at the best learning rate"), strict=True):
            axes.set_ylabel(text)
            axes.legend(fontsize=8, frameon=False)
