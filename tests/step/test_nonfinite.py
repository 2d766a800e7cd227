"""A step with non-finite gradients changes nothing (see also test_attack.py), and several in a row stop training."""

import copy
import functools
import math
from itertools import product

import pytest
import torch
import torch.distributed as dist
from support.devices import seeded
from support.nets import TwoLayers, assert_same, full_weights, same, states, weights
from support.products import in_turn
from support.shards import KINDS

import lowmem
from lowmem.errors import StepError
from lowmem.options import DynamicScale

POLICIES = ("immediate", "two_pass", "deferred")

Net = functools.partial(TwoLayers, 4, 6, 2)


def batch(step, rank=0):
    return torch.randn(3, 4, generator=seeded(100 * rank + step))


def make(net, policy="deferred", **options):
    options = {"rule": "adamw", "lr": 0.01, "policy": policy, "max_nonfinite_steps": 3, **options}
    return lowmem.FusedOptimizer(net.named_parameters(), model=net, **options)


def train(net, opt, steps, spoilt=lambda step: True):
    for step in steps:
        opt.backward(net(batch(step)) * (math.nan if spoilt(step) else 1.0))


def nan_in_the_loss(net, x):
    return net(x) * math.nan


def inf_in_the_data(net, x):
    return net(x.index_fill(1, torch.tensor([1]), math.inf))


def nan_in_one_gradient(net, x):
    """Returns a loss for which a hook makes the gradient of one weight NaN."""
    weight = net.first.weight * 1.0
    weight.register_hook(lambda grad: grad * math.nan)
    return net.last(torch.tanh(torch.nn.functional.linear(x, weight, net.first.bias))).square().mean()


EACH_POLICY = pytest.mark.parametrize("policy", POLICIES)


# -- one step ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "rule"),
    [*in_turn(POLICIES, ["adalomo", "adamw", "lans", "scaled_adam"]), *product(POLICIES, ["torch.optim.AdamW"])],
)
@pytest.mark.troubleshooting("The loss is NaN from some step on")
def test_a_non_finite_step_changes_no_state_and_is_not_counted(policy, rule, caplog):
    """A single warning reports it, with its cause."""
    net = Net()
    opt = make(net, policy, rule=rule)
    train(net, opt, [0], spoilt=lambda step: False)
    before, saved = weights(net), copy.deepcopy(opt.named_state_dict()["state"])
    train(net, opt, [1, 2])
    whole = policy != "immediate"
    if (policy, rule) == ("immediate", "torch.optim.AdamW"):  # these updates cannot be undone
        assert all(weight.isnan().all() for weight in weights(net))
        assert (opt.last_step.skipped_params, len(opt.last_step.nonfinite)) == (0, 4)
        opt.named_state_dict()
        assert any(message.startswith("step 2 was not skipped: the gradient of ") for message in caplog.messages)
        return
    assert (opt.last_step.skipped, opt.last_step.skipped_params) == (whole, 4)
    assert same(before, weights(net))
    after = opt.named_state_dict()
    assert after["step"] == (1 if whole else 3)
    for name, kept in saved.items():
        tensors = {key: state for key, state in kept.items() if isinstance(state, torch.Tensor)}
        assert same(tensors.values(), [after["state"][name][key] for key in tensors])
    opt.backward(net(batch(3)))
    assert (opt.nonfinite_steps, opt.nonfinite_gradients) == (2, 8)
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("step 2 was skipped" if whole else "step 2 skipped 4 parameter(s)")
    assert "the loss is not finite either" in warning


# -- many steps --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "spoil"), in_turn(POLICIES, [nan_in_the_loss, inf_in_the_data, nan_in_one_gradient])
)
def test_many_skipped_steps_in_a_row_raise(policy, spoil):
    net = Net()
    opt = make(net, policy)
    for step in (0, 1, 2, 3, 4, 5, 6):  # two in a row are not enough
        opt.backward(net(batch(step)) if step in (0, 3) else spoil(net, batch(step)))
    before = weights(net)
    with pytest.raises(StepError, match="the last 3 steps had non-finite gradients") as stopped:
        opt.backward(net(batch(7)))
    message = str(stopped.value)
    assert ("the loss is not finite either" in message) == (spoil is nan_in_the_loss)
    assert "first in 'first.weight'" in message and "max_nonfinite_steps=None" in message
    assert len(message) < 600 and "overflow" not in message
    assert same(weights(net), before)
    opt.backward(net(batch(7)))  # the count restarts after the error
    assert not same(weights(net), before)


def accumulated(net, opt, step):
    """Micro-batches count as one step."""
    with opt.accumulate():
        opt.backward(net(batch(step)) * math.nan)
    opt.backward(net(batch(step)))


def weight_that_is_nan(net, opt, step):
    with torch.no_grad():
        net.last.weight[0, 0] = math.nan
    opt.backward(net(batch(step)))


@pytest.mark.parametrize(("policy", "loop"), [("deferred", accumulated), *product(POLICIES, [weight_that_is_nan])])
def test_every_kind_of_loop_stops(policy, loop):
    net = Net()
    opt = make(net, policy, rule="adafactor")
    for step in range(3):
        loop(net, opt, step)
    with pytest.raises(StepError, match="the last 3 steps"):
        loop(net, opt, 3)
    assert opt.nonfinite_steps == 3


@pytest.mark.parametrize("loss_scale", [None, DynamicScale(init_scale=1.0)], ids=["no scale", "scale at its minimum"])
def test_without_a_limit_training_continues(loss_scale):
    net = Net()
    opt = make(net, max_nonfinite_steps=None, loss_scale=loss_scale)
    train(net, opt, range(60))
    assert opt.nonfinite_steps == 60


class Overflows(torch.nn.Module):
    """A weight whose scaled gradient overflows when the loss scale exceeds `limit`."""

    def __init__(self, limit):
        super().__init__()
        self.weight, self.limit = torch.nn.Parameter(torch.ones(2)), limit

    def forward(self):
        weight = self.weight * 1.0
        weight.register_hook(lambda grad: torch.where(grad > self.limit, math.inf, grad))
        return weight.sum()


@EACH_POLICY
def test_a_dynamic_scale_that_overflows_forever_raises(policy):
    """Forty initial backoffs are allowed although the limit is three. After the first finite step, consecutive
    overflows count, even if the scale could back off further."""
    net = Overflows(1.5)
    opt = make(net, policy, rule="lomo", loss_scale=DynamicScale(init_scale=2.0**40, min_scale=2.0**-40))
    for _ in range(42):
        opt.backward(net())
    assert (opt.nonfinite_steps, opt.loss_scale) == (40, 1.0)
    net.limit = 0.0
    with pytest.raises(StepError, match="the last 3 steps"):
        for _ in range(10):
            opt.backward(net())
    assert opt.loss_scale == 2.0**-3


@EACH_POLICY
def test_a_resumed_run_stops_in_the_same_step(policy):
    """A state that was saved without the count can be loaded, too."""
    net, other = Net(), Net()
    opt, resumed = make(net, policy), make(other, policy)
    train(net, opt, range(3), spoilt=lambda step: step > 0)
    saved = copy.deepcopy(opt.named_state_dict())
    other.load_state_dict(net.state_dict())
    resumed.load_named_state_dict(saved)
    for one, continued in ((net, opt), (other, resumed)):
        train(one, continued, [3])
        with pytest.raises(StepError, match="the last 3 steps"):
            train(one, continued, [4])
    del saved["nonfinite"]["streak"]
    resumed.load_named_state_dict(saved)
    train(other, resumed, [3, 4])


# -- finite gradients whose squares overflow float32 (a norm above 1.8e19) ---------------------------------------------


@pytest.mark.parametrize(
    ("rule", "policy"), in_turn(["adalomo", "adafactor", "adafactor_t2t", "scaled_adam", "lans", "adamw"], POLICIES)
)
def test_a_large_gradient_is_skipped(rule, policy, give_gradients, caplog):
    """`immediate` skips only its parameter, the other policies the whole step."""
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in [(7,), (40, 30), (200, 100)]]
    opt = lowmem.FusedOptimizer(params, rule, lr=1e-2, policy=policy, compile=False)
    for scale in (1.0, 1e20, 1.0):
        grads = [torch.randn(param.shape) for param in params]
        grads[1] *= scale
        before, saved = [param.detach().clone() for param in params], states(opt)
        give_gradients(opt, *zip(params, grads, strict=True))
        skipped = [n for n in range(3) if scale > 1 and (n == 1 or policy != "immediate")]
        assert [n for n in range(3) if torch.equal(params[n], before[n])] == skipped
        names = tuple(f"param{n}/" for n in skipped)
        assert_same(*({key: named[key] for key in saved if key.startswith(names)} for named in (states(opt), saved)))
        assert opt.last_step.nonfinite == (["param1"] if skipped else [])
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "the gradient of 'param1' is not finite" in warning


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_a_step_whose_norm_over_all_gradients_is_too_large_is_skipped(give_gradients, policy, caplog):
    params = [torch.nn.Parameter(torch.zeros(4)) for _ in range(4)]
    opt = lowmem.FusedOptimizer(params, "lomo", policy=policy, clip_norm=1.0)
    for size in (8e18, 0.0):
        give_gradients(opt, *((param, torch.full((4,), size)) for param in params))
        assert opt.last_step.skipped == (size > 0) and opt.last_step.nonfinite == []
        assert opt.last_step.norms.isfinite().all() and opt.last_step.grad_norm.isinf() == (size > 0)
        assert not any(param.any() for param in params)
    assert "the norm over all gradients is not finite" in caplog.text


# -- ranks -------------------------------------------------------------------------------------------------------------


def spoilt(step):
    return step == 2 or step >= 5


def on_one_rank(rank, kind, policy):
    """Trains with a loss that is NaN on rank 1 only, in step 2 and from step 5 on. Returns each step's loss scale, the
    step that raised, and the final weights."""
    net = KINDS[kind](rank, Net)
    opt = make(net, policy, max_nonfinite_steps=2, loss_scale=DynamicScale(init_scale=2.0**10))
    scales, stopped = [], None
    for step in range(12):
        try:
            opt.backward(net(batch(step, rank)) * (math.nan if rank == 1 and spoilt(step) else 1.0))
        except StepError as error:
            stopped = step, "the last 2 steps" in str(error)
            break
        skipped = opt.last_step.skipped_params == len(dict(net.named_parameters()))
        assert skipped == bool(opt.last_step.nonfinite) == spoilt(step)
        scales.append(opt.loss_scale)
    assert opt.named_state_dict()["step"] == (7 if policy == "immediate" else 4)
    full = full_weights(net)
    dist.barrier()
    return scales, stopped, full


@pytest.mark.parametrize(("kind", "policy"), product(KINDS, ("immediate", "deferred")))
def test_one_non_finite_gradient_skips_the_step_on_all_ranks(two, kind, policy):
    first, second = two.run(on_one_rank, kind, policy)
    assert first[:2] == second[:2]
    assert first[0] == [2.0**10] * 2 + [2.0**9] * 3 + [2.0**8, 2.0**7]
    assert first[1] == (7, True)
    assert_same(first[2], second[2])
    assert all(weight.isfinite().all() for weight in first[2].values())
