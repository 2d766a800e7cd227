"""Ranks with parts of a batch match one device with the whole batch, for replicated and sharded parameters."""

import functools
import pickle
from itertools import product

import pytest
import torch
import torch.distributed as dist
from support.nets import ROWS, Net, data, full_weights
from support.products import in_turn, pairwise
from support.shards import (
    ACCUMULATED,
    POLICIES,
    RULES,
    SHARDS,
    assert_alike,
    assert_as_one_device,
    everyones,
    make,
    settings_of,
    shared,
    train,
)

import lowmem
from lowmem import placements
from lowmem.errors import UnsupportedError

COUNTS = [2, 3]  # numbers of ranks
KINDS = ["replicated", *SHARDS]
EVERY_POLICY = {**POLICIES, "two_pass": {"policy": "two_pass", "clip_norm": 0.5}}


def replicated(rank, settings, micro_batches=1):
    """Ranks may take different branches of the model, which a sharded model does not support."""
    torch.manual_seed(rank)
    count, settings = dist.get_world_size(), {"placement": "replicated", **settings}
    return train(Net(), lambda ids: ids.tensor_split(count)[rank], settings, micro_batches, data())


@functools.cache
def replicated_alone(case):
    torch.manual_seed(0)
    return train(Net(), lambda ids: ids, pickle.loads(case), batches=data())


def as_one_device(ranks, kind, settings, micro_batches=1):
    if kind != "replicated":
        assert_as_one_device(ranks.run(shared, kind, settings, micro_batches), kind, settings)
    else:
        results = ranks.run(replicated, settings, micro_batches)
        assert_alike(results, kind, replicated_alone(pickle.dumps(settings)))


@pytest.mark.parametrize(("count", "kind", "rule"), pairwise(COUNTS, SHARDS, RULES))
def test_every_rule(ranks_of, count, kind, rule):
    as_one_device(ranks_of(count), kind, settings_of(rule))


@pytest.mark.parametrize(
    ("count", "kind", "policy"),
    [case for case in pairwise(COUNTS, KINDS, EVERY_POLICY) if case[1:] not in product(SHARDS, ["two_pass"])],
)
def test_every_policy(ranks_of, count, kind, policy):
    as_one_device(ranks_of(count), kind, EVERY_POLICY[policy])


@pytest.mark.parametrize(("count", "kind", "settings"), in_turn(COUNTS, KINDS, ACCUMULATED))
def test_accumulation(ranks_of, count, kind, settings):
    """Each micro-batch is one row, so the mean over ranks and micro-batches is the mean of the whole batch."""
    as_one_device(ranks_of(count), kind, ACCUMULATED[settings], micro_batches=ROWS // count)


def assert_raises(rank, kind, rule, hyper):
    net = SHARDS[kind](rank, make)
    with pytest.raises(UnsupportedError, match=r"needs full matrices.*'replicated'.*torch.optim.AdamW"):
        lowmem.FusedOptimizer(net.named_parameters(), model=net, rule=rule, **hyper)


@pytest.mark.parametrize("rule", ["torch.optim.Adafactor", "torch.optim.Muon"])
@pytest.mark.parametrize("kind", SHARDS)
def test_optimizers_that_need_full_matrices_raise(two, kind, rule):
    two.run(assert_raises, kind, rule, {})


def steps(net, opt, batches, rank, count):
    for ids in batches:
        opt.backward(net(ids.tensor_split(count)[rank]))


def continued(rank, kinds, settings, before):
    """Trains five steps, then continues from weights and state with another model under the next kind."""
    batches, count = list(map(everyones, data())), dist.get_world_size()
    net = SHARDS[kinds[0]](rank, make)
    opt = lowmem.FusedOptimizer(net.named_parameters(), model=net, **settings)
    if before is not None:
        fill(net, before["weights"])
        opt.load_state_dict(before["state"])
    else:
        steps(net, opt, batches[:5], rank, count)
    state = opt.state_dict()
    tensors = [value for states in state["state"].values() for value in states.values() if torch.is_tensor(value)]
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)  # saved with its storage
    weights = full_weights(net)
    other = SHARDS[kinds[1]](rank, make)
    resumed = lowmem.FusedOptimizer(other.named_parameters(), model=other, **settings)
    fill(other, weights)
    resumed.load_state_dict(state)
    steps(other, resumed, batches[5:], rank, count)
    return weights, state, full_weights(other)


def fill(net, weights):
    for name, param in net.named_parameters():
        placements.fill(param, weights[name])


CONTINUED = {
    "adalomo, compensated": {"rule": "adalomo", "rounding": "compensated"},
    "adamw": {"rule": "adamw", "lr": 1e-2},
    "lans, multi_precision": {"rule": "lans", "multi_precision": True, "lr": 1e-2},
    "scaled_adam": {"rule": "scaled_adam", "clipping_scale": 0.8, "clipping_update_period": 3, "policy": "deferred"},
    "torch.optim.AdamW": {"rule": "torch.optim.AdamW", "lr": 1e-2},
}


@pytest.mark.parametrize(
    ("count", "kinds", "settings"), in_turn(COUNTS, ["zero3-fsdp2", "fsdp2-zero3", "zero3-zero3"], CONTINUED)
)
def test_saved_states_are_full_and_load_elsewhere(ranks_of, count, kinds, settings):
    """A state saved under one placement continues under another one, and on one device, without a difference."""
    settings = CONTINUED[settings]
    results = ranks_of(count).run(continued, kinds.split("-"), settings, None)
    batches = list(map(everyones, data()))
    net = make()
    opt = lowmem.FusedOptimizer(net.named_parameters(), model=net, **settings)
    steps(net, opt, batches[:5], 0, 1)
    reference, (weights, state, _) = opt.state_dict(), results[0]
    shapes, expected = (
        {name: {k: getattr(v, "shape", None) for k, v in states.items()} for name, states in saved["state"].items()}
        for saved in (state, reference)
    )
    assert shapes == expected
    fill(net, weights)
    opt.load_state_dict(state)
    steps(net, opt, batches[5:], 0, 1)
    for *_, end in results:
        torch.testing.assert_close(end, full_weights(net), rtol=1e-5, atol=1e-5)
