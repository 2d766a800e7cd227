"""Compares a training loop with the same loop in plain PyTorch. `tests/step/test_attack.py` draws the loops.

In plain PyTorch, gradients are accumulated in `.grad` and clipped by torch's functions. Then an optimizer updates the
weights: a `torch.optim` class, or a rule of lowmem with one gradient at a time. Weights, losses and norms are compared
after each step, and optimizer states at the end.
"""

import copy
import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from support.devices import seeded
from support.nets import through_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR
from torch.utils.checkpoint import checkpoint

import lowmem
from lowmem.layers.head import linear_cross_entropy
from lowmem.layers.tied import share_gradient
from lowmem.tiles.quantized import QuantizedWeight, plain

# Hyperparameters of each rule. Updates are large compared with float32 rounding errors, but scales and divisors are not
# close to zero, so a difference in the last bits of a gradient changes only the last bits of an update.
HYPER: dict[str, dict[str, Any]] = {
    "lomo": {"lr": 0.01},
    "adalomo": {"lr": 0.03},
    "adamw": {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-3},
    "lion": {"lr": 0.003, "betas": (0.9, 0.95)},
    "adafactor": {"lr": 0.03, "min_dim_size_to_factor": 4, "beta1": 0.9},
    "adafactor_t2t": {"lr": 0.03},
    "lans": {"lr": 0.03, "epsilon": 1e-3},
    "scaled_adam": {"lr": 0.03, "betas": (0.9, 0.98), "eps": 1e-3, "size_update_period": 2},
    "torch.optim.SGD": {"lr": 0.01, "momentum": 0.9, "foreach": False},
    "torch.optim.AdamW": {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-3, "foreach": False},
}
NO_DECAY = ("adafactor_t2t", "scaled_adam")
DECAY = {"adafactor": "weight_decay_rate", "lans": "wd"}
DYNAMIC = lowmem.DynamicScale(init_scale=512.0, growth_interval=2)


@dataclass(frozen=True)
class Settings:
    """The settings of a loop. Each default is the simplest choice."""

    # the model
    dtype: torch.dtype = torch.float32
    hidden: int = 8
    blocks: int = 1
    more_words: int = 1
    tiled: bool = False  # the loss is computed from tiles of logits
    tied: bool = False
    twice: bool = False  # the first block and the embedding are used twice
    heads: int = 1  # uses of the head's weight, each with a separate bias
    bias: bool = False
    dropout: float = 0.0
    checkpoint: str | None = None
    codes: str | None = None  # format of quantized matrices, which are dequantized for plain PyTorch
    lora: bool = False  # matrices of blocks are frozen and have a low-rank adapter
    autocast: str | None = None  # for the forward or for the whole step
    # the optimizer
    rule: str = "adamw"
    decay: float = 0.0
    as_list: bool = False  # betas are a list, which an event can modify in place
    group: str | None = None  # whether vectors have a different learning rate or a different rule
    late: bool = False  # the last block is added by add_param_group
    with_model: bool = False
    policy: str = "auto"
    clip_norm: float | None = None
    clip_value: float | None = None
    loss_scale: Any = None
    store: str = "auto"
    accumulation_dtype: str = "float32"
    rounding: str = "nearest"
    state_storage: str = "float32"
    compile: bool = False
    batching: bool = True
    # the loop
    steps: int = 3
    accumulation: int = 1
    call: str = "loss"  # opt.backward(loss or callable), loss.backward() with or without inputs, or assigned .grad
    inputs: str = "all"  # the argument `inputs` of loss.backward
    by_step: bool = False  # the loop calls opt.step()
    scheduler: str | None = None
    events: tuple[tuple[int, str], ...] = ()  # (step, event before it)

    @property
    def ours(self) -> bool:
        return not self.rule.startswith("torch.")

    @property
    def decay_name(self) -> str | None:
        return None if self.rule in NO_DECAY else DECAY.get(self.rule, "weight_decay")

    @property
    def vocabulary(self) -> int:
        return (2000 if self.tiled else 10) + self.more_words

    @property
    def tokens(self) -> int:
        return 12 if self.tiled else 2

    @property
    def hyper(self) -> dict[str, Any]:
        """The rule's hyperparameters, as new objects in each call."""
        hyper = dict(HYPER[self.rule])
        if self.as_list and "betas" in hyper:
            hyper["betas"] = list(hyper["betas"])
        if self.decay_name is not None:
            hyper[self.decay_name] = self.decay or (None if self.rule == "adafactor" else 0.0)
        return hyper

    def options(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("rule", "rounding", "state_storage", *names)}

    @property
    def sixteen_bits(self) -> bool:
        return self.dtype == torch.bfloat16 or any(event == "bfloat16" for _, event in self.events)

    @property
    def sums_float32(self) -> bool:
        return self.sixteen_bits and self.accumulation > 1 and self.accumulation_dtype == "float32"

    @property
    def rounds_gradients(self) -> bool:
        """True if plain PyTorch rounds 16-bit gradients that lowmem does not round: those of a tiled head, of quantized
        weights with several uses under autocast, and gradients that are summed, unscaled or clipped.
        """
        several = self.twice or self.heads > 1 or (self.autocast == "step" and self.accumulation > 1)
        changed = any(option is not None for option in (self.clip_norm, self.clip_value, self.loss_scale))
        in_parts = self.checkpoint == "reentrant"
        in_16_bits = self.sixteen_bits and (self.tiled or self.sums_float32 or changed or in_parts)
        return in_16_bits or bool(self.codes and self.autocast and several)

    @property
    def exact(self) -> bool:
        """True if results must be bitwise equal. Tiled heads and compiled code sum in a different order."""
        return not (self.tiled or self.compile or self.rounds_gradients)


# -- the model ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, size: int, s: Settings) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size, bias=s.bias)
        self.norm, self.dropout = nn.LayerNorm(size), nn.Dropout(s.dropout)
        self.adapter = nn.Sequential(nn.Linear(size, 4, bias=False), nn.Linear(4, size, bias=False)) if s.lora else None
        self.linear.weight.requires_grad_(not s.lora)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        hidden = self.linear(normed) if self.adapter is None else self.linear(normed) + 2 * self.adapter(normed)
        return x + self.dropout(hidden.tanh())


class Net(nn.Module):
    """A language model with unusual uses of its parameters. tiled: whether it uses lowmem's tiled head."""

    def __init__(self, s: Settings, tiled: bool) -> None:
        super().__init__()
        self.settings, self.tiled = s, tiled
        self.embed = nn.Embedding(s.vocabulary, s.hidden, padding_idx=0)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.blocks = nn.ModuleList(Block(s.hidden, s) for _ in range(s.blocks))
        self.seldom = nn.Linear(s.hidden, s.hidden)
        self.output = nn.Linear(s.hidden, s.vocabulary, bias=False)
        self.output.weight = self.embed.weight if s.tied else nn.Parameter(torch.randn(s.vocabulary, s.hidden))
        with torch.no_grad():
            self.output.weight.mul_(2 * s.hidden**-0.5)
        self.biases = nn.ParameterList(torch.randn(s.vocabulary) / 5 for _ in range(s.heads if s.bias else 0))
        if tiled:
            share_gradient(self.embed)

    def forward(self, ids: Tensor, labels: Tensor, seldom: bool) -> Tensor:
        s, hidden = self.settings, self.embed(ids) * self.gain
        if s.checkpoint is None:
            hidden = self.hidden(hidden, ids)
        else:
            hidden = checkpoint(self.hidden, hidden, ids, use_reentrant=s.checkpoint == "reentrant")
        if seldom:
            hidden = hidden + self.seldom(hidden)
        biases = list(self.biases) or [None] * s.heads
        return sum(self.loss(hidden * (n + 1), labels.roll(n, 1), bias) for n, bias in enumerate(biases))

    def hidden(self, hidden: Tensor, ids: Tensor) -> Tensor:
        blocks = list(self.blocks)
        if self.settings.twice:
            hidden, blocks = hidden + self.embed(ids.flip(-1)), [*blocks, blocks[0]]
        for block in blocks:
            hidden = block(hidden)
        return hidden

    def loss(self, hidden: Tensor, labels: Tensor, bias: Tensor | None) -> Tensor:
        head = self.output.weight
        if self.tiled:
            return linear_cross_entropy(hidden, head, labels, bias=bias, memory=100_000)  # bytes, for several tiles
        logits = F.linear(hidden.float(), head.float())
        logits = logits if bias is None else logits + bias.float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@dataclass(frozen=True)
class Batch:
    """A micro-batch with the seed of its dropout and the factor of its loss."""

    ids: Tensor
    labels: Tensor
    seldom: bool
    seed: int
    factor: float

    def loss(self, net: Net) -> Tensor:
        torch.manual_seed(self.seed)
        with torch.autocast("cpu", torch.bfloat16) if net.settings.autocast == "forward" else nullcontext():
            return net(self.ids, self.labels, self.seldom) * self.factor


def batches(s: Settings, step: int, factor: float = 1.0) -> list[Batch]:
    source, size, micro_batches = seeded(step), (2, s.tokens), []
    for n in range(s.accumulation):
        ids, labels = (torch.randint(s.vocabulary, size, generator=source) for _ in range(2))
        labels[1, -1] = -100
        seldom = bool(torch.randint(2, (), generator=source))
        micro_batches.append(Batch(ids, labels, seldom, 10 * step + n, factor / s.accumulation))
    return micro_batches


# -- the two loops -----------------------------------------------------------------------------------------------------


class Loop:
    """A model with its optimizer, which both loops change in the same way between steps. Subclasses `quantize` the
    model, `make` the optimizer, run the `backward` of a micro-batch, and `finish` a step.
    """

    def __init__(self, s: Settings, tiled: bool) -> None:
        torch.manual_seed(0)
        self.settings, self.joined = s, False
        self.net = Net(s, tiled).to(s.dtype)
        self.quantize()
        last = self.net.blocks[-1].named_parameters(f"blocks.{s.blocks - 1}")
        self.late = dict(last) if s.late and s.blocks > 1 else {}
        for param in self.late.values():
            param.requires_grad_(False)
        self.optimizer = self.make()
        self.scheduler = self.schedule()

    def optimized(self, name: str, param: Tensor) -> Tensor:
        """Returns the tensor that the optimizer updates."""
        return param

    def groups(self) -> list[dict[str, Any]]:
        s, hyper = self.settings, self.settings.hyper
        named = {name: param for name, param in self.net.named_parameters() if name not in self.late}
        groups = [self.group(named, hyper)]
        if s.group is not None:
            other = {"rule": "lomo", "lr": 0.01} if s.group == "rule" else {**hyper, "lr": hyper["lr"] / 2}
            matrices, vectors = ({n: p for n, p in named.items() if (p.ndim > 1) == many} for many in (True, False))
            groups = [self.group(matrices, hyper), self.group(vectors, other)]
        return groups + [self.group(self.late, hyper)] * self.joined

    def group(self, named: dict[str, Tensor], hyper: dict[str, Any]) -> dict[str, Any]:
        return {"params": [(name, self.optimized(name, param)) for name, param in named.items()], **hyper}

    def schedule(self) -> Any:
        s = self.settings
        if s.scheduler == "one cycle":
            cycles = s.group is None and not {"betas", "momentum"}.isdisjoint(s.hyper)
            return OneCycleLR(self.optimizer, s.hyper["lr"], total_steps=9, cycle_momentum=cycles)
        return ExponentialLR(self.optimizer, 0.7 if s.scheduler else 1.0)

    def happen(self, event: str) -> None:
        s, group = self.settings, self.optimizer.param_groups[0]
        match event:
            case "lr":
                for group in self.optimizer.param_groups:
                    group["lr"] *= 0.3
            case "betas" if "betas" in group:
                group["betas"] = (0.6, 0.8)
            case "betas in place" if s.ours and isinstance(group.get("betas"), list):
                group["betas"][0] = 0.5
            case "decay" if s.decay_name is not None:
                group[s.decay_name] = 0.5
            case "freeze" | "thaw" if s.blocks > 1:
                self.net.blocks[0].linear.weight.requires_grad_(event == "thaw")
            case "add group" if self.late and not self.joined:
                self.joined = True
                for param in self.late.values():
                    param.requires_grad_(True)
                self.optimizer.add_param_group(self.group(self.late, s.hyper))
            case "bfloat16" | "float32":
                self.net.to(getattr(torch, event))

    def touch(self) -> None:
        """Changes a weight in place. With several micro-batches, this happens between them."""
        with torch.no_grad():
            (self.net.gain if self.settings.codes else self.net.output.weight).mul_(0.9)

    def advance(self, step: int) -> Tensor:
        """Runs the events of a step and the step, and returns the loss."""
        events = [event for at, event in self.settings.events if at == step]
        for event in events:
            self.happen(event)
        touches = "touch" in events
        if touches and self.settings.accumulation == 1:
            self.touch()
        micro_batches = batches(self.settings, step, math.inf if "overflow" in events else 1.0)
        with torch.autocast("cpu", torch.bfloat16) if self.settings.autocast == "step" else nullcontext():
            for n, batch in enumerate(micro_batches, start=1):
                if touches and n > 1:
                    self.touch()
                loss = self.backward(batch, n)
            self.finish()
        self.scheduler.step()
        return loss.detach()

    def inputs(self) -> list[Tensor] | None:
        """Returns the parameters for which backward computes gradients."""
        dims = {"all": (0, 1, 2), "matrices": (2,), "vectors": (0, 1)}[self.settings.inputs]
        return [param for param in self.net.parameters() if param.requires_grad and param.ndim in dims]


class Ordinary(Loop):
    """The loop in plain PyTorch. A rule of lowmem updates parameters that share memory with the model's parameters."""

    def __init__(self, s: Settings) -> None:
        self.shadows: dict[Tensor, Tensor] = {}
        self.codes: dict[str, QuantizedWeight] = {}
        self.sums: dict[Tensor, Tensor] = {}
        super().__init__(s, tiled=False)
        scale, interval = (512.0, 2) if s.loss_scale is DYNAMIC else (s.loss_scale, 1 << 30)
        self.scaler = torch.amp.GradScaler("cpu", scale or 1.0, growth_interval=interval, enabled=scale is not None)

    def quantize(self) -> None:
        if self.settings.codes:
            quantized = lowmem.quantize_(copy.deepcopy(self.net), self.settings.codes, group=group_size(self.settings))
            self.codes = {n: p for n, p in quantized.named_parameters() if isinstance(p, QuantizedWeight)}
        for name, codes in self.codes.items():
            self.net.get_parameter(name).data.copy_(codes.dequantize())

    def optimized(self, name: str, param: Tensor) -> Tensor:
        if self.settings.ours and param not in self.shadows:
            self.shadows[param] = nn.Parameter(self.codes.get(name, param).detach(), param.requires_grad)
        return self.shadows.setdefault(param, param)

    def make(self) -> torch.optim.Optimizer:
        s = self.settings
        if not s.ours:
            return eval(s.rule)(self.groups(), **s.hyper)
        return lowmem.FusedOptimizer(self.groups(), **s.options(), **s.hyper, compile=False, batching=False)

    def backward(self, batch: Batch, number: int) -> Tensor:
        loss = batch.loss(self.net)
        self.scaler.scale(loss).backward(inputs=self.inputs() if self.settings.call == "inputs" else None)
        for param in self.net.parameters():
            if param.grad is not None:
                grad = param.grad.float() if self.settings.sums_float32 else param.grad
                self.sums[param] = self.sums[param] + grad if param in self.sums else grad
                param.grad = None
        return loss

    def finish(self) -> None:
        for param, shadow in self.shadows.items():
            shadow.requires_grad_(param.requires_grad)
            if shadow is not param and not isinstance(shadow, QuantizedWeight):
                shadow.data = param.data  # the model may have been converted
            shadow.grad = self.sums.pop(param).to(param.dtype) if param in self.sums else None
        self.scaler.unscale_(self.optimizer)
        self.clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        for shadow in self.shadows.values():
            shadow.grad = None
        for name, codes in self.codes.items():
            param = self.net.get_parameter(name)
            param.data.copy_(self.shadows.get(param, codes).dequantize())

    def clip(self) -> None:
        s = self.settings
        in_groups = [param for group in self.optimizer.param_groups for param in group["params"]]
        in_order = [self.shadows[param] for param in self.net.parameters() if param in self.shadows]
        params = [param for param in (in_order if s.with_model else in_groups) if param.grad is not None]
        grads = [param.grad for param in params]
        self.norm = get_total_norm([grad.float() for grad in grads])
        unclamped = get_total_norm(grads)
        if s.clip_value is not None:
            clip_grad_value_(params, s.clip_value, foreach=False)
        if s.clip_norm is not None:  # AdaLomo's norm is computed before clamping, as in its source
            norm = unclamped if s.rule == "adalomo" else get_total_norm(grads)
            clip_grads_with_norm_(params, s.clip_norm, norm)


class Fused(Loop):
    """The loop with lowmem."""

    def __init__(self, s: Settings) -> None:
        super().__init__(s, s.tiled)

    def quantize(self) -> None:
        if self.settings.codes:
            lowmem.quantize_(self.net, self.settings.codes, group=group_size(self.settings))

    def make(self, **other: Any) -> lowmem.FusedOptimizer:
        s = self.settings
        clipping = ("clip_norm", "clip_value", "loss_scale")
        options = s.options("policy", "store", "accumulation_dtype", "compile", "batching", *clipping)
        model = self.net if s.with_model else None
        return lowmem.FusedOptimizer(self.groups(), model=model, **options, **s.hyper, **other)

    def happen(self, event: str) -> None:
        super().happen(event)
        match event:
            case "save":
                self.save()
            case "paused":
                with self.optimizer.paused():
                    batches(self.settings, 98)[0].loss(self.net).backward()
            case "dropped":
                with self.optimizer.accumulate():
                    self.optimizer.backward(batches(self.settings, 99)[0].loss(self.net))
                self.optimizer.zero_grad()

    def save(self) -> None:
        """Replaces the optimizer by a new one that loads its state. Its original seed is different."""
        saved = through_file(self.optimizer.state_dict())
        self.optimizer.remove()
        self.optimizer = self.make(seed=9)
        scheduler, self.scheduler = self.scheduler, self.schedule()
        self.optimizer.load_state_dict(saved)
        self.scheduler.load_state_dict(scheduler.state_dict())

    def backward(self, batch: Batch, number: int) -> Tensor:
        s, opt = self.settings, self.optimizer
        with opt.accumulate() if number < s.accumulation or (s.by_step and number > 1) else nullcontext():
            if s.call == "callable":
                return opt.backward(lambda: batch.loss(self.net))
            loss = batch.loss(self.net)
            if s.call == "by hand" and number == s.accumulation:
                params = [param for param in self.net.parameters() if param.requires_grad]
                for param, grad in zip(params, torch.autograd.grad(loss, params, allow_unused=True), strict=True):
                    param.grad = grad
            elif s.call in ("plain", "inputs"):
                loss.backward(inputs=self.inputs() if s.call == "inputs" else None)
            else:
                opt.backward(loss)
            return loss

    def finish(self) -> None:
        if self.settings.by_step or self.settings.call == "by hand":
            self.optimizer.step()
            self.optimizer.zero_grad()


def group_size(s: Settings) -> int:
    """Returns the number of elements that share a scale."""
    return min(64, s.hidden & -s.hidden)


# -- the comparison ----------------------------------------------------------------------------------------------------


def compare(s: Settings) -> None:
    """Runs both loops, and raises `AssertionError` at the first difference."""
    fused, ordinary = Fused(s), Ordinary(s)
    start = [param.detach().clone() for param in ordinary.net.parameters()]
    for step in range(s.steps):
        loss = ordinary.advance(step)
        assert_close(f"step {step}, loss", s, fused.advance(step), loss, torch.zeros(()))
        pairs = zip(ordinary.net.named_parameters(), fused.net.parameters(), start, strict=True)
        for (name, want), got, first in pairs:
            assert got.grad is None, f"step {step}, {name}: a gradient is left"
            assert_close(f"step {step}, {name}", s, plain(got.detach()), want.detach(), first)
        norm, rounded = fused.optimizer.last_step.grad_norm, s.sixteen_bits or s.rounds_gradients
        assert fused.optimizer.loss_scale in (None, ordinary.scaler.get_scale())
        assert fused.optimizer.last_step.skipped == (s.loss_scale is DYNAMIC and not ordinary.norm.isfinite())
        if ordinary.norm.isfinite():
            assert torch.isclose(norm, ordinary.norm, rtol=0.1 if rounded else 1e-4), f"grad_norm is {norm}"
    states = fused.optimizer.named_state_dict()["state"]
    if s.ours and s.exact:
        for name, expected in ordinary.optimizer.named_state_dict()["state"].items():
            for key, want in expected.items():
                assert_close(f"state {key} of {name}", s, states[name][key], want, torch.zeros(()))


def assert_close(where: str, s: Settings, got: Tensor, want: Tensor, first: Tensor) -> None:
    """Raises `AssertionError` if two tensors differ by more than a tolerance. first: the value before training."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape), where
    if torch.equal(got, want) or (want.isnan().any() and torch.equal(got.isnan(), want.isnan())):
        return
    got, want = got.float(), want.float()
    difference, size, moved = (got - want).norm(), want.norm(), (want - first.float()).norm()
    allowed = 1e-4 * moved + 1e-6 * size  # summation order
    if s.state_storage != "float32":  # rounding picks a neighbor for some states, 2⁻⁸ away
        allowed += 2**-8 * moved
    if s.sixteen_bits or s.rounds_gradients:  # some elements round to a neighbor; sign-like steps flip
        part = max(1 / 20 if s.rounds_gradients else 1 / 200, 1 / want.numel()) ** 0.5
        allowed += part * (2**-7 * size + (2 * moved if s.rounds_gradients else 0.0))
    if s.codes and want.ndim > 1:  # some codes differ by one
        scale = want.abs().max() / (2 ** (int(s.codes.removeprefix("int")) - 1) - 1)
        allowed += 2 * scale * max(1, want.numel() / (20 if s.autocast else 200)) ** 0.5
    assert not s.exact and difference <= allowed, (
        f"{where}: {int((got != want).sum())} of {got.numel()} elements differ, by a norm of {difference:.3g} (of "
        f"{size:.3g}, moved by {moved:.3g})"
    )
