"""Loops that edit weights between steps, drawn by Hypothesis, against float32 weights in plain PyTorch.

A step of either side is right if it starts from the same weights. So the plain weights are what the optimizer stores,
or what an edit has left, and each step may differ from them by a rounding. An edit that cannot be followed raises, and
leaves all weights as they are. `scripts/test.sh --full tests/step/test_edits.py` draws many more.
"""

import copy
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.devices import seeded
from support.products import FULL
from torch import Tensor, nn

import lowmem
from lowmem.errors import LowmemError
from lowmem.tiles.quantized import plain
from lowmem.tiles.rounding import spacing

RULES = {
    "lomo": (torch.optim.SGD, {"lr": 0.02}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.1}),
}
ROUNDINGS = ("nearest", "stochastic", "compensated", "compensated8", "master")
EDITS = (
    *("zero", "zero data", "mask", "mask data", "negate", "load", "assign", "average", "swap", "replace", "infinite"),
    *("unfreeze", "freeze", "unfreeze unknown", "retie", "resize", "bfloat16", "float32", "float16", "same dtype"),
    *("clear states", "resume", "resume then load"),
)


@dataclass(frozen=True)
class Settings:
    rule: str
    rounding: str
    dtype: torch.dtype
    codes: str | None
    policy: str
    accumulation: int
    edits: tuple[tuple[str, ...], ...]  # before each step


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 128)
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(2))  # 2¹⁴ elements: some are updated in stacks
        self.late, self.unknown = nn.Linear(128, 5), nn.Linear(128, 5)
        self.head = nn.Linear(128, 12, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        extra = self.late(hidden).float().square().mean() + self.unknown(hidden).float().square().mean()
        return nn.functional.cross_entropy(self.head(hidden).float(), ids.roll(1)) + extra


def create(s: Settings) -> tuple[Net, lowmem.FusedOptimizer]:
    torch.manual_seed(0)
    net = Net().to(s.dtype)
    net.late.requires_grad_(False)
    net.unknown.requires_grad_(False)
    if s.codes:
        lowmem.quantize_(net, s.codes)
    return net, optimizer_of(net, s)


def optimizer_of(net: Net, s: Settings) -> lowmem.FusedOptimizer:
    params = [(name, param) for name, param in net.named_parameters() if not name.startswith("unknown")]
    clip = {"immediate": None, "deferred": 0.5, "two_pass": 0.5}[s.policy]
    options = {"rounding": s.rounding, "policy": s.policy, "clip_norm": clip, "state_storage": "auto"}
    if s.rule == "adamw":
        options["state_storage"] = "float32"
    return lowmem.FusedOptimizer(params, s.rule, model=net, compile=False, **options, **RULES[s.rule][1])


def edit(kind: str, net: Net, optimizer: lowmem.FusedOptimizer, s: Settings) -> lowmem.FusedOptimizer:
    """Edits weights as loops do. Returns the optimizer that continues."""
    weights = [*net.layers.parameters(), net.embed.weight]
    if s.codes:  # the other matrices are integers, which have no elements to edit one by one
        weights = [weight for weight in weights if weight.ndim == 1]
    for n, weight in enumerate(weights):
        mask = torch.rand(weight.shape, generator=seeded(n)) > 0.4
        match kind:
            case "zero":
                weight.zero_()
            case "zero data":
                weight.data.zero_()
            case "mask":
                weight.mul_(mask)
            case "mask data":
                weight.data.mul_(mask)
            case "negate":
                torch.neg(weight, out=weight)
            case "replace":
                weight.data = weight.data.flip(0)
            case "infinite" if n == 0:
                weight.view(-1)[0] = torch.inf
    match kind:
        case "load" | "assign" if len(net.embed.weight) == 12:  # not resized
            other = Net().to(net.late.weight.dtype)
            if s.codes:
                lowmem.quantize_(other, s.codes)
            net.load_state_dict(other.state_dict(), assign=kind == "assign" and not s.codes)
        case "average":
            for weight in weights:
                torch._foreach_lerp_([weight], [torch.ones_like(weight)], 0.25)
        case "swap":  # for an evaluation, and back
            kept = [weight.detach().clone() for weight in weights]
            for weight, back in zip(weights, kept, strict=True):
                weight.data.copy_(torch.ones_like(weight))
                weight.data.copy_(back)
        case "freeze" | "unfreeze":
            net.late.requires_grad_(kind == "unfreeze")
        case "unfreeze unknown":
            net.unknown.requires_grad_()
        case "retie":
            net.head.weight = net.embed.weight
        case "resize":
            table = plain(net.embed.weight.detach())
            net.embed.weight.data = torch.cat([table, torch.zeros_like(table)])
        case "bfloat16" | "float16" | "float32":
            net.to(getattr(torch, kind))
        case "same dtype":
            net.to(net.late.weight.dtype)
        case "clear states":
            optimizer.state.clear()
        case "resume" | "resume then load":
            saved, weights_then = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(net.state_dict())
            optimizer.remove()
            optimizer = optimizer_of(net, s)
            optimizer.load_state_dict(saved)
            if kind == "resume then load":  # weights after the optimizer
                net.load_state_dict(weights_then)
    return optimizer


class Plain:
    """The weights that the optimizer stores, in float32, each with an optimizer of torch.

    Attributes:
        want: by parameter, its float32 weight.
        error: by parameter, by how much the stored weight may differ from it before it is rounded.
        seen: by parameter, its elements after the last step.
    """

    def __init__(self, s: Settings) -> None:
        self.settings = s
        self.want: dict[Tensor, Tensor] = {}
        self.error: dict[Tensor, Tensor] = {}
        self.seen: dict[Tensor, Tensor] = {}
        self.dtypes: dict[Tensor, torch.dtype] = {}
        self.named: dict[str, Tensor] = {}
        self.optimizers: dict[Tensor, torch.optim.Optimizer] = {}

    def begin(self, name: str, param: Tensor, edits: tuple[str, ...]) -> None:
        """Follows the edits of a parameter since the last step."""
        s, shown = self.settings, plain(param.detach()).float()
        before, self.named[name] = self.named.get(name), param
        resumed = any(edit.startswith("resume") for edit in edits)
        if param not in self.want or self.want[param].shape != shown.shape:
            cls, hyper = RULES[s.rule]
            self.want[param] = nn.Parameter(shown.clone())
            self.error[param] = torch.zeros_like(shown)
            self.optimizers[param] = cls([self.want[param]], foreach=False, **hyper)
            if resumed and before in self.want and before.shape == param.shape:  # states are loaded by name
                state = self.optimizers[before].state[self.want[before]]
                self.optimizers[param].state[self.want[param]] = copy.deepcopy(state)
        if "clear states" in edits:
            self.optimizers[param].state.clear()
        want, error, rounding = self.want[param], self.error[param], s.rounding
        if param.dtype == torch.float32:
            rounding = "nearest"
        changed = torch.ones_like(want, dtype=torch.bool)
        if self.dtypes.get(param) != param.dtype:
            self.dtypes[param] = param.dtype
        elif rounding == "master":
            distance, half = (shown - want).abs(), spacing(shown, param.dtype) / 2
            changed = ~(distance <= error + half)  # also from infinity
            unclear = (distance - half).abs() < 2 * error + half / 100  # may be seen as an edit, or not
            error += half * (unclear | (shown.frexp().mantissa.abs() == 0.5))  # below a power of 2 numbers are closer
        elif rounding.startswith("compensated") and torch.equal(shown.nan_to_num(), self.seen.get(param, want)):
            changed.fill_(False)
        want.data = torch.where(changed, shown, want.data)
        error.masked_fill_(changed, 0.0)
        noticed = changed.all() and {"zero", "mask", "negate", "load", "average", "replace"}.issuperset(edits)
        loaded = bool(changed.all()) and resumed
        if (rounding.startswith("compensated") and edits and not noticed) or (rounding == "master" and loaded):
            error += 0.501 * spacing(shown, param.dtype)  # the residual may have been dropped, or not

    def step(self, param: Tensor, grad: Tensor, coef: Tensor) -> None:
        want = self.want[param]
        before, want.grad = want.detach().clone(), grad * coef
        self.optimizers[param].step()
        largest = torch.maximum(before.abs(), want.detach().abs())
        self.error[param] += 1e-4 * (want.detach() - before).abs() + 1e-6 * largest + 1e-8
        if self.settings.rounding == "compensated8" and param.dtype != torch.float32:
            self.error[param] += spacing(largest, param.dtype) / 127

    def check(self, where: str, param: Tensor, before: Tensor) -> None:
        """Raises `AssertionError` unless a parameter is one that rounding may make of its float32 weight."""
        s, got, want = self.settings, plain(param.detach()).float(), self.want[param].data
        apart, largest = self.error[param].clone(), torch.maximum(want.abs(), before.abs())
        if s.codes and param.ndim == 2:
            unit = largest.unflatten(-1, (-1, 64)).amax(-1) / (2 ** (int(s.codes.removeprefix("int")) - 1) - 1)
            apart += 1.5 * unit.repeat_interleave(64, -1)
        if param.dtype != torch.float32:
            apart += spacing(largest, param.dtype) * (1.0 if s.rounding == "stochastic" else 0.501)
        near = ((got - want).abs() <= apart) | (got == want) | (got.isnan() & want.isnan())
        assert bool(near.all()), (
            f"{where}: {int((~near).sum())} of {near.numel()} weights are off, up to {(got - want)[~near].abs().max()}"
        )
        self.seen[param] = got.nan_to_num()


def compare(s: Settings) -> bool:
    """Trains both ways. Returns whether every edit was followed; False if one was refused."""
    net, optimizer = create(s)
    reference = Plain(s)
    clips = s.policy != "immediate"
    for number, kinds in enumerate(s.edits):
        with torch.no_grad():
            for kind in kinds:
                try:
                    optimizer = edit(kind, net, optimizer, s)
                except LowmemError:
                    return False
        batches = [torch.randint(12, (9,), generator=seeded(10 * number + n)) for n in range(s.accumulation)]
        names = {param: name for name, param in net.named_parameters()}
        known = {param for group in optimizer.param_groups for param in group["params"]}
        trained = [param for param in net.parameters() if param.requires_grad and param in known]
        grads: dict[Tensor, Tensor] = {}
        for ids in batches:
            loss = net(ids) / s.accumulation
            for param, grad in zip(trained, torch.autograd.grad(loss, trained) if trained else (), strict=True):
                grads[param] = grads.get(param, 0.0) + plain(grad).float()
            del loss  # its graph remembers the shapes of parameters
        norm = torch.stack([torch.zeros(()).double(), *(grad.double().norm() for grad in grads.values())]).norm()
        coef = (0.5 / (norm + 1e-6)).clamp(max=1.0).float() if clips else torch.ones(())
        before = {param: plain(param.detach()).float().clone() for param in net.parameters()}
        for param in trained:
            reference.begin(names[param], param, kinds)
        try:
            for n, ids in enumerate(batches, 1):
                with optimizer.accumulate() if n < len(batches) else nullcontext():
                    optimizer.backward(lambda ids=ids: net(ids) / s.accumulation)
        except LowmemError:
            assert all(same(param, old) for param, old in before.items()), f"step {number}: refused after an update"
            return False
        assert trained, f"step {number}, after {kinds}: nothing was trained"
        for param, grad in grads.items():
            if norm.isfinite() if clips else grad.isfinite().all():
                reference.step(param, grad, coef)
        for param in net.parameters():
            if param in grads:
                reference.check(f"step {number}, after {kinds}, {names.get(param)}", param, before[param])
            else:
                assert same(param, before[param]), f"step {number}, after {kinds}: {names.get(param)} has moved"
    return True


def same(param: Tensor, values: Tensor) -> bool:
    return torch.equal(plain(param.detach()).float().nan_to_num(), values.nan_to_num())


@st.composite
def loops(draw, rule: str, rounding: str) -> Settings:
    edits = st.lists(st.sampled_from(EDITS), max_size=2).map(tuple)
    policy = draw(st.sampled_from(["immediate", "deferred", "two_pass"]))
    return Settings(
        rule,
        rounding,
        draw(st.sampled_from([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32])),
        draw(st.sampled_from([None, None, "int8", "int12"])) if rounding == "stochastic" else None,
        policy,
        draw(st.sampled_from([1, 1, 2])) if policy == "deferred" else 1,
        ((), *draw(st.lists(edits, min_size=2, max_size=5))),
    )


@pytest.mark.filterwarnings("ignore")  # of lost updates, and of parameters that are not passed
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("rule", RULES)
def test_edited_weights_are_trained_as_they_are(rule, rounding):
    @settings(max_examples=200 if FULL else 4, derandomize=True, database=None, deadline=None)
    @given(loops(rule, rounding))
    def check(s: Settings) -> None:
        compare(s)

    check()
