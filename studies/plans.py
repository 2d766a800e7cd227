"""What is run: for each task the methods, learning rates, formats and seeds.

On most tasks, methods search for their best learning rate with float32 weights. Then come usual rates, other seeds and
other formats. Tasks with `rates` compare formats at these.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch

from studies import training
from studies.chat import Chat, Preference
from studies.formats import format_of
from studies.grid import SEEDS, Done, Run, at, like
from studies.llamas import LlamaTask
from studies.methods import METHODS, MOMENTUM_NAME
from studies.packages import available
from studies.search import Search
from studies.training import Task, matrices

MAIN = ("adamw", "adalomo", MOMENTUM_NAME)
WHOLE = tuple(name for name, method in METHODS.items() if not method.adapters)
MORE_RATES = {"adalomo": 1e-3, **{name: 2e-5 for name in WHOLE if "not relative" in name}}
BETAS = tuple(name for name in WHOLE if f"{MOMENTUM_NAME}, β₂" in name)
ROUNDINGS = ("stochastic", "nearest", "int12", "int10")
EIGHT_BITS = "stochastic, 8bit states"
MANY = ("float32", "stochastic", "int8", "int10", "int12", "int8, fresh units", "compensated")
LOW = ("float32", "stochastic", "nearest", "compensated8")
STATES = (*(
    f"{weights}{states}" for weights in ("float32", "stochastic", "compensated8")
    for states in ("", ", bfloat16 states", ", 8bit_nearest states", ", 8bit states")
), "float32, not compiled")  # fmt: skip


class Plan(NamedTuple):
    """The runs of a task.

    Attributes:
        lower: searches begin at learning rates that are so much lower than the ones of `METHODS`.
        fine: methods that search on the fine grid, and are repeated with other seeds.
        coarse: methods that search on the coarse grid.
        formats: of `MAIN` methods, bfloat16 at the usual and others at the best learning rate; and of `rates`.
        usual: learning rate of AdamW, and root mean square of the weights, from which usual rates follow.
        rates: learning rate by method, for tasks without searches.
        seeds: of `rates`, and of usual rates without searches.
    """

    task: Task
    lower: float = 1.0
    fine: tuple[str, ...] = ()
    coarse: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    usual: tuple[float, float] | None = None
    rates: Mapping[str, float] = {}
    seeds: int = SEEDS


LLAMA = LlamaTask()
NEW = replace(LLAMA, compiled=True)
OLD = replace(NEW, updates=5000, trained="old")
SCRATCH = replace(NEW, size="0.7M", updates=2000, length=64, pretrained=False)
LONG = replace(NEW, updates=10_000, batch=1, looks=(0.1, 0.2, 0.5, 1.0))
PLANS = {
    "search": Plan(Search(), 30, MAIN, (), (*ROUNDINGS[:2], EIGHT_BITS, "int12"), (2e-5, 0.058)),
    "search, 3,000 updates": Plan(Search(updates=3000, batch=4), usual=(2e-5, 0.058), rates=MORE_RATES, seeds=2),
    "search, batch 32": Plan(Search(updates=100, batch=32), 30, MAIN[:2]),
    "docstrings": Plan(LLAMA, 1, MAIN, WHOLE, (*ROUNDINGS, EIGHT_BITS), (2e-5, 0.099)),
    "scratch": Plan(SCRATCH, coarse=(*MAIN, *BETAS)),
    "preferences": Plan(Preference(), usual=(1e-5, 0.18)),
    "chats": Plan(Chat(), 30, (*MAIN, "lora"), usual=(2e-5, 0.18)),
    "docstrings, 5M": Plan(replace(NEW, size="5M")),
    "docstrings, 20M": Plan(replace(NEW, size="20M")),
    **{
        f"docstrings, batch {size}": Plan(replace(LLAMA, batch=size, updates=600 // size), 1, MAIN[:2])
        for size in (1, 16, 64)
    },
    "old text": Plan(OLD, formats=MANY[:-1], rates={"adalomo": 1e-3}),
    "new text": Plan(NEW, formats=MANY, rates={"adalomo": 3.2e-2}),
    "new text, low rate": Plan(NEW, formats=MANY, rates={"adalomo": 6.4e-4}),
    "fine-tuning, β₂ 0.95": Plan(NEW, formats=STATES, rates={"adamw, β₂ 0.95": 3.2e-3}),
    "fine-tuning, β₂ 0.999": Plan(NEW, formats=STATES, rates={"adamw": 3.2e-3}),
    "from scratch, β₂ 0.999": Plan(SCRATCH, formats=STATES, rates={"adamw": 2e-3}),
    "10,000 updates, lr 1e-6": Plan(LONG, formats=LOW, rates={"adamw": 1e-6}, seeds=1),
}
SETTINGS = {name: asdict(plan.task) for name, plan in PLANS.items()}


def usual(plan: Plan, name: str) -> list[float]:
    """The learning rate that corresponds to AdamW's usual one, if that is known."""
    if plan.usual is None or METHODS[name].adapters:
        return []
    adamw, rms = plan.usual
    return [float(f"{adamw / (rms if METHODS[name].relative else 1.0):.2g}")]


def runs(rows: Sequence[Run]) -> Iterator[Run]:
    """Yields the runs to do, in order; searches, and runs that depend on them, add more as runs are finished."""
    done, plans = Done(rows), {task: plan for task, plan in PLANS.items() if available(plan.task.packages)}
    for task, plan in plans.items():
        for name in plan.fine:
            yield from done.search(like(task, name), METHODS[name].lr / plan.lower, fine=True)
    for (task, plan), seed in itertools.product(plans.items(), range(SEEDS)):
        for name in (plan.fine or MAIN) if seed < (1 if plan.fine else plan.seeds) else ():
            yield from at(like(task, name, seed=seed), *usual(plan, name))
        yield from (run for name in plan.fine if (run := done.best(like(task, name, seed=seed))))
    for task, plan in plans.items():
        for form, name in itertools.product(plan.formats, MAIN if plan.fine else ()):
            if form in ROUNDINGS[:2]:
                yield from at(like(task, name, form), *usual(plan, name))
            elif (best := done.best(like(task, name))) and (METHODS[name].states or form != EIGHT_BITS):
                yield {**best, "format": form}
    for task, plan in plans.items():
        for name in plan.coarse:
            yield from done.search(like(task, name), METHODS[name].lr / plan.lower)
    for seed, (task, plan) in itertools.product(range(SEEDS), plans.items()):
        for name, lr in plan.rates.items() if seed < plan.seeds else ():
            first = like(task, name, lr=lr, seed=seed)  # the formats are compared with it when they end
            forms = plan.formats if lr in done.losses(first).index else ("float32",)
            yield from ({**first, "format": form} for form in forms)


def train(run: Run) -> Run:
    method, plan, form = METHODS[run["method"]], PLANS[run["task"]], format_of(run["format"])
    model = plan.task.model(run["seed"])
    model = with_adapters(model, run["seed"]) if method.adapters else model
    results = training.train(plan.task, model, method.rule, run["lr"], method.options, form, run["seed"])
    return {**results, **(_way(run, plan.task, model) if ", lr " in run["task"] else {})}


def with_adapters(model: Any, seed: int, rank: int = 16) -> Any:
    """Low-rank adapters [Hu et al. 2021, arXiv:2106.09685] in float32 beside all linear layers."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))


def _way(run: Run, task: Task, model: Any) -> dict[str, float]:
    """`way`: how far the weights went along the way of float32, as a share. `drift`: how far from it, by its norm."""
    change = matrices(model) - matrices(task.model(run["seed"]))
    path = training.WORK / f"{run['task']}-{run['method']}-{run['seed']}.pt"
    if run["format"] == "float32":
        torch.save(change, path)
    if not path.exists():  # float32 was trained on another machine
        return {}
    exact = torch.load(path)
    way = (change @ exact / exact.norm() ** 2).item()
    return {"way": way, "drift": ((change - way * exact).norm() / exact.norm()).item()}
