"""Models that the ranks of a group share, as DeepSpeed ZeRO-3 or FSDP2 cuts them."""

import os

import torch
import torch.distributed as dist


def zero3(rank, make, *, built_whole=False, **options):
    """`make()` under DeepSpeed without an optimizer; `options` are of its section zero_optimization."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(dist.get_world_size())}
    os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    import deepspeed

    # it would be compiled, for half a minute, and ranks that are killed leave a lock for which all others wait
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, **options}}
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=not built_whole):
        model = make()
    return deepspeed.initialize(model=model, config=config)[0].module


def fsdp2(rank, make, **options):
    """`make()` with `fully_shard` on each child that can be called, and on all; `options` are its."""
    from torch.distributed.fsdp import fully_shard

    model = make()
    for child in model.children():
        for layer in child if isinstance(child, torch.nn.ModuleList) else [child]:
            fully_shard(layer, **options)
    return fully_shard(model, **options)


SHARDS = {"zero3": zero3, "fsdp2": fsdp2}
