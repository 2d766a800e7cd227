"""Tests shards and gradients on different devices, and reads of memory that another stream writes."""

from types import SimpleNamespace

import pytest
import torch
from support import simgpu

from lowmem.placements import fsdp2
from lowmem.placements.zero3 import _Partition

if not hasattr(simgpu, "library"):
    pytest.skip("needs the simulated GPU: scripts/test.sh --simgpu", allow_module_level=True)


def slice_on(device):
    """Returns a parameter as DeepSpeed makes it, with its slice on a device, from which gathering copies it."""
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus

    slice = torch.ones(16, device=device, pin_memory=device == "cpu")
    slice.ds_numel, slice.status = 16, PartitionedParamStatus.AVAILABLE
    param = SimpleNamespace(device=torch.device("cuda:0"), ds_tensor=slice, ds_shape=(32,))
    param.nvme_swapper = param.ds_process_group = None
    param.all_gather_coalesced = lambda params: [
        other.ds_tensor.to(param.device, copy=True, non_blocking=True) for other in params
    ]
    return param


@pytest.mark.parametrize(("device", "ordered"), [("cuda", True), ("cuda", False), ("cpu", True)])
def test_a_gather_on_another_stream_waits_for_writes(device, ordered):
    params, shard = [slice_on(device), slice_on(device)], _Partition()
    shard._ranks = {None: SimpleNamespace(rank=0, world_size=2, members=[0, 1])}
    computing, gathering = torch.cuda.Stream(), torch.cuda.Stream()
    for stream in (computing, gathering):
        stream.wait_stream(torch.cuda.current_stream())
    with simgpu.provoke("race") as results:
        with torch.cuda.stream(computing):
            for param in params:
                if ordered:
                    shard.admit("param", param)
                shard.write(param, shard.read(param).add_(1))
        with torch.cuda.stream(gathering):
            gathered = params[0].all_gather_coalesced(params)
        torch.cuda.current_stream().wait_stream(gathering)
        arrived = torch.stack(gathered).eq(2).all()
    assert (arrived and not results) == ordered


def test_a_gradient_that_is_being_copied_to_the_host():
    """Before torch 2.13, FSDP2 with CPUOffloadPolicy calls hooks before the copy is complete."""
    reducing = torch.cuda.Stream()
    with torch.cuda.stream(reducing):
        shard = torch.ones(16, device="cuda").to("cpu", non_blocking=True)
        mesh = SimpleNamespace(device_type="cuda")
        param = SimpleNamespace(grad=SimpleNamespace(to_local=lambda: shard, device_mesh=mesh))
        assert fsdp2._FSDPReducer().take(param).eq(1).all()
    assert param.grad is None
