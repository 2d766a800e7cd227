"""Small parameters are updated as one, whatever order their gradients arrive in."""

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


def make():
    params = [torch.nn.Parameter(torch.linspace(-1, 1, 8) + n) for n in range(COUNT)]
    return params, lowmem.FusedOptimizer(params, rule="adamw", lr=0.01)


def step(opt, params, order=EVERY, seed=0):
    source = seeded(seed)
    grads = [torch.randn(8, generator=source) for _ in params]
    opt.backward(sum((params[n] * grads[n]).sum() for n in order))
    return grads


@pytest.mark.parametrize("reloads", [False, True])
@pytest.mark.parametrize("orders", ORDERS.values(), ids=ORDERS)
def test_stacks_do_not_depend_on_the_order_of_gradients(orders, reloads):
    """As `torch.optim.AdamW`, to the bit, also if states are loaded again in between."""
    params, opt = make()
    theirs = [param.detach().clone() for param in params]
    plain = torch.optim.AdamW(theirs, lr=0.01, foreach=False)
    for n, order in enumerate(orders):
        grads = step(opt, params, order, seed=n)
        for i, (param, grad) in enumerate(zip(theirs, grads, strict=True)):
            param.grad = grad if i in order else None
        plain.step()
        if reloads:
            opt.load_state_dict(opt.state_dict())
        for param, their in zip(params, theirs, strict=True):
            assert torch.equal(param, their)
            for name, state in plain.state.get(their, {}).items():
                assert torch.equal(opt.state[param][name], state)


def test_saved_states_do_not_share_the_memory_of_their_stack():
    """A file that has one parameter has nothing of another one."""
    params, opt = make()
    step(opt, params)
    state = opt.named_state_dict()["state"]["param0"]
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in state.values())
