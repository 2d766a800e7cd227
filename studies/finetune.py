"""Which rule, learning rate and rounding to fine-tune with: small Llamas, pretrained on code, trained on docstrings.

Every rule with float32 weights and with each rounding of bfloat16 weights, at learning rates until the best one is
inside; then small learning rates, other seeds, batches and sizes, and variants of the rules.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from benchmarks.pages import markdown
from benchmarks.reports import formatted, picture
from studies import training
from studies.methods import METHODS, RULES

Run = dict[str, Any]  # by KEYS

TASK = training.Task()
SETTINGS = asdict(TASK)
KEYS = ("method", "rounding", "lr", "size", "seed", "batch")
PER_DECADE = 4  # learning rates on the grid: 1, 1.8, 3.2, 5.6, 10; a search takes every other one at first
EXTENSIONS = 4  # how often the grid of a search may be extended by one learning rate
TIE = 0.005  # nats; paired differences between runs vary by more
ROUNDINGS = ("float32", "stochastic", "nearest", "compensated")
SIZES, LARGER = ("1M", "5M", "20M"), ("5M", "20M")
MAIN = ("adalomo", "adamw")
OTHERS = tuple(name for name in RULES if name not in MAIN)
SMALL_RATES = {"adamw": (1e-6, 5e-6, 2e-5, 1e-4, 4e-4), "adalomo": (5e-5, 2e-4, 1e-3, 4e-3)}
USUAL_RATES = {"adamw": 2e-5, "adalomo": 1e-3}


# -- what is run -------------------------------------------------------------------------------------------------------


def like(method: str, rounding: str, size: str = "1M", seed: int = 0, batch: int = 4, lr: float = 0.0) -> Run:
    return {"method": method, "rounding": rounding, "lr": lr, "size": size, "seed": seed, "batch": batch}


def at(run: Run, *lrs: float) -> Iterator[Run]:
    return ({**run, "lr": lr} for lr in lrs)


def on_grid(lr: float, steps: int = 0) -> float:
    """The learning rate of the grid that is next to `lr`, or so many places above it."""
    place = round(math.log10(lr) * PER_DECADE) + steps
    return float(f"{10 ** (place / PER_DECADE):.2g}")


class Done:
    """The runs that are finished."""

    def __init__(self, rows: Sequence[Run]) -> None:
        self.rows = pd.DataFrame(rows, columns=[*KEYS, "new", "old", "curve", "moved", "step"])

    def series(self, run: Run) -> pd.DataFrame:
        """The runs that differ from a run in the learning rate alone, sorted by it."""
        found = self.rows
        for key in KEYS:
            found = found if key == "lr" else found[found[key] == run[key]]
        return found.sort_values("lr").set_index("lr")

    def best(self, run: Run) -> float | None:
        """The best learning rate for the new text: the least of those within `TIE` of it, which forgets least."""
        new = self.series(run).new
        return None if new.empty else float(new.index[new <= new.min() + TIE][0])

    def seeds(self, run: Run) -> pd.DataFrame:
        """The runs that differ from a run in the seed alone."""
        found = pd.concat(
            self.series({**run, "seed": seed}).loc[lambda rows: rows.index == run["lr"]] for seed in range(3)
        )
        return found.set_index("seed")

    def search(self, run: Run, lr: float, *, fine: bool = False, wide: bool = True) -> Iterator[Run]:
        """Yields the next runs of a search for the best learning rate.

        Args:
            lr: in the middle of the grid.
            fine: go on with the places of the grid next to the best one.
            wide: extend a grid whose best learning rate is on its edge.
        """
        known, lrs = self.series(run).new, {on_grid(lr, steps) for steps in (-2, 0, 2)}
        while not (missing := sorted(lrs - set(known.index))):
            top = float(known[sorted(lrs)].idxmin())
            if not wide or min(lrs) < top < max(lrs) or len(lrs) == 3 + EXTENSIONS:
                if fine:
                    yield from at(run, on_grid(top, -1), on_grid(top, 1))
                return
            lrs.add(on_grid(top, 2 if top == max(lrs) else -2))
        yield from at(run, *missing)


def runs(rows: Sequence[Run]) -> Iterator[Run]:
    """Yields the runs to do, in order; searches, and runs that depend on them, add more as runs are finished."""
    done = Done(rows)

    def searches(names: Sequence[str], roundings: Sequence[str]) -> Iterator[Run]:
        for name, rounding in itertools.product(names, roundings):
            lr, middle = METHODS[name].lr, done.best(like(name, "float32"))
            if rounding != "float32" and middle is not None:  # at the next place that searches try at first
                places = round(math.log(middle / on_grid(lr)) / math.log(10) * PER_DECADE)
                lr = on_grid(lr, 2 * math.ceil(places / 2))
            fine = name in MAIN and rounding in ("float32", "stochastic")
            yield from done.search(like(name, rounding), lr, fine=fine)

    def again(names: Sequence[str], rounding: str, size: str = "1M") -> Iterator[Run]:
        for name, seed in itertools.product(names, (1, 2)):
            if (top := done.best(like(name, rounding, size))) is not None:
                yield like(name, rounding, size, seed, lr=top)

    yield from searches(MAIN, ROUNDINGS)
    for name, rounding in itertools.product(MAIN, ("nearest", "float32", "stochastic")):
        yield from at(like(name, rounding), *SMALL_RATES[name])
    yield from again(MAIN, "stochastic")
    yield from again(MAIN, "float32")
    yield from searches(OTHERS, ("float32",))
    for name in OTHERS:
        if (top := done.best(like(name, "float32"))) is not None:
            yield from (like(name, rounding, lr=top) for rounding in ROUNDINGS)
            yield from at(like(name, "float32"), *(on_grid(METHODS[name].lr, steps) for steps in (-6, -9)))
    for size, name in itertools.product(LARGER, MAIN):
        if (top := done.best(like(name, "stochastic"))) is not None:
            yield from done.search(like(name, "stochastic", size), on_grid(top, -1), fine=True)
        if (top := done.best(like(name, "stochastic", size))) is not None:
            yield from done.search(like(name, "float32", size), top, wide=False)
        yield from (like(name, rounding, size, lr=USUAL_RATES[name]) for rounding in ROUNDINGS[:3])
        yield from again((name,), "stochastic", size)
    for (batch, steps), name in itertools.product(((16, 1), (1, -1), (64, 1)), MAIN):
        if (top := done.best(like(name, "stochastic"))) is not None:
            yield from done.search(like(name, "stochastic", batch=batch), on_grid(top, steps))
    for name, method in METHODS.items():
        if method.variant:
            yield from done.search(like(name, "float32"), method.lr)
    yield from again(OTHERS, "stochastic")
    yield from searches(OTHERS, ROUNDINGS[1:])


def train(run: Run, work: Path) -> Run:
    method, bfloat16 = METHODS[run["method"]], run["rounding"] != "float32"
    rounding = run["rounding"] if bfloat16 else "nearest"
    known = {key: run[key] for key in ("size", "seed", "batch")}
    return training.train(
        TASK, work, method.rule, run["lr"], method.options, rounding=rounding, bfloat16=bfloat16, **known
    )


def parts(work: Path) -> dict[str, Any]:
    """The root mean square of all matrices of each pretrained model."""
    rms = {}
    for size in SIZES:
        weights = [weight for weight in training.pretrained(size, TASK, work).values() if weight.dim() > 1]
        rms[size] = {"rms": torch.cat([weight.float().flatten() for weight in weights]).square().mean().sqrt().item()}
    return {"weights": rms}


# -- tables ------------------------------------------------------------------------------------------------------------


def tables(report: Any) -> dict[str, str]:
    done, rms = Done(report["runs"]), {size: known["rms"] for size, known in report["weights"].items()}
    found = {"rules": _rules(done), "sizes": _sizes(done, rms), "rates": _rates(done, rms), "kept": _kept(done, rms)}
    found |= {"batch": _batch(done), "variants": _variants(done)}
    return {name: markdown(rows) for name, rows in found.items() if rows}


def _mean(losses: pd.Series) -> str:
    return f"{losses.mean():.3f} ± {losses.std():.3f}" if len(losses) > 1 else f"{losses.mean():.3f}"


def _rules(done: Done) -> list[dict[str, str]]:
    """Each rule at its best learning rate: stochastic over the seeds, and every storage of the weights with one seed. A
    learning rate in parentheses is another one.
    """
    rows = {}
    for name in RULES:
        if (lr := done.best(like(name, "stochastic"))) is None:
            continue
        seeds = done.seeds(like(name, "stochastic", lr=lr))
        row = {"rule": f"`{name}`", "best lr": f"{lr:.2g}", "new text": _mean(seeds.new), "old text": _mean(seeds.old)}
        for rounding in ROUNDINGS:
            best, losses = done.best(like(name, rounding)), done.series(like(name, rounding)).new
            other = "" if best in (lr, None) else f" ({best:.2g})"
            row[rounding] = "–" if best is None else f"{losses[best]:.3f}{other}"
        rows[seeds.new.mean()] = row
    return [rows[loss] for loss in sorted(rows)]


def _sizes(done: Done, rms: dict[str, float]) -> list[dict[str, str]]:
    """AdaLomo and AdamW at their best learning rates in each model; stochastic."""
    rows = []
    for size in rms:
        lrs = {name: done.best(like(name, "stochastic", size)) for name in ("adamw", "adalomo")}
        if None in lrs.values():
            continue
        row = {"model": size, "rms(w)": f"{rms[size]:.3f}"}
        for (name, lr), called in zip(lrs.items(), ("AdamW", "AdaLomo"), strict=True):
            loss = done.series(like(name, "stochastic", size)).new[lr]
            row |= {f"{called}: best lr": f"{lr:.2g}", f"{called}: loss": f"{loss:.3f}"}
        ratio = lrs["adalomo"] * rms[size] / lrs["adamw"]
        rows.append({**row, "AdaLomo's × rms(w) / AdamW's": f"{ratio:.2f}"})
    return rows


def _rates(done: Done, rms: dict[str, float]) -> list[dict[str, str]]:
    """The learning rate of each rule that ends where AdamW does, for each of AdamW's up to its best one; float32."""
    rows = []
    for size in rms:
        adamw = done.series(like("adamw", "float32", size)).new
        for lr, loss in adamw[: adamw.idxmin()].items() if len(adamw) else ():
            equal = {name: rate_of(done.series(like(name, "float32", size)).new, loss) for name in RULES}
            if any(rate for name, rate in equal.items() if name != "adamw"):
                ratio = equal["adalomo"] and equal["adalomo"] * rms[size] / lr
                cells = {name: formatted(rate, ".2g") for name, rate in equal.items() if name != "adamw"}
                row = {"model": size, "adamw": f"{lr:.2g}", "new text": f"{loss:.3f}", **cells}
                rows.append({**row, "AdaLomo's × rms(w) / AdamW's": formatted(ratio, ".2f")})
    return rows


def rate_of(losses: pd.Series, loss: float) -> float | None:
    """The learning rate up to the best one that ends at this loss, on straight lines over its logarithm."""
    for (lr0, loss0), (lr1, loss1) in itertools.pairwise(losses.items()):
        if loss1 <= loss <= loss0:
            return float(lr0 * (lr1 / lr0) ** ((loss0 - loss) / (loss0 - loss1)))
    return None


def kept_rows(done: Done) -> pd.DataFrame:
    """Runs with bfloat16 weights next to their float32 runs, and the share of the improvement that they have."""
    exact = done.rows[done.rows.rounding == "float32"].drop(columns=["rounding", "old"])
    both = done.rows[done.rows.rounding != "float32"].merge(
        exact, on=[key for key in KEYS if key != "rounding"], suffixes=("", " float32")
    )
    learned, exactly = (
        both[f"curve{suffix}"].map(lambda curve: curve[0][1]) - both[f"new{suffix}"] for suffix in ("", " float32")
    )
    both["kept"] = learned / exactly
    return both[exactly > 0.02]


def _kept(done: Done, rms: dict[str, float]) -> list[dict[str, str]]:
    """The share of float32's improvement at the same learning rate, and how many weights an update changes."""
    found = kept_rows(done)
    found = found[found.method.isin(MAIN) & (found.seed == 0) & (found.batch == 4)]
    rows = []
    for size, name in itertools.product(rms, MAIN):
        for lr, some in found[(found["size"] == size) & (found.method == name)].groupby("lr"):
            some = some.set_index("rounding")
            if not {"nearest", "stochastic"} <= set(some.index):
                continue
            relative = lr / (rms[size] if name == "adamw" else 1.0)
            row = {"model": size, "rule": name, "lr": f"{lr:.2g}", "lr / rms(w)": f"{relative:.2g}"}
            row["norm of an update"] = f"{100 * some['step float32'].iloc[0]:.2g} %"
            for what, each in itertools.product(("kept", "moved"), ("nearest", "stochastic")):
                row[f"{'learned' if what == 'kept' else what}: {each}"] = f"{some[what][each]:.1%}"
            rows.append(row)
    return rows


def _batch(done: Done) -> list[dict[str, str]]:
    """Other numbers of rows per update at equal tokens, each at its best learning rate; stochastic."""
    rows = []
    for batch in sorted(set(done.rows.batch)):
        row = {"sequences per update": str(batch)}
        for name, called in zip(MAIN, ("AdaLomo", "AdamW"), strict=True):
            known = like(name, "stochastic", batch=batch)
            lr, found = done.best(known), done.series(known)
            cells = ("–", "–", "–") if lr is None else (f"{lr:.2g}", f"{found.new[lr]:.3f}", f"{found.old[lr]:.3f}")
            row |= dict(zip((f"{called}: best lr", f"{called}: new text", f"{called}: old text"), cells, strict=True))
        rows.append(row)
    return rows


def _variants(done: Done) -> list[dict[str, str]]:
    """Rules with and without one of their parts, float32, each at its best learning rate."""
    variants = [name for name, method in METHODS.items() if method.variant]
    rows = []
    for name in sorted({*variants, *(METHODS[name].rule for name in variants)}):
        found = done.series(like(name, "float32"))
        if (lr := done.best(like(name, "float32"))) is not None:
            losses = {"new text": f"{found.new[lr]:.3f}", "old text": f"{found.old[lr]:.3f}"}
            rows.append({"method": name, "best lr": f"{lr:.2g}", **losses})
    return rows


# -- the picture -------------------------------------------------------------------------------------------------------


def draw(report: Any, path: Path) -> None:
    """Draws how much of float32's improvement bfloat16 weights reach, by the size of an update."""
    rows = kept_rows(Done(report["runs"]))
    rows = rows[(rows.batch == 4) & (rows.seed == 0) & (rows["size"] == "1M")]
    colors = {"stochastic": "#2a8f7c", "nearest": "#c44e52"}
    title = "Fine-tuning with bfloat16 weights, by rounding, compared with float32 weights at the same learning rate"
    with picture(path, title, (9, 4.4), 1) as axes:
        for rounding, color in colors.items():
            for name, style, words in (("adalomo", "-", "AdaLomo"), ("adamw", "--", "AdamW")):
                line = rows[(rows.rounding == rounding) & (rows.method == name)].sort_values("step float32")
                known = {"color": color, "ls": style, "marker": "o", "ms": 4, "label": f"{rounding}, {words}"}
                axes.plot(100 * line["step float32"], 100 * line.kept, **known)
        top = rows.loc[rows.kept.idxmax()]
        learned, exactly = top.curve[0][1] - top.new, (top.curve[0][1] - top.new) / top.kept
        words = f"{top.kept:.0%}: float32 improves the loss by {exactly:.2f},\n"
        words += f"and rounding adds noise that lowers it by {learned - exactly:.2f} more"
        axes.annotate(words, (100 * top["step float32"], 100 * top.kept), (4, 7), textcoords="offset points",
                      fontsize=8, va="bottom", color="#555555")  # fmt: skip
        axes.set(xscale="log", xlabel="size of an update, in % of the norm of the weights", ylim=(-4, 128))
        axes.set_ylabel("improvement of the held-out loss,\nin % of float32's")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.axvspan(0.2, 0.4, color="#eeeeee", zorder=0)
        axes.text(0.28, 4, "half the distance\nbetween two\nbfloat16 values", fontsize=8, ha="center", color="#555555")
        axes.legend(fontsize=9, frameon=False, loc="center right")
