"""Tests replicated parameters: gradients that only some ranks have, overflows of averages, and errors."""

from contextlib import nullcontext

import pytest
import torch
from support.nets import Layers

import lowmem
from lowmem.errors import StepError


def frozen_at_times(rank, settings, orders, frozen, micro_batches=1):
    """Rank 1 freezes the layers `frozen[step]`. The reference averages over ranks with zeros for these gradients."""
    net, reference = Layers(), Layers()
    reference.load_state_dict(net.state_dict())
    opt = lowmem.FusedOptimizer(net.named_parameters(), lr=0.1, **settings)
    plain = torch.optim.AdamW(reference.parameters(), lr=0.1, weight_decay=0.01, foreach=False)
    for order, names in zip(orders, frozen, strict=True):
        for n, layer in enumerate(net.layers):
            layer.weight.requires_grad_(rank != 1 or n not in names)
        for micro in range(micro_batches):
            with opt.accumulate() if micro + 1 < micro_batches else nullcontext():
                opt.backward((1 + rank) * net(order))
        plain.zero_grad()
        for one in (0, 1):
            for n, layer in enumerate(reference.layers):
                layer.weight.requires_grad_(one != 1 or n not in names)
            (0.5 * micro_batches * (1 + one) * reference(order)).backward()
        plain.step()
        torch.testing.assert_close(net.state_dict(), reference.state_dict(), rtol=1e-5, atol=1e-6)
    return [layer.weight.detach() for layer in net.layers]


@pytest.mark.parametrize("policy", ["immediate", "two_pass", "deferred"])
def test_a_parameter_frozen_on_one_rank_for_some_steps(two, policy):
    """Its gradient counts as zero there, as in DDP with `find_unused_parameters`, and both ranks update it."""
    orders = [(0, 1, 2, 3), (0, 1, 2, 3), (3, 0, 1, 2), (0, 1, 2), (0, 1, 2, 3)]
    settings = {"rule": "adamw", "weight_decay": 0.01, "policy": policy}
    one, other = two.run(frozen_at_times, settings, orders, [(), (1,), (0, 2), (0,), ()])
    assert all(map(torch.equal, one, other))
    if policy == "deferred":
        one, other = two.run(frozen_at_times, settings, orders, [(), (1,), (0, 2), (0,), ()], 2)
        assert all(map(torch.equal, one, other))


def large_gradients(rank, dtype):
    param = torch.nn.Parameter(torch.zeros(4, dtype=dtype))
    opt = lowmem.FusedOptimizer([param], rule="lomo", lr=1.0)
    opt.backward((param * torch.full((4,), -40000.0 if rank else -50000.0, dtype=dtype)).sum())
    return param.detach().float()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_averages_do_not_overflow(two, dtype):
    """40,000, 50,000 and their mean fit into float16, but their sum does not."""
    for results in two.run(large_gradients, dtype):
        torch.testing.assert_close(results, torch.full((4,), 45000.0), rtol=2**-8, atol=0.0)


def twice_fired(rank):
    from torch.utils.checkpoint import checkpoint

    shared = torch.nn.Linear(4, 4, bias=False)
    opt = lowmem.FusedOptimizer(shared.named_parameters(), policy="deferred")
    x = torch.ones(2, 4, requires_grad=True)
    with pytest.raises(StepError, match="is already being reduced"):
        opt.backward(shared(checkpoint(shared, x, use_reentrant=True)).sum())


def test_a_gradient_in_two_parts_raises(two):
    two.run(twice_fired)
