"""Cases from PyTorch's tests of torch.distributed.optim and its tutorial on optimizer steps in backward."""

import copy
import itertools
import weakref

import pytest
import torch
from judged import judge, report, untouched_if_refused
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.optim import _apply_optimizer_in_backward, _get_in_backward_optimizers
from torch.optim.lr_scheduler import LambdaLR

import lowmem

STEPS = 6


def layers(shared=False):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))
    if shared:
        net[0].weight = net[1].weight
    return net


class Vision(nn.Module):
    """A small substitute for the tutorial's vision transformer."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, 8, 4, stride=4)
        self.place = nn.Parameter(torch.randn(4, 8) * 0.02)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 5)

    def forward(self, images):
        return self.head(self.encoder(self.patches(images).flatten(2).mT + self.place).mean(1))


def vision():
    torch.manual_seed(0)
    return Vision()


def inputs(net):
    source = torch.Generator().manual_seed(1)
    shape = (3, 1, 8, 8) if isinstance(net, Vision) else (4, 10)
    return [torch.randn(shape, generator=source) for _ in range(STEPS)]


def loss_of(net, x):
    return net(x).square().mean()


def weights(net):
    return [param.detach().clone() for param in net.parameters()]


def same(*models):
    """Returns whether the other models are bitwise equal and differ from the first model, which was not trained."""
    start, first, *others = map(weights, models)
    return not any(map(torch.equal, start, first)) and all(all(map(torch.equal, first, other)) for other in others)


def train(net, optimizers=(), schedulers=(), batches=None):
    """Trains without leaving gradients. Without optimizers, only backward is called."""
    for x in inputs(net) if batches is None else batches:
        with untouched_if_refused(net):
            loss_of(net, x).backward()
        for item in (*optimizers, *schedulers):
            item.step()
        for opt in optimizers:
            opt.zero_grad()
        assert all(param.grad is None for param in net.parameters())
    return net


def fused(params, cls, **options):
    return lowmem.FusedOptimizer(params, rule=cls, **options)


def weights_and_biases(shared, optimizers):
    """Uses two optimizers, or one optimizer with two groups."""
    net, plain, theirs = (layers(shared) for _ in range(3))
    kinds = {"weight": {"lr": 0.1, "momentum": 0.9}, "bias": {"lr": 0.05}}

    def members(model, kind):
        return [param for name, param in model.named_parameters() if name.endswith(kind)]

    for kind, options in kinds.items():
        _apply_optimizer_in_backward(torch.optim.SGD, members(theirs, kind), options)
    train(plain, [torch.optim.SGD(members(plain, kind), **options) for kind, options in kinds.items()])
    if optimizers == 1:
        groups = [{"params": members(net, kind), **options} for kind, options in kinds.items()]
        ours = [fused(groups, torch.optim.SGD, lr=1.0)]
    else:
        ours = [fused(members(net, kind), torch.optim.SGD, **options) for kind, options in kinds.items()]
    train(net)
    assert len(ours) == optimizers
    return same(layers(shared), plain, train(theirs), net)


def not_hooked():
    """torch registers the optimizers but no hooks, so backward changes no weights."""
    net, theirs = layers(), layers()
    _apply_optimizer_in_backward(torch.optim.SGD, theirs.parameters(), {"lr": 0.03}, register_hook=False)
    x = inputs(net)[0]
    loss_of(theirs, x).backward()
    opt = fused(net.named_parameters(), torch.optim.SGD, lr=0.03)
    with opt.paused():
        loss_of(net, x).backward()
    return all(map(torch.equal, weights(net), weights(theirs))) and all(
        map(torch.equal, weights(net), weights(layers()))
    )


def two_optimizers_of_the_same_parameters():
    net, plain, theirs = (layers() for _ in range(3))
    rates = [0.03, 0.01]
    for lr in rates:
        _apply_optimizer_in_backward(torch.optim.SGD, theirs.parameters(), {"lr": lr})
    train(plain, [torch.optim.SGD(plain.parameters(), lr=lr) for lr in rates])
    ours = [fused(net.named_parameters(), torch.optim.SGD, lr=lr) for lr in rates]
    return len(ours) == 2 and same(layers(), plain, train(theirs), train(net))


def optimizers_are_found_again():
    """torch finds one optimizer per parameter. Ours has the same states by parameter name."""
    net, theirs = layers(), layers()
    _apply_optimizer_in_backward(torch.optim.Adam, theirs.parameters(), {"lr": 0.01})
    opt = fused(net.named_parameters(), torch.optim.Adam, lr=0.01)
    train(theirs), train(net)
    found = zip(theirs.named_parameters(), _get_in_backward_optimizers(theirs), strict=True)
    states = opt.named_state_dict()["state"]
    return len(states) == len(weights(net)) and all(
        states[name].keys() == own.state[param].keys()
        and all(torch.equal(states[name][key], value) for key, value in own.state[param].items())
        for (name, param), own in found
    )


def documentation():
    """Uses SGD for one parameter and Adam for the others."""
    net, plain, theirs = vision(), vision(), vision()
    kinds = [(torch.optim.SGD, {"lr": 0.02}), (torch.optim.Adam, {"lr": 0.04})]

    def split(model):
        first, *others = model.named_parameters()
        return [first], others

    for (cls, options), named in zip(kinds, split(theirs), strict=True):
        _apply_optimizer_in_backward(cls, [param for _, param in named], options)
    opts = [cls([p for _, p in named], **own) for (cls, own), named in zip(kinds, split(plain), strict=True)]
    groups = [
        {"params": named, "rule": f"torch.optim.{cls.__name__}", **own}
        for (cls, own), named in zip(kinds, split(net), strict=True)
    ]
    opt = fused(groups, torch.optim.SGD, lr=1.0)
    train(net)
    return opt.last_step.step == STEPS and same(vision(), train(plain, opts), train(theirs), net)


def tutorial(cls, options):
    """Uses a dict of optimizers, and a hook on every parameter that steps and drops the gradient."""
    net, plain, theirs = vision(), vision(), vision()
    optimizers = {param: cls([param], **options) for param in theirs.parameters()}

    def hook(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in theirs.parameters():
        param.register_post_accumulate_grad_hook(hook)
    opt = fused(net.named_parameters(), cls, **options)
    train(net)
    return opt.last_step.step == STEPS and same(
        vision(), train(plain, [cls(plain.parameters(), **options)]), train(theirs), net
    )


def one_gradient_at_a_time():
    """As measured in the tutorial, earlier gradients are freed when a parameter's gradient arrives."""

    def most_elements(make):
        net, gradients, counts = vision(), [], []

        def count(param):
            gradients.append(weakref.ref(param.grad))
            counts.append(sum(grad().numel() for grad in gradients if grad() is not None))

        for param in net.parameters():
            param.register_post_accumulate_grad_hook(count)
        opt = make(net.named_parameters())
        train(net, [opt])
        return max(counts)

    sizes = [param.numel() for param in vision().parameters()]
    assert most_elements(torch.optim.Adam) == sum(sizes)
    return most_elements(lambda named: fused(named, torch.optim.Adam)) == max(sizes)


def schedules(resumed):
    """Each of torch's optimizers has a scheduler. Ours has one, and may be resumed by torch's checkpoint functions."""
    net, plain, theirs = vision(), vision(), vision()

    def factor(step):
        return 0.7**step

    options = {"lr": 1e-2, "weight_decay": 0.1}
    _apply_optimizer_in_backward(torch.optim.AdamW, theirs.parameters(), options)
    train(theirs, schedulers=[LambdaLR(opt, factor) for opt in _get_in_backward_optimizers(theirs)])
    ordinary = torch.optim.AdamW(plain.parameters(), **options)
    train(plain, [ordinary], [LambdaLR(ordinary, factor)])
    opt = fused(net.named_parameters(), torch.optim.AdamW, **options)
    scheduler = LambdaLR(opt, factor)
    batches = inputs(net)
    train(net, (), [scheduler], batches[: STEPS // 2])
    if resumed:
        saved = copy.deepcopy((*get_state_dict(net, opt), scheduler.state_dict()))
        net = vision()
        opt = fused(net.named_parameters(), torch.optim.AdamW, lr=9.0)
        scheduler = LambdaLR(opt, factor)
        set_state_dict(net, opt, model_state_dict=saved[0], optim_state_dict=saved[1])
        scheduler.load_state_dict(saved[2])
    train(net, (), [scheduler], batches[STEPS // 2 :])
    return same(vision(), plain, theirs, net)


def every_backward_is_a_step():
    """Without step(), two losses of one forward are two steps. torch does the same."""
    net, theirs = vision(), vision()
    _apply_optimizer_in_backward(torch.optim.SGD, theirs.parameters(), {"lr": 0.1})
    opt = fused(net.named_parameters(), torch.optim.SGD, lr=0.1)
    for model in (theirs, net):
        for x, y in itertools.pairwise(inputs(model)):
            loss_of(model, x).backward()
            loss_of(model, y).backward()
    return opt.last_step.step == 2 * (STEPS - 1) and same(vision(), theirs, net)


def a_gradient_that_is_absent():
    """The step count of a layer does not increase in batches that skip the layer."""
    net, plain, theirs = (layers() for _ in range(3))
    _apply_optimizer_in_backward(torch.optim.Adam, theirs.parameters(), {"lr": 0.01})
    ordinary = torch.optim.Adam(plain.parameters(), lr=0.01)
    opt = fused(net.named_parameters(), torch.optim.Adam, lr=0.01)
    for model in (plain, theirs, net):
        for n, x in enumerate(inputs(model)):
            loss_of(model if n % 3 else model[1], x).backward()
            if model is plain:
                ordinary.step()
                ordinary.zero_grad()
    return opt.last_step.step == STEPS and same(layers(), plain, theirs, net)


CASES = {
    "two optimizers": lambda: weights_and_biases(False, 2),
    "two optimizers, a shared weight": lambda: weights_and_biases(True, 2),
    "two groups": lambda: weights_and_biases(False, 1),
    "two groups, a shared weight": lambda: weights_and_biases(True, 1),
    "without hooks": not_hooked,
    "two optimizers of the same parameters": two_optimizers_of_the_same_parameters,
    "optimizers are found again": optimizers_are_found_again,
    "the example of the documentation": documentation,
    "the tutorial": lambda: tutorial(torch.optim.Adam, {"foreach": False}),
    "the tutorial, fused Adam": lambda: tutorial(torch.optim.Adam, {"fused": True}),
    "the tutorial, SGD": lambda: tutorial(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "the tutorial, RMSprop": lambda: tutorial(torch.optim.RMSprop, {"centered": True}),
    "one gradient at a time": one_gradient_at_a_time,
    "schedules": lambda: schedules(False),
    "schedules, resumed": lambda: schedules(True),
    "every backward is a step": every_backward_is_a_step,
    "a gradient that is absent": a_gradient_that_is_absent,
}


@pytest.mark.filterwarnings("ignore:a FusedOptimizer was deleted")
def test_optimizer_in_backward():
    report("PyTorch's optimizers in backward", {name: judge(compare) for name, compare in CASES.items()}, at_least=16)
