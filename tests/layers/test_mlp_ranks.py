"""Models whose MLPs are tiled, on two ranks: the result is that of whole MLPs on one device."""

import functools
import itertools

import pytest
import torch
from products import FULL
from shards import by_layer, whole_first, zero3
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import lowmem
from lowmem import placements
from lowmem.errors import UnsupportedError
from lowmem.layers.mlp import tile_mlps

STEPS = 4  # DeepSpeed prefetches from the third on
SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "use_cache": False, "attn_implementation": "eager"}  # fmt: skip
TOKENS = 8  # per tile, of 27 on each rank


def make(tokens=None, checkpointing=False):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    if tokens:
        tile_mlps(model, tokens)
    return model.train()


def replicated(rank, make):
    return make()


LITTLE = {"stage3_param_persistence_threshold": 40, "stage3_prefetch_bucket_size": 3000,
          "stage3_max_live_parameters": 2000, "stage3_max_reuse_distance": 1000}  # fmt: skip
PLACEMENTS = {
    "replicated": replicated, "fsdp2": by_layer, "zero3": whole_first,
    "zero3, little gathered": functools.partial(whole_first, **LITTLE),
}  # fmt: skip


def batch(step):
    return torch.randint(97, (6, 9), generator=torch.Generator().manual_seed(100 + step))


def train(model, own, settings, part_frozen=False):
    named = dict(model.named_parameters())
    opt = lowmem.FusedOptimizer(named.items(), model=model, lr=1e-2, **settings)
    for step in range(STEPS):
        if part_frozen:
            model.model.embed_tokens.requires_grad_(False)
            model.model.layers[0].requires_grad_(False)
            model.model.layers[1].mlp.up_proj.requires_grad_(step == 2)
        ids = own(batch(step))

        def loss(ids=ids):
            return model(input_ids=ids, labels=ids).loss

        with torch.no_grad():
            loss()  # an evaluation in between
        opt.backward(loss if opt.replay == "forward" else loss())
    return {name: placements.full_tensor(param).clone() for name, param in named.items()}


def on_rank(rank, kind, checkpointing, settings, part_frozen):
    model = PLACEMENTS[kind](rank, functools.partial(make, TOKENS, checkpointing))
    return train(model, lambda ids: ids.tensor_split(2)[rank], settings, part_frozen)


CASES = {
    "adamw": (False, {"rule": "adamw", "eps": 1e-3}, False),
    "adalomo, checkpointed, two passes": (
        True, {"rule": "adalomo", "eps": (1e-30, 1e-3), "policy": "two_pass", "clip_norm": 0.5}, False
    ),
    "part frozen, checkpointed": (True, {"rule": "adamw", "eps": 1e-3}, True),
}  # fmt: skip


# Without --full: each way of gathering once, with a case that asks much of its hooks.
SOME = [("replicated", "adamw"), ("fsdp2", "part frozen, checkpointed"), ("zero3", "part frozen, checkpointed")]


@pytest.mark.parametrize(("kind", "case"), itertools.product(PLACEMENTS, CASES) if FULL else SOME)
def test_two_ranks_are_one_device(two, kind, case):
    """Sums over rows, tiles and ranks are taken in another order."""
    checkpointing, settings, part_frozen = CASES[case]
    alone = train(make(), lambda ids: ids, settings, part_frozen)
    found = two.run(on_rank, kind, checkpointing, settings, part_frozen)
    for name, weight in alone.items():
        assert torch.equal(found[0][name], found[1][name]), name
        torch.testing.assert_close(found[0][name], weight, rtol=1e-5, atol=1e-5, msg=name)


def made_sharded(rank):
    """The weights after training with whole and with tiled MLPs."""
    settings = {"rule": "adamw", "eps": 1e-3}
    models = [zero3(rank, functools.partial(make, tokens)) for tokens in (None, TOKENS)]
    return [train(model, lambda ids: ids.tensor_split(2)[rank], settings) for model in models]


def test_zero3_from_the_start(two):
    for whole, tiled in two.run(made_sharded):
        for name, weight in whole.items():
            torch.testing.assert_close(tiled[name], weight, rtol=1e-5, atol=1e-5, msg=name)


def initialized_first(rank):
    model = zero3(rank, make)
    with pytest.raises(UnsupportedError, match=r"'model\.layers\.0\.mlp'.*before deepspeed\.initialize"):
        tile_mlps(model, TOKENS)


def test_zero3_that_is_initialized_is_refused(two):
    two.run(initialized_first)


def sharded_inside(rank):
    model = make(TOKENS)
    fully_shard(model.model.layers[0].mlp.up_proj)
    ids = batch(0)
    with pytest.raises(UnsupportedError, match=r"'up_proj\.weight' of a tiled MLP.*Call fully_shard on the layer"):
        model(input_ids=ids)


def test_a_linear_layer_that_is_sharded_alone_is_refused(two):
    two.run(sharded_inside)


def sharded_mlps(rank):
    model = make(TOKENS)
    for layer in model.model.layers:
        fully_shard(layer.mlp)
    return train(fully_shard(model), lambda ids: ids.tensor_split(2)[rank], {"rule": "lomo"})


def test_mlps_that_are_sharded_by_themselves(two):
    alone = train(make(), lambda ids: ids, {"rule": "lomo"})
    for weights in two.run(sharded_mlps):
        for name, weight in alone.items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=1e-5, msg=name)
