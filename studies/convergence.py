"""How well rules train from scratch: one small Llama, the same text in the same order, each at its best learning rate.

The text is every docstring of the standard library, after its signature. AdamW is torch's and takes ordinary steps.
Each optimizer has a grid of learning rates, which is extended while the best one lies on its edge.
"""

import ast
import functools
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import lowmem
from benchmarks.measurement import llama
from benchmarks.pages import markdown
from scripts.make_docstrings import functions, signature
from scripts.make_model import train_tokenizer
from studies import training
from studies.methods import NO_DECAY

KEYS = ("optimizer", "lr")
STEPS, BATCH, LENGTH, VOCAB, EVERY = 255, 16, 128, 2048, 15
LAYERS, HIDDEN = 4, 128
SETTINGS = {"steps": STEPS, "batch": BATCH, "length": LENGTH, "vocab": VOCAB, "layers": LAYERS, "hidden": HIDDEN}
EXTENSIONS = 3  # how often a grid may be extended by one learning rate
ADAMW = (torch.optim.AdamW, (1e-3, 2e-3, 4e-3, 8e-3))
# Rule, or torch's class; learning rates with which the search begins; hyperparameters
OPTIMIZERS: dict[str, tuple[Any, tuple[float, ...], dict[str, Any]]] = {
    "AdamW": (*ADAMW, {"betas": (0.9, 0.95), **NO_DECAY}),
    "AdamW, β₂ 0.999": (*ADAMW, NO_DECAY),
    "adalomo": ("adalomo", (1e-2, 2e-2, 4e-2, 8e-2), {}),
    "adafactor": ("adafactor", (1e-2, 2e-2, 4e-2, 8e-2), {"min_dim_size_to_factor": 32}),
    "adafactor_t2t": ("adafactor_t2t", (1e-2, 2e-2, 4e-2, 8e-2), {}),
    "scaled_adam": ("scaled_adam", (1.5e-2, 3e-2, 6e-2, 1.2e-1), {}),
    "lans": ("lans", (2.5e-3, 5e-3, 1e-2, 2e-2), {}),
    "lomo": ("lomo", (1e-1, 3e-1, 1.0, 3.0), {}),
}


def documents() -> Iterator[str]:
    for name, _, tree in training.parsed():
        parts = [f"# {name}\n{ast.get_docstring(tree) or ''}"]
        for inside, function in functions(tree):
            if text := ast.get_docstring(function):
                parts.append(f"{inside}.{signature(function)}\n{text}")
        if len(parts) > 1:
            yield "\n\n".join(parts)


@functools.cache
def corpus() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of token ids [rows, length] to train on and, from other modules, to hold out."""
    texts = list(documents())
    random.Random(0).shuffle(texts)
    held_out = max(1, len(texts) // 20)
    tokenizer = train_tokenizer(texts[held_out:], VOCAB)

    def rows(some: list[str]) -> torch.Tensor:
        ids = torch.tensor([token for text in some for token in tokenizer(text)["input_ids"]])
        return ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)

    train = rows(texts[held_out:])
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    return train[order], rows(texts[:held_out])


@torch.no_grad()
def held_out_loss(model: Any, rows: torch.Tensor) -> float:
    model.eval()
    losses = [model(input_ids=part, labels=part).loss.item() * len(part) for part in rows.split(64)]
    model.train()
    return sum(losses) / len(rows)


def runs(done: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """The grid of each, and the learning rate beyond its edge while that is best."""
    for name, (_, grid, _) in OPTIMIZERS.items():
        known = {run["lr"]: run["losses"][-1] for run in done if run["optimizer"] == name}
        yield from ({"optimizer": name, "lr": lr} for lr in grid)
        best, ratio = min(known, key=known.get, default=None), grid[1] / grid[0]  # type: ignore[arg-type]
        if len(known) < len(grid) + EXTENSIONS and best in (min(known, default=0), max(known, default=0)):
            yield {"optimizer": name, "lr": best * ratio if best == max(known) else best / ratio}


def train(run: dict[str, Any], work: Path) -> dict[str, Any]:
    """Trains from the same weights on the same batches as every run."""
    rows, held_out = corpus()
    options = {
        "max_position_embeddings": LENGTH, "tie_word_embeddings": True, "num_attention_heads": HIDDEN // 32,
        "num_key_value_heads": HIDDEN // 64,
    }  # fmt: skip
    model = llama(LAYERS, HIDDEN, HIDDEN * 3, VOCAB, "float32", checkpointing=False, **options)
    rule, _, hyper = OPTIMIZERS[run["optimizer"]]
    if isinstance(rule, str):
        optimizer: Any = lowmem.FusedOptimizer(model.named_parameters(), rule, lr=run["lr"], **hyper)
    else:
        optimizer = rule(model.parameters(), lr=run["lr"], **hyper)
    schedule = training.schedule(optimizer, STEPS)
    tokens, losses = [0], [held_out_loss(model, held_out)]
    for done in range(1, STEPS + 1):
        first = (done - 1) * BATCH % (len(rows) - BATCH + 1)
        batch = rows[first : first + BATCH]
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if done % EVERY == 0 or done == STEPS:
            tokens.append(done * BATCH * LENGTH)
            losses.append(held_out_loss(model, held_out))
            if not losses[-1] < 2 * losses[0]:
                losses[-1] = math.inf
                break
    states = optimizer.state_dict()["state"].values()
    state = sum(value.nbytes for each in states for value in each.values() if isinstance(value, torch.Tensor))
    weights = sum(param.numel() for param in model.parameters())
    return {"tokens": tokens, "losses": losses, "state_bytes": state / weights}


def tokens_to(run: Any, loss: float) -> float | None:
    """Tokens until the held-out loss first is at most `loss`, on straight lines between evaluations."""
    for (t0, l0), (t1, l1) in itertools.pairwise(zip(run["tokens"], run["losses"], strict=True)):
        if l1 <= loss:
            return t1 if l0 <= loss else t0 + (t1 - t0) * (l0 - loss) / (l0 - l1)
    return None


def tables(report: Any) -> dict[str, str]:
    """Each at its best learning rate, the lowest loss first."""
    best: dict[str, Any] = {}
    for run in sorted(report["runs"], key=lambda run: run["losses"][-1]):
        best.setdefault(run["optimizer"], run)
    adamw = best["AdamW"]
    half = adamw["losses"][len(adamw["losses"]) // 2]
    rows = []
    for name, run in best.items():
        count, base = tokens_to(run, half), tokens_to(adamw, half)
        rows.append(
            {
                "optimizer": name, "best lr": f"{run['lr']:.3g}", "held-out loss": f"{run['losses'][-1]:.3f}",
                "over AdamW": f"{run['losses'][-1] - adamw['losses'][-1]:+.3f}",
                "tokens to AdamW's loss at half": f"{count / base:.2f} ×" if count and base else "not reached",
                "state, bytes per weight": f"{run['state_bytes']:.2f}",
            }
        )  # fmt: skip
    return {"": markdown(rows)}
