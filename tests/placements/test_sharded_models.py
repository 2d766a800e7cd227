"""Language models of Hugging Face whose ranks share them, used as loops use them: the result is that of one device."""

import functools
import pickle
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from shards import SHARDS, by_layer, whole_first
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import lowmem
from lowmem import placements

STEPS = 7  # DeepSpeed prefetches from the third on
ROWS = 12  # a step, over all ranks
SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "use_cache": False}  # fmt: skip


@pytest.fixture
def four(ranks_of):
    return ranks_of(4)


def make(model="llama", dtype=torch.float32, checkpointing=False, **config):
    torch.manual_seed(0)
    if model == "mixtral":
        experts = {"num_local_experts": 4, "experts_implementation": "eager"}
        net = MixtralForCausalLM(MixtralConfig(**SIZES, **experts, **config))
    else:
        net = LlamaForCausalLM(LlamaConfig(**SIZES, **config))
    if checkpointing:
        net.activation_checkpointing_enable({"use_reentrant": False})
    return net.to(dtype).train()


def at_the_root(rank, make, **options):
    """All hooks fire in FSDP2's last callback."""
    return fully_shard(make(), **options)


def hybrid(rank, make):
    return by_layer(rank, make, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def kept_after_backward(rank, make):
    model = by_layer(rank, make)
    model.set_reshard_after_backward(False)
    return model


def mixed(rank, make):
    """bfloat16 for both: gradients are summed in float32 and kept in float32."""
    return by_layer(rank, make, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


SHARED = {**SHARDS, "zero3": whole_first, "by layer": by_layer, "root": at_the_root, "hybrid": hybrid,
          "kept after backward": kept_after_backward, "mixed": mixed}  # fmt: skip
LITTLE = {"stage3_max_live_parameters": 2000, "stage3_max_reuse_distance": 1000, "stage3_prefetch_bucket_size": 3000,
          "stage3_param_persistence_threshold": 40}  # fmt: skip


def batch(step, rows=ROWS):
    source = torch.Generator().manual_seed(100 + step)
    return torch.randint(97, (rows, 9), generator=source)


def loss_of(net, ids):
    return net(input_ids=ids, labels=ids).loss


def score(net):
    net.eval()
    with torch.no_grad():
        found = loss_of(net, batch(999, 4)).item()
    net.train()
    return found


def plain(net, opt, own, step):
    loss_of(net, own(batch(step))).backward()


def as_told(net, opt, own, step):
    """By what the policy wants: a loss, or what computes it."""
    opt.backward(
        (lambda: loss_of(net, own(batch(step)))) if opt.replay == "forward" else loss_of(net, own(batch(step)))
    )


def with_scores(net, opt, own, step):
    """An evaluation between steps, and one between a forward and its backward."""
    score(net)
    loss = loss_of(net, own(batch(step)))
    with torch.no_grad():
        loss_of(net, batch(999, 4))
    opt.backward(loss)


def in_parts(net, opt, own, step):
    """One to three micro-batches, and an evaluation between them."""
    parts = batch(step).tensor_split(1 + step % 3)
    for n, part in enumerate(parts, start=1):
        with opt.accumulate() if n < len(parts) else nullcontext():
            opt.backward(loss_of(net, own(part)) / len(parts))
        score(net)


def part_frozen(net, opt, own, step):
    net.model.layers[1].requires_grad_(step not in (2, 3))
    net.model.embed_tokens.requires_grad_(step >= 1)
    as_told(net, opt, own, step)


def part_skipped(net, opt, own, step):
    net.model.config.num_hidden_layers = 2 if step in (3, 4) else 3
    as_told(net, opt, own, step)
    net.model.config.num_hidden_layers = 3


LOOPS = {"plain": plain, "as told": as_told, "with scores": with_scores, "in parts": in_parts,
         "part frozen": part_frozen, "part skipped": part_skipped}  # fmt: skip


def train(net, own, settings, loop):
    settings = settings if "rule" in settings else {"rule": "adamw", "eps": 1e-3, **settings}  # of no noise's making
    named = dict(net.named_parameters())  # those that are cut: an evaluation leaves others in their place under FSDP2
    opt = lowmem.FusedOptimizer(named.items(), model=net, **{"lr": 1e-2, **settings})
    scores, norms = [], []
    for step in range(STEPS):
        LOOPS[loop](net, opt, own, step)
        scores.append(score(net))
        norms.append(opt.last_step.grad_norm.item())
    return {name: placements.full_tensor(param).clone() for name, param in named.items()}, scores, norms


def shared(rank, kind, model, settings, loop, options):
    net = SHARED[kind](rank, lambda: make(**model), **options)
    count = dist.get_world_size()
    return train(net, lambda ids: ids.tensor_split(count)[rank], settings, loop)


@functools.cache
def on_one_device(case):
    model, settings, loop = pickle.loads(case)
    return train(make(**model), lambda ids: ids, settings, loop)


def both(ranks, kind, model, settings, loop="as told", options=None):
    found = ranks.run(shared, kind, model, settings, loop, options or {})
    return found, on_one_device(pickle.dumps((model, settings, loop)))


def assert_as_one_device(found, alone, tolerance=1e-5):
    for weights, scores, norms in found:
        for name, weight in weights.items():
            assert torch.equal(weight, found[0][0][name]), name
            torch.testing.assert_close(weight, alone[0][name], rtol=tolerance, atol=tolerance, msg=name)
        assert scores == pytest.approx(alone[1], rel=tolerance)  # by what is computed with, not by what is stored
        assert norms == pytest.approx(alone[2], rel=10 * tolerance)


KINDS = {
    "zero3": ("zero3", {}), "zero3, little gathered": ("zero3", LITTLE), "fsdp2": ("by layer", {}),
    "fsdp2, root alone": ("root", {}), "fsdp2, gathered once": ("by layer", {"reshard_after_forward": False}),
}  # fmt: skip
CASES = {
    "experts, checkpointed": (
        {"model": "mixtral", "checkpointing": True}, {"rule": "adalomo", "eps": (1e-30, 1e-3)}, "as told"
    ),
    "tied, two passes": (
        {"tie_word_embeddings": True, "checkpointing": True}, {"policy": "two_pass", "clip_norm": 0.5}, "as told"
    ),
    "plain backward": ({"checkpointing": True}, {}, "plain"),
    "evaluated between": ({"tie_word_embeddings": True}, {}, "with scores"),
    "micro-batches": ({}, {"clip_norm": 0.5, "policy": "deferred"}, "in parts"),
    "part frozen": ({}, {}, "part frozen"),
    "part skipped": ({}, {}, "part skipped"),
}  # fmt: skip


@pytest.mark.parametrize(("model", "settings", "loop"), CASES.values(), ids=CASES)
@pytest.mark.parametrize(("kind", "options"), KINDS.values(), ids=KINDS)
def test_loops(two, kind, options, model, settings, loop):
    assert_as_one_device(*both(two, kind, model, settings, loop, options))


@pytest.mark.parametrize("kind", ["zero3", "by layer"])
def test_three_ranks(ranks, kind):
    model = {"model": "mixtral", "tie_word_embeddings": True}
    settings = {"rule": "adalomo", "eps": (1e-30, 1e-3), "clip_norm": 0.5, "policy": "deferred"}
    assert_as_one_device(*both(ranks, kind, model, settings))


@pytest.mark.parametrize("loop", ["as told", "in parts"])
def test_what_is_kept_gathered_after_backward_is_not_computed_with_again(two, loop):
    assert_as_one_device(*both(two, "kept after backward", {}, {"policy": "deferred"}, loop))


def test_a_hybrid_mesh(four):
    settings = {"rule": "adalomo", "eps": (1e-30, 1e-3), "clip_norm": 0.5, "policy": "two_pass"}
    assert_as_one_device(*both(four, "hybrid", {"model": "mixtral"}, settings))


def test_secondary_partitions(four):
    assert_as_one_device(
        *both(four, "zero3", {"tie_word_embeddings": True}, {}, options={"zero_hpz_partition_size": 2})
    )


def test_mixed_precision_of_fsdp2(two):
    """Weights stay float32; what is computed in bfloat16, of 8 bits, is alike as far as that goes."""
    found, alone = both(two, "mixed", {}, {"policy": "two_pass", "clip_norm": 0.5, "rule": "lomo"})
    assert found[0][1] == pytest.approx(alone[1], rel=1e-2)
    assert found[0][2] == pytest.approx(alone[2], rel=5e-2)
    start = dict(make().named_parameters())
    far = sum((alone[0][n] - p).square().sum() for n, p in start.items()).sqrt()
    apart = sum((alone[0][n] - w).square().sum() for n, w in found[0][0].items()).sqrt()
    assert apart < 0.05 * far
    assert all(w.dtype == torch.float32 for w in found[0][0].values())


@pytest.mark.parametrize("rounding", ["stochastic", "compensated"])
@pytest.mark.parametrize("rule", ["adamw", "lion"])
def test_rounded_weights_are_bit_equal_wherever_they_are(two, rule, rounding):
    """Given the same gradients (of two ranks with the same data) the random bits are those of each element."""
    model = {"dtype": torch.bfloat16, "tie_word_embeddings": True}
    settings = {"rule": rule, "rounding": rounding, "lr": 1e-3, "seed": 5}
    alone = train_bits(make(**model), settings)
    found = [two.run(bits, kind, model, settings)[0] for kind in ("zero3", "by layer", "replicated")]
    for weights in found:
        for name, weight in weights.items():
            assert torch.equal(weight, alone[name]), name


def train_bits(net, settings):
    opt = lowmem.FusedOptimizer(net.named_parameters(), model=net, **settings)
    for step in range(STEPS):
        opt.backward(loss_of(net, batch(step)))
    return {n: placements.full_tensor(p).clone() for n, p in net.named_parameters()}


def bits(rank, kind, model, settings):
    return train_bits(make(**model) if kind == "replicated" else SHARED[kind](rank, lambda: make(**model)), settings)


def dropped_out(rank, kind):
    """Two passes, of a forward that draws random numbers, are a stored step that draws the same."""
    found = []
    for policy in ("two_pass", "deferred"):
        net = SHARED[kind](rank, lambda: make(attention_dropout=0.3, checkpointing=True))
        opt = lowmem.FusedOptimizer(
            net.named_parameters(), model=net, rule="lomo", lr=0.1, policy=policy, clip_norm=0.5
        )
        for step in range(STEPS):
            torch.manual_seed(10 * step + rank)
            as_told(net, opt, lambda ids: ids.tensor_split(2)[rank], step)
        found.append({n: placements.full_tensor(p).clone() for n, p in net.named_parameters()})
        opt.remove()
    return found


@pytest.mark.parametrize("kind", ["zero3", "by layer"])
def test_two_passes_draw_the_same_random_numbers(two, kind):
    for measured, stored in two.run(dropped_out, kind):
        for name, weight in measured.items():
            torch.testing.assert_close(weight, stored[name], rtol=1e-5, atol=1e-6, msg=name)
