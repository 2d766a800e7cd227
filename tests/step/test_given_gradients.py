"""`step()` trains with gradients that the loop computes and assigns to `.grad`, as any optimizer does."""

import pytest
import torch
from support.nets import same, weights
from torch import nn
from torch.nn.utils import clip_grad_norm_

import lowmem
from lowmem.errors import StepError

SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 160), nn.Tanh(), nn.Linear(160, 160), nn.Tanh(), nn.Linear(160, 2))


def make(net, rule=SGD, **options):
    return lowmem.FusedOptimizer(net.named_parameters(), rule=rule, lr=0.1, **options)


def loss_of(net, step=0):
    return net(torch.arange(12.0).view(4, 3) / 10 + step).square().mean()


def give(net, step=0, scale=lambda loss: loss):
    params = [param for param in net.parameters() if param.requires_grad]
    for param, grad in zip(params, torch.autograd.grad(scale(loss_of(net, step)), params), strict=True):
        param.grad = grad


@pytest.mark.parametrize("options", [{"policy": "immediate"}, {"policy": "two_pass", "clip_value": 0.01}], ids=str)
def test_gradients_of_the_loop_are_not_modified(options):
    """One tensor is assigned to two parameters, one is expanded, and one is transposed."""
    one, two, three = (nn.Parameter(torch.ones(3, 4)) for _ in range(3))
    opt = lowmem.FusedOptimizer([one, two, three], rule=SGD, lr=1.0, **options)
    shared, turned = torch.full((), 0.5).expand(3, 4), torch.arange(12.0).view(4, 3).t()
    one.grad = two.grad = shared
    three.grad = turned
    opt.step()
    limit = options.get("clip_value", 100.0)
    assert torch.equal(one, torch.full((3, 4), 1 - min(0.5, limit))) and torch.equal(one, two)
    assert torch.equal(three, 1 - turned.clamp(max=limit))
    assert torch.equal(shared, torch.full((3, 4), 0.5)) and torch.equal(turned, torch.arange(12.0).view(4, 3).t())


def test_a_step_that_raises_leaves_the_gradients():
    net = make_net()
    opt = make(net)
    give(net)
    grads = [param.grad for param in net.parameters()]
    opt.param_groups[0]["params"] = []
    with pytest.raises(StepError, match="'params' of parameter group 0 was changed"):
        opt.step()
    assert all(param.grad is grad for param, grad in zip(net.parameters(), grads, strict=True))


@pytest.mark.parametrize("scales", [False, True])
def test_clipping_and_scaling_by_hand(scales):
    """A GradScaler scales the loss and unscales the gradients of torch.autograd.grad in `.grad`."""
    net, other = make_net(), make_net()
    plain = ADAMW(other.parameters(), lr=0.1, weight_decay=0.01, foreach=False)
    for model, opt in ((net, make(net, ADAMW)), (other, plain)):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=scales)
        for step in range(5):
            give(model, step, scaler.scale)
            scaler.unscale_(opt)
            clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    assert same(weights(net), weights(other))


FAULTS = {
    "a loss scale": (
        {"loss_scale": 128.0},
        lambda net, opt: None,
        r"parameter '0\.weight' with the gradient in \.grad, but it has not been multiplied by the loss scale",
    ),
    "a frozen parameter": (
        {},
        lambda net, opt: net[2].weight.requires_grad_(False),
        r"'2\.weight' with the gradient in \.grad, but the parameter is frozen: call requires_grad_\(\)",
    ),
    "another hook": (
        {},
        lambda net, opt: net[2].weight.register_hook(lambda grad: grad * 2),
        r"'2\.weight' with the gradient in \.grad, but other hooks on the parameter",
    ),
    "an edited group": ({}, lambda net, opt: opt.param_groups.append({}), "number of parameter groups"),
}


@pytest.mark.parametrize(("options", "spoil", "message"), FAULTS.values(), ids=FAULTS)
def test_invalid_gradients_raise_before_any_update(options, spoil, message):
    net = make_net()
    opt, before = make(net, **options), weights(net)
    give(net)
    spoil(net, opt)
    with pytest.raises(StepError, match=message):
        opt.step()
    assert same(weights(net), before)


def test_gradients_after_a_backward_raise_and_a_failed_step_can_be_repeated():
    net, other = make_net(), make_net()
    opt, plain = make(net), SGD(other.parameters(), lr=0.1, foreach=False)
    opt.backward(loss_of(net))
    before = weights(net)
    give(net, 1)
    with pytest.raises(StepError, match=r"a second backward before step\(\), or a gradient in \.grad"):
        opt.step()
    assert same(weights(net), before) and opt.last_step.step == 1
    net.zero_grad()
    opt.step()
    for step in (0, 1):
        give(other, step)
        plain.step()
    give(net, 1)
    opt.step()
    assert same(weights(net), weights(other)) and opt.last_step.step == 2
