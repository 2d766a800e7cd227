"""Counts the collectives of a step on two ranks, and those that block the backward."""

import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.shards import by_layer, zero3

import lowmem
from lowmem.placements.ranks import Ranks

LAYERS = 4
MATRICES = 7 * LAYERS + 2  # with 2¹⁵ elements or more
NORMS = 2 * LAYERS + 1
KINDS = {"zero3": zero3, "fsdp2": by_layer}
SCATTER, GATHER = "reduce_scatter_single", "all_gather_single"
if not hasattr(dist, GATHER):  # torch 2.12
    SCATTER, GATHER = "reduce_scatter_tensor", "all_gather_into_tensor"
OPTIONS = {"stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 1000, "stage3_max_reuse_distance": 0}


def make_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False)).train()


def counted(rank, kind, settings, micro_batches):
    """Counts lowmem's collectives in a step, separately for blocking ones and those in flight."""
    net = KINDS[kind](rank, make_llama, **OPTIONS if kind == "zero3" else {})
    opt = lowmem.FusedOptimizer(net.named_parameters(), model=net, lr=1e-3, compile=False, **settings)
    ids = torch.arange(32)[None]

    def step():
        for n in range(1, micro_batches + 1):
            with opt.accumulate() if n < micro_batches else nullcontext():
                opt.backward(net(input_ids=ids, labels=ids).loss / micro_batches)

    step()
    calls = Counter()
    folder = str(Path(lowmem.__file__).parent)

    def counting(call, name):
        def counted(*args, **kwargs):
            if sys._getframe(1).f_code.co_filename.startswith(folder):
                calls[f"{name}, in flight" if kwargs.get("async_op") else name] += 1
            return call(*args, **kwargs)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", SCATTER, GATHER):
            patch.setattr(dist, name, counting(getattr(dist, name), name))
        for param in net.parameters():
            if kind == "zero3":  # DeepSpeed's method waits for the device
                patch.setattr(param, "all_gather", counting(param.all_gather, "gather"))
        step()
    return dict(calls)


def largest(rank):
    ranks, values = Ranks(dist.group.WORLD, torch.device("cpu")), torch.tensor([1.0 + rank, -rank])
    return ranks.all_reduce([values], largest=True)[0].tolist()


def test_maxima_over_ranks(two):
    assert two.run(largest) == [[2.0, 0.0]] * 2


STACK = 1  # norms are updated as one stack
BATCHES = (MATRICES + 1) // 2  # two halves are as large as a matrix: the same number with several sizes


@pytest.mark.parametrize("rule", ["adamw", "lion", "torch.optim.SGD"])
def test_ranks_agree_on_several_gradients_at_once(two, rule):
    (calls, _) = two.run(counted, "fsdp2", {"rule": rule}, 1)
    assert calls["all_reduce"] <= BATCHES + (NORMS if "." in rule else STACK)


def test_elementwise_rules_reduce_nothing_after_clipping_is_known(two):
    (calls, _) = two.run(counted, "fsdp2", {"rule": "adamw", "clip_norm": 1.0, "policy": "deferred"}, 2)
    assert calls == {"all_reduce": 1}  # norms


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_zero3_gathers_once_per_step_and_reduces_while_backward_goes_on(two, micro_batches):
    (calls, _) = two.run(counted, "zero3", {"rule": "adamw"}, micro_batches)
    assert calls.pop("all_reduce, in flight") == (MATRICES + NORMS) * micro_batches
    assert calls.pop(GATHER) == 1
    assert calls.pop("all_reduce") <= (BATCHES + STACK if micro_batches == 1 else 1)
    assert not calls
