"""Finite gradients whose squares overflow float32 (a norm above 1.8e19): they are skipped like Inf."""

import logging

import pytest
import torch
from support.compiled import compiles
from support.devices import seeded
from support.nets import full_weights
from support.shards import SHARDS

import lowmem

POLICIES = ["immediate", "two_pass", "deferred"]
SHAPES = [(7,), (40, 30), (200, 100)]  # the last one is updated by itself


def gradients(size, seed=0):
    source = seeded(seed)
    return [torch.randn(shape, generator=source) * size for shape in SHAPES]


def make_optimizer(values, rule, **options):
    params = [torch.nn.Parameter(value.clone()) for value in values]
    return params, lowmem.FusedOptimizer(params, rule, **{"lr": 1e-2, "compile": False, **options})


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rule", ["adalomo", "adafactor", "adafactor_t2t", "scaled_adam", "lans", "adamw"])
def test_a_large_gradient_is_skipped(give_gradients, rule, policy, caplog):
    """Its parameter under "immediate", else the whole step."""
    params, opt = make_optimizer([torch.randn(shape) for shape in SHAPES], rule, policy=policy)
    for step, scale in enumerate((1.0, 1e20, 1.0)):
        grads = gradients(1.0, step)
        grads[1] *= scale
        before = [param.detach().clone() for param in params]
        states = [{name: state.clone() for name, state in opt.state.get(param, {}).items()} for param in params]
        give_gradients(opt, *zip(params, grads, strict=True))
        skipped = [n for n in range(3) if scale > 1 and (n == 1 or policy != "immediate")]
        assert [n for n in range(3) if torch.equal(params[n], before[n])] == skipped
        assert all(torch.equal(opt.state[params[n]][name], states[n][name]) for n in skipped for name in states[n])
        assert opt.last_step.skipped_params == len(skipped)
        assert opt.last_step.nonfinite == (["param1"] if skipped else [])
    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert "the gradient of 'param1' is not finite" in warning


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_a_step_whose_norm_over_all_gradients_is_too_large_is_skipped(give_gradients, policy, caplog):
    params, opt = make_optimizer([torch.zeros(4)] * 4, "lomo", policy=policy, clip_norm=1.0)
    for size in (8e18, 0.0):
        give_gradients(opt, *((param, torch.full((4,), size)) for param in params))
        assert opt.last_step.skipped == (size > 0) and opt.last_step.nonfinite == []
        assert opt.last_step.norms.isfinite().all() and opt.last_step.grad_norm.isinf() == (size > 0)
        assert not any(param.any() for param in params)
    assert "the norm over all gradients is not finite" in caplog.text


@compiles
@pytest.mark.parametrize("rule", ["adamw", "adalomo"])
def test_compiled(give_gradients, rule):
    shape = (200, 130)
    value, grads = torch.randn(shape), [torch.randn(shape) * size for size in (1.0, 1e20, 1.0)]
    runs = [make_optimizer([value], rule, policy="immediate", compile=compiled) for compiled in (False, True)]
    for grad in grads:
        for (param,), opt in runs:
            give_gradients(opt, (param, grad))
            assert bool(opt.last_step.nonfinite) == (grad.abs().max() > 1e19)
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
    return full_weights(net), opt.last_step.nonfinite


def on_rank(rank, kind, settings):
    return train(SHARDS[kind](rank, Large), settings)


@pytest.mark.parametrize("kind", sorted(SHARDS))
@pytest.mark.parametrize("settings", [{"rule": "adamw"}, {"rule": "adalomo"}, {"clip_norm": 1.0}], ids=str)
def test_sharded(two, kind, settings):
    weights, nonfinite = train(Large(), settings)
    assert nonfinite
    for actual in two.run(on_rank, kind, settings):
        assert actual[1] == nonfinite
        torch.testing.assert_close(actual[0], weights, rtol=1e-5, atol=1e-6)
