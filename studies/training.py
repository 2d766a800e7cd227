"""One run of the studies of fine-tuning: its texts, its pretrained model, and a short training by one rule.

All text is the Python standard library's of this machine: models are pretrained on its code ("old text") and trained on
its docstrings ("new text").
"""

import ast
import functools
import math
import random
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lowmem
from benchmarks.measurement import llama
from lowmem.errors import StepError
from scripts.make_docstrings import functions, module_name, source_files
from scripts.make_model import train_tokenizer

# Layers, hidden size, and updates and learning rate of pretraining.
SIZES = {
    "0.7M": (2, 128, 1500, 4e-3), "1M": (4, 128, 1500, 4e-3), "5M": (6, 256, 800, 2e-3), "20M": (6, 512, 500, 1e-3),
}  # fmt: skip
PRETRAINING_ROWS = 8  # per update
TABLES = {"encodings", "pydoc_data", "unicodedata", "turtledemo"}  # modules that hold data rather than code
LONGEST = 40_000  # characters of one module that are read
WARMUP = 0.05  # of the updates; then the learning rate decays linearly to zero


@dataclass(frozen=True)
class Task:
    """Settings that the runs of a study share.

    Attributes:
        rows: of each text that are held out.
        pretrained: whether weights are pretrained, or random, others for each seed.
        trained: the text to train on: "new", or "old" again.
        looks: shares of the updates after which the held-out losses are taken.
        products: dtype of matrix products and hidden states. In "float32" all parameters are float32 as well, and a
            storage may hold them in fewer bits: for processors without bfloat16 instructions.
    """

    updates: int = 150
    batch: int = 4
    length: int = 128
    vocab: int = 2048
    rows: int = 64
    pretrained: bool = True
    trained: str = "new"
    looks: tuple[float, ...] = (0.5, 1.0)
    products: str = "bfloat16"


# -- texts -------------------------------------------------------------------------------------------------------------


class _WithoutDocstrings(ast.NodeTransformer):
    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return node


def parsed() -> Iterator[tuple[str, Path, ast.Module]]:
    """The modules of the standard library, with their names."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in source_files(root):
        try:
            yield module_name(path, root), path.relative_to(root), ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # the library contains broken files on purpose, for its tests
            continue


def modules() -> Iterator[tuple[str, str]]:
    """Each module in two texts: its code without docstrings and comments, and its docstrings."""
    for name, path, tree in parsed():
        if TABLES.isdisjoint(path.parts):
            docstrings = [ast.get_docstring(tree), *(ast.get_docstring(function) for _, function in functions(tree))]
            code = ast.unparse(_WithoutDocstrings().visit(tree))
            yield f"# {name}\n{code}"[:LONGEST], "\n\n".join(text for text in docstrings if text)


@dataclass(frozen=True)
class Texts:
    """Token ids [rows, length] of code ("old") and docstrings ("new"), to train on and, of other modules, held out."""

    old: Tensor
    new: Tensor
    old_held_out: Tensor
    new_held_out: Tensor


@functools.cache
def texts(length: int, vocab: int, held_out_rows: int) -> Texts:
    every = list(modules())
    random.Random(0).shuffle(every)
    held_out = len(every) // 12
    tokenizer = train_tokenizer((text for pair in every[held_out:] for text in pair), vocab)

    def rows(some: list[str]) -> Tensor:
        ids = torch.tensor([token for ids in tokenizer([text for text in some if text])["input_ids"] for token in ids])
        rows = ids[: len(ids) // length * length].view(-1, length)
        return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]

    old, new = zip(*every, strict=True)
    some = (rows(old[:held_out])[:held_out_rows], rows(new[:held_out])[:held_out_rows])
    return Texts(rows(old[held_out:]), rows(new[held_out:]), *some)


# -- the model ---------------------------------------------------------------------------------------------------------


def model_of(size: str, task: Task, seed: int = 0) -> Any:
    """A Llama with random float32 weights. Its hidden states have the dtype of the task, whatever its weights are."""
    layers, hidden, *_ = SIZES[size]
    options = {
        "max_position_embeddings": task.length, "tie_word_embeddings": True, "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64, "attn_implementation": "eager",  # faster than sdpa at these sizes
    }  # fmt: skip
    model = llama(layers, hidden, hidden * 3, task.vocab, "float32", checkpointing=False, seed=seed, **options)
    model.products = task.products
    if task.products == "bfloat16":
        model.get_input_embeddings().register_forward_hook(lambda module, args, states: states.bfloat16())
    return model


def loss_of(model: Any, rows: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=model.products == "bfloat16"):
        return model(input_ids=rows, labels=rows).loss


@torch.no_grad()
def held_out_losses(model: Any, text: Texts) -> tuple[float, float]:
    """Of the new text and of the old one."""
    model.eval()
    new, old = (
        sum(loss_of(model, part).item() * len(part) for part in rows.split(32)) / len(rows)
        for rows in (text.new_held_out, text.old_held_out)
    )
    model.train()
    return new, old


def batches(rows: Tensor, batch: int, seed: int) -> Iterator[Tensor]:
    """Batches in another order for each seed, again and again; smaller batches see the same rows."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        for some in torch.randperm(len(rows), generator=generator)[: len(rows) // batch * batch].split(batch):
            yield rows[some]


def warmup(updates: int) -> int:
    return max(1, round(updates * WARMUP))


def schedule(optimizer: torch.optim.Optimizer, updates: int) -> Any:
    rising = warmup(updates)

    def factor(done: int) -> float:
        return min((done + 1) / rising, (updates - done) / max(1, updates - rising))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def pretrained(size: str, task: Task, work: Path) -> dict[str, Tensor]:
    """Weights that were trained on code by torch's AdamW, rounded to bfloat16; from the folder if they are there."""
    path = work / f"{size}-{task.vocab}-{task.products}.pt"
    if not path.exists():
        _, _, updates, lr = SIZES[size]
        model = model_of(size, task)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), fused=True)
        rates, text = schedule(optimizer, updates), texts(task.length, task.vocab, task.rows)
        for _, rows in zip(range(updates), batches(text.old, PRETRAINING_ROWS, 0), strict=False):
            loss_of(model, rows).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            rates.step()
        torch.save({name: param.detach().bfloat16() for name, param in model.named_parameters()}, path)
    return torch.load(path)


def norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(tensor.float().square().sum().item() for tensor in tensors))


def distance(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The norm of the difference over the norm of `theirs`."""
    return norm(a.float() - b.float() for a, b in zip(ours, theirs, strict=True)) / norm(theirs)


def changed(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The share of the elements that differ."""
    pairs = list(zip(ours, theirs, strict=True))
    return sum((a != b).sum().item() for a, b in pairs) / sum(a.numel() for a, _ in pairs)


# -- a run -------------------------------------------------------------------------------------------------------------


def matrices(model: Any) -> list[Tensor]:
    return [param.detach() for param in model.parameters() if param.dim() > 1]


def train(
    task: Task, work: Path, rule: str, lr: float, options: dict[str, Any], *, rounding: str = "nearest",
    size: str = "1M", seed: int = 0, batch: int = 4, bfloat16: bool = False,
    prepare: Callable[[Any], None] = lambda model: None,
    parameters: Callable[[Any], Iterable[Any]] = lambda model: model.named_parameters(), compile_model: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Trains the pretrained model, or a random one.

    Args:
        options: hyperparameters and options of `FusedOptimizer`.
        batch: rows per update, at equal tokens.
        bfloat16: the weights are bfloat16.
        prepare: changes the model before its first update.
        parameters: returns a model's parameters as optimizers take them.
        compile_model: train the model compiled; held-out losses are computed by the uncompiled model.

    Returns:
        `new`, `old`: held-out losses in nats per token on both texts; infinite if the run diverged.
        `curve`: (share of the updates, loss on the new text, loss on the old one).
        `moved`: share of the elements of matrices that an update changes, at the highest learning rate.
        `step`: norm of an update over the norm of the weights, there.
        `change`: norm of all changes over the norm of the first weights, at the end.
    """
    text = texts(task.length, task.vocab, task.rows)
    model = model_of(size, task, 0 if task.pretrained else seed)
    if bfloat16 and task.products == "bfloat16":
        for param in model.parameters():  # and no buffer, such as the frequencies of positions
            param.data = param.data.bfloat16()
    if task.pretrained:
        model.load_state_dict(pretrained(size, task, work), strict=False)  # the head is the embedding
    prepare(model)
    first = [weight.clone() for weight in matrices(model)]
    settings = {"lr": lr, "rounding": rounding, "state_storage": "float32", "seed": seed, "compile": size != "1M"}
    optimizer = lowmem.FusedOptimizer(parameters(model), rule, **settings | options)
    trained = torch.compile(model) if compile_model else model
    updates = task.updates * task.batch // batch
    rates = schedule(optimizer, updates)
    watched = {min(warmup(updates) + more, updates) for more in (1, 3, 5)}
    shown = {max(1, round(updates * share)) for share in task.looks}
    rows_trained, loss = (text.old, 2) if task.trained == "old" else (text.new, 1)
    curve, moved, steps = [(0.0, *held_out_losses(model, text))], [], []
    try:
        for update, rows in zip(range(1, updates + 1), batches(rows_trained, batch, seed), strict=False):
            before = [weight.clone() for weight in matrices(model)] if update in watched else []
            optimizer.backward(loss_of(trained, rows))
            rates.step()
            if before:
                moved.append(changed(matrices(model), before))
                steps.append(distance(matrices(model), before))
            if update in shown:
                curve.append((update / updates, *held_out_losses(model, text)))
                if not curve[-1][loss] < curve[0][loss] + 1.0:
                    break
    except StepError:  # gradients that are not finite
        curve.append((1.0, math.inf, math.inf))
    optimizer.remove()
    new, old = curve[-1][1:] if curve[-1][0] == 1.0 else (math.inf, math.inf)
    means = {"moved": sum(moved) / max(1, len(moved)), "step": sum(steps) / max(1, len(steps))}
    return {"new": new, "old": old, "curve": curve, **means, "change": distance(matrices(model), first)}
