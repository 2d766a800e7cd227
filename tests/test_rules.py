"""The rules of the package against float64 transcriptions, the table, and what hyperparameters are refused."""

import math

import numpy as np
import pytest
import torch
from golden.replay import ordered
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.adalomo import AdaLomo
from reference.lomo import Lomo

import lowmem
from lowmem.errors import ConfigError
from lowmem.layout import View
from lowmem.rules.rule import TABLE
from lowmem.sweep import Sums

REFERENCES = {"lomo": Lomo, "adalomo": AdaLomo}
SHAPES = st.lists(st.integers(1, 9), max_size=4).map(tuple)
OPTIONS = {
    "lomo": st.fixed_dictionaries({"lr": st.sampled_from([0.0, 1e-3, 0.1])}),
    "adalomo": st.fixed_dictionaries(
        {"lr": st.sampled_from([0.0, 1e-3, 0.1])},
        optional={
            "eps": st.sampled_from([(1e-12, 0.5), (0.05, 0.0)]),
            "clip_threshold": st.sampled_from([0.1, 3.0]),
            "decay_rate": st.sampled_from([-0.5, -1.0]),
        },
    ),
}
COMMON = st.fixed_dictionaries(
    {}, optional={"weight_decay": st.sampled_from([0.01, 0.5]), "clip_value": st.sampled_from([0.3, 2.0])}
)
CASES = st.sampled_from(sorted(REFERENCES)).flatmap(
    lambda rule: st.tuples(st.just(rule), SHAPES, OPTIONS[rule], COMMON, st.integers(0, 2**32 - 1))
)


def trajectory(give_gradients, case, dtype, steps, loss_scale=None):
    """Takes steps and yields after each the weight before it, the engine's weight, the reference's answer to the weight
    before, and the two."""
    rule, shape, options, common, seed = case
    rng = np.random.default_rng(seed)

    def draw():
        return torch.tensor(rng.normal(size=shape), dtype=torch.float64).to(dtype)

    reference = REFERENCES[rule](shape, **options, **common)
    param = torch.nn.Parameter(draw())
    opt = lowmem.FusedOptimizer([("w", param)], rule=rule, **options, **common, loss_scale=loss_scale)
    for _ in range(steps):
        stored, grad = param.detach().clone(), draw()
        give_gradients(opt, (param, grad))
        yield stored, param.detach(), reference.step(stored.double().numpy(), grad.double().numpy()), opt, reference


@given(CASES)
@settings(max_examples=120, deadline=None)
def test_float32_follows_the_reference(give_gradients, case):
    """A float32 result is a few roundings of 6e-8 away: pairwise sums, a root, a quotient, the step itself. Weights are
    compared relative to the largest, which the step is proportional to, states (sums of positive numbers) by
    themselves. 1500 examples came to 1.3e-7 and 2.8e-7."""
    for stored, weight, want, opt, reference in trajectory(give_gradients, case, torch.float32, steps=4):
        size = max(stored.abs().max().item(), np.abs(want).max())
        assert np.abs(weight.numpy() - want).max() <= 5e-7 * size
        kept = opt.state_dict()["state"].get("w", {})
        assert kept.keys() == reference.states().keys()
        for name, state in reference.states().items():
            assert tuple(kept[name].shape) == state.shape
            np.testing.assert_allclose(kept[name].numpy(), state, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@given(CASES)
@settings(max_examples=60, deadline=None)
def test_16_bit_weights_are_the_rounded_reference(give_gradients, dtype, case):
    """Float32 arithmetic before the rounding may tip a value that lies between two neighbours, hence the one ulp; where
    weight and step all but cancel, its own rounding is many ulps of the little that is left."""
    for stored, weight, want, _, _ in trajectory(give_gradients, case, dtype, steps=3):
        rounded = torch.from_numpy(np.asarray(want)).to(dtype)
        neighbours = (ordered(weight) - ordered(rounded)).abs() <= 1
        cancelled = (weight.double() - rounded.double()).abs() <= 5e-7 * stored.abs().max()
        assert (neighbours | cancelled).all()


@pytest.mark.parametrize("rule", REFERENCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_loss_scale_leaves_no_trace(give_gradients, rule, dtype):
    """A power of two scales and unscales exactly; the clip by value sees the unscaled gradient."""
    case = rule, (5, 7), {"lr": 0.1}, {"clip_value": 0.3, "weight_decay": 0.1}, 0
    plain = trajectory(give_gradients, case, dtype, steps=3)
    scaled = trajectory(give_gradients, case, dtype, steps=3, loss_scale=1024)
    for (_, weight, *_), (_, same, *_) in zip(plain, scaled, strict=True):
        assert torch.equal(weight, same)


@pytest.mark.parametrize("shape", [(2, 5, 7), (3, 4, 2, 2)])
def test_experts_and_convolutions_are_matrices(give_gradients, shape):
    """A stack updates as its slices do by themselves, a convolution as the matrix [out, in * kernel]."""
    whole = torch.nn.Parameter(torch.randn(shape))
    parts = list(whole.detach().clone()) if len(shape) == 3 else [whole.detach().clone().flatten(1)]
    parts = [torch.nn.Parameter(part) for part in parts]
    one, many = (lowmem.FusedOptimizer(params, lr=0.1) for params in ([whole], parts))
    for _ in range(3):
        grad = torch.randn(shape)
        give_gradients(one, (whole, grad))
        grads = list(grad) if len(shape) == 3 else [grad.flatten(1)]
        give_gradients(many, *zip(parts, grads, strict=True))
    # the same sums in another order
    torch.testing.assert_close(whole.flatten(), torch.cat([part.flatten() for part in parts]), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("rule", "option", "value", "allowed"),
    [
        ("lomo", "lr", -0.1, "a number >= 0"),
        ("lomo", "lr", math.nan, "a number >= 0"),
        ("lomo", "lr", "fast", "a number >= 0"),
        ("lomo", "weight_decay", -1, "a number >= 0"),
        ("adalomo", "lr", math.inf, "a number >= 0"),
        ("adalomo", "eps", 1e-30, "two numbers"),
        ("adalomo", "eps", (0.0, 1e-3), "a number > 0"),
        ("adalomo", "eps", (1e-30, -1e-3), "a number >= 0"),
        ("adalomo", "decay_rate", 0.0, "a number < 0"),
        ("adalomo", "decay_rate", 0.8, "a number < 0"),
        ("adalomo", "clip_threshold", 0.0, "a number > 0"),
        ("adalomo", "clip_threshold", None, "a number > 0"),
        ("adalomo", "weight_decay", True, "a number >= 0"),
    ],
)
def test_hyperparameter_out_of_range(rule, option, value, allowed):
    param = torch.nn.Parameter(torch.zeros(3))
    for groups in ([param], [{"params": [param], option: value}]):
        given_to_all = {option: value} if groups == [param] else {}
        with pytest.raises(ConfigError, match=option) as error:
            lowmem.FusedOptimizer(groups, rule=rule, **given_to_all)
        assert allowed in str(error.value)


def test_table():
    rows = {row.name: row for row in lowmem.rules.table()}
    assert list(rows) == sorted(TABLE)
    assert rows["lomo"].state_bytes == 0
    assert rows["adalomo"].state_bytes == (4096 + 4096) * 4 / 4096**2
    assert rows["adalomo"].defaults["decay_rate"] == -0.8
    assert "arXiv:2310.10195" in rows["adalomo"].source


@pytest.fixture
def clean_table():
    known = dict(TABLE)
    yield
    TABLE.clear()
    TABLE.update(known)


def largest_rows(t):
    return Sums(row={"size": t.grad.abs().sum(-1)})


def signed(t):
    momentum = t.full.momentum * t.scalar.beta + t.grad * (1.0 - t.scalar.beta)
    return {"param": t.param - t.scalar.lr * t.row.size * momentum.sign(), "momentum": momentum}


def test_rule_from_outside(clean_table, give_gradients):
    """A rule that reduces, keeps a state and is found by name, class and instance."""

    @lowmem.rules.register("row_signs")
    class RowSigns(lowmem.rules.UpdateRule):
        source, keeps, defaults = "here", "momentum", {"lr": 0.1, "beta": 0.9}

        def check(self, hyper):
            pass

        def plan(self, name, shape, hyper):
            return lowmem.rules.Plan(View.matrix(len(shape)), {"momentum": lowmem.rules.StateSpec("full")})

        def update(self, sweep, plan, state, hyper, step):
            size = sweep.reduce(largest_rows).row["size"] / sweep.shape[2]
            sweep.apply(signed, full=dict(state), row={"size": size}, scalar={k: hyper[k] for k in ("lr", "beta")})

    assert "row_signs" in {row.name for row in lowmem.rules.table()}
    grad = torch.tensor([[1.0, -3.0], [0.5, 0.5]])
    for rule in ("row_signs", RowSigns, RowSigns()):
        param = torch.nn.Parameter(torch.zeros(2, 2))
        opt = lowmem.FusedOptimizer([("w", param)], rule=rule)
        give_gradients(opt, (param, grad))
        torch.testing.assert_close(param.detach(), torch.tensor([[-0.2, 0.2], [-0.05, -0.05]]))
        torch.testing.assert_close(opt.state_dict()["state"]["w"]["momentum"], 0.1 * grad)
        opt.remove()
    with pytest.raises(ConfigError, match="'row_signs' is registered already"):
        lowmem.rules.register("row_signs")(RowSigns)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("adalmo", "Did you mean 'adalomo'"),
        ("nothing_like_it", "Known are adalomo, lomo"),
        ("torch.optim.AdamX", "Did you mean 'Adam"),
        ("no_such_package.AdamW", "cannot import 'no_such_package'"),
        ("torch.nn.Linear", "not a torch.optim.Optimizer class"),
        (torch.nn.Linear, "neither a name"),
        (3, "neither a name"),
    ],
)
def test_unknown_rule(rule, message):
    with pytest.raises(ConfigError, match=message):
        lowmem.FusedOptimizer([torch.nn.Parameter(torch.zeros(2))], rule=rule)
