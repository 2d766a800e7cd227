"""Training steps of Llamas with random weights: time and memory of every policy and of AdamW."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

import lowmem
from benchmarks import models
from benchmarks.gpu import measure
from benchmarks.gpu.measure import DEVICE, GPU, clear, median, peak, seconds
from benchmarks.gpu.report import Report
from benchmarks.gpu.updates import POLICIES
from lowmem.layers.embedding import compute_gradient
from lowmem.layers.head import linear_cross_entropy

GIB = 2**30

# name → layers, hidden, inner, vocabulary, heads
Size = tuple[int, int, int, int, int]
MODELS: dict[str, Size] = {
    "8B": (32, 4096, 14336, 128256, 32),
    "3B": (28, 3072, 8192, 128256, 24),
    "1B": (16, 2048, 8192, 128256, 32),
}
SMALL_MODELS: dict[str, Size] = {"tiny": (2, 64, 128, 512, 4), "tinier": (1, 32, 64, 128, 4)}

Loss = Callable[[Any, Tensor], Tensor]
Step = Callable[[Tensor], object]
Optimizer = Callable[[Any], AbstractContextManager[Step]]


def llama(layers: int, hidden: int, inner: int, vocab: int, heads: int) -> Any:
    """Random bfloat16 weights, activation checkpointing, and an embedding whose gradient is computed as it is read."""
    options = {"num_attention_heads": heads, "num_key_value_heads": heads // 4, "attn_implementation": "sdpa"}
    model = models.llama(layers, hidden, inner, vocab, "bfloat16", DEVICE, **options)
    compute_gradient(model.get_input_embeddings())
    return model


# -- the loss ----------------------------------------------------------------------------------------------------------


def tiled_loss(model: Any, ids: Tensor) -> Tensor:
    hidden = model.model(input_ids=ids).last_hidden_state
    return linear_cross_entropy(hidden[0, :-1], model.lm_head.weight, ids[0, 1:])


def model_loss(model: Any, ids: Tensor) -> Tensor:
    return models.loss_of(model, ids)()


# -- optimizers --------------------------------------------------------------------------------------------------------


@contextmanager
def fused(model: Any, **options: Any) -> Iterator[Step]:
    opt = lowmem.FusedOptimizer(model.named_parameters(), **{"rounding": "stochastic", **options})
    try:
        yield opt.backward
    finally:
        opt.remove()


@contextmanager
def with_tensors(model: Any) -> Iterator[Step]:
    """The gradients of the head and the embedding exist as a whole."""
    opt = lowmem.FusedOptimizer(model.named_parameters(), rounding="stochastic")
    for record in opt._records.values():
        record.computes = False
    try:
        yield opt.backward
    finally:
        opt.remove()


@contextmanager
def dropped(model: Any) -> Iterator[Step]:
    handles = [p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)) for p in model.parameters()]
    try:
        yield Tensor.backward
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def adamw(model: Any) -> Iterator[Step]:
    opt = torch.optim.AdamW(model.parameters(), fused=True)

    def step(loss: Tensor) -> None:
        loss.backward()
        opt.step()
        opt.zero_grad()

    try:
        yield step
    finally:
        opt.zero_grad()


@contextmanager
def adamw_in_hooks(model: Any) -> Iterator[Step]:
    optimizers = {param: torch.optim.AdamW([param], fused=True) for param in model.parameters()}

    def update(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    handles = [param.register_post_accumulate_grad_hook(update) for param in optimizers]
    try:
        yield Tensor.backward
    finally:
        for handle in handles:
            handle.remove()


# -- parts -------------------------------------------------------------------------------------------------------------


def policies_agree(report: Report, small: bool) -> None:
    """Compares the weights after four clipped float32 steps with those of `two_pass`."""
    weights = {}
    for name, options in {**POLICIES, "deferred, disk": {**POLICIES["deferred, host"], "store": "disk"}}.items():
        if name == "immediate":
            continue
        torch.manual_seed(0)
        model = llama(*SMALL_MODELS["tiny"] if small else (4, 256, 512, 8192, 4)).float()
        opt = lowmem.FusedOptimizer(model.named_parameters(), lr=1e-3, **options)
        for _ in range(4):
            ids = torch.randint(0, model.config.vocab_size, (2, 64), device=DEVICE)
            opt.backward(model_loss(model, ids))
        weights[name] = torch.cat([param.detach().flatten() for param in model.parameters()])
        difference = float((weights[name] - weights["two_pass"]).abs().max())
        report.row(f"{name}: largest difference from two_pass", difference, ("<=", 1e-6))


def vocabulary_gradients(report: Report, small: bool) -> None:
    """The head's gradients in bfloat16 against float64: products of 16-bit matrices that are summed in float32."""
    tokens, vocabulary, size = (20, 300, 16) if small else (1500, 20_000, 1024)
    hidden = torch.randn(tokens, size, device=DEVICE).mul_(2).bfloat16().requires_grad_()
    weight = torch.randn(vocabulary, size, device=DEVICE).mul_(0.1).bfloat16().requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), device=DEVICE)
    linear_cross_entropy(hidden, weight, labels).backward()
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    torch.nn.functional.cross_entropy(exact[0] @ exact[1].t(), labels).backward()
    for what, one, other in zip(("hidden states", "weight"), (hidden, weight), exact, strict=True):
        assert one.grad is not None and other.grad is not None
        error = float((one.grad.double() - other.grad).norm() / other.grad.norm())
        report.row(f"gradient of the {what} of a head: relative error", error, ("<=", 5e-3))


def one_billion(report: Report, small: bool) -> None:
    """A size at which launching kernels on the host is a large part of a step."""
    size = SMALL_MODELS["tinier"] if small else MODELS["1B"]
    steps(report, "tinier" if small else "1B", size, 64 if small else 2048)


def eight_billion(report: Report, small: bool) -> None:
    """8B, or the next smaller model that fits, with 2,048 tokens per step."""
    for name, size in (SMALL_MODELS if small else MODELS).items():
        needed, free = _bytes(size), measure.free_memory()
        if needed > free:
            report.row(f"{name}: fits", False, needed_gib=needed / GIB, free_gib=free / GIB)
            continue
        try:
            steps(report, name, size, 64 if small else 2048)
            return
        except torch.OutOfMemoryError as error:
            reason = str(error).split("\n")[0]
        report.row(f"{name}: fits", False, needed_gib=needed / GIB, free_gib=free / GIB, reason=reason)
        clear()


def _bytes(size: Size) -> int:
    """The bfloat16 weights, and a fifth as much for everything else."""
    layers, hidden, inner, vocab, _ = size
    parameters = 2 * vocab * hidden + layers * hidden * (2.5 * hidden + 3 * inner)
    return int(1.2 * 2 * parameters)


def steps(report: Report, name: str, size: Size, tokens: int) -> None:
    """Measures a step under each policy, and with AdamW and its states on the device.

    Raises:
        torch.OutOfMemoryError: not even `immediate` fits.
    """
    model = llama(*size)
    weights = sum(param.nbytes for param in model.parameters())
    report.row(f"{name}: bytes of the weights", weights)
    immediate = train(model, fused, tokens, tiled_loss)
    most = None if immediate["above"] is None else 1 + immediate["above"] / weights
    report.row(f"{name}, immediate: peak over the weights", most, ("<=", 1.1), **immediate)

    def compare(what: str, optimizer: Optimizer, loss: Loss = tiled_loss) -> dict[str, Any] | None:
        """Adds a row with the time of a step relative to `immediate`."""
        clear()
        if report.affords(f"{name}, {what}", 15):
            with report.trial(f"{name}, {what}"):
                figures = train(model, optimizer, tokens, loss)
                over = figures["seconds"] / immediate["seconds"]
                report.row(f"{name}, {what}: seconds, times immediate", over, **figures)
                return figures
        return None

    compare("gradients dropped", dropped)
    tensors = compare("immediate, gradients of the vocabulary as tensors", with_tensors)
    if tensors is not None:
        times = immediate["seconds"] / tensors["seconds"]
        report.row(f"{name}: seconds, times those with tensors", times, ("<=", 1.08))
    resident = compare("AdamW(fused=True)", adamw)
    if resident is not None:
        faster = immediate["tokens_per_second"] / resident["tokens_per_second"]
        report.row(f"{name}: tokens per second, times those of AdamW(fused=True)", faster, (">=", 1.0))
    for policy in ("two_pass", "deferred, host", "deferred, device"):
        compare(policy, partial(fused, **POLICIES[policy]))
    all_logits = compare("immediate, the model's loss", fused, model_loss)
    if all_logits is not None and all_logits["above"] is not None:
        over = 1 + all_logits["above"] / weights
        report.row(f"{name}, immediate, the model's loss: peak over the weights", over, ("<=", 1.15))
    if _has_flash():
        model.set_attn_implementation("flash_attention_2")
        compare("immediate, flash_attention_2", fused)


def _has_flash() -> bool:
    try:
        import flash_attn  # noqa: F401
    except ImportError:
        return False
    return True


def train(model: Any, optimizer: Optimizer, tokens: int, loss: Loss) -> dict[str, Any]:
    """Measures four steps after two to warm up: time, tokens per second, and the peak of bytes above the weights,
    optimizer states included.
    """
    weights = sum(param.nbytes for param in model.parameters())
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), device=DEVICE)
    others = torch.cuda.memory_allocated() - weights if GPU else 0
    try:
        with optimizer(model) as step:

            def run() -> None:
                step(loss(model, ids))

            first = seconds(run)
            seconds(run)
            before = torch.cuda.memory_allocated() if GPU else 0
            above = peak(run)
            taken = median(seconds, run, 4)
    finally:
        for param in model.parameters():
            param.grad = None
    return {
        "seconds": taken,
        "tokens_per_second": tokens / taken,
        "first_step_seconds": first,
        "above": None if above is None else before + above - weights - others,
    }
