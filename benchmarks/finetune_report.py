"""The tables, figures and pictures of the fine-tuning study."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks import reports
from benchmarks.finetune_runs import METHODS, SIZES, Result, Run, Study, as_line, weight_rms
from benchmarks.reports import formatted, picture, print_table

Results = Mapping[Run, Result]

TIE = 0.005  # nats; paired differences between runs vary by more
ROUNDINGS = ("float32", "stochastic", "nearest", "compensated")
RULES = [name for name, method in METHODS.items() if not method.variant]
LOOKS = {
    "float32": ("#333333", "-", "o"), "stochastic": ("#2a8f7c", "-", "s"), "nearest": ("#c44e52", "-", "v"),
    "compensated": ("#4c72b0", ":", "x"),
}  # fmt: skip
COLORS = {
    "adalomo": "#2a8f7c", "adamw": "#333333", "adafactor": "#4c72b0", "adafactor_t2t": "#8fb3e0", "lion": "#8172b3",
    "lomo": "#937860", "lans": "#dd8452", "scaled_adam": "#c44e52",
}  # fmt: skip

SHADES = {"1M": 0.4, "5M": 0.65, "20M": 1.0}


def report(results: Results, study: Study, work: Path, folder: Path) -> None:
    """Prints the tables of what is there, and writes the figures and the pictures."""
    sizes = [size for size in SIZES if any(run.size == size for run in results)]
    weights = {size: weight_rms(size, study, work) for size in sizes}
    first = {size: next(result.curve[0] for run, result in results.items() if run.size == size) for size in sizes}
    for size, known in weights.items():
        _, new, old = first[size]
        print(f"{size}: {known['parameters']:,.0f} parameters, rms of the matrices {known['rms']:.4f} "
              f"({known['least']:.4f} to {known['most']:.4f}); before: new text {new:.3f}, old {old:.3f}")  # fmt: skip
    tables = {
        "rules": rules_table(results),
        "paired": paired_table(results),
        "kept": kept_table(results, weights),
        "sizes": sizes_table(results, weights),
        "rates": rates_table(results, weights),
        "batch": batch_table(results),
        "variants": variants_table(results),
    }
    for name, rows in tables.items():
        if rows:
            print(f"\n{name}\n")
            print_table(list(rows[0]), [[_shown(value) for value in row.values()] for row in rows])
    seconds = sum(result.seconds for result in results.values())
    print(f"\n{len(results)} runs, {seconds / 60:.0f} minutes of one thread")
    runs = [as_line(run, result) for run, result in results.items()]
    before = {size: {"new": new, "old": old} for size, (_, new, old) in first.items()}
    reports.save(
        folder / "finetune.json",
        asdict(study),
        weights=weights,
        before=before,
        seconds=seconds,
        tables=tables,
        runs=runs,
    )
    if "1M" in first:
        draw_grid(results, first["1M"][1], folder / "finetune_grid.png")
        draw_rounding(results, folder / "finetune_rounding.png")
        draw_forgetting(results, folder / "finetune_forgetting.png")
        draw_sizes(results, weights, folder / "finetune_sizes.png")


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "–" if value is None else str(value)


def compared(ours: Sequence[float], theirs: Sequence[float], every: Sequence[float]) -> dict[str, Any]:
    """Losses of a format, less those of float32 with the same seeds, and the mean of these differences in units of the
    noise: the standard deviation of `every` loss of float32, None of a single one.
    """
    differences = [our - their for our, their in zip(ours, theirs, strict=True)]
    noise = stdev(every) if len(every) > 1 else None
    return {
        "differences": differences,
        "difference": mean(differences),
        "noise": noise,
        "in units of the noise": mean(differences) / noise if noise else None,
    }


# -- what is looked up -------------------------------------------------------------------------------------------------


def series(results: Results, like: Run) -> dict[float, Result]:
    """The results at every learning rate, in their order, of runs that otherwise are as `like`."""
    found = {run.lr: result for run, result in results.items() if replace(run, lr=like.lr) == like}
    return dict(sorted(found.items()))


def best_lr(results: Results, like: Run) -> float | None:
    """The best learning rate for the new text: the least of those within `TIE` of it, which forgets least."""
    found = series(results, like)
    least = min((result.new for result in found.values()), default=math.inf)
    return next((lr for lr, result in found.items() if result.new <= least + TIE), None)


def with_seeds(results: Results, run: Run) -> list[Result]:
    """The run's result and those with other seeds, in the order of the seeds."""
    found = {other.seed: result for other, result in results.items() if replace(other, seed=run.seed) == run}
    return [found[seed] for seed in sorted(found)]


def spread(values: Iterable[float], digits: int = 3) -> str:
    """The mean and, of several values, their standard deviation."""
    values = list(values)
    text = f"{mean(values):.{digits}f}"
    return f"{text} ± {stdev(values):.{digits}f}" if len(values) > 1 else text


def within(found: Mapping[float, Result], before: float, share: float) -> tuple[float, float]:
    """The range of learning rates around the best one with so large a share of its improvement, on straight lines
    over the logarithm; the end of the grid where that is not left."""
    lrs = [lr for lr, result in found.items() if math.isfinite(result.new)]
    losses = [found[lr].new for lr in lrs]
    top = losses.index(min(losses))
    limit = before - share * (before - losses[top])

    def reach(places: Sequence[int]) -> float:
        for here, there in itertools.pairwise(places):
            if losses[there] > limit:
                part = (limit - losses[here]) / (losses[there] - losses[here])
                return float(lrs[here] * (lrs[there] / lrs[here]) ** part)
        return lrs[places[-1]]

    return reach(range(top, -1, -1)), reach(range(top, len(lrs)))


# -- tables ------------------------------------------------------------------------------------------------------------

Row = dict[str, Any]


def rules_table(results: Results) -> list[Row]:
    """Each rule and rounding at its best learning rate, with the spread of its seeds."""
    rows = []
    for name, rounding in itertools.product(RULES, ROUNDINGS):
        found, lr = series(results, Run(name, rounding, 0.0)), best_lr(results, Run(name, rounding, 0.0))
        if lr is None:
            continue
        seeds = with_seeds(results, Run(name, rounding, lr))
        before = next(iter(found.values())).curve[0][1]
        low, high = within(found, before, 0.95) if len(found) > 2 else (None, None)
        rows.append(
            {
                "rule": name,
                "weights": rounding,
                "best lr": lr,
                "new text": spread(result.new for result in seeds),
                "old text": spread(result.old for result in seeds),
                "seeds": len(seeds),
                "95 % of it from": low,
                "to": high,
                "step / weights": found[lr].step,
                "runs": len(found),
            }
        )
    return rows


def paired_table(results: Results) -> list[Row]:
    """Differences to AdamW with the same weights, seed by seed, each at its best learning rate."""
    rows = []
    for size, rounding, name in itertools.product(SHADES, ("float32", "stochastic"), RULES):
        lrs = {rule: best_lr(results, Run(rule, rounding, 0.0, size)) for rule in (name, "adamw")}
        if name == "adamw" or None in lrs.values():
            continue
        ours, theirs = (with_seeds(results, Run(rule, rounding, lr or 0.0, size)) for rule, lr in lrs.items())
        pairs = list(zip(ours, theirs, strict=False))
        rows.append(
            {
                "model": size,
                "weights": rounding,
                "rule": name,
                "new text, less AdamW's": ", ".join(f"{a.new - b.new:+.3f}" for a, b in pairs),
                "old text": ", ".join(f"{a.old - b.old:+.3f}" for a, b in pairs),
            }
        )
    return rows


def kept_rows(results: Results) -> list[tuple[Run, Result, float]]:
    """Runs with bfloat16 weights whose float32 run is there, and the share of its improvement that they have."""
    rows = []
    for run, result in results.items():
        other = results.get(replace(run, rounding="float32"))
        if run.rounding != "float32" and other is not None and other.new < other.curve[0][1] - 0.02:
            rows.append((run, result, _gain(result) / _gain(other)))
    return sorted(rows, key=lambda row: (list(SHADES).index(row[0].size), row[0].method, row[0].lr, row[0].rounding))


def _gain(result: Result) -> float:
    return result.curve[0][1] - result.new


def kept_table(results: Results, weights: Mapping[str, Any]) -> list[Row]:
    """What is left of float32's improvement at the same learning rate, and how many weights an update changes."""
    rows: dict[tuple[str, str, float], Row] = {}
    for run, result, kept in kept_rows(results):
        if run.method not in ("adamw", "adalomo") or run.seed or run.batch != 4 or run.rounding == "compensated":
            continue
        float32 = results[replace(run, rounding="float32")]
        rms = weights[run.size]["rms"] if run.method == "adamw" else 1.0
        row = {
            "model": run.size,
            "rule": run.method,
            "lr": run.lr,
            "lr / rms(w)": run.lr / rms,
            "step / weights": float32.step,
        }
        row = rows.setdefault((run.size, run.method, run.lr), row)
        row[f"kept, {run.rounding}"] = f"{kept:.1%}"
        row[f"moved, {run.rounding}"] = f"{result.moved:.1%}"
    columns = [f"{what}, {rounding}" for what in ("kept", "moved") for rounding in ("nearest", "stochastic")]
    return [{**row, **{name: row.get(name) for name in columns}} for row in rows.values()]


def sizes_table(results: Results, weights: Mapping[str, Any]) -> list[Row]:
    """Every model: AdaLomo and AdamW at their best learning rates, and how those relate to the rms of the weights."""
    rows = []
    for size, rounding in itertools.product(weights, ("float32", "stochastic")):
        lrs = {name: best_lr(results, Run(name, rounding, 0.0, size)) for name in ("adamw", "adalomo")}
        adamw, adalomo = lrs.values()
        if adamw is None or adalomo is None:
            continue
        row: Row = {"model": size, "weights": rounding, "rms(w)": weights[size]["rms"]}
        for name, lr in (("adamw", adamw), ("adalomo", adalomo)):
            result = results[Run(name, rounding, lr, size)]
            row |= {f"{name} lr": lr, f"{name} new": f"{result.new:.3f}", f"{name} old": f"{result.old:.3f}"}
        rows.append({**row, "adalomo lr × rms / adamw lr": adalomo * weights[size]["rms"] / adamw})
    return rows


def rates_table(results: Results, weights: Mapping[str, Any]) -> list[Row]:
    """The learning rate of each rule that ends where AdamW does, for each of AdamW's up to its best one; float32."""
    rows = []
    for size in weights:
        adamw = series(results, Run("adamw", "float32", 0.0, size))
        top = min(adamw, key=lambda lr: adamw[lr].new, default=0.0)
        for lr, result in adamw.items():
            equal = {}
            for name in RULES:
                if name != "adamw" and any(run.method == name and run.size == size for run in results):
                    equal[name] = rate_of(series(results, Run(name, "float32", 0.0, size)), result.new)
            if lr <= top and any(equal.values()):
                ratio = equal["adalomo"] and equal["adalomo"] * weights[size]["rms"] / lr
                row = {"model": size, "adamw": lr, "new text": f"{result.new:.3f}", **equal}
                rows.append({**row, "adalomo's × rms / adamw's": ratio})
    columns = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in columns} for row in rows]


def rate_of(found: Mapping[float, Result], loss: float) -> float | None:
    """The learning rate up to the best one that ends at this loss, on straight lines over its logarithm."""
    for (lr0, r0), (lr1, r1) in itertools.pairwise(found.items()):
        if r1.new <= loss <= r0.new:
            return float(lr0 * (lr1 / lr0) ** ((r0.new - loss) / (r0.new - r1.new)))
    return None


def batch_table(results: Results) -> list[Row]:
    """Other numbers of rows per update at equal tokens, each at its best learning rate."""
    rows = []
    for batch, name in itertools.product(sorted({run.batch for run in results}), ("adalomo", "adamw")):
        found = series(results, like := Run(name, "stochastic", 0.0, batch=batch))
        if (lr := best_lr(results, like)) is not None:
            rows.append({"rows per update": batch, "rule": name, "best lr": lr, "new text": f"{found[lr].new:.3f}",
                         "old text": f"{found[lr].old:.3f}", "learning rates": len(found)})  # fmt: skip
    return rows


def variants_table(results: Results) -> list[Row]:
    """Rules with and without one of their parts, float32, each at its best learning rate."""
    variants = [name for name, method in METHODS.items() if method.variant]
    bases = {METHODS[name].rule for name in variants}
    rows = []
    for name in sorted((*bases, *variants)):
        found = series(results, like := Run(name, "float32", 0.0))
        if (lr := best_lr(results, like)) is not None:
            rows.append({"method": name, "best lr": lr, "new text": f"{found[lr].new:.3f}",
                         "old text": f"{found[lr].old:.3f}", "learning rates": len(found)})  # fmt: skip
    return rows


# -- pictures ----------------------------------------------------------------------------------------------------------


def _line(
    axes: Any, found: Mapping[float, Result], value: Callable[[float, Result], tuple[float, float]], **look: Any
) -> None:
    points = [value(lr, result) for lr, result in found.items() if math.isfinite(result.new)]
    if points:
        axes.plot(*zip(*points, strict=True), **look)


def draw_grid(results: Results, before: float, path: Path) -> None:
    """The loss on the new text over the learning rate, a panel per rule and a line per rounding."""
    lowest = min(result.new for result in results.values())
    title = "Loss on the new text after fine-tuning a 1M Llama, by learning rate and how weights are stored"
    with picture(path, title, (12, 6), 1) as single:
        figure = single.figure
        single.remove()
        panels = figure.subplots(2, 4, sharey=True)
        for axes, name in zip(panels.flat, RULES, strict=True):
            for rounding, (color, style, marker) in LOOKS.items():
                found = series(results, Run(name, rounding, 0.0))
                label = rounding if rounding == "float32" else f"bfloat16, {rounding}"
                look = {"color": color, "ls": style, "marker": marker, "ms": 4, "lw": 1.4, "label": label}
                _line(axes, found, lambda lr, result: (lr, result.new), **look)
            axes.axhline(before, color="#bbbbbb", lw=0.8)
            axes.set(xscale="log", ylim=(lowest - 0.1, before + 0.15))
            axes.xaxis.set_minor_formatter("")
            axes.set_title(name, fontsize=10)
        for axes in panels[:, 0]:
            axes.set_ylabel("held-out loss, nats")
        for axes in panels[1]:
            axes.set_xlabel("peak learning rate")
        legend = panels[0, 0].get_legend_handles_labels()
        figure.legend(*legend, loc="outside lower center", ncols=4, frameon=False, fontsize=9)


def draw_rounding(results: Results, path: Path) -> None:
    """The share of float32's improvement that bfloat16 weights have, over the size of a step and over what moves."""
    rows = [row for row in kept_rows(results) if row[0].batch == 4 and not row[0].seed]
    title = "Improvement of bfloat16 weights, as a share of that of float32 weights at the same learning rate"
    with picture(path, title, (11, 4.6), 2, sharey=True) as (left, right):
        for name, marker in (("adamw", "o"), ("adalomo", "s")):
            for rounding in ("nearest", "stochastic"):
                like = ("1M", name, rounding)
                some = [(run, kept) for run, _, kept in rows if (run.size, run.method, run.rounding) == like]
                steps = [100 * results[replace(run, rounding="float32")].step for run, _ in some]
                look = {"color": LOOKS[rounding][0], "marker": marker, "ms": 5, "lw": 1.2}
                look |= {"ls": "-" if name == "adalomo" else "--", "label": f"{name}, {rounding}"}
                left.plot(steps, [100 * kept for _, kept in some], **look)
        left.set(xscale="log", xlabel="norm of an update, per cent of that of the weights (float32)")
        left.set_ylabel("per cent of float32's improvement")
        left.axvspan(0.2, 0.4, color="#eeeeee", zorder=0)
        left.annotate("half a spacing\nof bfloat16", (0.28, -4), fontsize=8, ha="center", color="#777777")
        left.legend(fontsize=8, frameon=False, loc="lower right", bbox_to_anchor=(1, 0.2))
        for rounding in ("stochastic", "nearest"):
            color, _, marker = LOOKS[rounding]
            some = [(100 * result.moved, 100 * kept) for run, result, kept in rows if run.rounding == rounding]
            look = {"color": color, "marker": marker, "s": 22, "label": f"{rounding}, every rule and model"}
            right.scatter([moved for moved, _ in some], [kept for _, kept in some], **look)
        right.axvline(5, color="#bbbbbb", lw=0.8)
        right.axhline(12, color="#bbbbbb", lw=0.8)
        right.annotate("5 %", (5.8, 45), fontsize=8, color="#777777")
        right.annotate("12 %", (94, 14), fontsize=8, color="#777777")
        right.set(xlabel="per cent of the weights that an update changes", ylim=(-8, 119), xlim=(-2, 102))
        right.legend(fontsize=8, frameon=False, loc="lower right", bbox_to_anchor=(1, 0.2))


def draw_forgetting(results: Results, path: Path) -> None:
    """The loss on the old text over that on the new one, a line per rule over its learning rates."""
    title = "Forgetting: loss on code against loss on docstrings, a point per learning rate"
    with picture(path, title, (11, 4.8), 2) as (left, right):
        lowest = min(result.new for run, result in results.items() if run.size == "1M" and run.batch == 4)
        for name in RULES:
            found = series(results, Run(name, "float32", 0.0))
            look = {"color": COLORS[name], "marker": "o", "ms": 3.5, "lw": 2.2 if name in ("adalomo", "adamw") else 1.1}
            _line(left, found, lambda lr, result: (result.new, result.old), label=name, **look)
        left.set(xlabel="new text: held-out loss, nats", xlim=(lowest - 0.05, lowest + 0.7), ylim=(3, 7.2))
        left.set_ylabel("old text: held-out loss, nats")
        left.set_title("1M, every rule, float32 weights", fontsize=10)
        left.legend(fontsize=8, frameon=False, ncols=3, loc="upper left")
        for (size, style), name in itertools.product(SHADES.items(), ("adalomo", "adamw")):
            found = series(results, Run(name, "stochastic", 0.0, size))
            look = {"color": COLORS[name], "marker": "o", "ms": 3.5, "alpha": style, "label": f"{name}, {size}"}
            _line(right, found, lambda lr, result: _changes(result), **look)
        right.set(xlabel="new text: change of the loss", ylabel="old text: change of the loss", ylim=(-0.1, 2.6))
        right.set_title("three models, bfloat16 weights, stochastic", fontsize=10)
        right.legend(fontsize=8, frameon=False)


def _changes(result: Result) -> tuple[float, float]:
    return result.new - result.curve[0][1], result.old - result.curve[0][2]


def draw_sizes(results: Results, weights: Mapping[str, Any], path: Path) -> None:
    """Loss over the learning rate by model, and by rows per update; stochastic."""
    title = "Loss on the new text by size of the model, and by batch at equal tokens; bfloat16, stochastic"
    with picture(path, title, (11, 4.8), 2) as (left, right):
        for size, name in itertools.product(weights, ("adalomo", "adamw")):
            scale = weights[size]["rms"] if name == "adamw" else 1.0
            found = series(results, Run(name, "stochastic", 0.0, size))
            look = {"color": COLORS[name], "alpha": SHADES[size], "marker": "o", "ms": 4, "label": f"{name}, {size}"}
            _line(left, found, lambda lr, result, scale=scale: (lr / scale, result.new), **look)
        left.set(xscale="log", xlabel="learning rate, relative to rms(w)", ylabel="held-out loss, nats")
        lowest = min(result.new for result in results.values())
        left.set(xlim=(8e-4, 0.25), ylim=(lowest - 0.1, lowest + 1.2))
        left.legend(fontsize=8, frameon=False)
        for name in ("adalomo", "adamw"):
            rows = [row for row in batch_table(results) if row["rule"] == name]
            batches, losses = [row["rows per update"] for row in rows], [float(row["new text"]) for row in rows]
            right.plot(batches, losses, color=COLORS[name], marker="o", ms=4, label=name)
            for x, y, row in zip(batches, losses, rows, strict=True):
                offset = (-14, 6) if name == "adamw" else (14, -13)
                text = formatted(row["best lr"], ".2g")
                right.annotate(
                    text, (x, y), xytext=offset, textcoords="offset points", fontsize=8, ha="center", color=COLORS[name]
                )
        right.set_xscale("log", base=2)
        right.xaxis.set_major_formatter("{x:g}")
        right.margins(y=0.18, x=0.1)
        right.set(xlabel="rows of 128 tokens per update (with the best learning rate)", ylabel="held-out loss, nats")
        right.legend(fontsize=8, frameon=False)
