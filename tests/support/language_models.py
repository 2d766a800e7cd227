"""Trains Hugging Face language models in typical loops, on one device and on ranks."""

import functools
import pickle
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from support.devices import seeded
from support.nets import assert_same
from support.shards import KINDS, by_layer, whole_first
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import lowmem
from lowmem import placements
from lowmem.layers.mlp import tile_mlps

STEPS = 6  # DeepSpeed prefetches from the third step on
ROWS = 12  # rows per step, over all ranks
SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "use_cache": False}  # fmt: skip


def make(model="llama", dtype=torch.float32, checkpointing=False, mlp_tile=None, **config):
    torch.manual_seed(0)
    if model == "mixtral":
        experts = {"num_local_experts": 4, "experts_implementation": "eager"}
        net = MixtralForCausalLM(MixtralConfig(**SIZES, **experts, **config))
    else:
        net = LlamaForCausalLM(LlamaConfig(**SIZES, **config))
    if checkpointing:
        net.gradient_checkpointing_enable({"use_reentrant": False})
    if mlp_tile:
        tile_mlps(net, mlp_tile)
    return net.to(dtype).train()


def at_the_root(rank, make, **options):
    """Shards the model as a whole, so FSDP2's last callback calls all hooks."""
    return fully_shard(make(), **options)


def hybrid(rank, make):
    return by_layer(rank, make, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def kept_after_backward(rank, make):
    model = by_layer(rank, make)
    model.set_reshard_after_backward(False)
    return model


def mixed(rank, make):
    """Computes in bfloat16 and reduces gradients in float32."""
    return by_layer(rank, make, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


SHARED = {**KINDS, "zero3": whole_first,
          "by layer": by_layer, "root": at_the_root, "hybrid": hybrid,
          "kept after backward": kept_after_backward, "mixed": mixed}  # fmt: skip
LITTLE = {"stage3_max_live_parameters": 2000, "stage3_max_reuse_distance": 1000, "stage3_prefetch_bucket_size": 3000,
          "stage3_param_persistence_threshold": 40}  # fmt: skip


def batch(step, rows=ROWS):
    source = seeded(100 + step)
    return torch.randint(97, (rows, 9), generator=source)


def loss_of(net, ids):
    return net(input_ids=ids, labels=ids).loss


def score(net):
    net.eval()
    with torch.no_grad():
        results = loss_of(net, batch(999, 4)).item()
    net.train()
    return results


def plain(net, opt, rows_of, step):
    loss_of(net, rows_of(batch(step))).backward()


def usual(net, opt, rows_of, step):
    opt.backward(loss_of(net, rows_of(batch(step))))


def with_scores(net, opt, rows_of, step):
    """Evaluates between steps, and between a forward and its backward."""
    score(net)
    loss = loss_of(net, rows_of(batch(step)))
    with torch.no_grad():
        loss_of(net, batch(999, 4))
    opt.backward(loss)


def in_parts(net, opt, rows_of, step):
    """Trains with one to three micro-batches, and evaluates after each."""
    parts = batch(step).tensor_split(1 + step % 3)
    for n, part in enumerate(parts, start=1):
        with opt.accumulate() if n < len(parts) else nullcontext():
            opt.backward(loss_of(net, rows_of(part)) / len(parts))
        score(net)


def part_frozen(net, opt, rows_of, step):
    net.model.layers[1].requires_grad_(step not in (2, 3))
    net.model.embed_tokens.requires_grad_(step >= 1)
    usual(net, opt, rows_of, step)


def part_skipped(net, opt, rows_of, step):
    net.model.config.num_hidden_layers = 2 if step in (3, 4) else 3
    usual(net, opt, rows_of, step)
    net.model.config.num_hidden_layers = 3


LOOPS = {"plain": plain, "usual": usual, "with scores": with_scores, "in parts": in_parts,
         "part frozen": part_frozen, "part skipped": part_skipped}  # fmt: skip


def train(net, rows_of, settings, loop):
    settings = settings if "rule" in settings else {"rule": "adamw", "eps": 1e-3, **settings}  # eps suppresses noise
    named = dict(net.named_parameters())  # the sharded ones, which an evaluation replaces
    opt = lowmem.FusedOptimizer(named.items(), model=net, **{"lr": 1e-2, **settings})
    scores, norms = [], []
    for step in range(STEPS):
        LOOPS[loop](net, opt, rows_of, step)
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
    return train(make(**{**model, "mlp_tile": None}), lambda ids: ids, settings, loop)


def both(ranks, kind, model, settings, loop="usual", options=None):
    results = ranks.run(shared, kind, model, settings, loop, options or {})
    return results, on_one_device(pickle.dumps((model, settings, loop)))


def assert_as_one_device(results, alone, tolerance=1e-5):
    for weights, scores, norms in results:
        assert_same(weights, results[0][0])
        torch.testing.assert_close(weights, alone[0], rtol=tolerance, atol=tolerance)
        # scores depend on the weights that the forward uses, in addition to the stored ones
        assert scores == pytest.approx(alone[1], rel=tolerance)
        assert norms == pytest.approx(alone[2], rel=10 * tolerance)
