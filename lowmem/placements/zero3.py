"""DeepSpeed ZeRO-3: parameters are sharded, and DeepSpeed gathers each one while its module computes.

The engine has no optimizer of its own. Its hooks on modules gather and release; the gradient is reduced here.
"""

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowmem.errors import StepError, UnsupportedError
from lowmem.placements.base import Reduced, Reducer, Tensors
from lowmem.placements.placed import Placed
from lowmem.placements.ranks import Ranks
from lowmem.placements.sharded import FlatShard, Sharded, span_of_rank
from lowmem.tiles.gradients import ComputedGradient, Gradient
from lowmem.tiles.layout import Span

# Elements of all shards that are computed together: the same number on every rank, whatever its batch is.
_BLOCK = 1 << 22


class _Partition(FlatShard):
    """This rank's slice of a parameter, which DeepSpeed keeps on the device, on the host or in a file."""

    def admit(self, name: str, param: Tensor) -> None:
        if hasattr(param, "comm"):
            raise UnsupportedError(
                f"parameter {name!r} is sharded by MiCS (mics_shard_size), whose groups of ranks would each train a "
                "model of their own. Omit it; zero_hpz_partition_size also gathers within a node"
            )
        super().admit(name, param)

    def group_of(self, param: Any) -> tuple[dist.ProcessGroup, torch.device]:
        return param.ds_process_group, param.device

    def span(self, param: Any) -> Span:
        return span_of_rank(self.ranks_of(param).rank, tuple(param.ds_shape), param.ds_tensor.ds_numel)

    def read(self, param: Any, states: Tensors) -> tuple[Tensor, Tensors]:
        _swap_in(param)
        return param.ds_tensor.detach()[: self.span(param).held].to(param.device), states

    def write(self, param: Any, shard: Tensor, states: Tensors) -> None:
        stored = param.ds_tensor
        if stored.data_ptr() != shard.data_ptr():
            _swap_in(param)
            stored.detach()[: shard.numel()].copy_(shard)
        if _in_file(param):
            param.nvme_swapper.swap_out_and_release([param])
        param.ds_secondary_tensor = None  # the copy of hierarchical partitioning, made again at the next gather

    def full_tensor(self, param: Any) -> Tensor:
        full = super().full_tensor(param)
        if _in_file(param):  # there are few buffers that it is read into
            param.nvme_swapper.remove_partition_and_release_buffers([param])
        return full

    def fill(self, param: Tensor, full: Tensor) -> None:
        super().fill(param, full)
        self.release(param)

    def release(self, param: Any) -> None:
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        if param.ds_status is ZeroParamStatus.AVAILABLE:
            param.ds_active_sub_modules.clear()
            param.partition()


class _ReduceScatter(Reducer):
    """Reduce-scatters each gradient in its hook, one that is computed block by block: no rank has all of it."""

    accumulates_first = False

    def __init__(self, shard: FlatShard) -> None:
        self._shard = shard

    def reduce(self, record: Placed, grad: Gradient) -> Reduced:
        ranks = self._shard.ranks_of(record.param)
        if isinstance(grad, Tensor):
            yield record, ranks.reduce_scatter_mean(grad.contiguous().view(-1), record.span.size)
        else:
            yield record, self._reduce_blocks(record, grad, ranks)

    def _reduce_blocks(self, record: Placed, grad: ComputedGradient, ranks: Ranks) -> Tensor:
        """This rank's shard of the mean, of which blocks of all shards are computed together."""
        span, dtype = record.span, record.param.dtype
        shard = torch.empty(span.held, dtype=dtype, device=grad.device)
        count = max(1, _BLOCK // ranks.world_size)
        for start in range(0, span.size, count):
            size = min(count, span.size - start)
            blocks = [grad.elements(rank * span.size + start, size).to(dtype) for rank in range(ranks.world_size)]
            block = ranks.reduce_scatter_mean(torch.cat(blocks), size)
            shard[start : start + size] = block[: max(0, span.held - start)]
        return shard


class Zero3(Sharded):
    """Parameters made under `deepspeed.zero.Init`, or converted by `deepspeed.initialize`.

    This rank's slice is updated on the device that computes, also where DeepSpeed keeps it on the host or in a file.
    Parameters that are still gathered when the step is over hold the weights before it: they are released, and those
    that DeepSpeed keeps gathered (`stage3_param_persistence_threshold`) are gathered again.

    Raises:
        UnsupportedError: another optimizer has these parameters, or they are sharded by MiCS.
    """

    name = "zero3"
    replays_graph = False

    def __init__(self) -> None:
        shard = _Partition()
        super().__init__(shard, _ReduceScatter(shard))

    def adopt(self, records: Collection[Placed], model: nn.Module | None) -> None:
        # DeepSpeed 0.19, runtime/zero/stage3.py, _link_all_hp_params: its optimizer marks the parameters that it has
        if any(hasattr(record.param, "_z3_optimizer") for record in records):
            raise UnsupportedError(
                "DeepSpeed has an optimizer for these parameters, which would update them too. Omit 'optimizer' in its "
                "configuration and pass none to deepspeed.initialize(model=model, config=...)"
            )

    @torch.no_grad()
    def free_copies(self, records: Collection[Placed]) -> None:
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        params: list[Any] = [record.param for record in records]
        for param in params:
            if param.ds_status is ZeroParamStatus.INFLIGHT and param.requires_grad:
                raise StepError(
                    f"DeepSpeed was still gathering a parameter of shape {list(param.ds_shape)} when the step ended, "
                    "and would continue with the weights before it. Set stage3_prefetch_bucket_size to 0"
                )
            self.shard.release(param)
        for param in params:
            if param.ds_persist:
                param.all_gather()  # one at a time: of a list, DeepSpeed 0.18 waits only for the last one


def _in_file(param: Any) -> bool:
    """Returns whether DeepSpeed keeps this rank's slice on NVMe."""
    return param.nvme_swapper is not None and str(param.ds_tensor.final_location).endswith("nvme")


def _swap_in(param: Any) -> None:
    """Loads this rank's slice into memory if it is in a file."""
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus

    if param.ds_tensor.status is PartitionedParamStatus.INFLIGHT:
        param.nvme_swapper.synchronize_reads()
    if param.ds_tensor.status is PartitionedParamStatus.NOT_AVAILABLE:
        param.nvme_swapper.swap_in([param], async_op=False)
