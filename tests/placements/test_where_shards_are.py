"""Shards that are stored elsewhere than gradients are computed, and streams that read what another has written."""

from types import SimpleNamespace

import pytest
import torch
from support import pretended_gpu
from support.pretended_gpu import MODULE, Failed, Stream, watched

from lowmem.placements.zero3 import _Partition

# -- ZeRO-3 ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pretending():
    process = pretended_gpu.Process()
    yield process.run
    process.stop()


def slice_on(device):
    """A parameter as DeepSpeed makes it, with its slice on a device, which gathers by copying that."""
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus

    param = SimpleNamespace(device=torch.device("gpu:0"), ds_tensor=torch.ones(16, device=device), ds_shape=(32,))
    param.ds_tensor.ds_numel, param.ds_tensor.status = 16, PartitionedParamStatus.AVAILABLE
    param.nvme_swapper = param.ds_process_group = None
    param.all_gather_coalesced = lambda params: [each.ds_tensor.to(param.device, copy=True) for each in params]
    return param


def gather_elsewhere(device, ordered):
    from deepspeed.runtime.swap_tensor import partitioned_param_swapper  # noqa: F401 (not while it is watched)

    with watched(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "data_ptr", lambda tensor: tensor.untyped_storage()._cdata)  # 0 without values
        params, shard = [slice_on(device), slice_on(device)], _Partition()
        shard._ranks = {None: SimpleNamespace(rank=0, world_size=2, members=[0, 1])}
        for param in params:
            if ordered:
                shard.admit("param", param)
            shard.write(param, shard.read(param).add_(1))
        gathering = Stream()
        with MODULE.stream(gathering):
            params[0].all_gather_coalesced(params)
        MODULE.current_stream().wait_stream(gathering)


@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_a_gather_on_another_stream_waits_for_what_is_written(device, pretending):
    with pytest.raises(Failed, match=r"Race.*another stream may not have written"):
        pretending(gather_elsewhere, device, False)
    pretending(gather_elsewhere, device, True)
