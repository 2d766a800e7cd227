"""optimi's optimizers in a plain loop, with optimi's gradient release, and with ours, also with accumulation."""

import contextlib
import io
from itertools import product

import pytest
import torch
from judged import judge, report, untouched_if_refused
from support.products import sample
from torch import nn

import lowmem

optimi = pytest.importorskip("optimi", reason="torch-optimi is not installed")

STEPS = 14  # Ranger looks ahead every six steps
WINDOW = 4  # micro-batches per step
DECAYED = {"weight_decay": 0.01}
DECOUPLED = {"weight_decay": 1e-5, "decouple_lr": True, "max_lr": 2e-3}
ADAN = {"betas": (0.98, 0.92, 0.99)}
# Class and settings.
TABLE = {
    "Adam": ("Adam", {}),
    "Adam, L2": ("Adam", DECAYED),
    "AdamW": ("AdamW", {}),
    "AdamW, decay": ("AdamW", DECAYED),
    "AdamW, decoupled": ("AdamW", DECOUPLED),
    "AdamW, Kahan sums": ("AdamW", {**DECAYED, "kahan_sum": True}),
    "AdamW, no Kahan sums": ("AdamW", {**DECAYED, "kahan_sum": False}),
    "Adan": ("Adan", ADAN),
    "Adan, decay": ("Adan", {**ADAN, "weight_decay": 2e-2}),
    "Adan, decay of Adam": ("Adan", {**ADAN, "weight_decay": 2e-2, "adam_wd": True}),
    "Adan, decoupled": ("Adan", {**ADAN, **DECOUPLED}),
    "Lion": ("Lion", {}),
    "Lion, decay": ("Lion", {"weight_decay": 0.1}),
    "Lion, decoupled": ("Lion", DECOUPLED),
    "RAdam": ("RAdam", {}),
    "RAdam, L2": ("RAdam", DECAYED),
    "RAdam, decay": ("RAdam", {**DECAYED, "decouple_wd": True}),
    "RAdam, decoupled": ("RAdam", DECOUPLED),
    "Ranger": ("Ranger", {"k": 6, "alpha": 0.5}),
    "Ranger, decay": ("Ranger", {**DECAYED, "k": 3}),
    "SGD": ("SGD", {}),
    "SGD, momentum": ("SGD", {"momentum": 0.9}),
    "SGD, dampening": ("SGD", {"momentum": 0.9, "dampening": True, "torch_init": True}),
    "SGD, decay": ("SGD", {**DECAYED, "momentum": 0.9}),
    "SGD, decoupled": ("SGD", {**DECOUPLED, "momentum": 0.9, "dampening": True, "torch_init": True}),
    "StableAdamW": ("StableAdamW", {}),
    "StableAdamW, decay": ("StableAdamW", DECAYED),
    "StableAdamW, decoupled": ("StableAdamW", DECOUPLED),
}
# Accumulation in the states approximates accumulated gradients only without L2 decay, and in SGD with dampening.
ACCUMULATING = ["Adam", "AdamW", "AdamW, decay", "Adan", "Lion", "RAdam", "SGD, dampening", "StableAdamW"]


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.first = nn.Linear(16, 24, bias=False)
        self.last = nn.Linear(24, 1, bias=False)

    def forward(self, x):
        return self.last(nn.functional.mish(self.first(self.norm(x))))


def make_net(dtype):
    torch.manual_seed(0)
    return Perceptron().to(dtype)


def batches(count, dtype):
    source = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(8, size, generator=source).to(dtype) for size in (16, 1)) for _ in range(count)]


def settings_of(case, **options):
    """Returns the settings of optimi's tests, with loops over parameters."""
    name, settings = TABLE[case]
    return getattr(optimi, name), {"lr": 1e-3, "foreach": False, "triton": False, **settings, **options}


def backward(net, batch, scale=1):
    x, y = batch
    (nn.functional.mse_loss(net(x), y) / scale).backward()


def train(net, opt, data):
    for batch in data:
        with untouched_if_refused(net):
            backward(net, batch)
        opt.step()
        opt.zero_grad()
    return net


def same(start, first, *others):
    """Returns whether the weights are bitwise equal and have changed. In bfloat16 some may stay unchanged."""
    start, first, *others = (list(map(torch.clone, net.parameters())) for net in (start, first, *others))
    assert not all(map(torch.equal, start, first))
    return all(all(map(torch.equal, first, other)) for other in others)


def released(case, dtype):
    """Compares ours, a plain loop, and gradient release, whose step() and zero_grad() do nothing."""
    cls, options = settings_of(case)
    net, plain, theirs = make_net(dtype), make_net(dtype), make_net(dtype)
    data = batches(STEPS, dtype)
    release = cls(theirs.parameters(), **options, gradient_release=True)
    optimi.prepare_for_gradient_release(theirs, release)
    opt = lowmem.FusedOptimizer(net.named_parameters(), rule=cls, **options)
    train(plain, cls(plain.parameters(), **options), data)
    return same(make_net(dtype), plain, train(theirs, release, data), train(net, opt, data))


def resumed(case, dtype):
    """Resumes every few steps from a file written by torch.save."""
    cls, options = settings_of(case)
    net, plain = make_net(dtype), make_net(dtype)
    data = batches(STEPS, dtype)
    train(plain, cls(plain.parameters(), **options), data)
    file = io.BytesIO()
    for start in range(0, STEPS, 4):
        opt = lowmem.FusedOptimizer(net.named_parameters(), rule=cls, **{**options, "lr": 1.0})
        if start:
            file.seek(0)
            opt.load_state_dict(torch.load(file, weights_only=True))
        else:
            opt.param_groups[0]["lr"] = options["lr"]
        train(net, opt, data[start : start + 4])
        file.seek(0)
        torch.save(opt.state_dict(), file)
        opt.remove()
    return same(make_net(dtype), plain, net)


def accumulated(case, dtype):
    """Sums gradients in their own dtype, as in a plain loop."""
    cls, options = settings_of(case)
    net, plain = make_net(dtype), make_net(dtype)
    data = batches(3 * WINDOW, dtype)
    opt = lowmem.FusedOptimizer(net.named_parameters(), rule=cls, accumulation_dtype="gradient", **options)
    ordinary = cls(plain.parameters(), **options)
    for n, batch in enumerate(data, start=1):
        last = n % WINDOW == 0
        with contextlib.nullcontext() if last else opt.accumulate():
            backward(net, batch, WINDOW)
        backward(plain, batch, WINDOW)
        if last:
            for optimizer in (opt, ordinary):
                optimizer.step()
                optimizer.zero_grad()
    return opt.last_step.step == 3 and same(make_net(dtype), plain, net)


def accumulated_in_the_states(case, dtype):
    """optimi adds each micro-batch to the moments. Its tests require 96.5 % of the weights to agree within 0.01."""
    cls, options = settings_of(case)
    net, theirs = make_net(dtype), make_net(dtype)
    opt = lowmem.FusedOptimizer(net.named_parameters(), rule=cls, policy="deferred", **options)
    release = cls(theirs.parameters(), **options, gradient_release=True)
    optimi.prepare_for_gradient_release(theirs, release)
    for n, batch in enumerate(batches(10 * WINDOW, dtype), start=1):
        last = n % WINDOW == 0
        release.optimizer_accumulation = not last
        backward(theirs, batch)
        with contextlib.nullcontext() if last else opt.accumulate():
            backward(net, batch)
    pairs = zip(net.parameters(), theirs.parameters(), strict=True)
    close = torch.cat([torch.isclose(one, other, 1e-2, 1e-2).flatten() for one, other in pairs])
    return opt.last_step.step == 10 and close.float().mean() > 0.965


def looped_over_lists(case):
    """Uses foreach=True, which optimi deprecates."""
    cls, options = settings_of(case, foreach=True)
    net, plain = make_net(torch.float32), make_net(torch.float32)
    data = batches(STEPS, torch.float32)
    opt = lowmem.FusedOptimizer(net.named_parameters(), rule=cls, **options)
    return same(make_net(torch.float32), train(plain, cls(plain.parameters(), **options), data), train(net, opt, data))


def groups_by_decay():
    """`param_groups_weight_decay` excludes norms and biases."""
    net, plain = make_net(torch.float32), make_net(torch.float32)
    data = batches(STEPS, torch.float32)
    _, options = settings_of("AdamW")

    def split(model):
        return optimi.param_groups_weight_decay(model, weight_decay=0.1, additional_layers=["last"])

    opt = lowmem.FusedOptimizer(split(net), rule=optimi.AdamW, **options)
    train(plain, optimi.AdamW(split(plain), **options), data)
    return len(opt.param_groups) == 2 and same(make_net(torch.float32), plain, train(net, opt, data))


def low_precision():
    """`to_low_precision` casts the parameters to two dtypes."""

    def cast():
        return optimi.to_low_precision(make_net(torch.float32), fp32_modules=nn.LayerNorm)

    net, plain = cast(), cast()
    data = batches(STEPS, torch.float32)
    _, options = settings_of("AdamW")
    opts = (
        lowmem.FusedOptimizer(net.named_parameters(), rule=optimi.AdamW, **options),
        optimi.AdamW(plain.parameters(), **options),
    )
    for model, opt in zip((net, plain), opts, strict=True):
        for x, y in data:
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            opt.step()
            opt.zero_grad()
    assert {param.dtype for param in net.parameters()} == {torch.float32, torch.bfloat16}
    return same(cast(), plain, net)


def refused(**options):
    cls, settings = settings_of("AdamW", **options)
    return bool(lowmem.FusedOptimizer(make_net(torch.float32).named_parameters(), rule=cls, **settings))


@pytest.mark.filterwarnings("ignore:Parameter `foreach` is deprecated", "ignore:You are using weight_decay")
def test_optimi():
    cases = {}
    for case, dtype in product(TABLE, (torch.float32, torch.bfloat16)):
        for compare in (released, resumed, accumulated):
            cases[f"{case}, {str(dtype)[6:]}, {compare.__name__}"] = lambda scene=(compare, case, dtype): scene[0](
                *scene[1:]
            )
    for case in TABLE:
        cases[f"{case}, foreach"] = lambda case=case: looped_over_lists(case)
    for case, dtype in product(ACCUMULATING, (torch.float32, torch.bfloat16)):
        cases[f"{case}, {str(dtype)[6:]}, its own accumulation"] = lambda scene=(case, dtype): (
            accumulated_in_the_states(*scene)
        )
    cases = {case: cases[case] for case in sample(cases, share=0.1)}
    cases |= {
        "param_groups_weight_decay": groups_by_decay,
        "to_low_precision": low_precision,
        "gradient_release": lambda: refused(gradient_release=True),
        "max_lr is derived": lambda: refused(decouple_lr=True),
    }
    report("optimi", {case: judge(compare) for case, compare in cases.items()}, at_least=len(cases) - 2)
