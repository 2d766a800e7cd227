"""Gradients that a loop assigns to `.grad` on several ranks are averaged as in a backward."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from support.nets import full_weights
from support.shards import KINDS, SHARDS, make
from torch.distributed.tensor import distribute_tensor

import lowmem

STEPS = 4


def gradient(name, shape, rank, step):
    source = torch.Generator().manual_seed(sum(map(ord, name)) + 100 * rank + step)
    return torch.randn(shape, generator=source)


def has_gradient(name, rank, step):
    """Returns whether the parameter has a gradient, which varies by rank and step."""
    return (len(name) + rank + step) % 3 > 0


def optimizer(net, settings, **options):
    return lowmem.FusedOptimizer(net.named_parameters(), model=net, lr=1e-2, **settings, **options)


def alone(count, settings, micro_batches=1, apart=True):
    """Trains one device with the averages of `count` ranks. If `apart`, ranks lack different gradients."""
    net = make()
    opt = optimizer(net, settings, placement="local")
    for step in range(STEPS):
        for name, param in net.named_parameters():
            ranks = [rank for rank in range(count) if param.requires_grad and has_gradient(name, rank * apart, step)]
            if ranks:
                param.grad = sum(gradient(name, param.shape, rank, step) for rank in ranks) / count
            if micro_batches > 1 and name in ("one", "embed"):
                param.grad = micro_batches - 1 + (torch.zeros(param.shape) if param.grad is None else param.grad)
        opt.step()
        opt.zero_grad()
    return full_weights(net), opt.last_step.grad_norm.item()


def on_ranks(rank, kind, settings, micro_batches=1):
    """Sharded ranks lack the same gradients. Under FSDP2, `.grad` is a shard of the average, as after a backward."""
    net, count = KINDS[kind](rank, make), dist.get_world_size()
    opt = optimizer(net, settings)
    trained = {name: param for name, param in net.named_parameters() if param.requires_grad}
    for step in range(STEPS):
        for _ in range(micro_batches - 1):
            with opt.accumulate():
                (net.one.sum() + net.embed.sum()).backward()
        with gathered(kind, trained.values()):
            for name, param in trained.items():
                if not has_gradient(name, rank if kind == "replicated" else 0, step):
                    continue
                if kind == "fsdp2":
                    average = sum(gradient(name, param.shape, n, step) for n in range(count)) / count
                    param.grad = distribute_tensor(average, param.device_mesh, param.placements)
                else:
                    param.grad = gradient(name, param.shape, rank, step)
            opt.step()
        opt.zero_grad()
    return full_weights(net), opt.last_step.grad_norm.item()


def gathered(kind, params):
    if kind != "zero3":
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(params))


def assert_same(results, alone):
    for weights, norm in results:
        assert all(torch.equal(weight, results[0][0][name]) for name, weight in weights.items())
        torch.testing.assert_close(weights, alone[0], rtol=1e-5, atol=1e-5)
        assert norm == pytest.approx(alone[1], rel=1e-4)


CASES = {
    "immediate": ({"rule": "adamw"}, 1),
    "two_pass": ({"rule": "adamw", "policy": "two_pass", "clip_norm": 0.5}, 1),
    "deferred": ({"rule": torch.optim.AdamW, "policy": "deferred", "clip_norm": 0.5}, 1),
    "after micro-batches": ({"rule": torch.optim.AdamW, "policy": "deferred", "clip_norm": 0.5}, 3),
}


@pytest.mark.parametrize(("settings", "micro_batches"), CASES.values(), ids=CASES)
def test_replicated(ranks, settings, micro_batches):
    results = ranks.run(on_ranks, "replicated", settings, micro_batches)
    assert_same(results, alone(ranks.count, settings, micro_batches))


@pytest.mark.parametrize("kind", SHARDS)
@pytest.mark.parametrize(
    "settings", [{"rule": "adalomo"}, {"rule": "adamw", "policy": "deferred", "clip_norm": 0.5}], ids=str
)
def test_sharded(two, kind, settings):
    assert_same(two.run(on_ranks, kind, settings), alone(2, settings, apart=False))
