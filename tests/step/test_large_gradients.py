"""Finite gradients whose squares overflow float32 (a norm above 1.8e19): they are not mistaken for Inf or NaN."""

import logging
import math

import pytest
import torch
from reference.adafactor import Adafactor
from reference.adalomo import AdaLomo
from reference.lans import Lans
from reference.lion import Lion
from support.compiled import compiles
from support.devices import seeded
from support.nets import full_weights
from support.shards import SHARDS

import lowmem

POLICIES = ["immediate", "two_pass", "deferred"]
SHAPES = [(7,), (40, 30), (200, 100)]  # the last one is updated by itself


def start():
    return [torch.randn(shape) for shape in SHAPES]


def gradients(size, seed=0):
    source = seeded(seed)
    return [torch.randn(shape, generator=source) * size for shape in SHAPES]


def make_optimizer(values, rule, dtype=torch.float32, **options):
    params = [torch.nn.Parameter(value.to(dtype)) for value in values]
    return params, lowmem.FusedOptimizer(params, rule, **{"lr": 1e-2, "compile": False, **options})


def norm(grads):
    return math.sqrt(sum(grad.double().square().sum().item() for grad in grads))


REFERENCES = {"lion": Lion, "lans": Lans, "adalomo": AdaLomo, "adafactor": Adafactor}
CLIPS = [{"clip_norm": 1.0}, {"clip_value": 1e3}]
AS_REFERENCE = [("lion", {}, {}), ("lans", {}, {}), ("lans", {"wd": 0.1, "variant": "step"}, {})]
AS_REFERENCE += [("adalomo", {}, clip) for clip in CLIPS]
AS_REFERENCE += [("adafactor", {"min_dim_size_to_factor": 8}, clip) for clip in CLIPS]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("rule", "options", "clip"), AS_REFERENCE, ids=str)
def test_as_the_reference(give_gradients, rule, options, clip, policy):
    """Rules that sum squares take gradients clipped."""
    if "clip_norm" in clip and policy == "immediate":
        pytest.skip("not supported")
    values = start()
    params, opt = make_optimizer(values, rule, policy=policy, **options, **clip)
    twins = [REFERENCES[rule](shape, lr=1e-2, **options) for shape in SHAPES]
    want = [value.double().cpu().numpy() for value in values]
    for step, scale in enumerate((1.0, 1e20, 1.0)):
        grads = gradients(scale, step)
        give_gradients(opt, *zip(params, grads, strict=True))
        assert opt.last_step.skipped_params == 0
        coef = min(1.0, clip.get("clip_norm", math.inf) / norm(grads))
        limit = clip.get("clip_value", math.inf)
        clipped = [(grad.double() * coef).clamp(-limit, limit) for grad in grads]
        want = [twin.step(weight, grad.cpu().numpy()) for twin, weight, grad in zip(twins, want, clipped, strict=True)]
    for param, weight in zip(params, want, strict=True):
        close = {"rtol": 1e-4, "atol": 1e-5} if clip else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(param.detach().double(), torch.as_tensor(weight), **close)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rule", ["adalomo", "adafactor", "adafactor_t2t", "scaled_adam"])
def test_a_mean_of_squares_that_would_overflow(give_gradients, rule, policy, caplog):
    """The parameter with that gradient is left as it is, with a warning; others move, and the step counts."""
    values = start()
    params, opt = make_optimizer(values, rule, policy=policy, loss_scale=lowmem.DynamicScale(init_scale=2.0))
    twins, twin = make_optimizer([values[0], values[2]], rule, policy=policy)
    for step, scale in enumerate((1.0, 1e20, 1.0)):
        grads = gradients(1.0, step)
        grads[1] *= scale
        before = params[1].detach().clone()
        states = {name: state.clone() for name, state in opt.state.get(params[1], {}).items()}
        give_gradients(opt, *zip(params, grads, strict=True))
        give_gradients(twin, *zip(twins, (grads[0], grads[2]), strict=True))
        assert opt.last_step.overflowed == (["param1"] if scale > 1 else [])
        assert (opt.last_step.skipped_params, opt.last_step.skipped) == (scale > 1, False)
        assert opt.last_step.nonfinite == []
        assert opt.last_step.norms[1].item() == pytest.approx(norm([grads[1]]), rel=1e-6)
        assert torch.equal(params[1], before) == (scale > 1)
        if scale > 1:
            assert states
            assert all(torch.equal(opt.state[params[1]][name], state) for name, state in states.items())
        assert torch.equal(params[0], twins[0]) and torch.equal(params[2], twins[1])
    assert (opt.named_state_dict()["step"], opt.loss_scale) == (3, 2.0)
    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert "step 2 skipped 1 parameter(s): the squared gradient of 'param1' overflow" in warning


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_non_finite_element_among_large_ones(give_gradients, policy, bad):
    params, opt = make_optimizer(start(), "adamw", policy=policy)
    grads, before = gradients(1e20), [param.detach().clone() for param in params]
    grads[2].view(-1)[-1] = bad
    give_gradients(opt, *zip(params, grads, strict=True))
    assert opt.last_step.nonfinite == ["param2"]
    stayed = [torch.equal(param, old) for param, old in zip(params, before, strict=True)]
    assert stayed == ([False, False, True] if policy == "immediate" else [True] * 3)


@pytest.mark.parametrize("policy", POLICIES[1:])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e18, 1e20, 1e35])
def test_gradients_are_clipped_by_their_norm(give_gradients, size, dtype, policy):
    """PyTorch's own norm is infinite, and its coefficient 0."""
    values = [torch.zeros(shape) for shape in (*SHAPES, (600, 500))]  # the last one is more than a tile
    grads = [(torch.randn(value.shape) * size).to(dtype) for value in values]
    params, opt = make_optimizer(values, "lomo", dtype, lr=1.0, clip_norm=2.0, policy=policy)
    give_gradients(opt, *zip(params, grads, strict=True))
    total = norm(grads)
    assert opt.last_step.clip_coef.item() == pytest.approx(2.0 / total, rel=1e-6)
    for param, grad in zip(params, grads, strict=True):
        want = (-grad.double() * (2.0 / total)).to(dtype)
        torch.testing.assert_close(param.detach(), want, rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=0)


def test_a_norm_beyond_float32(give_gradients):
    """Every element is finite, and its clipped value is."""
    (param,), opt = make_optimizer([torch.zeros(40, 30)], "lomo", lr=1.0, clip_norm=1.0, policy="two_pass")
    grad = torch.full((40, 30), 3e38)
    give_gradients(opt, (param, grad))
    assert opt.last_step.nonfinite == []
    assert opt.last_step.grad_norm.item() == math.inf
    torch.testing.assert_close(param.detach(), torch.full((40, 30), -1.0 / math.sqrt(1200)), rtol=1e-4, atol=0)


@compiles
@pytest.mark.parametrize("rule", ["adamw", "adalomo"])
def test_compiled(give_gradients, rule):
    shape = (200, 130)
    value, grads = torch.randn(shape), [torch.randn(shape) * size for size in (1.0, 1e20, 1.0)]
    runs = [make_optimizer([value], rule, policy="immediate", compile=compiled) for compiled in (False, True)]
    for grad in grads:
        for (param,), opt in runs:
            give_gradients(opt, (param, grad))
            assert opt.last_step.grad_norm.item() == pytest.approx(norm([grad]), rel=1e-6)
            assert opt.last_step.nonfinite == []
    ((one,), _), ((other,), _) = runs
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


class Large(torch.nn.Module):
    """A loss whose gradients are large."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(6, 11, bias=False), torch.nn.Linear(11, 5)

    def forward(self, x):
        return self.second(self.first(x)).sum()


def train(net, settings):
    opt = lowmem.FusedOptimizer(net.named_parameters(), model=net, lr=1e-2, **settings)
    opt.backward(net(torch.linspace(-1e20, 3e20, 12).view(2, 6)))
    return full_weights(net), opt.last_step.norms.tolist(), opt.last_step.nonfinite, opt.last_step.overflowed


def on_rank(rank, kind, settings):
    return train(SHARDS[kind](rank, Large), settings)


@pytest.mark.parametrize("kind", sorted(SHARDS))
@pytest.mark.parametrize(
    "settings",
    [
        {"rule": "adamw", "policy": "immediate"},
        {"rule": "adamw", "policy": "deferred", "clip_norm": 1.0},
        {"rule": "adalomo", "policy": "immediate"},
        {"rule": "adalomo", "policy": "deferred"},
    ],
    ids=str,
)
def test_sharded(two, kind, settings):
    weights, norms, nonfinite, overflowed = train(Large(), settings)
    assert nonfinite == []
    for actual in two.run(on_rank, kind, settings):
        assert actual[2:] == (nonfinite, overflowed)
        assert actual[1] == pytest.approx(norms, rel=1e-5)
        torch.testing.assert_close(actual[0], weights, rtol=1e-5, atol=1e-6)
