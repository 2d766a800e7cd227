"""DeepSpeed ZeRO-3: parameters are cut over the ranks, and DeepSpeed gathers each while its module computes.

The engine has no optimizer of its own. Its hooks on modules gather and release; the gradient is reduced here.
"""

import gc
import sys
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from lowmem.errors import StepError, UnsupportedError
from lowmem.placements.local import Reduced
from lowmem.placements.ranks import Ranks
from lowmem.placements.record import ParamRecord
from lowmem.placements.sharded import Sharded, held_by
from lowmem.tiles.layout import Span


class Zero3(Sharded):
    """Parameters made under `deepspeed.zero.Init`, or converted by `deepspeed.initialize`.

    In the hook the gradient is reduce-scattered, and this rank's slice is updated on the device that computes, also
    where DeepSpeed keeps it on the host or in a file. What DeepSpeed has still gathered when the step is over, it
    releases, since it is the weights of the step before; those that are to stay gathered are gathered anew.

    Raises:
        UnsupportedError: another optimizer has these parameters, or they are sharded in a way of MiCS.
    """

    name = "zero3"
    graph_stays = False

    def admit(self, name: str, param: Tensor) -> None:
        if hasattr(param, "comm"):
            raise UnsupportedError(
                f"parameter {name!r} is sharded by MiCS (mics_shard_size), whose groups of ranks would each train a "
                "model of their own. Leave it out; zero_hpz_partition_size keeps gathering in the node too"
            )
        super().admit(name, param)

    def adopt(self, records: Collection[ParamRecord]) -> None:
        _refuse_engine_optimizer({record.param for record in records})

    def _ranks_of(self, param: Any) -> Ranks:
        return Ranks(param.ds_process_group, param.device)

    def span(self, param: Any) -> Span:
        ranks = self.ranks or self._ranks_of(param)
        return held_by(ranks.rank, tuple(param.ds_shape), param.ds_tensor.ds_numel)

    def read(self, param: Any) -> Tensor:
        _swap_in(param)
        piece: Tensor = param.ds_tensor.detach()[: self.span(param).held]
        return piece.to(param.device)

    def write(self, param: Any, piece: Tensor) -> None:
        stored = param.ds_tensor
        if stored.data_ptr() != piece.data_ptr():
            _swap_in(param)
            stored.detach()[: piece.numel()].copy_(piece)
        if _in_file(param):
            param.nvme_swapper.swap_out_and_release([param])
        param.ds_secondary_tensor = None  # hierarchical partitioning's copy, made anew at the next gather

    def reduce(self, record: ParamRecord, grad: Tensor) -> Reduced:
        assert self.ranks is not None
        yield record, self.ranks.scatter_mean(grad.contiguous().view(-1), record.span.size)

    def full_tensor(self, param: Any) -> Tensor:
        whole = super().full_tensor(param)
        if _in_file(param):  # the buffers that it is read into are few
            param.nvme_swapper.remove_partition_and_release_buffers([param])
        return whole

    def fill(self, param: Tensor, whole: Tensor) -> None:
        super().fill(param, whole)
        self.release(param)

    def release(self, param: Any) -> None:
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        if param.ds_status is ZeroParamStatus.AVAILABLE:
            param.ds_active_sub_modules.clear()
            param.partition()

    @torch.no_grad()
    def settle(self, records: Collection[ParamRecord]) -> None:
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        params: list[Any] = [record.param for record in records if record.handle is not None]
        for param in params:
            if param.ds_status is ZeroParamStatus.INFLIGHT:
                raise StepError(
                    f"DeepSpeed was still gathering a parameter of shape {list(param.ds_shape)} when the step ended, "
                    "and would go on with weights of the step before. Set stage3_prefetch_bucket_size to 0"
                )
            self.release(param)
        staying = [param for param in params if param.ds_persist]
        if staying:
            staying[0].all_gather(staying)


def _in_file(param: Any) -> bool:
    """Whether DeepSpeed keeps this rank's slice on NVMe."""
    return param.nvme_swapper is not None and str(param.ds_tensor.final_location).endswith("nvme")


def _swap_in(param: Any) -> None:
    """Has this rank's slice in memory."""
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus

    if param.ds_tensor.status is PartitionedParamStatus.INFLIGHT:
        param.nvme_swapper.synchronize_reads()
    if param.ds_tensor.status is PartitionedParamStatus.NOT_AVAILABLE:
        param.nvme_swapper.swap_in([param], async_op=False)


def _refuse_engine_optimizer(params: set[Tensor]) -> None:
    stage3: Any = sys.modules.get("deepspeed.runtime.zero.stage3")
    for found in gc.get_objects() if stage3 is not None else ():
        if type(found) is stage3.DeepSpeedZeroOptimizer_Stage3 and not params.isdisjoint(
            p for group in found.fp16_groups for p in group
        ):
            raise UnsupportedError(
                "DeepSpeed has an optimizer for these parameters, which would update them too. Leave 'optimizer' out "
                "of its configuration and hand none to deepspeed.initialize(model=model, config=...)"
            )
