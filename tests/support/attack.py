"""Random training loops: each trains as the ordinary loop does, or is refused before a weight has moved.

    python -m benchmarks.fuzz --only attack --inputs 10000 --seed 0    # in processes of their own, with a summary
    python -m benchmarks.fuzz --only attack --inputs 1 --seed 1234     # one of them: its settings, the first difference

A seed decides about a model, an optimizer, and what a loop does with both between steps. The loop runs twice: as users
of lowmem write it, and in plain PyTorch on an equal model, where gradients are tensors, are summed in `.grad`, are
clipped by torch's functions, and go to a class of `torch.optim`, or to a rule that is swept over one finished gradient
after another. After each step weights, losses and norms are compared, and at the end the states of the optimizer.
"""

# ruff: noqa: RUF009 (fields with their choices)

import copy
import io
import math
import random
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from support.devices import seeded
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR
from torch.utils.checkpoint import checkpoint

import lowmem
from lowmem.errors import LowmemError, StepError
from lowmem.layers.embedding import compute_gradient
from lowmem.layers.head import linear_cross_entropy
from lowmem.tiles.quantized import QuantizedWeight, plain

SMALL = 1 << 14  # elements of a parameter whose gradient is never computed as it is read
GUARD = 7.0  # what memory next to a parameter holds

# Hyperparameters of each rule. Steps are large next to float32's roundings, but a scale does not come near zero, and
# nothing is divided by a tiny root: where a gradient differs in its last bits, so does a step.
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
    "torch.optim.RMSprop": {"lr": 0.003, "eps": 1e-3, "foreach": False},
    "torch.optim.Adagrad": {"lr": 0.03, "eps": 1e-3, "foreach": False},
}
DECAY = {
    "adafactor": "weight_decay_rate",
    "lans": "wd",
    "adafactor_t2t": None,
    "scaled_adam": None,
}  # else weight_decay
DYNAMIC = lowmem.DynamicScale(init_scale=512.0, growth_interval=2)
SCHEDULED = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")  # what schedulers put into groups
EDITS = ("lr", "betas", "betas in place", "decay", "freeze", "thaw", "add group", "bfloat16", "float32")
EVENTS = (*EDITS, "save", "paused", "dropped", "touch", "overflow")


# -- choices -----------------------------------------------------------------------------------------------------------


def one_of(*values: Any) -> Any:
    """A field that is drawn; what occurs twice is twice as likely."""
    return field(metadata={"values": values})


@dataclass(frozen=True)
class Settings:
    """What a seed decides. `fitting` makes most of it go together."""

    seed: int
    # the model
    dtype: torch.dtype = one_of(torch.float32, torch.float32, torch.bfloat16)
    computed: bool = one_of(True, True, False, False, False)  # gradients of head and embedding, as they are read
    same_layers: bool = one_of(True, False)  # plain PyTorch has the same head, whose gradients are tensors there
    hidden: int = one_of(8, 24, 48, 96, 192)
    blocks: int = one_of(1, 2, 3)
    tied: bool = one_of(True, False)
    twice: bool = one_of(True, False, False)  # the first block and the embedding are used twice
    heads: int = one_of(1, 1, 2)  # uses of the head's weight, each with its own bias
    bias: bool = one_of(True, False)
    prompt: bool = one_of(True, *[False] * 5)  # hidden states that are a view of a parameter
    buffer: bool = one_of(True, *[False] * 5)  # hidden states in memory that the next micro-batch writes to
    head: dict[str, float] = one_of(*[{}] * 4, {"softcap": 5.0}, {"label_smoothing": 0.1}, {"logit_scale": 0.5})
    odd: str | None = one_of(*[None] * 75, "mask", "hook", "scale", "int32", "bad label")
    dropout: float = one_of(0.0, 0.0, 0.1)
    checkpoint: str | None = one_of(None, None, None, "non-reentrant", "reentrant")
    codes: str | None = one_of(*[None] * 4, "int8", "int10", "int12")  # of matrices; plain PyTorch has what they show
    lora: bool = one_of(True, *[False] * 4)  # matrices of blocks are frozen, and have an adapter of low rank
    reads: str | None = one_of(*[None] * 6, "detach", "no_grad", "data")  # a matrix is used without a gradient too
    reads_early: bool = one_of(True, False)  # before it is used with one: backward comes to that first
    autocast: str | None = one_of(*[None] * 5, "forward", "step")  # what runs in it
    # the optimizer
    rule: str = one_of("adamw", "adalomo", *HYPER)
    decay: float = one_of(0.0, 0.1)
    as_list: bool = one_of(True, False)  # betas are a list, which can be edited in place
    group: str | None = one_of(None, None, None, "lr", "rule")  # vectors have their own
    late: bool = one_of(True, False, False, False)  # the last block joins by add_param_group
    with_model: bool = one_of(True, False)
    policy: str = one_of("auto", "auto", "immediate", "two_pass", "deferred")
    clip_norm: float | None = one_of(None, None, 0.5)
    norm_type: float = one_of(2.0, 2.0, math.inf)
    clip_value: float | None = one_of(None, None, None, 0.01)
    loss_scale: Any = one_of(None, None, None, 1024.0, DYNAMIC)
    store: str | None = one_of(None, "host", "device")
    accumulation_dtype: str = one_of("float32", "gradient")
    rounding: str = one_of("nearest", "stochastic", "compensated")
    state_storage: str = one_of("float32", "float32", "bfloat16")
    compile: bool = one_of(True, *[False] * 15)
    batching: bool = one_of(True, True, False)
    # the loop
    steps: int = one_of(2, 3, 4, 5)
    accumulation: int = one_of(1, 1, 1, 2, 3)
    call: str = one_of(
        "loss", "loss", "loss", "callable", "plain", "inputs", "by hand"
    )  # how backward is called, if it is
    inputs: str = one_of("all", "matrices", "vectors")  # of backward(inputs=...)
    by_step: bool = one_of(True, False, False)  # step() ends a step
    scheduler: str | None = one_of(None, None, "exponential", "one cycle")
    guard: bool = one_of(True, False, False)  # parameters lie between memory that nobody may write to
    events: tuple[tuple[int, str], ...] = ()  # before which step

    def __str__(self) -> str:
        return ", ".join(f"{each.name}={getattr(self, each.name)}" for each in fields(self))

    def happens(self, *events: str) -> bool:
        return any(event in events for _, event in self.events)

    @property
    def ours(self) -> bool:
        return not self.rule.startswith("torch.")

    @property
    def vocabulary(self) -> int:
        return (SMALL // self.hidden if self.computed else 10) + 1 + self.seed % 40

    @property
    def tokens(self) -> int:
        return max(2, min(12, self.vocabulary // 40))  # few enough for gradients to be computed

    @property
    def hyper(self) -> dict[str, Any]:
        """Hyperparameters of the rule, made at each call."""
        hyper, decay = dict(HYPER[self.rule]), DECAY.get(self.rule, "weight_decay")
        if self.as_list and "betas" in hyper:
            hyper["betas"] = list(hyper["betas"])
        return hyper if decay is None else {**hyper, decay: self.decay or (None if self.rule == "adafactor" else 0.0)}

    @property
    def options(self) -> dict[str, Any]:
        """Of `FusedOptimizer`."""
        names = ("policy", "clip_norm", "norm_type", "clip_value", "loss_scale", "store", "accumulation_dtype")
        storage = ("rounding", "state_storage", "compile", "batching")
        return {"rule": self.rule, **{name: getattr(self, name) for name in (*names, *storage)}}

    @property
    def group_size(self) -> int:
        """Elements of a row with one unit."""
        return min(64, self.hidden & -self.hidden)

    def inputs_of(self, net: nn.Module) -> list[Tensor]:
        """The parameters that a backward is for."""
        wanted = {"all": (0, 1, 2), "matrices": (2,), "vectors": (0, 1)}[self.inputs]
        return [param for param in net.parameters() if param.requires_grad and min(param.ndim, 2) in wanted]

    @property
    def changed(self) -> bool:
        """Gradients are unscaled or clipped."""
        return any(each is not None for each in (self.clip_norm, self.clip_value, self.loss_scale))

    @property
    def sixteen_bits(self) -> bool:
        return self.dtype == torch.bfloat16 or self.happens("bfloat16")

    @property
    def sums_float32(self) -> bool:
        return self.sixteen_bits and self.accumulation > 1 and self.accumulation_dtype == "float32"

    @property
    def rounds_gradients(self) -> bool:
        """Plain PyTorch rounds 16-bit gradients where lowmem does not: computed, summed, unscaled or clipped ones, and
        those of a weight that autocast has cast once for several uses, which it does not do with codes.
        """
        several = self.twice or self.heads > 1 or self.prompt or self.buffer
        several = several or (self.autocast == "step" and self.accumulation > 1)
        if self.codes and self.autocast and several:
            return True
        in_parts = self.checkpoint == "reentrant"
        return self.sixteen_bits and (self.computed or self.sums_float32 or self.changed or in_parts)

    @property
    def exact(self) -> bool:
        """Whether bits have to agree. Computed gradients and compiled code add in another order."""
        return not (self.computed or self.compile or self.rounds_gradients)


def draw(seed: int, compile: bool = True) -> Settings:
    """The settings of a seed; `compile` allows that updates are compiled, which takes seconds for each kind of them."""
    r = random.Random(seed)
    s = Settings(seed, **{each.name: r.choice(each.metadata["values"]) for each in fields(Settings) if each.metadata})
    s = fitting(replace(s, compile=s.compile and compile), anything=r.random() < 0.03)
    possible = list(EVENTS)
    if s.policy in ("immediate", "two_pass"):
        possible.remove("dropped")
    if s.loss_scale is not DYNAMIC or s.policy == "immediate":
        possible.remove("overflow")
    if s.rounding == "compensated" or s.codes:  # only lowmem knows what was cut off, which a change of dtype loses
        possible = [event for event in possible if event not in ("bfloat16", "float32")]
    if s.compile:
        possible = [*EDITS, "save"]
    events = [(r.randrange(s.steps), r.choice(possible)) for _ in range(r.choice((s.compile, 1, 1, 2, 3)))]
    return replace(s, events=tuple(sorted(events)))


def fitting(s: Settings, anything: bool) -> Settings:
    """Replaces what would be refused, or `anything`, and what cannot be compared."""
    if s.compile:  # few kinds, and much that may go wrong with them
        s = replace(s, rule="adamw" if s.seed % 3 else "adalomo", group=None, scheduler=None, batching=False)
        s = replace(s, clip_norm=None, clip_value=None, loss_scale=None, state_storage="float32", computed=False)
        s = replace(s, rounding="stochastic", as_list=True, guard=True)
    if s.rule == "lion":  # the sign of a sum that all but cancels depends on its last bits
        s = replace(s, computed=False, autocast=None if s.codes else s.autocast)
    if (
        s.compile or not s.ours or s.rule == "adafactor_t2t"
    ):  # which updates ordinary matrices, or rounds in its own way
        s = replace(s, codes=None)
    if s.codes:
        s = replace(s, rounding="stochastic")
    if s.autocast:  # what is computed as it is read is computed in bfloat16 in another order
        s = replace(s, computed=False)
    if s.policy != "deferred":  # what backward still has to read must not have changed
        s = replace(s, reads_early=False)
    if not s.ours or s.rule == "adafactor_t2t":  # which rounds in its own way
        s = replace(s, rounding="nearest", state_storage="float32")
    if s.late and s.scheduler == "one cycle":  # which knows nothing of groups that join
        s = replace(s, scheduler=None)
    both = s.clip_norm is not None and s.clip_value is not None  # AdaLomo measures before it clamps, others after
    if s.group == "rule" and (s.rule not in ("adamw", "adalomo", "lans") or (both and s.rule == "adalomo")):
        s = replace(s, group="lr")
    if s.checkpoint == "reentrant" and s.call in ("by hand", "inputs"):  # which torch refuses
        s = replace(s, call="loss")
    if s.odd == "mask":  # which smoothing would make infinite
        s = replace(s, head={})
    if anything:
        return s
    if s.checkpoint == "reentrant":  # a region hides what is in it from a pass that measures
        s = replace(s, policy="deferred" if s.policy in ("auto", "two_pass") else s.policy)
        s = replace(s, call="loss" if s.call == "plain" else s.call)
    if s.call in ("plain", "inputs", "by hand"):
        s = replace(s, loss_scale=None)
    if (s.accumulation > 1 and s.policy != "auto") or (s.call in ("plain", "inputs") and s.clip_norm is not None):
        s = replace(s, policy="deferred")
    if s.policy == "two_pass" and s.call in ("plain", "inputs"):
        s = replace(s, policy="immediate")
    if s.policy == "immediate" and (s.clip_norm is not None or (s.loss_scale is not None and not s.ours)):
        s = replace(s, policy="two_pass" if s.checkpoint != "reentrant" else "deferred")
    if s.policy != "deferred":
        s = replace(s, store=None, accumulation_dtype="float32")
    return s


# -- the model ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, size: int, s: Settings) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size, bias=s.bias)
        self.norm, self.dropout = nn.LayerNorm(size), nn.Dropout(s.dropout)
        self.adapter = nn.Sequential(nn.Linear(size, 4, bias=False), nn.Linear(4, size, bias=False)) if s.lora else None
        self.linear.weight.requires_grad_(not s.lora)

    def forward(self, x: Tensor) -> Tensor:
        x, normed = x, self.norm(x)
        hidden = self.linear(normed) if self.adapter is None else self.linear(normed) + 2 * self.adapter(normed)
        return x + self.dropout(hidden.tanh())


class Net(nn.Module):
    """A language model whose gradients arrive in unusual ways; `computed`: with head and embedding of lowmem."""

    def __init__(self, s: Settings, computed: bool) -> None:
        super().__init__()
        self.settings, self.computed = s, computed
        self.embed = nn.Embedding(s.vocabulary, s.hidden, padding_idx=0)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.blocks = nn.ModuleList(Block(s.hidden, s) for _ in range(s.blocks))
        self.seldom = nn.Linear(s.hidden, s.hidden)
        self.output = nn.Linear(s.hidden, s.vocabulary, bias=False)
        self.output.weight = self.embed.weight if s.tied else nn.Parameter(torch.randn(s.vocabulary, s.hidden))
        with torch.no_grad():
            self.head.mul_(2 * s.hidden**-0.5)
        self.biases = nn.ParameterList(torch.randn(s.vocabulary) / 5 for _ in range(s.heads if s.bias else 0))
        self.prompt = nn.Parameter(torch.randn(2, s.tokens, s.hidden)) if s.prompt else None
        self.scale = nn.Parameter(torch.tensor(0.7)) if s.odd == "scale" else s.head.get("logit_scale", 1.0)
        self.register_buffer("memory", torch.zeros(2, s.tokens, s.hidden))
        self.register_buffer("mask", torch.zeros(s.vocabulary))
        self.mask[: s.vocabulary // 2] = -math.inf
        if s.odd == "hook":  # trains half of the tokens
            self.head.register_hook(lambda grad: grad * (torch.arange(len(grad)) % 2)[:, None])
        if computed:
            compute_gradient(self.embed, 100_000)  # bytes: some blocks

    @property
    def head(self) -> Tensor:
        return self.output.weight

    def read(self, hidden: Tensor) -> Tensor:
        """A use of a matrix without a gradient."""
        weight = self.blocks[0].linear.weight
        if self.settings.reads == "no_grad":
            with torch.no_grad():
                return F.linear(hidden, weight) / 8
        return F.linear(hidden, weight.detach() if self.settings.reads == "detach" else weight.data) / 8

    def forward(self, ids: Tensor, labels: Tensor, seldom: bool) -> Tensor:
        s, hidden = self.settings, self.embed(ids) * self.gain
        if s.checkpoint is None:
            hidden = self.hidden(hidden, ids)
        else:
            hidden = checkpoint(self.hidden, hidden, ids, use_reentrant=s.checkpoint == "reentrant")
        if s.reads and not s.reads_early:
            hidden = hidden + self.read(hidden)
        if seldom:
            hidden = hidden + self.seldom(hidden)
        biases = list(self.biases) or [None] * s.heads
        loss = sum(self.loss(hidden * (n + 1), labels.roll(n, 1), bias) for n, bias in enumerate(biases))
        if self.prompt is not None:
            loss = loss + self.loss(self.prompt.view(2, -1, s.hidden), labels, None)
        return loss + self.loss(self.memory.copy_(hidden.detach()), labels, None) if s.buffer else loss

    def hidden(self, hidden: Tensor, ids: Tensor) -> Tensor:
        blocks = list(self.blocks)
        if self.settings.twice:
            hidden, blocks = hidden + self.embed(ids.flip(-1)), [*blocks, blocks[0]]
        if self.settings.reads and self.settings.reads_early:
            hidden = hidden + self.read(hidden)
        for block in blocks:
            hidden = block(hidden)
        return hidden

    def loss(self, hidden: Tensor, labels: Tensor, bias: Tensor | None) -> Tensor:
        head = self.settings.head
        if self.settings.odd == "mask":
            bias = self.mask if bias is None else bias + self.mask
        if self.computed:
            head = {**head, "logit_scale": self.scale}
            return linear_cross_entropy(hidden, self.head, labels, bias=bias, memory=100_000, **head)
        logits = F.linear(hidden.float(), self.head.float())
        logits = (logits if bias is None else logits + bias.float()) * self.scale
        if "softcap" in head:
            logits = head["softcap"] * (logits / head["softcap"]).tanh()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=head.get("label_smoothing", 0.0))


@dataclass(frozen=True)
class Batch:
    """A micro-batch. seed: of dropout.  factor: of the loss."""

    ids: Tensor
    labels: Tensor
    seldom: bool
    seed: int
    factor: float

    def loss(self, net: Net) -> Tensor:
        torch.manual_seed(self.seed)
        with torch.autocast("cpu", torch.bfloat16) if net.settings.autocast == "forward" else nullcontext():
            return net(self.ids, self.labels, self.seldom) * self.factor


def batches(s: Settings, step: int, factor: float) -> list[Batch]:
    source, size = seeded(100 * s.seed + step), (2, s.tokens)
    made = []
    for n in range(s.accumulation):
        ids = torch.randint(s.vocabulary, size, generator=source).to(torch.int32 if s.odd == "int32" else torch.int64)
        labels = torch.randint(s.vocabulary // 2, s.vocabulary, size, generator=source)  # none of them is masked
        labels[1, -1] = -1 if s.odd == "bad label" else -100
        seldom = bool(torch.randint(2, (), generator=source))
        made.append(Batch(ids, labels, seldom, 10 * step + n, factor / s.accumulation))
    return made


def guard(net: Net) -> list[Tensor]:
    """Moves every ordinary parameter into the middle of new memory, the rest of which it returns."""
    around = []
    for param in net.parameters():
        if isinstance(param, QuantizedWeight):
            continue
        room = -(-param.numel() // 64) * 64
        memory = torch.full((2 * room + param.numel(),), GUARD, dtype=param.dtype)
        before, inside, after = memory.split((room, param.numel(), room))
        param.data = inside.view(param.shape).copy_(param.detach())
        around += [before, after]
    return around


# -- the two loops -----------------------------------------------------------------------------------------------------


class Loop:
    """A model with its optimizer, and what happens to both between steps, alike on both sides.

    before: the weights as they were when the last step began, or the loop has changed one.
    """

    def __init__(self, s: Settings, computed: bool) -> None:
        torch.manual_seed(s.seed)
        self.settings, self.joined = s, False
        self.net = Net(s, computed).to(s.dtype)
        self.codes: dict[str, QuantizedWeight] = {}
        if s.codes:
            self.hold()
        late = self.net.blocks[-1].named_parameters(f"blocks.{s.blocks - 1}") if s.late and s.blocks > 1 else ()
        self.late = dict(late)
        for param in self.late.values():
            param.requires_grad_(False)
        self.optimizer = self.make()
        self.scheduler = self.schedule()
        self.before = weights(self.net)

    def make(self) -> Any:
        raise NotImplementedError

    def hold(self) -> None:
        """Holds matrices in codes."""
        raise NotImplementedError

    def groups(self) -> list[dict[str, Any]]:
        s, hyper = self.settings, self.settings.hyper
        named = [(name, param) for name, param in self.net.named_parameters() if name not in self.late]
        groups = [{"params": named, **hyper}]
        if s.group is not None:
            own = {"rule": "lomo", "lr": 0.01} if s.group == "rule" else {**hyper, "lr": hyper["lr"] / 2}
            groups = [{"params": [pair for pair in named if pair[1].ndim > 1], **hyper}]
            groups.append({"params": [pair for pair in named if pair[1].ndim <= 1], **own})
        return groups + [self.late_group()] * self.joined

    def late_group(self) -> dict[str, Any]:
        return {"params": list(self.late.items()), **self.settings.hyper}

    def schedule(self) -> Any:
        s = self.settings
        if s.scheduler == "one cycle":
            cycles = s.group is None and not {"betas", "momentum"}.isdisjoint(s.hyper)
            return OneCycleLR(self.optimizer, s.hyper["lr"], total_steps=9, cycle_momentum=cycles)
        return ExponentialLR(self.optimizer, 0.7 if s.scheduler else 1.0)

    def happen(self, event: str) -> None:
        group, block = self.optimizer.param_groups[0], self.net.blocks[0].linear.weight
        decay = DECAY.get(self.settings.rule, "weight_decay")
        match event:
            case "lr":
                for each in self.optimizer.param_groups:
                    each["lr"] *= 0.3
            case "betas" if "betas" in group:
                group["betas"] = (0.6, 0.8)
            case "betas in place" if self.settings.ours and isinstance(group.get("betas"), list):
                group["betas"][0] = 0.5
            case "decay" if decay is not None:
                group[decay] = 0.5
            case "freeze" | "thaw" if self.settings.blocks > 1:
                block.requires_grad_(event == "thaw")
            case "add group" if self.late and not self.joined:
                self.joined = True
                for param in self.late.values():
                    param.requires_grad_(True)
                self.optimizer.add_param_group(self.late_group())
            case "bfloat16" | "float32":
                self.net.to(getattr(torch, event))

    def train(self, micro_batches: list[Batch], touches: bool) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if self.settings.autocast == "step" else nullcontext():
            return self.step(micro_batches, touches)

    def step(self, micro_batches: list[Batch], touches: bool) -> Tensor:
        raise NotImplementedError

    def touch(self) -> None:
        """The loop itself changes a weight, between micro-batches if there are some."""
        with torch.no_grad():
            (self.net.gain if self.settings.codes else self.net.head).mul_(0.9)
        self.before = weights(self.net)


class Ordinary(Loop):
    """Plain PyTorch."""

    def __init__(self, s: Settings) -> None:
        super().__init__(s, s.computed and s.same_layers)
        scale, interval = (512.0, 2) if s.loss_scale is DYNAMIC else (s.loss_scale, 1 << 30)
        self.scaler = torch.amp.GradScaler("cpu", scale or 1.0, growth_interval=interval, enabled=scale is not None)
        self.sums: dict[Tensor, Tensor] = {}

    def make(self) -> torch.optim.Optimizer:
        s, held = self.settings, {param: self.codes.get(name) for name, param in self.net.named_parameters()}
        return OneByOne(self.groups(), s, held) if s.ours else eval(s.rule)(self.groups(), **s.hyper)

    def hold(self) -> None:
        """The weights are ordinary matrices, which show what an optimizer holds in codes."""
        held = lowmem.quantize_(copy.deepcopy(self.net), self.settings.codes, group=self.settings.group_size)
        self.codes = {name: param for name, param in held.named_parameters() if isinstance(param, QuantizedWeight)}
        for name, codes in self.codes.items():
            self.net.get_parameter(name).data.copy_(codes.dequantize())

    def step(self, micro_batches: list[Batch], touches: bool) -> Tensor:
        for n, batch in enumerate(micro_batches):
            if n and touches:
                self.touch()
            loss = batch.loss(self.net)
            inputs = self.settings.inputs_of(self.net) if self.settings.call == "inputs" else None
            self.scaler.scale(loss).backward(inputs=inputs)
            if self.settings.sums_float32:
                self.sum_float32(last=n + 1 == len(micro_batches))
        self.scaler.unscale_(self.optimizer)
        self.clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.net.zero_grad()
        self.scheduler.step()
        return loss.detach()

    def sum_float32(self, last: bool) -> None:
        """Sums 16-bit gradients in float32, as `.grad` does not."""
        for param in self.net.parameters():
            if param.grad is not None:
                self.sums[param], param.grad = self.sums.get(param, 0) + param.grad.float(), None
            if last and param in self.sums:
                param.grad = self.sums.pop(param).to(param.dtype)

    def clip(self) -> None:
        s = self.settings
        in_groups = [param for group in self.optimizer.param_groups for param in group["params"]]
        params = [param for param in (self.net.parameters() if s.with_model else in_groups) if param.grad is not None]
        grads = [param.grad for param in params]
        self.norm = get_total_norm([grad.float() for grad in grads])
        unclamped = get_total_norm(grads, s.norm_type)
        if s.clip_value is not None:
            clip_grad_value_(params, s.clip_value, foreach=False)
        if s.clip_norm is not None:  # AdaLomo measures before it clamps, as its source does
            norm = unclamped if s.rule == "adalomo" else get_total_norm(grads, s.norm_type)
            clip_grads_with_norm_(params, s.clip_norm, norm)


class OneByOne(torch.optim.Optimizer):
    """A rule of lowmem as an ordinary optimizer: swept over one finished gradient after another, and not compiled."""

    def __init__(self, groups: list[dict[str, Any]], s: Settings, held: dict[Tensor, QuantizedWeight | None]) -> None:
        super().__init__(groups, {})
        self.held = held  # in codes
        self.defaults = s.hyper  # which schedulers read
        self.options = {"rule": s.rule, "rounding": s.rounding, "state_storage": s.state_storage, "policy": "deferred"}
        self.inner: lowmem.FusedOptimizer | None = None

    def step(self) -> None:
        self.prepare()
        losses = []
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({key: copy.copy(each) for key, each in group.items() if key not in ("params", "param_names")})
            for param, shadow in zip(group["params"], inner["params"], strict=True):
                shadow.requires_grad_(param.requires_grad)
                if param.grad is not None:
                    losses.append(Give.apply(shadow, param.grad))
        self.inner.backward(sum(losses))
        for param, codes in self.held.items():
            if codes is not None:
                param.data.copy_(codes.dequantize())

    def shadow(self, param: Tensor) -> Tensor:
        """What is swept: it has the memory of the parameter, or is what the parameter shows."""
        return param.detach() if self.held[param] is None else self.held[param].detach()

    def prepare(self) -> None:
        """Makes the sweeping optimizer, again if parameters have joined or have other memory by now."""
        params = [param for group in self.param_groups for param in group["params"]]
        inner = [shadow for group in self.inner.param_groups for shadow in group["params"]] if self.inner else []
        if list(map(memory, map(self.shadow, params))) == list(map(memory, inner)):
            return
        groups = []
        for group in self.param_groups:  # shadows have the memory of the parameters
            hyper = {key: each for key, each in group.items() if key not in SCHEDULED}
            groups.append({**hyper, "params": [nn.Parameter(self.shadow(param)) for param in group["params"]]})
        before = self.inner and self.inner.named_state_dict()
        self.inner = lowmem.FusedOptimizer(groups, **self.options, compile=False, batching=False)
        if before:
            kept = {"state": before["state"], "step": before["step"]}
            self.inner.load_named_state_dict({**self.inner.named_state_dict(), **kept})


def memory(tensor: Tensor) -> int:
    return (tensor.parts[0] if isinstance(tensor, QuantizedWeight) else tensor).data_ptr()


class Give(torch.autograd.Function):
    """A loss with a given gradient."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, grad: Tensor) -> Tensor:
        ctx.grad = grad
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.grad, None


class Fused(Loop):
    """The loop as users of lowmem write it."""

    def __init__(self, s: Settings) -> None:
        super().__init__(s, s.computed)

    def hold(self) -> None:
        lowmem.quantize_(self.net, self.settings.codes, group=self.settings.group_size)

    def make(self, **other: Any) -> lowmem.FusedOptimizer:
        s = self.settings
        self.around = guard(self.net) if s.guard else []
        options = {**s.options, **s.hyper, "model": self.net if s.with_model else None, **other}
        return lowmem.FusedOptimizer(self.groups(), **options)

    def happen(self, event: str) -> None:
        super().happen(event)
        match event:
            case "bfloat16" | "float32" if self.settings.guard:
                self.around = guard(self.net)
            case "save":
                self.save()
            case "paused":
                with self.optimizer.paused():
                    batches(self.settings, 98, 1.0)[0].loss(self.net).backward()
            case "dropped":
                with self.optimizer.accumulate():
                    self.optimizer.backward(batches(self.settings, 99, 1.0)[0].loss(self.net))
                self.optimizer.zero_grad()

    def save(self) -> None:
        """Continues with another optimizer, whose constructor was told another seed."""
        file = io.BytesIO()
        torch.save(self.optimizer.state_dict(), file)
        self.optimizer.remove()
        self.optimizer = self.make(seed=9)
        scheduler, self.scheduler = self.scheduler, self.schedule()
        self.optimizer.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
        self.scheduler.load_state_dict(scheduler.state_dict())

    def step(self, micro_batches: list[Batch], touches: bool) -> Tensor:
        s, opt = self.settings, self.optimizer
        for n, batch in enumerate(micro_batches, start=1):
            if n > 1 and touches:
                self.touch()
            with opt.accumulate() if n < s.accumulation or (s.by_step and n > 1) else nullcontext():
                if s.call == "callable":
                    loss = opt.backward(lambda batch=batch: batch.loss(self.net))
                elif s.call == "by hand" and n == s.accumulation:
                    loss = self.by_hand(batch)
                else:
                    loss = batch.loss(self.net)
                    if s.call == "inputs":
                        loss.backward(inputs=s.inputs_of(self.net))
                    else:
                        loss.backward() if s.call == "plain" else opt.backward(loss)
        if s.by_step or s.call == "by hand":
            opt.step()
            opt.zero_grad()
        self.scheduler.step()
        return loss.detach()

    def by_hand(self, batch: Batch) -> Tensor:
        """The last micro-batch of a step, whose gradients the loop puts into `.grad`."""
        loss, params = batch.loss(self.net), [param for param in self.net.parameters() if param.requires_grad]
        for param, grad in zip(params, torch.autograd.grad(loss, params, allow_unused=True), strict=True):
            param.grad = grad
        return loss


# -- a trial -----------------------------------------------------------------------------------------------------------


class DefectError(AssertionError):
    """The loops differ, or an error was raised that should not have been."""


def run(seed: int, folder: Path | None = None, compile: bool = True) -> str:
    """Runs both loops of a seed. Returns "accepted", or the name of the error by which both or lowmem refused it.

    Raises:
        DefectError: with the first difference, and the settings.
    """
    s = draw(seed, compile)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # steps of the ordinary optimizer that a scheduler misses
            return trained(s)
    except Exception as error:
        kind = "" if isinstance(error, DefectError) else f"{type(error).__name__}: "
        raise DefectError(f"{kind}{error}\n    {s}") from error


def trained(s: Settings) -> str:
    """Trains in both loops, and compares them."""
    try:
        fused = Fused(s)
    except LowmemError as error:
        return type(error).__name__
    ordinary = Ordinary(s)
    start = weights(ordinary.net)
    for step in range(s.steps):
        try:
            loss = advance(ordinary, step)
        except Exception as error:  # plain PyTorch refuses it
            try:
                advance(fused, step)
            except Exception:
                return type(error).__name__
            raise
        try:
            fused_loss = advance(fused, step)
        except LowmemError as error:
            untouched = all(map(torch.equal, fused.before, weights(fused.net)))
            torn = s.checkpoint == "reentrant" and is_torn(
                fused.optimizer
            )  # only the second part of a gradient shows it
            if untouched or torn:
                return type(error).__name__
            raise
        compare(f"step {step}", s, ordinary, fused, start)
        refuse_difference(f"step {step}, loss", s, fused_loss, loss, torch.zeros(()))
    compare_states(s, ordinary, fused)
    return "accepted"


def advance(loop: Loop, step: int) -> Tensor:
    """One step, after what happens before it."""
    s, loop.before = loop.settings, weights(loop.net)
    events = [event for at, event in s.events if at == step]
    for event in events:
        loop.happen(event)
        loop.before = weights(loop.net)
    if "touch" in events and s.accumulation == 1:
        loop.touch()
    return loop.train(batches(s, step, math.inf if "overflow" in events else 1.0), "touch" in events)


def weights(net: Net) -> list[Tensor]:
    return [plain(param.detach()).clone() for param in net.parameters()]


def is_torn(opt: lowmem.FusedOptimizer) -> bool:
    try:
        opt.state_dict()
    except StepError:
        return True
    return False


def compare(where: str, s: Settings, ordinary: Ordinary, fused: Fused, start: list[Tensor]) -> None:
    """Raises `DefectError` if weights or norms differ, a gradient is left, or a guard was written to."""
    if not all((part == GUARD).all() for part in fused.around):
        raise DefectError(f"{where}: memory next to a parameter was written to")
    pairs = zip(ordinary.net.named_parameters(), fused.net.parameters(), start, strict=True)
    for (name, want), got, first in pairs:
        if got.grad is not None:
            raise DefectError(f"{where}, {name}: a gradient is left")
        refuse_difference(f"{where}, {name}", s, plain(got.detach()), want.detach(), first)
    norm, want = fused.optimizer.last_step.grad_norm, ordinary.norm
    if want.isfinite() and not torch.isclose(
        norm.float(), want, rtol=0.1 if s.sixteen_bits or s.rounds_gradients else 1e-4
    ):
        raise DefectError(f"{where}: grad_norm is {norm}, not {want}")


def compare_states(s: Settings, ordinary: Ordinary, fused: Fused) -> None:
    """Raises `DefectError` if states of our rules differ; in any case it saves, which a torn optimizer does not."""
    got = fused.optimizer.named_state_dict()["state"]
    inner = ordinary.optimizer.inner if s.ours and s.exact else None
    for name, states in inner.named_state_dict()["state"].items() if inner is not None else ():
        for key, want in states.items():
            refuse_difference(f"state {key} of {name}", s, got[name][key], want, torch.zeros(()))


def refuse_difference(where: str, s: Settings, got: Tensor, want: Tensor, first: Tensor) -> None:
    """Raises `DefectError` if two tensors differ more than they may; plain PyTorch began with `first`."""
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        raise DefectError(f"{where}: {got.dtype} {list(got.shape)}, not {want.dtype} {list(want.shape)}")
    if torch.equal(got, want) or (want.isnan().any() and torch.equal(got.isnan(), want.isnan())):
        return
    got, want = got.float(), want.float()
    difference, size, moved = (got - want).norm(), want.norm(), (want - first.float()).norm()
    allowed = 1e-4 * moved + 1e-6 * size  # sums in another order
    if s.state_storage != "float32":  # some states are rounded to a neighbour, 2⁻⁸ away
        allowed += 2**-8 * moved
    if (
        s.sixteen_bits or s.rounds_gradients
    ):  # some elements, and one at least, are rounded to a neighbour; a sign-like step changes its sign
        part = max(1 / 20 if s.rounds_gradients else 1 / 200, 1 / want.numel()) ** 0.5
        allowed += part * (2**-7 * size + (2 * moved if s.rounds_gradients else 0.0))
    if s.codes and want.ndim > 1:  # some codes are the next ones
        unit = want.abs().max() / (2 ** (int(s.codes.removeprefix("int")) - 1) - 1)
        allowed += 2 * unit * max(1, want.numel() / (20 if s.autocast else 200)) ** 0.5
    if s.exact or not difference <= allowed:
        at = int((got - want).abs().nan_to_num(math.inf).argmax())
        raise DefectError(
            f"{where}: {int((got != want).sum())} of {got.numel()} elements differ, by a norm of {difference:.3g} (of "
            f"{size:.3g}, moved by {moved:.3g}); the largest, {at}: {got.flatten()[at]}, not {want.flatten()[at]}"
        )
