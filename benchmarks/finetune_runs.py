"""One run of the fine-tuning study: its texts, its pretrained model, and a short training by one rule."""

import ast
import functools
import math
import random
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lowmem
from benchmarks.models import llama
from lowmem.errors import StepError
from scripts.make_docstrings import functions, module_name, source_files
from scripts.make_model import train_tokenizer

# Layers, hidden size, and updates and learning rate of pretraining.
SIZES = {
    "0.7M": (2, 128, 1500, 4e-3),
    "1M": (4, 128, 1500, 4e-3),
    "5M": (6, 256, 800, 2e-3),
    "20M": (6, 512, 500, 1e-3),
}
PRETRAINING_ROWS = 8  # per update
TABLES = {"encodings", "pydoc_data", "unicodedata", "turtledemo"}  # modules that hold data rather than code
LONGEST = 40_000  # characters of one module that are read
WARMUP = 0.05  # of the updates; then the learning rate decays linearly to zero


@dataclass(frozen=True)
class Method:
    """A rule with its hyperparameters, and the learning rate near which its search begins.

    `variant`: it is part of an ablation, and not of the grid.
    """

    rule: str
    lr: float
    options: dict[str, Any] = field(default_factory=dict)
    variant: bool = False


NO_DECAY = {"weight_decay": 0.0}
SMALL_MATRICES = {"min_dim_size_to_factor": 32}
METHODS = {
    "adalomo": Method("adalomo", 3e-2),
    "adamw": Method("adamw", 3e-3, NO_DECAY),
    "adafactor": Method("adafactor", 3e-2, SMALL_MATRICES),
    "adafactor_t2t": Method("adafactor_t2t", 3e-2),
    "lion": Method("lion", 3e-4, NO_DECAY),
    "lomo": Method("lomo", 1.0, {"clip_norm": 1.0}),
    "lans": Method("lans", 1e-2),
    "scaled_adam": Method("scaled_adam", 3e-2),
    "adamw, β₂ 0.95": Method("adamw", 3e-3, {**NO_DECAY, "betas": (0.9, 0.95)}, True),
    "adalomo, u not clipped": Method("adalomo", 3e-2, {"clip_threshold": 1e30}, True),
    "adalomo, ε₂ 0.1": Method("adalomo", 3e-2, {"eps": (1e-30, 0.1)}, True),
    "adalomo, ε₂ 1e-6": Method("adalomo", 3e-2, {"eps": (1e-30, 1e-6)}, True),
    "adalomo, ε₁ 1e-8": Method("adalomo", 3e-2, {"eps": (1e-8, 1e-3)}, True),
    "adafactor, lr not relative": Method(
        "adafactor", 3e-3, {**SMALL_MATRICES, "multiply_by_parameter_scale": False}, True
    ),
    "lomo, not clipped": Method("lomo", 1.0, {}, True),
}  # fmt: skip


@dataclass(frozen=True)
class Study:
    """What all runs share. `rows` are those of each text that are held out.

    Attributes:
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
    pretraining: float = 1.0  # of the updates in `SIZES`; 0: weights are random, others for each seed
    trained: str = "new"
    looks: tuple[float, ...] = (0.5, 1.0)
    products: str = "bfloat16"


@dataclass(frozen=True)
class Run:
    """One training. `rounding` of bfloat16 weights, or "float32"; `batch` rows per update, at equal tokens."""

    method: str
    rounding: str
    lr: float
    size: str = "1M"
    seed: int = 0
    batch: int = 4


@dataclass(frozen=True)
class Result:
    """Held-out losses in nats per token on the new text and on the old one; infinite if the run diverged.

    Attributes:
        curve: (share of the updates, loss on the new text, loss on the old one).
        moved: share of the elements of matrices that an update changes, at the highest learning rate.
        step: norm of an update over that of the weights, there.
        change: norm of all changes over that of the first weights, at the end.
        codes: share of the elements of 8-bit states whose code the last update changed.
    """

    new: float
    old: float
    curve: list[tuple[float, float, float]]
    moved: float
    step: float
    change: float
    seconds: float
    codes: float | None = None


# -- texts -------------------------------------------------------------------------------------------------------------


class _WithoutDocstrings(ast.NodeTransformer):
    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return node


def modules() -> Iterator[tuple[str, str]]:
    """Each module of the standard library in two texts: its code without docstrings and comments, its docstrings."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in source_files(root):
        if not TABLES.isdisjoint(path.relative_to(root).parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # the library contains broken files on purpose, for its tests
            continue
        found = [ast.get_docstring(tree), *(ast.get_docstring(function) for _, function in functions(tree))]
        code = ast.unparse(_WithoutDocstrings().visit(tree))
        yield f"# {module_name(path, root)}\n{code}"[:LONGEST], "\n\n".join(text for text in found if text)


@dataclass(frozen=True)
class Texts:
    """Token ids [rows, length] of code ("old") and docstrings ("new"), to train on and, of other modules, held out."""

    old: Tensor
    new: Tensor
    old_held_out: Tensor
    new_held_out: Tensor


def texts(study: Study) -> Texts:
    """The texts of a study, in rows of tokens."""
    return _texts(study.length, study.vocab, study.rows)


@functools.cache
def _texts(length: int, vocab: int, rows_held_out: int) -> Texts:
    every = list(modules())
    random.Random(0).shuffle(every)
    held_out = len(every) // 12
    tokenizer = train_tokenizer((text for pair in every[held_out:] for text in pair), vocab)

    def rows(some: list[str]) -> Tensor:
        ids = torch.tensor([token for ids in tokenizer([text for text in some if text])["input_ids"] for token in ids])
        found = ids[: len(ids) // length * length].view(-1, length)
        return found[torch.randperm(len(found), generator=torch.Generator().manual_seed(0))]

    old, new = zip(*every, strict=True)
    return Texts(
        rows(old[held_out:]),
        rows(new[held_out:]),
        rows(old[:held_out])[:rows_held_out],
        rows(new[:held_out])[:rows_held_out],
    )


# -- the model ---------------------------------------------------------------------------------------------------------


def model_of(size: str, study: Study, seed: int = 0) -> Any:
    """A Llama with random float32 weights. Its hidden states have the dtype of the study, whatever its weights are."""
    layers, hidden, *_ = SIZES[size]
    model = llama(
        layers,
        hidden,
        hidden * 3,
        study.vocab,
        "float32",
        checkpointing=False,
        seed=seed,
        max_position_embeddings=study.length,
        tie_word_embeddings=True,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        attn_implementation="eager",  # faster than sdpa at these sizes
    )
    model.products = study.products
    if study.products == "bfloat16":
        model.get_input_embeddings().register_forward_hook(lambda module, args, states: states.bfloat16())
    return model


def loss_of(model: Any, rows: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=model.products == "bfloat16"):
        return model(input_ids=rows, labels=rows).loss


@torch.no_grad()
def held_out_loss(model: Any, rows: Tensor) -> float:
    return sum(loss_of(model, part).item() * len(part) for part in rows.split(32)) / len(rows)


def batches(rows: Tensor, batch: int, seed: int) -> Iterator[Tensor]:
    """Batches in an order of their own for each seed, again and again; smaller batches see the same rows."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        for some in torch.randperm(len(rows), generator=generator)[: len(rows) // batch * batch].split(batch):
            yield rows[some]


def schedule(optimizer: torch.optim.Optimizer, updates: int) -> Any:
    warmup = max(1, round(updates * WARMUP))
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: min((done + 1) / warmup, (updates - done) / max(1, updates - warmup))
    )


def pretrained(size: str, study: Study, folder: Path) -> dict[str, Tensor]:
    """Weights that were trained on code by torch's AdamW, rounded to bfloat16; from the folder if they are there."""
    path = folder / f"{size}-{study.vocab}-{study.pretraining:g}-{study.products}.pt"
    if not path.exists():
        _, _, updates, lr = SIZES[size]
        updates = max(1, round(updates * study.pretraining))
        model = model_of(size, study)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), fused=True)
        rates = schedule(optimizer, updates)
        for _, rows in zip(range(updates), batches(texts(study).old, PRETRAINING_ROWS, 0), strict=False):
            loss_of(model, rows).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            rates.step()
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({name: param.detach().bfloat16() for name, param in model.named_parameters()}, path)
    return torch.load(path)


def matrices(model: nn.Module) -> list[Tensor]:
    return [param.detach() for param in model.parameters() if param.dim() > 1]


def norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(tensor.float().square().sum().item() for tensor in tensors))


def weight_rms(size: str, study: Study, folder: Path) -> dict[str, float]:
    """The root mean square of all matrices of the pretrained model together, the median and extremes over them, and
    the number of its parameters."""
    weights = pretrained(size, study, folder)
    each = sorted(weight.float().square().mean().sqrt().item() for weight in weights.values() if weight.dim() > 1)
    elements = sum(weight.numel() for weight in weights.values() if weight.dim() > 1)
    together = norm([weight for weight in weights.values() if weight.dim() > 1]) / math.sqrt(elements)
    parameters = sum(weight.numel() for weight in weights.values())
    return {
        "rms": together,
        "least": each[0],
        "median": each[len(each) // 2],
        "most": each[-1],
        "parameters": parameters,
    }


# -- a run -------------------------------------------------------------------------------------------------------------


def train(
    run: Run,
    study: Study,
    folder: Path,
    method: Method | None = None,
    *,
    prepare: Callable[[Any], None] = lambda model: None,
    parameters: Callable[[Any], Iterable[Any]] = lambda model: model.named_parameters(),
    compile_model: bool = False,
) -> Result:
    """Trains the pretrained model, or a random one, on docstrings, or on code.

    Args:
        method: the one that the run names, if it is not in `METHODS`.
        prepare: changes the model before its first update.
        parameters: returns a model's parameters as optimizers take them.
        compile_model: train the model compiled; held-out losses are those of the model as it is.
    """
    start = time.perf_counter()
    text, method = texts(study), method or METHODS[run.method]
    model = model_of(run.size, study, 0 if study.pretraining else run.seed)
    if run.rounding != "float32" and study.products == "bfloat16":
        for param in model.parameters():  # and no buffer, such as the frequencies of positions
            param.data = param.data.bfloat16()
    if study.pretraining:
        model.load_state_dict(pretrained(run.size, study, folder), strict=False)  # the head is the embedding
    prepare(model)
    first = [weight.clone() for weight in matrices(model)]
    rounding = "nearest" if run.rounding == "float32" else run.rounding
    optimizer = lowmem.FusedOptimizer(
        parameters(model),
        method.rule,
        lr=run.lr,
        rounding=rounding,
        seed=run.seed,
        **({"store": "device"} if "clip_norm" in method.options else {}),
        **{"compile": run.size != "1M", **method.options},
    )
    trained = torch.compile(model) if compile_model else model
    updates = study.updates * study.batch // run.batch
    rates, warmup = schedule(optimizer, updates), max(1, round(updates * WARMUP))
    watched = {min(warmup + more, updates) for more in (1, 3, 5)}
    shown = {max(1, round(updates * share)) for share in study.looks}
    rows_trained, loss = (text.old, 2) if study.trained == "old" else (text.new, 1)
    curve, moved, steps, changed = [(0.0, *_losses(model, text))], [], [], None
    try:
        for update, rows in zip(range(1, updates + 1), batches(rows_trained, run.batch, run.seed), strict=False):
            before = [weight.clone() for weight in matrices(model)] if update in watched else []
            codes = [code.clone() for code in _codes(optimizer)] if update == updates else []
            optimizer.backward(loss_of(trained, rows))
            rates.step()
            if before:
                after = matrices(model)
                pairs = list(zip(after, before, strict=True))
                elements = sum(weight.numel() for weight in after)
                moved.append(sum((new != old).sum().item() for new, old in pairs) / elements)
                steps.append(norm([new.float() - old.float() for new, old in pairs]) / norm(before))
            if codes:
                pairs = list(zip(_codes(optimizer), codes, strict=True))
                changed = sum((new != old).sum().item() for new, old in pairs) / sum(code.numel() for code in codes)
            if update in shown:
                curve.append((update / updates, *_losses(model, text)))
                if not curve[-1][loss] < curve[0][loss] + 1.0:
                    break
    except StepError:  # gradients that are not finite
        curve.append((1.0, math.inf, math.inf))
    optimizer.remove()
    finished = curve[-1][0] == 1.0
    change = norm([new.float() - old.float() for new, old in zip(matrices(model), first, strict=True)]) / norm(first)
    return Result(
        curve[-1][1] if finished else math.inf,
        curve[-1][2] if finished else math.inf,
        curve,
        sum(moved) / max(1, len(moved)),
        sum(steps) / max(1, len(steps)),
        change,
        time.perf_counter() - start,
        changed,
    )


def _codes(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The 8-bit states of AdamW."""
    states = optimizer.state_dict()["state"].values()
    each = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq") if name in state]
    return [state for state in each if state.dtype in (torch.int8, torch.uint8)]


def _losses(model: Any, text: Texts) -> tuple[float, float]:
    model.eval()
    losses = held_out_loss(model, text.new_held_out), held_out_loss(model, text.old_held_out)
    model.train()
    return losses


def as_line(run: Run, result: Result) -> dict[str, Any]:
    return {**asdict(run), **asdict(result)}
