"""Sharded Hugging Face language models in the training loops of users give the results of one device."""

import pickle
from itertools import product

import pytest
import torch
from support.language_models import LITTLE, assert_as_one_device, both, make, on_one_device, shared
from support.products import FULL, in_turn

from lowmem.step import policies
from lowmem.step.offload import GradientStore

KINDS = {
    "zero3": ("zero3", {}), "zero3, little gathered": ("zero3", LITTLE), "fsdp2": ("by layer", {}),
    "fsdp2, root alone": ("root", {}), "fsdp2, gathered once": ("by layer", {"reshard_after_forward": False}),
}  # fmt: skip
CASES = {
    "experts, checkpointed": (
        {"model": "mixtral", "checkpointing": True}, {"rule": "adalomo", "eps": (1e-30, 1e-3)}, "usual"
    ),
    "tied, clipped": (
        {"tie_word_embeddings": True, "checkpointing": True}, {"policy": "deferred", "clip_norm": 0.5}, "usual"
    ),
    "plain backward": ({"checkpointing": True}, {}, "plain"),
    "evaluated between": ({"tie_word_embeddings": True}, {}, "with scores"),
    "micro-batches": ({}, {"clip_norm": 0.5, "policy": "deferred"}, "in parts"),
    "part frozen": ({}, {}, "part frozen"),
    "part skipped": ({}, {}, "part skipped"),
}  # fmt: skip

# MLPs in tiles of 8 of the 54 tokens on each rank, compared with whole MLPs on one device.
TILED = {
    "tiled": ({"mlp_tile": 8}, {}, "with scores"),
    "tiled, checkpointed, clipped": (
        {"mlp_tile": 8, "checkpointing": True},
        {"rule": "adalomo", "eps": (1e-30, 1e-3), "policy": "deferred", "clip_norm": 0.5}, "usual",
    ),
    "tiled, part frozen": ({"mlp_tile": 8, "checkpointing": True}, {}, "part frozen"),
}  # fmt: skip
# Without --full: each way of gathering once, with a case that is demanding for its hooks.
SOME = [("replicated", "tiled"), ("fsdp2", "tiled, part frozen"), ("zero3", "tiled, part frozen")]


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        *in_turn(list(KINDS)[:2], CASES),  # ZeRO-3
        *in_turn(list(KINDS)[2:], CASES),  # FSDP2
        *(product(["replicated", *KINDS], TILED) if FULL else SOME),
    ],
)
def test_loops(two, kind, case):
    kind, options = KINDS.get(kind, (kind, {}))
    assert_as_one_device(*both(two, kind, *{**CASES, **TILED}[case], options))


CLIPPED = {"rule": "adalomo", "eps": (1e-30, 1e-3), "clip_norm": 0.5, "policy": "deferred"}
MORE_RANKS = {
    "three": (3, "zero3", {"model": "mixtral", "tie_word_embeddings": True}, CLIPPED, {}),
    "a hybrid mesh": (4, "hybrid", {"model": "mixtral"}, CLIPPED, {}),
    "secondary partitions": (4, "zero3", {"tie_word_embeddings": True}, {}, {"zero_hpz_partition_size": 2}),
}


@pytest.mark.parametrize(("count", "kind", "model", "settings", "options"), MORE_RANKS.values(), ids=MORE_RANKS)
def test_more_than_two_ranks(ranks_of, count, kind, model, settings, options):
    assert_as_one_device(*both(ranks_of(count), kind, model, settings, options=options))


def test_parameters_left_gathered_after_backward_are_gathered_anew(two):
    assert_as_one_device(*both(two, "kept after backward", {}, {"policy": "deferred"}, "in parts"))


def with_half_of_the_gradients_offloaded(rank, *args):
    """On one rank, all gradients are offloaded."""
    policies.GradientStore = lambda budget: GradientStore(rank * 30_000)
    try:
        return shared(rank, *args)
    finally:
        policies.GradientStore = GradientStore


@pytest.mark.parametrize("kind", ["zero3", "by layer"])
def test_ranks_keep_different_gradients_on_their_devices(two, kind):
    results = two.run(with_half_of_the_gradients_offloaded, kind, {}, CLIPPED, "in parts", {})
    assert_as_one_device(results, on_one_device(pickle.dumps(({}, CLIPPED, "in parts"))))


def test_mixed_precision_of_fsdp2(two):
    """Weights stay in float32, but the model computes in bfloat16, so results agree to 8 bits."""
    results, alone = both(two, "mixed", {}, {"policy": "deferred", "clip_norm": 0.5, "rule": "lomo"})
    assert results[0][1] == pytest.approx(alone[1], rel=1e-2)
    assert results[0][2] == pytest.approx(alone[2], rel=5e-2)
    start = dict(make().named_parameters())
    far = sum((alone[0][n] - p).square().sum() for n, p in start.items()).sqrt()
    apart = sum((alone[0][n] - w).square().sum() for n, w in results[0][0].items()).sqrt()
    assert apart < 0.05 * far
    assert all(w.dtype == torch.float32 for w in results[0][0].values())
