"""How well the rules train: one small Llama, the same text in the same order, each optimizer at its best learning rate.

    python benchmarks/convergence.py [--steps 255 --jobs 2] [--only adalomo] [--out benchmarks/results]

The text is every docstring of this machine's Python standard library, behind its signature. AdamW is torch's own and
takes ordinary steps; all others run through `FusedOptimizer`. Each has a grid of learning rates, which grows while the
best one lies on its edge. Finished runs are kept in the results folder, so that an interrupted benchmark goes on.
"""

import argparse
import ast
import functools
import itertools
import json
import math
import multiprocessing
import os
import platform
import random
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import lowmem
from lowmem.run.tokenizers import train_tokenizer

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from make_docstrings import functions, module_name, signature, source_files

GROWTH = 3  # how often a grid may grow by one learning rate
WARMUP = 0.05  # of the steps; from there on the learning rate falls to zero in a line


@dataclass(frozen=True)
class Contender:
    """An optimizer as it is made, and where its search for a learning rate begins."""

    rule: str | type
    lrs: tuple[float, ...]
    settings: tuple[tuple[str, Any], ...] = ()
    ordinary: bool = False  # torch's own loop, with a step() after backward


NO_DECAY = (("weight_decay", 0.0),)
CONTENDERS = {
    "AdamW": Contender(torch.optim.AdamW, (1e-3, 2e-3, 4e-3, 8e-3), (("betas", (0.9, 0.95)), *NO_DECAY), ordinary=True),
    "AdamW, β₂ 0.999": Contender(torch.optim.AdamW, (1e-3, 2e-3, 4e-3, 8e-3), NO_DECAY, ordinary=True),
    "adalomo": Contender("adalomo", (1e-2, 2e-2, 4e-2, 8e-2)),
    "adafactor": Contender("adafactor", (1e-2, 2e-2, 4e-2, 8e-2), (("min_dim_size_to_factor", 32),)),
    "adafactor_t2t": Contender("adafactor_t2t", (1e-2, 2e-2, 4e-2, 8e-2)),
    "scaled_adam": Contender("scaled_adam", (1.5e-2, 3e-2, 6e-2, 1.2e-1)),
    "lans": Contender("lans", (2.5e-3, 5e-3, 1e-2, 2e-2)),
    "lomo": Contender("lomo", (1e-1, 3e-1, 1.0, 3.0)),
}
# Colours and line widths; the factored rules are one another's equals here, and are drawn as rims of one line.
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
    """A finished run: held-out loss in nats a token after so many tokens; of one that diverged, infinity at its end."""

    contender: str
    lr: float
    tokens: list[int]
    losses: list[float]
    state_bytes: float
    seconds: float

    @property
    def final(self) -> float:
        return self.losses[-1]


def documents() -> Iterator[str]:
    """Every docstring of the standard library behind its signature, module by module."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in source_files(root):
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # the library ships broken files on purpose, for its tests
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

    def rows(chosen: list[str]) -> torch.Tensor:
        ids = torch.tensor([token for text in chosen for token in tokenizer(text)["input_ids"]])
        return ids[: len(ids) // settings.length * settings.length].view(-1, settings.length)

    train = rows(texts[held_out:])
    return train[torch.randperm(len(train), generator=torch.Generator().manual_seed(settings.seed))], rows(
        texts[:held_out]
    )


def model_of(settings: Settings) -> LlamaForCausalLM:
    torch.manual_seed(settings.seed)
    config = LlamaConfig(
        vocab_size=settings.vocab,
        hidden_size=settings.hidden,
        intermediate_size=settings.hidden * 3,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.hidden // 32,
        num_key_value_heads=settings.hidden // 64,
        max_position_embeddings=settings.length,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).train()


def stepping(
    contender: Contender, model: torch.nn.Module, lr: float
) -> tuple[torch.optim.Optimizer, Callable[..., None]]:
    """An optimizer over the model, and what takes a step by a loss."""
    if not contender.ordinary:
        fused = lowmem.FusedOptimizer(model.named_parameters(), contender.rule, lr=lr, **dict(contender.settings))
        return fused, fused.backward
    assert isinstance(contender.rule, type)
    optimizer = contender.rule(model.parameters(), lr=lr, **dict(contender.settings))

    def step(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return optimizer, step


def bytes_kept(optimizer: torch.optim.Optimizer) -> int:
    return sum(t.nbytes for kept in optimizer.state.values() for t in kept.values() if isinstance(t, torch.Tensor))


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, rows: torch.Tensor) -> float:
    model.eval()
    losses = [model(input_ids=part, labels=part).loss.item() * len(part) for part in rows.split(64)]
    model.train()
    return sum(losses) / len(rows)


def train(name: str, lr: float, settings: Settings) -> Run:
    """One run from the same weights over the same batches."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    rows, held_out = corpus(settings)
    held_out = held_out[:256]
    model = model_of(settings)
    optimizer, step = stepping(CONTENDERS[name], model, lr)
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
    kept = bytes_kept(optimizer) / sum(p.numel() for p in model.parameters())
    return Run(name, lr, tokens, losses, kept, time.perf_counter() - start)


def key_of(name: str, settings: Settings) -> str:
    """What a finished run depends on but its learning rate."""
    made = CONTENDERS[name]
    return repr((made.rule, made.settings, made.ordinary, settings))


def best_of(runs: list[Run]) -> Run:
    return min(runs, key=lambda run: run.final)


def wanted(runs: dict[str, list[Run]], names: list[str], grown: dict[str, int]) -> list[tuple[str, float]]:
    """Runs still to be done: the rest of a grid, or the learning rate beyond its edge if that was best."""
    found = []
    for name in names:
        done = {run.lr for run in runs[name]}
        missing = [lr for lr in CONTENDERS[name].lrs if lr not in done]
        if not missing and grown[name] < GROWTH:
            lrs, best = sorted(done), best_of(runs[name]).lr
            ratio = CONTENDERS[name].lrs[1] / CONTENDERS[name].lrs[0]
            missing = [best * ratio] if best == lrs[-1] else [best / ratio] if best == lrs[0] else []
            grown[name] += 1
        found += [(name, lr) for lr in missing]
    return found


def tokens_to(run: Run, loss: float) -> float | None:
    """Tokens until the held-out loss first is at most `loss`, on straight lines between evaluations."""
    for (t0, l0), (t1, l1) in itertools.pairwise(zip(run.tokens, run.losses, strict=True)):
        if l1 <= loss:
            return t1 if l0 <= loss else t0 + (t1 - t0) * (l0 - loss) / (l0 - l1)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    sizes = {
        "steps": 255,
        "hidden": 128,
        "layers": 4,
        "batch": 16,
        "length": 128,
        "vocab": 2048,
        "every": 15,
        "seed": 0,
    }
    for option, default in sizes.items():
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, one thread each")
    parser.add_argument("--only", choices=CONTENDERS, action="append", help="this contender alone; may be repeated")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    settings = Settings(**{name: getattr(options, name) for name in sizes})
    names = options.only or list(CONTENDERS)
    options.out.mkdir(parents=True, exist_ok=True)
    cache = options.out / "convergence.runs.jsonl"
    runs: dict[str, list[Run]] = {name: [] for name in CONTENDERS}
    for line in cache.read_text().splitlines() if cache.exists() else []:
        kept = json.loads(line)
        if kept.pop("key") == key_of(kept["contender"], settings):
            runs[kept["contender"]].append(Run(**kept))
    grown = dict.fromkeys(names, 0)
    with (
        ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool,
        cache.open("a") as file,
    ):
        while todo := wanted(runs, names, grown):
            futures = [pool.submit(train, name, lr, settings) for name, lr in todo]
            for number, future in enumerate(futures, 1):
                run = future.result()
                runs[run.contender].append(run)
                file.write(json.dumps({**asdict(run), "key": key_of(run.contender, settings)}) + "\n")
                file.flush()
                shown = f"{run.contender:14} lr {run.lr:8.2e}  loss {run.final:.4f}  {run.seconds:.0f} s"
                print(f"{number}/{len(futures)}  {shown}", file=sys.stderr, flush=True)
    runs = {name: sorted(runs[name], key=lambda run: run.lr) for name in names}
    report(runs, settings, options.out)


def report(runs: dict[str, list[Run]], settings: Settings, folder: Path) -> None:
    """A table on the terminal, the figures as JSON, the curves as a picture."""
    best = {name: best_of(found) for name, found in runs.items()}
    adamw = best.get("AdamW")
    print("| optimizer | best lr | held-out loss | over AdamW | tokens to AdamW's loss at half | state, bytes |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, run in sorted(best.items(), key=lambda item: item[1].final):
        over = reached = "-"
        if adamw is not None:
            half = adamw.losses[len(adamw.losses) // 2]
            count, base = tokens_to(run, half), tokens_to(adamw, half)
            assert base is not None
            over = f"{run.final - adamw.final:+.3f}"
            reached = f"{count:,.0f} ({count / base:.2f} x)" if count is not None else "not reached"
        print(f"| {name} | {run.lr:.3g} | {run.final:.3f} | {over} | {reached} | {run.state_bytes:.2f} |")
    rows, held_out = corpus(settings)
    text = {
        "rows": len(rows),
        "held_out": len(held_out),
        "parameters": sum(p.numel() for p in model_of(settings).parameters()),
    }
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
    found = {"settings": asdict(settings), "text": text, "machine": machine}
    listed = {name: {"best_lr": best[name].lr, "runs": [asdict(run) for run in runs[name]]} for name in runs}
    (folder / "convergence.json").write_text(json.dumps({**found, "contenders": listed}, indent=1) + "\n")
    draw(runs, best, settings, text["parameters"], folder / "convergence.png")


def draw(runs: dict[str, list[Run]], best: dict[str, Run], settings: Settings, parameters: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.9), width_ratios=(3, 2), layout="constrained")
    for name, (color, width) in LOOKS.items():
        if name not in best:
            continue
        run, finite = best[name], [r for r in runs[name] if math.isfinite(r.final)]
        label = f"{name}  lr {run.lr:.2g}  {run.final:.2f}"
        left.plot([t / 1000 for t in run.tokens], run.losses, color=color, lw=width, label=label)
        right.plot([r.lr for r in finite], [r.final for r in finite], color=color, lw=width, marker="o", ms=width + 2)
    lowest = min(run.final for run in best.values())
    left.set(xlabel="thousand tokens", ylabel="held-out loss, nats a token", ylim=(lowest - 0.15, lowest + 3.2))
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    right.set(xlabel="peak learning rate", xscale="log", ylabel="at the end", ylim=(lowest - 0.1, lowest + 2.2))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    tokens = settings.steps * settings.batch * settings.length
    figure.suptitle(
        f"Llama of {parameters / 1e6:.1f}M parameters on docstrings, {tokens / 1e3:,.0f} thousand tokens, float32"
    )
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
