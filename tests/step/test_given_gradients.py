"""Gradients that a loop computes itself and puts into `.grad`: `step()` trains by them as any optimizer does."""

import pytest
import torch
from support.nets import same, weights
from torch import nn
from torch.nn.utils import clip_grad_norm_

import lowmem
from lowmem.errors import StepError

STEPS = 5


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 160), nn.Tanh(), nn.Linear(160, 160), nn.Tanh(), nn.Linear(160, 2))


def losses(net, step):
    x = torch.arange(12.0).view(4, 3) / 10 + step
    out = net(x)
    return out.square().mean(), (out - 1).abs().mean()


def projected(net, step):
    """PCGrad: of two tasks whose gradients disagree, the part of one that the other one opposes is taken away."""
    first, second = losses(net, step)
    params = list(net.parameters())
    one = torch.autograd.grad(first, params, retain_graph=True)
    two = torch.autograd.grad(second, params)
    for param, a, b in zip(params, one, two, strict=True):
        agreement = (a * b).sum().clamp(max=0)
        param.grad = a + b - agreement / (b.square().sum() + 1e-12) * b


@pytest.mark.parametrize("options", [{"policy": "immediate"}, {"policy": "two_pass", "clip_value": 0.01}], ids=str)
def test_the_tensors_of_the_loop_stay_as_they_are(options):
    """One tensor for two parameters, an expanded one, and a transposed one."""
    one, two, three = (nn.Parameter(torch.ones(3, 4)) for _ in range(3))
    opt = lowmem.FusedOptimizer([one, two, three], rule=torch.optim.SGD, lr=1.0, **options)
    shared, turned = torch.full((), 0.5).expand(3, 4), torch.arange(12.0).view(4, 3).t()
    one.grad = two.grad = shared
    three.grad = turned
    opt.step()
    limit = options.get("clip_value", 100.0)
    assert torch.equal(one, torch.full((3, 4), 1 - min(0.5, limit))) and torch.equal(one, two)
    assert torch.equal(three, 1 - turned.clamp(max=limit))
    assert torch.equal(shared, torch.full((3, 4), 0.5)) and torch.equal(turned, torch.arange(12.0).view(4, 3).t())


def test_inside_inference_mode():
    param = nn.Parameter(torch.ones(4))
    opt = lowmem.FusedOptimizer([param], rule=torch.optim.SGD, lr=1.0)
    with torch.inference_mode():
        param.grad = torch.full((4,), 0.25)
        opt.step()
    assert torch.equal(param, torch.full((4,), 0.75))


@pytest.mark.cpu_only("the simulated GPU has no sparse tensors")
def test_a_sparse_gradient():
    embedding = nn.Embedding(5, 3, sparse=True)
    before = embedding.weight.detach().clone()
    opt = lowmem.FusedOptimizer(embedding.named_parameters(), rule=torch.optim.SGD, lr=1.0)
    loss = embedding(torch.tensor([1, 1, 4])).sum()
    (embedding.weight.grad,) = torch.autograd.grad(loss, [embedding.weight])
    opt.step()
    assert torch.equal(embedding.weight, before - torch.tensor([0.0, 2.0, 0.0, 0.0, 1.0])[:, None])


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="a gradient has the dtype of its parameter")
def test_a_gradient_of_another_dtype():
    param = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    opt = lowmem.FusedOptimizer([param], rule="lomo", lr=1.0, rounding="nearest")
    param.grad_dtype = None
    param.grad = torch.full((4,), 0.123456)
    opt.step()
    assert torch.equal(param, torch.full((4,), 1 - 0.123456).bfloat16())


@pytest.mark.troubleshooting("clip_grad_norm_()")
def test_clipping_by_hand():
    net, other = make_net(), make_net()
    opt = lowmem.FusedOptimizer(net.named_parameters(), rule=torch.optim.SGD, lr=0.1)
    ordinary = torch.optim.SGD(other.parameters(), lr=0.1, foreach=False)
    for each, of in ((net, opt), (other, ordinary)):
        projected(each, 0)
        clip_grad_norm_(each.parameters(), 0.05)
        of.step()
    assert same(weights(net), weights(other))
    losses(net, 1)[0].backward()
    with pytest.raises(StepError, match=r"clip_grad_norm_\(\): parameter '0\.weight' has no gradient"):
        clip_grad_norm_(net.parameters(), 0.05)


def test_a_grad_scaler():
    """It has scaled a loss whose gradients torch.autograd.grad returns, and unscales them in .grad."""

    def run(net, opt):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        for step in range(STEPS):
            params = list(net.parameters())
            scaled = scaler.scale(losses(net, step)[0])
            for param, grad in zip(params, torch.autograd.grad(scaled, params), strict=True):
                param.grad = grad
            scaler.unscale_(opt)
            clip_grad_norm_(net.parameters(), 0.05)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        return weights(net)

    net, other = make_net(), make_net()
    opt = lowmem.FusedOptimizer(net.named_parameters(), rule=torch.optim.AdamW, lr=1e-2)
    assert same(run(net, opt), run(other, torch.optim.AdamW(other.parameters(), lr=1e-2, foreach=False)))


@pytest.mark.troubleshooting("step() would update parameter")
def test_what_cannot_be_right_raises_before_anything_moves():
    net = make_net()
    before = weights(net)

    def refuses(opt, message):
        with pytest.raises(StepError, match=message):
            opt.step()
        opt.zero_grad()
        assert same(weights(net), now)
        opt.remove()

    def make(**options):
        return lowmem.FusedOptimizer(net.named_parameters(), rule=torch.optim.SGD, lr=0.1, **options)

    now = before
    opt = make(loss_scale=128.0)
    projected(net, 0)
    refuses(opt, r"parameter '0\.weight' with the gradient in \.grad, but it has not been multiplied by the loss scale")

    opt = make()
    projected(net, 0)
    net[2].weight.requires_grad_(False)
    refuses(opt, r"'2\.weight' with the gradient in \.grad, but the parameter is frozen: call requires_grad_\(\)")
    net[2].weight.requires_grad_(True)

    opt = make()
    projected(net, 0)
    handle = net[2].weight.register_hook(lambda grad: grad * 2)
    refuses(opt, r"'2\.weight' with the gradient in \.grad, but other hooks on the parameter")
    handle.remove()

    opt = make()
    opt.backward(losses(net, 0)[0])
    now = weights(net)
    projected(net, 0)
    with pytest.raises(StepError, match=r"a second backward before step\(\), or a gradient in \.grad"):
        opt.step()
    assert same(weights(net), now) and opt.last_step.step == 1


def test_what_has_no_elements_keeps_its_gradient():
    """No hook is on it, so an ordinary backward leaves a gradient there."""
    net, empty = make_net(), nn.Parameter(torch.zeros(0, 3))
    opt = lowmem.FusedOptimizer([*net.parameters(), empty], rule=torch.optim.SGD, lr=0.1)
    for step in range(2):
        (losses(net, step)[0] + empty.sum()).backward()
        opt.step()
        assert opt.last_step.step == step + 1


def test_a_failed_step_can_be_repeated():
    net, other = make_net(), make_net()
    opt = lowmem.FusedOptimizer(net.named_parameters(), rule=torch.optim.SGD, lr=0.1)
    projected(net, 0)
    opt.param_groups.append({})
    with pytest.raises(StepError, match="number of parameter groups"):
        opt.step()
    opt.param_groups.pop()
    projected(net, 0)
    opt.step()
    projected(other, 0)
    torch.optim.SGD(other.parameters(), lr=0.1, foreach=False).step()
    assert same(weights(net), weights(other)) and opt.last_step.step == 1
