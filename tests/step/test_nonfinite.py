"""Gradients that are not finite: one step of them changes nothing that it should not, and many of them end training."""

import copy
import itertools
import math

import pytest
import torch
import torch.distributed as dist
from support.devices import seeded
from support.nets import same, weights
from support.shards import SHARDS

import lowmem
from lowmem import placements
from lowmem.errors import ConfigError, StepError
from lowmem.options import DynamicScale, FusedConfig

POLICIES = ("immediate", "two_pass", "deferred")


class Net(torch.nn.Module):
    """Two layers, `first` [6, 4] and `last` [2, 6], and a bias in each."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(4, 6), torch.nn.Linear(6, 2)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x))).square().mean()


def batch(step, rank=0):
    return torch.randn(3, 4, generator=seeded(100 * rank + step))


def make(net, policy="deferred", **options):
    options = {"rule": "adamw", "lr": 0.01, "policy": policy, "max_nonfinite_steps": 3, **options}
    return lowmem.FusedOptimizer(net.named_parameters(), model=net, **options)


def spoil_nothing(net, x):
    return net(x)


def nan_in_the_loss(net, x):
    return net(x) * math.nan


def inf_in_the_loss(net, x):
    return net(x) * math.inf


def inf_in_the_data(net, x):
    return net(x.index_fill(1, torch.tensor([1]), math.inf))


def nan_in_one_gradient(net, x):
    """By a hook on the weight of one parameter, which stays for this backward."""
    weight = net.first.weight * 1.0
    weight.register_hook(lambda grad: grad * math.nan)
    return net.last(torch.tanh(torch.nn.functional.linear(x, weight, net.first.bias))).square().mean()


SPOILT = [nan_in_the_loss, inf_in_the_loss, inf_in_the_data, nan_in_one_gradient]


@pytest.mark.parametrize("spoil", SPOILT)
@pytest.mark.parametrize("policy", POLICIES)
def test_one_step_changes_nothing_that_it_should_not(policy, spoil):
    """The ordinary loop leaves out what is not finite: all of the step, or under `immediate` that parameter."""
    net, ordinary = Net(), Net()
    opt = make(net, policy, compile=False)
    reference = torch.optim.AdamW(ordinary.parameters(), lr=0.01, weight_decay=opt.param_groups[0]["weight_decay"])
    for step in range(6):
        loss = spoil if step == 2 else spoil_nothing
        opt.backward(loss(net, batch(step)))
        reference.zero_grad()
        loss(ordinary, batch(step)).backward()
        finite = [param.grad.isfinite().all() for param in ordinary.parameters()]
        for param, keeps in zip(ordinary.parameters(), finite, strict=True):
            if not (keeps if policy == "immediate" else all(finite)):
                param.grad = None
        reference.step()
    for one, other in zip(weights(net), weights(ordinary), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    assert opt.nonfinite_steps == 1


@pytest.mark.parametrize("spoil", SPOILT)
@pytest.mark.parametrize("policy", POLICIES)
def test_many_in_a_row_stop(policy, spoil):
    net = Net()
    opt = make(net, policy)
    for step in (0, 1, 2, 3):  # two of them are not enough
        opt.backward((spoil_nothing if step in (0, 3) else spoil)(net, batch(step)))
    for step in (4, 5, 6):
        opt.backward(spoil(net, batch(step)))
    before = weights(net)
    with pytest.raises(StepError, match="the last 3 steps had non-finite gradients") as stopped:
        opt.backward(spoil_nothing(net, batch(7)))
    message = str(stopped.value)
    assert ("the loss is not finite either" in message) == (spoil in (nan_in_the_loss, inf_in_the_loss))
    assert "first in 'first.weight'" in message and "max_nonfinite_steps=None" in message
    assert len(message) < 600 and "overflow" not in message
    assert same(weights(net), before)
    opt.backward(spoil_nothing(net, batch(7)))  # said once; whoever goes on gets as many steps again
    assert not same(weights(net), before)


def test_a_plain_backward_stops_too():
    net = Net()
    opt = make(net, "deferred")
    for step in range(3):
        nan_in_the_loss(net, batch(step)).backward()
    with pytest.raises(StepError, match="the last 3 steps"):
        net(batch(3)).backward()
    opt.zero_grad()
    net(batch(3)).backward()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_weight_that_is_nan_stops(policy):
    net = Net()
    opt = make(net, policy)
    with torch.no_grad():
        net.last.weight[0, 0] = math.nan
    with pytest.raises(StepError, match="the loss is not finite either"):
        for step in range(10):
            opt.backward(net(batch(step)))
    assert opt.nonfinite_steps == 3


@pytest.mark.parametrize("policy", POLICIES)
def test_a_rule_that_leaves_out_elements_itself_stops_as_well(policy):
    net = Net()
    opt = make(net, policy, rule="adafactor", skip_nan_updates=True)
    with pytest.raises(StepError, match="the last 3 steps"):
        for step in range(10):
            opt.backward((nan_in_the_loss if step else spoil_nothing)(net, batch(step)))
    assert not opt.last_step.skipped


def test_micro_batches_are_one_step():
    net = Net()
    opt = make(net, "deferred")
    for _ in range(3):
        with opt.accumulate():
            opt.backward(nan_in_the_loss(net, batch(0)))
        opt.backward(net(batch(1)))
    assert opt.nonfinite_steps == 3
    with pytest.raises(StepError, match="the last 3 steps"), opt.accumulate():
        opt.backward(net(batch(2)))


def test_none_never_stops():
    net = Net()
    opt = make(net, max_nonfinite_steps=None)
    for step in range(60):
        opt.backward(nan_in_the_loss(net, batch(step)))
    assert opt.nonfinite_steps == 60


@pytest.mark.parametrize("wrong", [0, -1, 2.5, math.nan, "20", True])
def test_a_limit_that_is_no_count_is_refused(wrong):
    with pytest.raises(
        ConfigError, match=r"max_nonfinite_steps=.* is out of range; allowed: a whole number >= 1, or None"
    ):
        FusedConfig(max_nonfinite_steps=wrong)


# -- with a dynamic loss scale -----------------------------------------------------------------------------------------


class Overflows(torch.nn.Module):
    """A weight whose scaled gradient overflows beyond a loss scale of `limit`."""

    def __init__(self, limit):
        super().__init__()
        self.weight, self.limit = torch.nn.Parameter(torch.ones(2)), limit

    def forward(self):
        weight = self.weight * 1.0
        weight.register_hook(lambda grad: torch.where(grad > self.limit, math.inf, grad))
        return weight.sum()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_scale_that_looks_for_its_first_value_is_left_alone(policy):
    """Forty halvings, with a limit of three."""
    net = Overflows(1.5)
    opt = make(net, policy, rule="lomo", loss_scale=DynamicScale(init_scale=2.0**40))
    for _ in range(42):
        opt.backward(net())
    assert (opt.nonfinite_steps, opt.loss_scale) == (40, 1.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_storm_of_overflows_ends(policy):
    """Once a step was finite, overflows in a row count, however far the scale could still back off."""
    net = Overflows(2.0**20)
    opt = make(net, policy, rule="lomo", loss_scale=DynamicScale(init_scale=2.0**16))
    opt.backward(net())
    net.limit = 0.0
    with pytest.raises(StepError, match="the last 3 steps"):
        for _ in range(10):
            opt.backward(net())
    assert opt.loss_scale == 2.0**13


# -- saving ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_resumed_run_stops_in_the_same_step(policy):
    net = Net()
    opt = make(net, policy)
    for step in range(3):
        opt.backward((nan_in_the_loss if step else spoil_nothing)(net, batch(step)))
    saved, model = copy.deepcopy(opt.state_dict()), copy.deepcopy(net.state_dict())
    other = Net()
    other.load_state_dict(model)
    resumed = make(other, policy)
    resumed.load_state_dict(saved)
    for one, continued in ((net, opt), (other, resumed)):
        continued.backward(nan_in_the_loss(one, batch(3)))
        with pytest.raises(StepError, match="the last 3 steps"):
            continued.backward(one(batch(4)))


def test_a_state_that_was_saved_without_the_count_loads():
    opt = make(net := Net())
    opt.backward(net(batch(0)))
    saved = opt.named_state_dict()
    del saved["nonfinite"]["streak"]
    opt.load_named_state_dict(saved)
    opt.backward(net(batch(1)))


# -- ranks -------------------------------------------------------------------------------------------------------------


def replicated(rank, make_net):
    return make_net()


KINDS = {"replicated": replicated, **SHARDS}


def spoilt(step):
    return step == 2 or step >= 5


def on_one_rank(rank, kind, policy):
    """What rank 1 alone meets in step 2 and from step 5 on, seen from each rank: what was skipped, the loss scale, the
    step of the error, and the weights in the end."""
    net = KINDS[kind](rank, Net)
    options = {"placement": "replicated"} if kind == "replicated" else {}
    opt = make(net, policy, max_nonfinite_steps=2, loss_scale=DynamicScale(init_scale=2.0**10), **options)
    told, stopped = [], None
    for step in range(12):
        spoils = rank == 1 and spoilt(step)

        def loss(step=step, spoils=spoils):
            value = net(batch(step, rank))
            return value * math.nan if spoils else value

        try:
            opt.backward(loss())
        except StepError as error:
            stopped = step, "the last 2 steps" in str(error)
            break
        skipped = opt.last_step.skipped_params == len(dict(net.named_parameters()))
        assert skipped == bool(opt.last_step.nonfinite) == spoilt(step)
        told.append(opt.loss_scale)
    assert opt.named_state_dict()["step"] == (7 if policy == "immediate" else 4)
    full = [placements.full_tensor(param).clone() for param in net.parameters()]
    dist.barrier()
    return told, stopped, full


@pytest.mark.parametrize(("kind", "policy"), itertools.product(KINDS, ("immediate", "deferred")))
def test_what_one_rank_meets_all_ranks_skip_and_stop_at(two, kind, policy):
    first, second = two.run(on_one_rank, kind, policy)
    assert first[:2] == second[:2]
    assert first[0] == [2.0**10] * 2 + [2.0**9] * 3 + [2.0**8, 2.0**7]
    assert first[1] == (7, True)
    assert same(first[2], second[2])
    assert all(weight.isfinite().all() for weight in first[2])
