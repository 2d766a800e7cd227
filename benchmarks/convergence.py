"""How well the rules train: one small Llama, the same text in the same order, each optimizer at its best learning rate.

    python -m benchmarks.convergence [--steps 255 --jobs 2] [--only adalomo]

The text is every docstring of this machine's Python standard library, after its signature. AdamW is torch's and takes
ordinary steps; all others run through `FusedOptimizer`. Each has a grid of learning rates, which is extended while the
best one lies on its edge. Finished runs are stored in the results folder, so that an interrupted benchmark continues.
"""

import ast
import functools
import itertools
import json
import math
import multiprocessing
import random
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import lowmem
from benchmarks import reports
from benchmarks.baselines import select
from benchmarks.models import llama
from benchmarks.reports import command, headline, picture, print_table
from scripts.make_docstrings import functions, module_name, signature, source_files
from scripts.make_model import train_tokenizer

EXTENSIONS = 3  # how often a grid may be extended by one learning rate
WARMUP = 0.05  # of the steps; after it the learning rate decays linearly to zero


@dataclass(frozen=True)
class Candidate:
    """An optimizer, and the learning rates with which its search begins.

    `ordinary`: it is torch's, and steps after backward.
    """

    rule: str | type
    lrs: tuple[float, ...]
    hyper: tuple[tuple[str, Any], ...] = ()
    ordinary: bool = False


NO_DECAY = (("weight_decay", 0.0),)
CANDIDATES = {
    "AdamW": Candidate(torch.optim.AdamW, (1e-3, 2e-3, 4e-3, 8e-3), (("betas", (0.9, 0.95)), *NO_DECAY), ordinary=True),
    "AdamW, β₂ 0.999": Candidate(torch.optim.AdamW, (1e-3, 2e-3, 4e-3, 8e-3), NO_DECAY, ordinary=True),
    "adalomo": Candidate("adalomo", (1e-2, 2e-2, 4e-2, 8e-2)),
    "adafactor": Candidate("adafactor", (1e-2, 2e-2, 4e-2, 8e-2), (("min_dim_size_to_factor", 32),)),
    "adafactor_t2t": Candidate("adafactor_t2t", (1e-2, 2e-2, 4e-2, 8e-2)),
    "scaled_adam": Candidate("scaled_adam", (1.5e-2, 3e-2, 6e-2, 1.2e-1)),
    "lans": Candidate("lans", (2.5e-3, 5e-3, 1e-2, 2e-2)),
    "lomo": Candidate("lomo", (1e-1, 3e-1, 1.0, 3.0)),
}
# Colors and line widths. The curves of the factored rules coincide, so that wider lines are drawn below narrower ones.
LOOKS = {
    "AdamW": ("#333333", 1.8), "AdamW, β₂ 0.999": ("#a5a5a5", 1.8), "adafactor": ("#4c72b0", 6.5),
    "adafactor_t2t": ("#b9d3f0", 4.0), "adalomo": ("#2a8f7c", 1.8), "scaled_adam": ("#c44e52", 1.8),
    "lans": ("#dd8452", 1.8), "lomo": ("#937860", 1.8),
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """Sizes of the model, the text and a run."""

    steps: int
    hidden: int
    layers: int
    batch: int
    length: int
    vocab: int
    every: int  # steps between evaluations
    seed: int


@dataclass(frozen=True)
class Run:
    """A finished run: held-out losses in nats per token, after so many tokens; the last is infinite if it diverged."""

    optimizer: str
    lr: float
    tokens: list[int]
    losses: list[float]
    state_bytes: float
    seconds: float

    @property
    def final(self) -> float:
        return self.losses[-1]


def documents() -> Iterator[str]:
    """Every docstring of the standard library after its signature, module by module."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in source_files(root):
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # the library contains broken files on purpose, for its tests
            continue
        parts = [f"# {module_name(path, root)}\n{ast.get_docstring(tree) or ''}"]
        for inside, function in functions(tree):
            if text := ast.get_docstring(function):
                parts.append(f"{inside}.{signature(function)}\n{text}")
        if len(parts) > 1:
            yield "\n\n".join(parts)


@functools.cache
def corpus(settings: Settings) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of token ids [rows, length] to train on and, from other modules, to hold out."""
    texts = list(documents())
    random.Random(settings.seed).shuffle(texts)
    held_out = max(1, len(texts) // 20)
    tokenizer = train_tokenizer(texts[held_out:], settings.vocab)

    def rows(some: list[str]) -> torch.Tensor:
        ids = torch.tensor([token for text in some for token in tokenizer(text)["input_ids"]])
        return ids[: len(ids) // settings.length * settings.length].view(-1, settings.length)

    train = rows(texts[held_out:])
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(settings.seed))
    return train[order], rows(texts[:held_out])


def model_of(settings: Settings) -> Any:
    return llama(
        settings.layers,
        settings.hidden,
        settings.hidden * 3,
        settings.vocab,
        "float32",
        checkpointing=False,
        seed=settings.seed,
        max_position_embeddings=settings.length,
        tie_word_embeddings=True,
        num_attention_heads=settings.hidden // 32,
        num_key_value_heads=settings.hidden // 64,
    )


def stepping(
    candidate: Candidate, model: torch.nn.Module, lr: float
) -> tuple[torch.optim.Optimizer, Callable[..., object]]:
    """Returns an optimizer of the model, and a function that takes a step by a loss."""
    if not candidate.ordinary:
        fused = lowmem.FusedOptimizer(model.named_parameters(), candidate.rule, lr=lr, **dict(candidate.hyper))
        return fused, fused.backward
    assert isinstance(candidate.rule, type)
    optimizer = candidate.rule(model.parameters(), lr=lr, **dict(candidate.hyper))

    def step(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return optimizer, step


@torch.no_grad()
def held_out_loss(model: Any, rows: torch.Tensor) -> float:
    model.eval()
    losses = [model(input_ids=part, labels=part).loss.item() * len(part) for part in rows.split(64)]
    model.train()
    return sum(losses) / len(rows)


def train(name: str, lr: float, settings: Settings) -> Run:
    """Trains from the same weights on the same batches as every run."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    rows, held_out = corpus(settings)
    held_out = held_out[:256]
    model = model_of(settings)
    optimizer, step = stepping(CANDIDATES[name], model, lr)
    warmup = max(1, round(settings.steps * WARMUP))

    def factor(done: int) -> float:
        return min((done + 1) / warmup, (settings.steps - done) / max(1, settings.steps - warmup))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    tokens, losses = [0], [held_out_loss(model, held_out)]
    for done in range(1, settings.steps + 1):
        first = (done - 1) * settings.batch % (len(rows) - settings.batch + 1)
        batch = rows[first : first + settings.batch]
        loss = model(input_ids=batch, labels=batch).loss
        step(loss)
        schedule.step()
        if done % settings.every == 0 or done == settings.steps:
            tokens.append(done * settings.batch * settings.length)
            losses.append(held_out_loss(model, held_out))
            if not losses[-1] < 2 * losses[0]:
                losses[-1] = math.inf
                break
    state = sum(tensor.nbytes for tensor in reports.state_tensors(optimizer))
    parameters = sum(p.numel() for p in model.parameters())
    return Run(name, lr, tokens, losses, state / parameters, time.perf_counter() - start)


def key_of(name: str, settings: Settings) -> str:
    """Everything that a run depends on except its learning rate."""
    candidate = CANDIDATES[name]
    return repr((candidate.rule, candidate.hyper, candidate.ordinary, settings))


def best_of(runs: list[Run]) -> Run:
    return min(runs, key=lambda run: run.final)


def missing_runs(
    runs: dict[str, list[Run]], names: Sequence[str], extensions: dict[str, int]
) -> list[tuple[str, float]]:
    """Runs that are still to be done: the rest of a grid, or the learning rate beyond its edge if that was best."""
    todo = []
    for name in names:
        done = {run.lr for run in runs[name]}
        missing = [lr for lr in CANDIDATES[name].lrs if lr not in done]
        if not missing and extensions[name] < EXTENSIONS:
            lrs, best = sorted(done), best_of(runs[name]).lr
            ratio = CANDIDATES[name].lrs[1] / CANDIDATES[name].lrs[0]
            missing = [best * ratio] if best == lrs[-1] else [best / ratio] if best == lrs[0] else []
            extensions[name] += 1
        todo += [(name, lr) for lr in missing]
    return todo


def tokens_to(run: Run, loss: float) -> float | None:
    """Tokens until the held-out loss first is at most `loss`, on straight lines between evaluations."""
    for (t0, l0), (t1, l1) in itertools.pairwise(zip(run.tokens, run.losses, strict=True)):
        if l1 <= loss:
            return t1 if l0 <= loss else t0 + (t1 - t0) * (l0 - loss) / (l0 - l1)
    return None


@command
def main(argv: Sequence[str] | None = None) -> None:
    sizes = {
        "steps": (255, "steps of a run"),
        "hidden": (128, "hidden size"),
        "layers": (4, "layers"),
        "batch": (16, "rows per step"),
        "length": (128, "tokens per row"),
        "vocab": (2048, "vocabulary"),
        "every": (15, "steps between evaluations"),
    }
    jobs = {"jobs": (1, "concurrent runs, of one thread each")}
    parser = reports.make_parser(__doc__, {**sizes, **jobs}, dtype=False, only="optimizer")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and batches (0)")
    options = parser.parse_args(argv)
    settings = Settings(**{name: getattr(options, name) for name in (*sizes, "seed")})
    names = list(select(CANDIDATES, options.only))
    with reports.output(options.out, "convergence"):
        report(finished_runs(names, settings, options.jobs, options.out), settings, options.out)


def finished_runs(names: Sequence[str], settings: Settings, jobs: int, folder: Path) -> dict[str, list[Run]]:
    """Does the runs that are not stored in the folder yet, and returns all of them by optimizer."""
    stored = folder / "convergence.runs.jsonl"
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for line in stored.read_text().splitlines() if stored.exists() else []:
        fields = json.loads(line)
        name = fields["optimizer"]
        if name in runs and fields.pop("key") == key_of(name, settings):
            runs[name].append(Run(**fields))
    extensions = dict.fromkeys(names, 0)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool, stored.open("a") as file:
        while todo := missing_runs(runs, names, extensions):
            futures = [pool.submit(train, name, lr, settings) for name, lr in todo]
            for number, future in enumerate(futures, 1):
                run = future.result()
                runs[run.optimizer].append(run)
                file.write(json.dumps({**asdict(run), "key": key_of(run.optimizer, settings)}) + "\n")
                file.flush()
                shown = f"{run.optimizer:14} lr {run.lr:8.2e}  loss {run.final:.4f}  {run.seconds:.0f} s"
                print(f"{number}/{len(futures)}  {shown}", file=sys.stderr, flush=True)
    return {name: sorted(runs[name], key=lambda run: run.lr) for name in names}


def report(runs: dict[str, list[Run]], settings: Settings, folder: Path) -> None:
    """Prints the table, and writes the figures and the curves."""
    best = {name: best_of(found) for name, found in runs.items()}
    adamw = best.get("AdamW")
    rows = []
    for name, run in sorted(best.items(), key=lambda item: item[1].final):
        over = reached = "–"
        if adamw is not None:
            half = adamw.losses[len(adamw.losses) // 2]
            count, base = tokens_to(run, half), tokens_to(adamw, half)
            assert base is not None
            over = f"{run.final - adamw.final:+.3f}"
            reached = f"{count:,.0f} ({count / base:.2f} ×)" if count is not None else "not reached"
        rows.append((name, f"{run.lr:.3g}", f"{run.final:.3f}", over, reached, f"{run.state_bytes:.2f}"))
    print(f"{headline('float32')}\n")
    losses = ("held-out loss", "over AdamW", "tokens to AdamW's loss at half")
    print_table(("optimizer", "best lr", *losses, "state, bytes per weight"), rows)
    train_rows, held_out = corpus(settings)
    parameters = sum(p.numel() for p in model_of(settings).parameters())
    text = {"rows": len(train_rows), "held_out": len(held_out), "parameters": parameters}
    listed = {name: {"best_lr": best[name].lr, "runs": [asdict(run) for run in runs[name]]} for name in runs}
    reports.save(folder / "convergence.json", asdict(settings), text=text, optimizers=listed)
    draw(runs, best, settings, parameters, folder / "convergence.png")


def draw(runs: dict[str, list[Run]], best: dict[str, Run], settings: Settings, parameters: int, path: Path) -> None:
    """Draws the loss against tokens at the best learning rate, and the last loss against the learning rate."""
    tokens = settings.steps * settings.batch * settings.length
    title = f"Llama of {parameters / 1e6:.1f}M parameters on docstrings, {tokens / 1e3:,.0f} thousand tokens, float32"
    with picture(path, title, (11, 4.9), 2, width_ratios=(3, 2)) as (left, right):
        for name, (color, width) in LOOKS.items():
            if name not in best:
                continue
            run, finite = best[name], [r for r in runs[name] if math.isfinite(r.final)]
            label = f"{name}  lr {run.lr:.2g}  {run.final:.2f}"
            left.plot([t / 1000 for t in run.tokens], run.losses, color=color, lw=width, label=label)
            lrs, finals = [r.lr for r in finite], [r.final for r in finite]
            right.plot(lrs, finals, color=color, lw=width, marker="o", ms=width + 2)
        lowest = min(run.final for run in best.values())
        left.set(xlabel="thousand tokens", ylabel="held-out loss, nats per token", ylim=(lowest - 0.15, lowest + 3.2))
        legend = left.get_legend_handles_labels()
        left.figure.legend(*legend, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
        right.set(xlabel="peak learning rate", xscale="log", ylabel="at the end", ylim=(lowest - 0.1, lowest + 2.2))


if __name__ == "__main__":
    main()
