"""Trains a model on ranks whose parameters DeepSpeed ZeRO-3 or FSDP2 shards."""

import functools
import os
import pickle
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from support.nets import Net, assert_same, data, full_weights

import lowmem
from lowmem.rules.rule import TABLE

RULES = [*sorted(TABLE), "torch.optim.AdamW"]
POLICIES = {
    "deferred": {"policy": "deferred", "clip_norm": 0.5},
    "dynamic scale": {"clip_norm": 0.5, "loss_scale": "dynamic"},
    "clamped": {"clip_norm": 0.05, "clip_value": 0.1},
    "its own clipping": {"rule": "scaled_adam", "clipping_scale": 0.8, "clipping_update_period": 3},
    "not batched": {"rule": "adamw", "batching": False},
    "several rules": {
        "rule": "adamw",
        "groups": ({"match": "bias|gain|one", "rule": "lomo", "lr": 1e-2},),
        "clip_norm": 0.5,
    },
}
ACCUMULATED = {
    "clipped": {"policy": "deferred", "clip_norm": 0.5},
    "scaled, in the dtype of gradients": {
        "policy": "deferred", "loss_scale": "dynamic", "accumulation_dtype": "gradient"
    },
}  # fmt: skip


def settings_of(rule):
    factors = [("convolution.weight", ["ROW", "NONE", "COLUMN", "COLUMN"]), (".*", "HEURISTIC")]
    options = {"adafactor": {"min_dim_size_to_factor": 3, "factor_map": factors}, "lion": {"lr": 1e-3}}
    return {"rule": rule, "lr": 1e-2, **options.get(rule, {})}


def deepspeed_on(rank):
    """Initializes DeepSpeed on this rank and returns the package."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(dist.get_world_size())}
    os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    import deepspeed

    # its compilation takes half a minute, and a rank that is killed during it leaves a lock that blocks all others
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    return deepspeed


def engine(rank, net, stage, optimizer=None):
    """Returns a DeepSpeed engine that shards an existing model."""
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    config["zero_allow_untested_optimizer"] = True
    return deepspeed_on(rank).initialize(model=net, config=config, optimizer=optimizer)[0]


def zero3(rank, make, *, built_whole=False, **options):
    """Creates a model sharded by DeepSpeed without an optimizer. options: entries of zero_optimization."""
    deepspeed = deepspeed_on(rank)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, **options}}
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=not built_whole):
        model = make()
    return deepspeed.initialize(model=model, config=config)[0].module


def whole_first(rank, make, **options):
    """Like `zero3`, but creates the whole model first, so its initial weights are the same as on one device."""
    return zero3(rank, make, built_whole=True, **options)


def fsdp2(rank, make, **options):
    """Creates a model and applies `fully_shard(**options)` to each callable child and to the root."""
    from torch.distributed.fsdp import fully_shard

    model = make()
    for child in model.children():
        for layer in child if isinstance(child, torch.nn.ModuleList) else [child]:
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def by_layer(rank, make, **options):
    """Applies `fully_shard` to each decoder layer of a language model and to the root, as users do."""
    from torch.distributed.fsdp import fully_shard

    model = make()
    for layer in model.model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def replicated(rank, make):
    return make()


SHARDS = {"zero3": zero3, "fsdp2": fsdp2}
KINDS = {"replicated": replicated, **SHARDS}


def make():
    torch.manual_seed(0)
    return Net(scalar=(1,))  # neither engine supports 0-D parameters


def everyones(ids):
    """Makes all ranks take the same branch, because different branches would deadlock with any optimizer."""
    ids[:, 0] = ids[0, 0]
    return ids


def train(net, rows_of, settings, micro_batches=1, batches=None):
    opt = lowmem.FusedOptimizer(net.named_parameters(), model=net, **{"lr": 1e-2, **settings})
    for ids in batches or map(everyones, data()):
        parts = rows_of(ids).tensor_split(micro_batches)
        for n, part in enumerate(parts, start=1):

            def loss(part=part):
                return net(part) / micro_batches

            with opt.accumulate() if n < micro_batches else nullcontext():
                opt.backward(loss())
    report = opt.last_step
    return {
        "weights": full_weights(net),
        "report": (report.step, report.names, report.grad_norm.item()),
        "factor": None if report.clip_coef is None else report.clip_coef.item(),
        "placement": opt.placement,
    }


def shared(rank, kind, settings, micro_batches=1, options=None):
    net = SHARDS[kind](rank, make, **options or {})
    return train(net, lambda ids: ids.tensor_split(dist.get_world_size())[rank], settings, micro_batches)


@functools.cache
def on_one_device(case):
    settings, micro_batches = pickle.loads(case)
    return train(make(), lambda ids: ids, settings, micro_batches)


def assert_as_one_device(results, kind, settings, micro_batches=1):
    assert_alike(results, kind, on_one_device(pickle.dumps((settings, micro_batches))))


def assert_alike(results, kind, alone):
    for rank in results:
        assert rank["placement"] == kind
        assert_same(rank["weights"], results[0]["weights"])
        # the order of sums over rows and elements differs
        torch.testing.assert_close(rank["weights"], alone["weights"], rtol=1e-5, atol=1e-5)
        assert rank["report"][:2] == alone["report"][:2]
        assert rank["report"][2] == pytest.approx(alone["report"][2], rel=1e-4)
        assert (rank["factor"] is None) == (alone["factor"] is None)
        assert alone["factor"] is None or rank["factor"] == pytest.approx(alone["factor"], rel=1e-4)


class Wide(torch.nn.Module):
    """A model whose shards have at least 1 MiB, because DeepSpeed does not store smaller ones in files."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1024, 1024, bias=False) for _ in range(6))
        self.embed = torch.nn.Embedding(512, 1024)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return torch.nn.functional.cross_entropy(x @ self.embed.weight.T, ids)  # tied


def make_wide():
    torch.manual_seed(0)
    return Wide()
