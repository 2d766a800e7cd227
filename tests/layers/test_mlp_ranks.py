"""Tests which shardings of models with tiled MLPs are supported. placements/test_sharded_models.py trains them."""

import pytest
import torch
from support.language_models import assert_as_one_device, batch, make, train
from support.shards import zero3
from torch.distributed.fsdp import fully_shard

from lowmem.errors import UnsupportedError
from lowmem.layers.mlp import tile_mlps


def mine(ids):
    return ids.tensor_split(2)[torch.distributed.get_rank()]


def initialized_first(rank):
    model = zero3(rank, make)
    with pytest.raises(UnsupportedError, match=r"'model\.layers\.0\.mlp'.*before deepspeed\.initialize"):
        tile_mlps(model, 8)


def sharded_inside(rank):
    """Shards a single linear layer."""
    model = make(mlp_tile=8)
    fully_shard(model.model.layers[0].mlp.up_proj)
    with pytest.raises(UnsupportedError, match=r"'up_proj\.weight' of a tiled MLP.*Call fully_shard on the layer"):
        model(input_ids=batch(0))


@pytest.mark.parametrize("case", [initialized_first, sharded_inside])
def test_sharding_that_is_not_supported_raises(two, case):
    two.run(case)


def sharded_mlps(rank):
    model = make(mlp_tile=8)
    for layer in model.model.layers:
        fully_shard(layer.mlp)
    return train(fully_shard(model), mine, {"rule": "lomo"}, "usual")


def test_separately_sharded_mlps(two):
    assert_as_one_device(two.run(sharded_mlps), train(make(), lambda ids: ids, {"rule": "lomo"}, "usual"))
