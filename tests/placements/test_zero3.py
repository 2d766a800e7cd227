"""Tests DeepSpeed ZeRO-3 in typical configurations."""

from contextlib import nullcontext

import pytest
import torch
from support.nets import assert_same, full_weights, plain_step
from support.products import in_turn
from support.shards import SHARDS, assert_as_one_device, deepspeed_on, make_wide, shared

import lowmem

ZERO3_OPTIONS = {
    "nothing stays gathered": {"stage3_param_persistence_threshold": 0},
    "some stay gathered": {"stage3_param_persistence_threshold": 20},
    "everything stays gathered": {"stage3_param_persistence_threshold": 10**9},
    "on the host": {"offload_param": {"device": "cpu"}},
    "nothing prefetched": {"stage3_prefetch_bucket_size": 0},
    "hierarchical": {"zero_hpz_partition_size": 1},
    "made whole": {"built_whole": True},
}

SETTINGS = [{"rule": "adalomo"}, {"rule": "adamw", "clip_norm": 0.5}]


@pytest.mark.parametrize(("configuration", "settings"), in_turn(ZERO3_OPTIONS, SETTINGS), ids=str)
def test_zero3_configurations(two, configuration, settings):
    options = ZERO3_OPTIONS[configuration]
    assert_as_one_device(two.run(shared, "zero3", settings, 1, options), "zero3", settings)


def read_after_steps(rank, threshold):
    import deepspeed

    net = SHARDS["zero3"](rank, make_wide, stage3_param_persistence_threshold=threshold)
    opt, params = lowmem.FusedOptimizer(net.named_parameters(), lr=0.1, rule="adamw"), list(net.parameters())
    for step in range(4):
        with opt.accumulate() if step % 2 else nullcontext():
            opt.backward(net(torch.arange(3) * 17 + step + rank))
        with deepspeed.zero.GatheredParameters(params):
            gathered = [param.detach().clone() for param in params]
        assert all(map(torch.equal, gathered, full_weights(net).values())), step
        with deepspeed.zero.GatheredParameters(params, modifier_rank=0):
            params[0].data.mul_(2)


@pytest.mark.parametrize("threshold", [0, 10**9])
def test_weights_are_read_and_changed_between_steps(two, threshold):
    two.run(read_after_steps, threshold)


def shared_slowly(rank, settings):
    """Runs `shared` with gathered parameters that are NaN until they are waited for."""
    comm = deepspeed_on(rank).comm
    gather = comm.all_gather_into_tensor

    class Gathering:
        def __init__(self, full, shard, group):
            self.full, self.arriving = full.fill_(torch.nan), torch.empty_like(full)
            self.work = gather(self.arriving, shard, group=group, async_op=True)

        def wait(self):
            self.work.wait()
            self.full.copy_(self.arriving)

    def slowly(full, shard, group=None, async_op=False):
        gathering = Gathering(full, shard, group)
        return gathering if async_op else gathering.wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "all_gather_into_tensor", slowly)
        return shared(rank, "zero3", settings, 1, {"stage3_param_persistence_threshold": 10**9})


def test_gathered_parameters_are_waited_for(two):
    settings = {"rule": "adamw", "clip_norm": 0.5}
    assert_as_one_device(two.run(shared_slowly, settings), "zero3", settings)


def three_steps(net, rows_of, settings):
    opt = lowmem.FusedOptimizer(net.named_parameters(), model=net, **settings)
    for step in range(3):
        opt.backward(net(rows_of(torch.arange(6) * 17 + step)))
    return full_weights(net)


def in_files(rank, settings, folder):
    offload = {"device": "nvme", "nvme_path": folder, "buffer_count": 5, "buffer_size": 2**20}
    # a gathered parameter occupies a buffer, and there are fewer buffers than parameters
    net = SHARDS["zero3"](rank, make_wide, offload_param=offload, stage3_max_reuse_distance=0)
    kept_in = {str(param.ds_tensor.final_location) for param in net.parameters()}
    return three_steps(net, lambda ids: ids.tensor_split(2)[rank], settings), kept_in


@pytest.fixture
def asynchronous_io(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("DeepSpeed puts parameters into files with libaio, which is not here")
    AsyncIOBuilder().load(verbose=False)  # compiled once, before ranks need it


@pytest.mark.parametrize("settings", [{"rule": "adalomo"}, {"rule": "lans", "clip_norm": 0.5}], ids=str)
def test_zero3_in_files(two, asynchronous_io, settings, tmp_path):
    alone = three_steps(make_wide(), lambda ids: ids, settings)
    for weights, kept_in in two.run(in_files, settings, str(tmp_path)):
        assert any("nvme" in place for place in kept_in)
        torch.testing.assert_close(weights, alone, rtol=1e-5, atol=1e-5)


class Embeddings(torch.nn.Module):
    """DeepSpeed does not detect the end of the backward of an embedding or of a weight tied to it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.positions = torch.nn.Embedding(16, 8), torch.nn.Embedding(16, 8)
        self.body, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.positions.weight.requires_grad_(False)
        self.positions.register_forward_hook(lambda module, inputs, out: out.requires_grad_(True))  # as adapters do

    def forward(self, ids):
        hidden = torch.tanh(self.body(self.embed(ids) + self.positions(ids)))
        return torch.nn.functional.cross_entropy(self.head(hidden), ids)


def gathered(rank, plain, threshold):
    """Returns the names of gathered parameters after each of three micro-batches in two steps, and the weights."""
    net = SHARDS["zero3"](rank, Embeddings, stage3_param_persistence_threshold=threshold)
    opt = lowmem.FusedOptimizer(net.named_parameters(), model=net, rule="adamw", lr=1e-2)
    results = []
    for n in range(6):
        with opt.accumulate() if n % 3 < 2 else nullcontext():
            loss = net(torch.arange(4) + n + rank) / 3
            loss.backward() if plain else opt.backward(loss)
        results.append({name for name, param in net.named_parameters() if param.ds_status.name != "NOT_AVAILABLE"})
    return results, full_weights(net)


@pytest.mark.parametrize(("plain", "threshold"), [(False, 0), (True, 10)])
def test_nothing_stays_gathered_between_micro_batches(two, plain, threshold):
    (first, weights), (second, others) = two.run(gathered, plain, threshold)
    persistent = {"body.bias"} if threshold else set()  # DeepSpeed has gathered it before
    assert all(names <= persistent for names in first + second)
    net = Embeddings()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=lowmem.rules.AdamW.defaults["weight_decay"])
    for step in range(2):
        plain_step(opt, *(net(torch.arange(4) + 3 * step + n + rank) / 6 for n in range(3) for rank in range(2)))
    assert_same(weights, others)
    torch.testing.assert_close(weights, full_weights(net), rtol=1e-5, atol=1e-5)
