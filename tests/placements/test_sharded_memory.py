"""Tests the tensor memory of ranks with sharded parameters during a step, while saving and while loading."""

import warnings

import pytest
import torch
import torch.distributed as dist
from support.nets import Chain, Memory
from support.products import in_turn
from support.shards import SHARDS

import lowmem
from lowmem import placements
from lowmem.hf import checkpoint
from lowmem.hf.weights import load_weights, save_weights


def make_deep():
    """Returns eight layers of 4 MiB."""
    return Chain(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(8)))


NOTHING_EARLY = ("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_max_reuse_distance")
BARE = {"zero3": dict.fromkeys(NOTHING_EARLY, 0), "fsdp2": {}}  # DeepSpeed would keep some parameters gathered

IN_FLIGHT = {"zero3": 4 << 20, "fsdp2": 0}  # a full gradient is reduced while the backward continues


def memory_of(action, *existing):
    with warnings.catch_warnings(), Memory(*existing) as memory:
        warnings.simplefilter("ignore")
        action()
    return memory


def drop(param):
    param.grad = None


def peaks(rank, kind, settings, folder):
    """Returns peaks of a step that drops its gradients in the hook, of a real step, and of saving and loading."""
    net = SHARDS[kind](rank, make_deep, **BARE[kind])
    pieces = [getattr(param, "ds_tensor", param) for param in net.parameters()]
    x = torch.ones(1, 1024)

    def floor_step():
        net(x).backward()
        for param in net.parameters():
            placements.shard_of(param).release(param)

    hooks = [param.register_post_accumulate_grad_hook(drop) for param in net.parameters()]
    floor_step()
    floor = memory_of(floor_step, net, *pieces).most
    for hook in hooks:
        hook.remove()
    opt = lowmem.FusedOptimizer(net.named_parameters(), model=net, lr=1e-3, **settings)

    def step():
        opt.backward(net(x))

    def save():
        save_weights(net, folder / "weights", write=rank == 0)
        checkpoint.save_optimizer(opt, folder / "optimizer.safetensors", write=rank == 0)

    def load():
        load_weights(net, folder / "weights")
        checkpoint.load_optimizer(opt, folder / "optimizer.safetensors")

    step()
    weights = sum(piece.to_local().nbytes if kind == "fsdp2" else piece.nbytes for piece in pieces)
    memory = memory_of(step, net, opt, *pieces)
    most, above = memory.most, memory.above
    others = {}
    for name, action in (("saving", save), ("loading", load)):
        others[name] = memory_of(action, net, opt, *pieces).most
        dist.barrier()
    return floor - weights, above, weights, most, others


@pytest.mark.parametrize(("kind", "settings"), in_turn(SHARDS, [{"rule": "adalomo"}, {"rule": "adamw"}]), ids=str)
def test_memory_is_shards_gathered_parameters_and_one_gradient(two, kind, settings, tmp_path):
    """Compared with a step that drops its gradients in the hook, a step adds a shard of one gradient or of a batch of
    small ones, a tile's temporaries on a CPU, and under ZeRO-3 the gradient in flight.
    """
    piece, tiles = (4 << 20) if settings["rule"] in ("lomo", "adamw") else (2 << 20), 3 << 20
    late = 2 * (4 << 20)  # each of gloo's two threads may release a tensor only after its collective has returned
    for floor, above, weights, most, others in two.run(peaks, kind, settings, tmp_path):
        assert weights == 16 << 20  # half of the weights
        if kind == "zero3":
            assert floor <= 8.1 * 2**20  # one gathered parameter and one gradient
        assert above <= floor + piece + tiles + IN_FLIGHT[kind]
        assert others["saving"] <= most + late
        assert others["loading"] <= most + late


def test_offloaded_gradients_are_shards(two, tmp_path):
    for floor, above, weights, _, _ in two.run(peaks, "fsdp2", {"rule": "lomo", "policy": "deferred"}, tmp_path):
        assert weights - (1 << 20) <= above <= floor + weights + (1 << 20)
