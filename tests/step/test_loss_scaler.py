"""The loss scale follows `torch.amp.GradScaler` exactly in every step."""

import copy
import math
import random

import pytest
import torch
from support.nets import weights

import lowmem
from lowmem.errors import ConfigError, StepError
from lowmem.options import DynamicScale, FusedConfig
from lowmem.step.loss_scaler import LossScaler

CPU = torch.device("cpu")


def make_scaler(**options):
    return LossScaler(DynamicScale(**options), CPU)


def learn(scale, overflow):
    scale.update(torch.tensor(not overflow))
    return float(scale.value)


def pattern(steps, share):
    """Returns a list of booleans: True for a step that overflows, about `share` of them."""
    source = random.Random(0)
    return [source.random() < share for _ in range(steps)]


class Scaler:
    """Runs `GradScaler` on an optimizer of one parameter whose gradient is finite or infinite."""

    def __init__(self, *options):
        self.scaler = torch.amp.GradScaler("cpu", *options)
        self.param = torch.nn.Parameter(torch.zeros(1))
        self.sgd = torch.optim.SGD([self.param], lr=0.0)
        self.scaler.scale(torch.ones(()))

    def learn(self, overflow):
        self.param.grad = torch.full((1,), math.inf if overflow else 1.0)
        self.scaler.step(self.sgd)
        self.scaler.update()
        return self.scaler.get_scale()


@pytest.mark.parametrize(
    "options",
    [
        (65536.0, 2.0, 0.5, 5),
        (1.0, 4.0, 0.25, 1),
        (1024.0, 1.5, 0.75, 2),
        (1000.0, 1.1, 0.9, 3),  # factors that float32 cannot represent: GradScaler multiplies by them in float64
        (300.0, 1.001, 0.7, 1),
        (2.0**125, 2.0, 0.5, 1),  # close to the largest float32, where growth stops
    ],
)
def test_as_grad_scaler(options):
    names = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
    ours, theirs = make_scaler(**dict(zip(names, options, strict=True)), min_scale=1e-30), Scaler(*options)
    for overflow in [*pattern(60, 0.03), *pattern(60, 0.3), *pattern(60, 0.8), *[False] * 9]:
        if theirs.scaler.get_scale() > 1e-20:  # GradScaler has no minimum
            assert learn(ours, overflow) == theirs.learn(overflow)


def test_the_defaults_equal_grad_scaler():
    ours, theirs = DynamicScale(), torch.amp.GradScaler("cpu").state_dict()
    assert ours.init_scale == theirs["scale"]
    for name in ("growth_factor", "backoff_factor", "growth_interval"):
        assert getattr(ours, name) == theirs[name]


def test_hysteresis_as_megatron():
    """The scale backs off from the third overflow on. Finite steps reset the count only when the scale grows."""
    scale = make_scaler(init_scale=64.0, growth_interval=3, min_scale=4.0, hysteresis=3)
    overflows = [True, True, False, True, True, False, False, False, True, True, True, True, True]
    expected = [64.0, 64.0, 64.0, 32.0, 16.0, 16.0, 16.0, 32.0, 32.0, 32.0, 16.0, 8.0, 4.0]
    assert [learn(scale, overflow) for overflow in overflows] == expected


def test_a_scale_stays_within_its_range():
    low, high = make_scaler(init_scale=100.0, min_scale=30.0), make_scaler(init_scale=3e38, growth_interval=1)
    assert low.can_back_off()
    assert [learn(low, True) for _ in range(3)] == [50.0, 30.0, 30.0]
    assert not low.can_back_off()
    largest = torch.tensor(3e38).item()
    assert [learn(high, overflow) for overflow in (False, False, True)] == [largest, largest, largest / 2]


def test_a_scale_changes_in_place():
    """Another stream may still read its memory, which must not be freed."""
    scale = make_scaler(init_scale=8.0)
    value, inverse = scale.value, scale.inverse(CPU)
    learn(scale, True)
    assert scale.value is value and scale.inverse(CPU) is inverse
    assert (value.item(), inverse.item()) == (4.0, 0.25)


@pytest.mark.parametrize("requested", [3.0, 1000.0, 65536.0, 7])
def test_a_fixed_scale_is_constant_with_the_inverse_of_grad_scaler(requested):
    """The inverse is computed in float64 and rounded once."""
    scale = LossScaler(requested, CPU)
    scale.update(torch.tensor(False))
    assert torch.equal(scale.inverse(CPU), torch.tensor(float(requested)).double().reciprocal().float())
    assert (float(scale.value), float(scale.scaled(torch.tensor(2.0)))) == (requested, 2.0 * requested)
    assert (scale.dynamic, scale.can_back_off(), scale.state_dict()) == (None, None, None)


@pytest.mark.parametrize("requested", [None, 0, 1, 1.0])
def test_no_scale(requested):
    scale, loss = LossScaler(requested, CPU), torch.tensor(3.0)
    scale.update(torch.tensor(False))
    assert (scale.value, scale.inverse(CPU), scale.dynamic, scale.can_back_off()) == (None, None, None, None)
    assert scale.scaled(loss) is loss


def test_a_saved_scale_continues():
    """The counts of overflows and finite steps are saved too, so a run may resume after any step."""
    options = {"init_scale": 256.0, "growth_interval": 4, "hysteresis": 3, "min_scale": 2.0}
    overflows, scale = pattern(60, 0.3), make_scaler(**options)
    for done, overflow in enumerate(overflows, start=1):
        learn(scale, overflow)
        resumed, other = make_scaler(**options), copy.deepcopy(scale)
        resumed.load_state_dict(scale.state_dict())
        assert torch.equal(resumed.inverse(CPU), scale.inverse(CPU))
        assert [learn(resumed, each) for each in overflows[done:]] == [learn(other, each) for each in overflows[done:]]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("init_scale", [0.5, 1e39, math.nan, "2", None]), ("growth_factor", [1.0, math.inf]),
        ("backoff_factor", [0.0, 1.0]), ("growth_interval", [0, 1.5]), ("min_scale", [0.0]), ("hysteresis", [0, 1.5]),
    ],
)  # fmt: skip
def test_a_value_out_of_range(name, values):
    for value in values:
        with pytest.raises(ConfigError, match=rf"loss_scale\.{name}=.* Expected "):
            DynamicScale(**{name: value})


@pytest.mark.parametrize("value", [-1, math.inf, math.nan, True, "big", [2.0], 1e39, 1e-46])
def test_an_invalid_scale_raises(value):
    with pytest.raises(ConfigError, match=r"loss_scale=.*a number >= 0.*'dynamic'"):
        FusedConfig(loss_scale=value)


def test_a_count_beyond_the_interval_grows_at_the_next_step():
    scale = make_scaler(init_scale=8.0, growth_interval=10)
    scale.load_state_dict({"scale": 8.0, "good": 50, "patience": 1})
    assert [learn(scale, False) for _ in range(2)] == [16.0, 16.0]


def test_a_fixed_scale_neither_saves_nor_loads():
    dynamic, fixed = make_scaler(init_scale=64.0), LossScaler(8, CPU)
    fixed.load_state_dict(dynamic.state_dict())
    assert (learn(dynamic, True), float(fixed.value)) == (32.0, 8.0)
    dynamic.load_state_dict(fixed.state_dict())
    assert float(dynamic.value) == 64.0


def fused(loss_scale, **options):
    """Returns a model and a function `give` that runs a backward with given gradients, one of them multiplied."""
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 5))
    opt = lowmem.FusedOptimizer(net.named_parameters(), rule="lomo", lr=0.05, loss_scale=loss_scale, **options)

    def give(factor=1.0):
        handle = net[0].weight.register_hook(lambda grad: grad * factor)
        opt.backward(net(torch.ones(2, 6)).square().mean())
        handle.remove()

    return net, opt, give


@pytest.mark.parametrize("policy", ["immediate", "two_pass", "deferred"])
def test_an_overflow_at_the_minimum_raises_at_the_next_backward(policy):
    """It raises once, and training may continue. A fixed scale never raises, since it cannot back off."""
    for loss_scale in (DynamicScale(init_scale=4.0, min_scale=2.0), 1024):
        net, _, give = fused(loss_scale, policy=policy)
        for factor in (1.0, math.inf, math.nan):  # the second overflow reaches the minimum
            give(factor)
        before = weights(net)
        if loss_scale != 1024:
            with pytest.raises(StepError, match=r"'0\.weight' is not finite.*cannot back off below"):
                give()
            assert all(map(torch.equal, weights(net), before))
        give()
        assert not any(map(torch.equal, weights(net), before))
