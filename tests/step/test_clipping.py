"""Gradient norms are exact in any dtype and layout. The clipping of rules matches their reference implementations."""

import math
from itertools import chain

import numpy as np
import pytest
import torch
from support.devices import seeded
from support.nets import give_gradients, plain_step
from support.products import in_turn, pairwise

import lowmem
from lowmem.errors import StepError
from lowmem.rules.rule import TABLE


def norm_of(grads):
    return np.linalg.norm(np.concatenate([grad.double().cpu().numpy().ravel() for grad in grads]))


# -- the norm ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["two_pass", "deferred"])
def test_the_norm_is_summed_in_parameter_order(policy):
    """Gradients arrive in the opposite order, and float32 sums tell the two orders apart."""
    source = seeded(4)
    layers = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(40))
    grads = [torch.randn(4, 4, generator=source) * 10.0 ** (n % 3) for n in range(40)]
    norms = torch.stack([torch.linalg.vector_norm(grad) for grad in grads])
    forwards, backwards = (torch.linalg.vector_norm(ordered) for ordered in (norms, norms.flip(0)))
    assert forwards != backwards
    arrived = []
    for n, layer in enumerate(layers):
        layer.weight.register_post_accumulate_grad_hook(lambda _, n=n: arrived.append(n))
    opt = lowmem.FusedOptimizer(layers.parameters(), rule="lomo", clip_norm=1.0, policy=policy)
    give_gradients(opt, *((layer.weight, grad) for layer, grad in zip(layers, grads, strict=True)))
    assert arrived[:40] != sorted(arrived[:40])
    assert torch.equal(opt.last_step.norms, norms)
    assert torch.equal(opt.last_step.grad_norm, forwards)
    assert torch.equal(opt.last_step.clip_coef, 1.0 / (forwards + 1e-6))


# -- gradients in 16 bits ----------------------------------------------------------------------------------------------


def spread(size, dtype, top, seed=0):
    """Returns a gradient whose elements span four orders of magnitude."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=size) * 10.0 ** rng.uniform(-4, 0, size=size)
    return torch.tensor(values / np.abs(values).max() * top).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "loss_scale", "clip_value", "policy"),
    in_turn([torch.bfloat16, torch.float16], [None, None, 8.0, 8.0], [None, 30.0, 30.0], ["two_pass", "deferred"]),
)
def test_narrow_gradients_are_measured_in_float32(dtype, loss_scale, clip_value, policy):
    """The square of the largest element overflows float16. One parameter has several tiles, the other one is small.

    torch sums 16,000 squares of a tile sequentially in each of eight float32 lanes, with a measured error of 5e-6, so a
    tolerance of 3e-5 is enough. A bfloat16 norm would be off by 2e-3, and a float16 norm would be infinite.
    """
    grads = [spread(300_000, dtype, 300.0), spread((3, 5), dtype, 500.0, seed=1)]
    params = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    clip = {"clip_norm": 1.0, "clip_value": clip_value, "loss_scale": loss_scale}
    opt = lowmem.FusedOptimizer(params, rule="lomo", lr=1.0, policy=policy, **clip)
    give_gradients(opt, *zip(params, grads, strict=True))
    exact = [grad.double().cpu().numpy().ravel() for grad in grads]
    clamped = [np.clip(grad, -(clip_value or np.inf), clip_value or np.inf) for grad in exact]
    total = np.linalg.norm(np.concatenate(clamped))
    assert opt.last_step.norms.tolist() == pytest.approx([np.linalg.norm(grad) for grad in exact], rel=3e-5)
    assert opt.last_step.clip_coef.item() == pytest.approx(1.0 / (total + 1e-6), rel=3e-5)
    for param, grad in zip(params, clamped, strict=True):  # one rounding to the weight's dtype, subnormals included
        actual = param.detach().double().cpu().numpy().ravel()
        spacing = torch.finfo(dtype).eps
        np.testing.assert_allclose(actual, -grad / (total + 1e-6), rtol=spacing, atol=1e-7)


# -- strides -----------------------------------------------------------------------------------------------------------


LAYOUTS = {
    "transposed": lambda dtype: torch.randn(6, 5).to(dtype).t(),
    "permuted stack": lambda dtype: torch.randn(4, 3, 5).to(dtype).permute(1, 0, 2),
    "columns of another": lambda dtype: torch.randn(5, 12).to(dtype)[:, 2:9],
}


@pytest.mark.parametrize(
    ("layout", "dtype", "policy"),
    in_turn(LAYOUTS, [torch.float32, torch.bfloat16, torch.float32, torch.float16], ["two_pass", "deferred"]),
)
def test_parameters_that_are_not_contiguous(policy, dtype, layout):
    """Results equal a contiguous copy's. Norms sum the same elements in another order: 1e-6 in float32."""
    torch.manual_seed(3)
    lies = LAYOUTS[layout](dtype)
    param, plain = torch.nn.Parameter(lies), torch.nn.Parameter(lies.clone(memory_format=torch.contiguous_format))
    assert not param.is_contiguous()
    grad = torch.randn(param.shape).to(dtype)
    clip = {"clip_norm": 0.5, "clip_value": 1.0, "loss_scale": 64.0, "policy": policy}
    for trained in (param, plain):
        opt = lowmem.FusedOptimizer([trained], rule="adalomo", lr=0.1, batching=False, **clip)
        for _ in range(3):
            give_gradients(opt, (trained, grad))
        want = np.linalg.norm(grad.double().cpu().numpy())
        assert opt.last_step.grad_norm.item() == pytest.approx(want, rel=1e-6)
        assert opt.last_step.clip_coef.item() == pytest.approx(0.5 / want, rel=2e-6)
    torch.testing.assert_close(param, plain, rtol=1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps, atol=1e-6)


# -- norms of clamped gradients ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "policy"), in_turn([*sorted(TABLE), "adalomo"], ["two_pass", "deferred"]))
def test_norms_are_measured_after_clamping_except_in_adalomo(rule, policy):
    """AdaLomo's source computes the norm before clamping. All other rules follow PyTorch and compute it afterwards."""
    p, q = torch.nn.Parameter(torch.ones(3, 4)), torch.nn.Parameter(torch.ones(5))
    options = {"clip_norm": 0.1, "clip_value": 0.5, "policy": policy}
    opt = lowmem.FusedOptimizer([p, q], rule=rule, **options)
    grads = [torch.randn(3, 4), torch.randn(5)]
    give_gradients(opt, (p, grads[0]), (q, grads[1]))
    limit = math.inf if rule == "adalomo" else 0.5
    norm = norm_of([grad.clamp(-limit, limit) for grad in grads])
    assert opt.last_step.clip_coef.item() == pytest.approx(0.1 / (norm + 1e-6), rel=1e-6)
    assert opt.last_step.grad_norm.item() == pytest.approx(norm_of(grads), rel=1e-6)


# -- the clipping of Adafactor -----------------------------------------------------------------------------------------


def adafactor(params, **options):
    return lowmem.FusedOptimizer(params, rule="adafactor", **options)


@pytest.mark.parametrize("policy", ["two_pass", "deferred"])
def test_t5x_threshold_on_gradients_of_zeros(policy):
    """A norm of zero is not divided by: the weights are the same as without a threshold."""
    start = torch.randn(4, 6)
    params = [torch.nn.Parameter(start.clone()) for _ in range(2)]
    for param, options in zip(params, ({}, {"global_norm_clip_threshold": 0.3, "policy": policy}), strict=True):
        opt = adafactor([param], weight_decay_rate=0.1, **options)
        for _ in range(2):
            give_gradients(opt, (param, torch.zeros(4, 6)))
    assert torch.equal(*params)
    assert not torch.equal(params[0], start)


@pytest.mark.parametrize("policy", ["two_pass", "deferred"])
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_t5x_threshold_is_on_the_norm_of_all_groups(policy, scale):
    """Only the group with the option is clipped, but by the norm over both groups: t·min(1/norm, 1/t). `epsilon1` is
    large enough that the size of a gradient affects the update."""
    start = [torch.randn(4, 6), torch.randn(5)]
    grads = [scale * torch.randn(4, 6), scale * torch.randn(5)]
    factor = 0.25 * min(1 / norm_of(grads), 1 / 0.25)
    assert (factor < 1) == (scale == 1)
    common = {"lr": 0.1, "epsilon1": 0.1, "clipping_threshold": None}
    clipped, by_hand = ([torch.nn.Parameter(value.clone()) for value in start] for _ in range(2))
    asks = {"params": [clipped[0]], "global_norm_clip_threshold": 0.25}
    give_gradients(
        adafactor([asks, {"params": [clipped[1]]}], policy=policy, **common), *zip(clipped, grads, strict=True)
    )
    give_gradients(adafactor(by_hand, **common), (by_hand[0], grads[0] * factor), (by_hand[1], grads[1]))
    torch.testing.assert_close(clipped, by_hand, rtol=1e-6, atol=1e-6)  # T5X computes the factor in float32


@pytest.mark.parametrize(("size", "policy"), [(200, "two_pass"), (300_000, "deferred")])
def test_t5x_threshold_comes_after_clip_value(size, policy):
    """This includes bfloat16 gradients, with one tile and with several. The float32 momentum is half of a step."""
    grad = torch.where(torch.arange(size) % 7 == 0, 40.0, 0.5).bfloat16()
    clamped = grad.double().cpu().numpy().clip(-1, 1)
    norm = np.linalg.norm(clamped)
    assert norm > 2
    square = (2.0 / norm * clamped) ** 2
    options = {"global_norm_clip_threshold": 2.0, "clip_value": 1.0, "policy": policy, "factored": False}
    options |= {"multiply_by_parameter_scale": False, "clipping_threshold": None, "epsilon1": 1e-3, "beta1": 0.5}
    options |= {"state_storage": "float32"}
    param = torch.nn.Parameter(torch.zeros_like(grad))
    opt = adafactor([param], lr=1.0, **options)
    give_gradients(opt, (param, grad))
    # a norm over tiles is good to 3e-5, as above
    np.testing.assert_allclose(opt.state[param]["m"].cpu().numpy(), 0.5 * np.sqrt(square / (square + 1e-3)), rtol=3e-5)


def test_t5x_threshold_comes_after_clip_norm():
    """The threshold applies to gradients that `clip_norm` has already scaled."""
    start, grad = torch.randn(4, 6), torch.randn(4, 6)
    params = [torch.nn.Parameter(start.clone()) for _ in range(2)]
    common = {"epsilon1": 0.1, "clip_norm": 0.01, "policy": "deferred"}
    for param, threshold in zip(params, (None, 0.02), strict=True):
        give_gradients(adafactor([param], global_norm_clip_threshold=threshold, **common), (param, grad))
    torch.testing.assert_close(*params, rtol=1e-6, atol=0)


# -- the clipping of ScaledAdam, beyond the trajectories of rules/test_golden.py ---------------------------------------

PERIOD = 6


def values(seed):
    source = seeded(seed)
    return [torch.randn(shape, generator=source) for shape in [(3, 4), (5,), (), (2, 3, 2), (3, 4)]]


def gradients(step):
    """Returns gradients of which some are large. One parameter sometimes has none."""
    actual = [grad * (30.0 if step % 5 == 3 else 1.0 + step % 2) for grad in values(1000 + step)]
    return [None if (n, step % 4) == (1, 2) else grad for n, grad in enumerate(actual)]


def scaled_adam(start, **options):
    params = [torch.nn.Parameter(value.clone()) for value in start]
    options = {"lr": 0.02, "clipping_update_period": PERIOD, **options}
    return params, lowmem.FusedOptimizer(params, rule="scaled_adam", **options)


def give(opt, params, grads):
    give_gradients(opt, *zip(params, grads, strict=True))


def group_state(opt, group=0):
    saved = opt.named_state_dict()["state"].get(f"_group{group}", {})
    return {name: value.clone() for name, value in saved.items()}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[k].nan_to_num(-1), other[k].nan_to_num(-1)) for k in one)


@pytest.mark.parametrize(
    ("clipping_scale", "period", "policy", "batching"),
    [(2.0, PERIOD, "deferred", True), (0.6, PERIOD, "two_pass", True), (0.9, 8, "deferred", False)],
)
def test_scaled_adam_clips_whole_gradients(clipping_scale, period, policy, batching):
    """Clipping has the effect of smaller gradients, as `clip_update` documents. The test's gradients keep the quartiles
    of a period's norms where different rounding does not change them."""
    options = {"clipping_scale": clipping_scale, "clipping_update_period": period, "batching": batching}
    params, opt = scaled_adam(values(0), policy=policy, **options)
    others, unclipped = scaled_adam(values(0), batching=batching)
    clipped = {0: 0}  # steps, by period
    for step in range(31):
        give(opt, params, gradients(step))
        statistics, norms = opt.last_step.statistics, group_state(opt)["model_norms"]
        factor = 1.0
        if step < period:
            assert math.isnan(statistics["model_norm_threshold"])  # no threshold yet
        else:
            factor = min(1.0, statistics["model_norm_threshold"] / statistics["model_norm"])
        if step:
            assert norms[step % period].item() == pytest.approx(statistics["model_norm"], rel=1e-6)
        if step and step % period == 0:
            quartiles = [statistics[f"model_norm_quartile{n}"] for n in range(5)]
            in_order = norms.sort().values.tolist()
            assert quartiles == pytest.approx([in_order[min(period - 1, period // 4 * n)] for n in range(5)])
            assert statistics["model_norm_threshold"] == pytest.approx(clipping_scale * quartiles[2])
            percent = 100 * clipped.get(step // period - 1, 0) / period
            assert statistics["percent_clipped"] == pytest.approx(percent)
        clipped[step // period] = clipped.get(step // period, 0) + (factor < 1)
        give(unclipped, others, [None if grad is None else grad * factor for grad in gradients(step)])
    torch.testing.assert_close(params, others, rtol=1e-5, atol=1e-5)
    assert 3 < sum(clipped.values()) < 25 and clipped[0] == 0


def test_scaled_adam_groups_clip_by_their_own_norms():
    """Groups with different settings, one without clipping, match separate optimizers bit for bit."""
    settings = [{"clipping_scale": 0.7}, {}, {"clipping_scale": 1.5, "clipping_update_period": 4, "clip_update": False}]
    separate = [scaled_adam(values(n), policy="deferred", **options) for n, options in enumerate(settings)]
    params = [[torch.nn.Parameter(value) for value in values(n)] for n in range(3)]
    groups = [{"params": members, **options} for members, options in zip(params, settings, strict=True)]
    options = {"policy": "deferred", "lr": 0.02, "clipping_update_period": PERIOD}
    opt = lowmem.FusedOptimizer(groups, rule="scaled_adam", **options)
    for step in range(25):
        sizes = [1.0, 100.0, 40.0 if step % 6 == 5 else 1.0]
        grads = [[size * grad for grad in values(7 * step + n)] for n, size in enumerate(sizes)]
        give(opt, chain(*params), chain(*grads))
        for (others, alone), group_grads in zip(separate, grads, strict=True):
            give(alone, others, group_grads)
    for n, (others, alone) in enumerate(separate):
        assert all(map(torch.equal, params[n], others))
        assert equal(group_state(opt, n), group_state(alone))
    assert bool(group_state(opt, 0)) and not group_state(opt, 1)
    thresholds = {key for key in opt.last_step.statistics if key.startswith("model_norm_threshold")}
    assert thresholds == {"model_norm_threshold_group0", "model_norm_threshold_group1"}


@pytest.mark.parametrize(
    ("at", "bad", "policy"), pairwise([0, 2, PERIOD, PERIOD + 3], [math.inf, math.nan], ["two_pass", "deferred"])
)
def test_scaled_adam_a_skipped_step_leaves_no_trace(at, bad, policy):
    """The group's state and later steps are unaffected, whether the first step is skipped, one within the first period,
    one where a threshold is due, or one after it."""
    runs = [scaled_adam(values(0), clipping_scale=0.8, policy=policy) for _ in range(2)]
    for step in range(2 * PERIOD + 5):
        for spoilt, (params, opt) in enumerate(runs):
            if spoilt and step == at:
                before = group_state(opt)
                give(opt, params, [values(0)[0] * bad, *gradients(step)[1:]])
                assert opt.last_step.skipped
                assert not before or equal(group_state(opt), before)
            give(opt, params, gradients(step))
    assert equal(group_state(runs[0][1]), group_state(runs[1][1]))
    assert all(map(torch.equal, runs[0][0], runs[1][0]))


def test_a_new_state_forgets_the_norms():
    params, opt = scaled_adam(values(0), clipping_scale=0.8)
    give(opt, params, gradients(0))
    assert group_state(opt)
    opt.state = {}
    assert not group_state(opt)


# -- parameters that the optimizer does not have -----------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "plain"), [("two_pass", False), ("deferred", True)])
def test_unfreezing_a_parameter_that_was_not_passed(policy, plain):
    """PyTorch's clipping norm includes its gradient; so does ours once the parameter is added to the optimizer."""

    def make():
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        net[0].requires_grad_(False)
        return net

    net, expected, x = make(), make(), torch.arange(6.0).view(2, 3)
    opt = lowmem.FusedOptimizer(net[1].parameters(), rule="lomo", lr=0.1, model=net, policy=policy, clip_norm=0.1)
    sgd = torch.optim.SGD(expected[1].parameters(), lr=0.1, foreach=False)

    def step():
        loss = net(x).square().mean()
        loss.backward() if plain else opt.backward(loss)

    step()
    net[0].requires_grad_(True)
    before = [param.detach().clone() for param in net.parameters()]
    with pytest.raises(StepError, match=r"'0\.weight' was frozen.*opt\.add_param_group\(\{'params': \[\('0\.w"):
        step()
    assert all(map(torch.equal, before, net.parameters()))
    net.zero_grad()
    opt.add_param_group({"params": [(f"0.{name}", param) for name, param in net[0].named_parameters()]})
    step()
    for step_number in range(2):
        if step_number:
            expected[0].requires_grad_(True)
            sgd.add_param_group({"params": expected[0].parameters()})
        expected(x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
        plain_step(sgd)
    assert all(map(torch.equal, net.parameters(), expected.parameters()))
