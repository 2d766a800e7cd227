"""Ranks of one process group whose parameters or settings differ raise an error and are left unchanged."""

import itertools

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import lowmem
from lowmem.errors import ConfigError, UnsupportedError
from lowmem.placements.agreement import drifted


def layers(count, dtype=torch.float32):
    return torch.nn.Sequential(*(torch.nn.Linear(4, 4, dtype=dtype) for _ in range(count)))


def seeded_by(rank):
    torch.manual_seed(rank)
    return layers(2)


def changed(rank, change):
    net = layers(2)
    if rank:
        change(net[1].weight.data)
    return net.named_parameters()


def groups(net):
    return [{"params": list(layer.named_parameters(prefix=str(n)))} for n, layer in enumerate(net)]


# The parameters of each rank, and the expected error.
VALUES = "the values of the parameters differ between rank 0 and rank 1"
NAMES = "the names, shapes or dtypes of the parameters differ"
DIFFERENT = {
    "values": (lambda rank: seeded_by(rank).named_parameters(), VALUES),
    "one element": (lambda rank: changed(rank, lambda weight: weight[3, 3].add_(1e-7)), VALUES),
    "two exchanged": (lambda rank: changed(rank, lambda weight: weight[0, :2].copy_(weight[0, :2].flip(0))), VALUES),
    "stages": (lambda rank: layers(2 + rank).named_parameters(), r"rank 0 has 4 parameter\(s\) and rank 1 has 6"),
    "groups": (lambda rank: groups(layers(1 + rank)), r"rank 0 has 2 parameter\(s\) and rank 1 has 4"),
    "names": (lambda rank: layers(1).named_parameters(prefix=f"stage{rank}"), NAMES),
    "dtypes": (lambda rank: layers(1, torch.bfloat16 if rank else torch.float32).named_parameters(), NAMES),
}


def assert_raises(rank, name):
    make, message = DIFFERENT[name]
    params = list(make(rank))
    tensors = [pair for item in params for pair in (item["params"] if isinstance(item, dict) else [item])]
    before = [param.detach().clone() for _, param in tensors]
    with pytest.raises(UnsupportedError, match=message) as caught:
        lowmem.FusedOptimizer(params, rule="lomo", lr=0.1)
    assert "placement='replicated'" in str(caught.value)
    assert "placement='local'" in str(caught.value)
    for (_, param), values in zip(tensors, before, strict=True):
        assert torch.equal(param.detach(), values)
    lowmem.FusedOptimizer(params, rule="lomo", lr=0.1, placement="local").remove()


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_parameters_on_ranks_raise(two, name):
    two.run(assert_raises, name)


def a_group_that_differs(rank):
    net, late = layers(1), layers(1)
    opt = lowmem.FusedOptimizer(net.named_parameters(), rule="lomo", lr=0.1)
    torch.manual_seed(rank)
    with pytest.raises(UnsupportedError, match="the values of the parameters differ between rank 0 and rank 1"):
        opt.add_param_group({"params": list(layers(1).named_parameters(prefix="late"))})
    opt.backward(net(torch.ones(1, 4)).sum())
    opt.add_param_group({"params": list(late.named_parameters(prefix="late")), "lr": 0.1 + rank})
    with pytest.raises(ConfigError, match="lr of parameter group 1"):
        opt.backward(late(net(torch.ones(1, 4))).sum())
    return [param.detach() for param in net.parameters()]


def test_a_group_that_is_added_later(two):
    one, other = two.run(a_group_that_differs)
    assert all(map(torch.equal, one, other))


def named_replicated(rank):
    net = seeded_by(rank)
    lowmem.FusedOptimizer(net.named_parameters(), rule="lomo", lr=0.1, placement="replicated")
    return [param.detach() for param in net.parameters()]


def test_replicated_broadcasts_the_weights_of_rank_0(two):
    expected = [param.detach() for param in seeded_by(0).parameters()]
    for weights in two.run(named_replicated):
        assert all(map(torch.equal, weights, expected))


def steps_that_notice(rank, at):
    """Returns the steps in which ranks detect that their elements differ at this index."""
    param = torch.nn.Parameter(torch.zeros(4096))  # a step compares every fourth element
    param.data[at] += rank
    return [step for step in range(8) if drifted({"param": param}, step)]


def test_every_element_is_compared_in_its_turn(two):
    assert two.run(steps_that_notice, 6) == [[2, 6]] * 2


SETTINGS = {
    "seed": ({"seed": 0}, {"seed": 1}, "seed is 0 on rank 0 and 1 on rank 1"),
    "clip_norm": ({"clip_norm": 1.0}, {}, "clip_norm is 1.0 on rank 0 and None on rank 1"),
    "clip_value": ({"clip_value": 1.0}, {"clip_value": 2.0}, "clip_value is 1.0 on rank 0 and 2.0 on rank 1"),
    "loss_scale": ({"loss_scale": 8.0}, {"loss_scale": 2.0}, "loss_scale is 8.0 on rank 0"),
    "policy": ({"policy": "deferred"}, {"policy": "two_pass"}, "policy is 'deferred' on rank 0"),
    "lr": ({"lr": 0.1}, {"lr": 0.2}, "lr of parameter group 0 is 0.1 on rank 0 and 0.2 on rank 1"),
    "rule": ({"rule": "lomo"}, {"rule": "adamw"}, "of parameter group 0 is"),
    "rounding": ({"rounding": "stochastic"}, {}, "rounding is 'stochastic' on rank 0 and"),
}


def settings_that_differ(rank, name, plain, sharded):
    *options, message = SETTINGS[name]
    net = fully_shard(layers(2)) if sharded else layers(2)
    opt = lowmem.FusedOptimizer(net.named_parameters(), model=net, **{"rule": "lomo", "lr": 0.1, **options[rank]})
    before = [param.detach().clone() for param in net.parameters()]
    with pytest.raises(ConfigError, match=message):
        loss = net(torch.ones(1, 4)).sum()
        loss.backward() if plain else opt.backward(loss)
    for param, value in () if sharded else zip(net.parameters(), before, strict=True):
        assert torch.equal(param, value)
    opt.remove()


@pytest.mark.parametrize(
    ("name", "plain", "sharded"),
    [*itertools.product(SETTINGS, [False, True], [False]), ("seed", False, True), ("lr", False, True)],
)
def test_different_settings_on_ranks_raise(two, name, plain, sharded):
    """Every rank raises before the first update."""
    two.run(settings_that_differ, name, plain, sharded)


def edited_on_one_rank(rank):
    net = layers(2)
    opt = lowmem.FusedOptimizer(net.named_parameters(), rule="adamw", betas=(0.9, 0.99 + 0.001 * rank))
    with pytest.raises(ConfigError, match="betas of parameter group 0"):
        opt.backward(net(torch.ones(1, 4)).sum())
    opt.param_groups[0]["betas"] = (0.9, 0.99)
    opt.backward(net(torch.ones(1, 4)).sum())
    opt.param_groups[0]["lr"] = 0.1 + rank  # settings are compared in the first step only
    opt.backward(net(torch.ones(1, 4)).sum())
    opt.remove()
    opt = lowmem.FusedOptimizer(net.named_parameters(), rule="lomo", placement="local", seed=rank, lr=0.1 + rank)
    opt.backward(net(torch.ones(1, 4)).sum())  # local optimizers may differ


def a_frozen_one(rank):
    net = layers(2)
    net[0].weight.requires_grad_(rank == 0)
    opt = lowmem.FusedOptimizer(net.named_parameters(), rule="lomo")
    with pytest.raises(ConfigError, match="number of trained parameters is 4 on rank 0 and 3 on rank 1"):
        opt.backward(net(torch.ones(1, 4)).sum())


@pytest.mark.parametrize("case", [edited_on_one_rank, a_frozen_one])
def test_settings_are_compared_once_and_by_type(two, case):
    two.run(case)
