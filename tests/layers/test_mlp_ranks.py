"""Models whose MLPs are tiled, on two ranks: the result is that of whole MLPs on one device."""

import pytest
import torch
from support.language_models import LITTLE, assert_as_one_device, batch, both, make, train
from support.products import FULL
from support.shards import zero3
from torch.distributed.fsdp import fully_shard

from lowmem.errors import UnsupportedError
from lowmem.layers.mlp import tile_mlps

TILED = {"mlp_tile": 8}  # tokens, of 54 on each rank
CASES = {
    "adamw": (TILED, {}, "with scores"),
    "adalomo, checkpointed, clipped": (
        TILED | {"checkpointing": True},
        {"rule": "adalomo", "eps": (1e-30, 1e-3), "policy": "deferred", "clip_norm": 0.5},
        "as told",
    ),
    "part frozen, checkpointed": (TILED | {"checkpointing": True}, {}, "part frozen"),
}
KINDS = {"replicated": {}, "by layer": {}, "zero3": {}, "zero3, little gathered": LITTLE}

# Without --full: each way of gathering once, with a case that asks much of its hooks.
SOME = [("replicated", "adamw"), ("by layer", "part frozen, checkpointed"), ("zero3", "part frozen, checkpointed")]


@pytest.mark.parametrize(("kind", "case"), [(k, c) for k in KINDS for c in CASES] if FULL else SOME)
def test_two_ranks_are_one_device(two, kind, case):
    """Sums over rows, tiles and ranks are taken in another order."""
    assert_as_one_device(*both(two, kind.partition(",")[0], *CASES[case], KINDS[kind]))


def mine(ids):
    return ids.tensor_split(2)[torch.distributed.get_rank()]


def made_sharded(rank):
    """What comes of whole and of tiled MLPs."""
    return [train(zero3(rank, lambda tile=tile: make(mlp_tile=tile)), mine, {}, "as told") for tile in (None, 8)]


def test_zero3_from_the_start(two):
    for whole, tiled in two.run(made_sharded):
        assert_as_one_device([tiled], whole)


def initialized_first(rank):
    model = zero3(rank, make)
    with pytest.raises(UnsupportedError, match=r"'model\.layers\.0\.mlp'.*before deepspeed\.initialize"):
        tile_mlps(model, 8)


def sharded_inside(rank):
    """A linear layer that is sharded alone."""
    model = make(**TILED)
    fully_shard(model.model.layers[0].mlp.up_proj)
    with pytest.raises(UnsupportedError, match=r"'up_proj\.weight' of a tiled MLP.*Call fully_shard on the layer"):
        model(input_ids=batch(0))


@pytest.mark.parametrize("case", [initialized_first, sharded_inside])
def test_what_is_refused(two, case):
    two.run(case)


def sharded_mlps(rank):
    model = make(**TILED)
    for layer in model.model.layers:
        fully_shard(layer.mlp)
    return train(fully_shard(model), mine, {"rule": "lomo"}, "as told")


def test_mlps_that_are_sharded_by_themselves(two):
    assert_as_one_device(two.run(sharded_mlps), train(make(), lambda ids: ids, {"rule": "lomo"}, "as told"))
