"""Small parameters are updated as one, whatever order their gradients arrive in and whoever moves them."""

import io

import pytest
import torch
from support.devices import seeded

import lowmem

COUNT = 6
EVERY = tuple(range(COUNT))

# The parameters that get a gradient in each step, in the order of the forward.
ORDERS = {
    "same": [EVERY] * 4,
    "permuted": [EVERY, EVERY[::-1], EVERY[::-1], (3, 0, 5, 1, 2, 4)],
    "some at first": [(0, 1, 2), EVERY, EVERY, (2, 3)],
    "some later": [EVERY, (1, 2, 3), (3, 4), EVERY],
    "exchanged": [(0, 1, 2), (3, 4, 5), (0, 1, 3), (2, 4, 5), EVERY],
}


def make(rule="adamw", **options):
    params = [torch.nn.Parameter(torch.linspace(-1, 1, 8) + n) for n in range(COUNT)]
    return params, lowmem.FusedOptimizer(params, rule=rule, lr=0.01, **options)


def step(opt, params, order=EVERY, seed=0):
    source = seeded(seed)
    grads = [torch.randn(8, generator=source) for _ in params]
    opt.backward(sum((params[n] * grads[n]).sum() for n in order))
    return grads


def replace(opt, param):
    opt.state[param]["exp_avg"] = opt.state[param]["exp_avg"].clone()


def replace_data(opt, param):
    opt.state[param]["exp_avg"].data = opt.state[param]["exp_avg"].clone()


def reload(opt, param):
    opt.load_state_dict(opt.state_dict())


@pytest.mark.parametrize("moving", [None, replace, replace_data, reload])
@pytest.mark.parametrize("orders", ORDERS.values(), ids=ORDERS)
def test_whatever_the_order(orders, moving):
    """As `torch.optim.AdamW`, to the bit, also if somebody moves a state in between."""
    params, opt = make()
    theirs = [param.detach().clone() for param in params]
    plain = torch.optim.AdamW(theirs, lr=0.01, foreach=False)
    for n, order in enumerate(orders):
        grads = step(opt, params, order, seed=n)
        for i, (param, grad) in enumerate(zip(theirs, grads, strict=True)):
            param.grad = grad if i in order else None
        plain.step()
        if moving is not None:
            moving(opt, params[order[-1]])
        for param, their in zip(params, theirs, strict=True):
            assert torch.equal(param, their)
            for name, state in plain.state.get(their, {}).items():
                assert torch.equal(opt.state[param][name], state)


def test_a_saved_state_is_saved_by_itself():
    """Of what a file has of one parameter, nothing is of another one."""
    params, opt = make()
    _, alone = make(batching=False)
    step(opt, params)
    state = opt.named_state_dict()["state"]["param0"]
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in state.values())
    step(alone, alone.param_groups[0]["params"])
    files = [io.BytesIO(), io.BytesIO()]
    for one, file in zip((opt, alone), files, strict=True):
        torch.save(one.state_dict(), file)
    assert len(files[0].getvalue()) == len(files[1].getvalue())
