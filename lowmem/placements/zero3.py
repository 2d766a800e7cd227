"""DeepSpeed ZeRO-3: parameters are sharded, and DeepSpeed gathers each parameter while its module computes.

The engine does not have an optimizer. Its module hooks gather and release parameters, and lowmem reduces gradients.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowmem.errors import StepError, UnsupportedError
from lowmem.placements.base import ParamEntry, Placement, ReadyGradients, Reducer
from lowmem.placements.sharded import FlatShard, span_of_rank
from lowmem.tiles.layout import Span

# Number of elements, over all ranks, that are gathered in one collective.
_BLOCK = 1 << 22


@dataclass(frozen=True)
class _AfterWrites:
    """Replaces DeepSpeed's function that gathers parameters. With `overlap_comm` that function uses a separate stream,
    which must first wait until the last slice has been written.

    Attributes:
        ends: device → event of the last write. It belongs to the process, like the streams: one gather reads slices of
            several parameters, which several `Zero3` objects may have written.
    """

    ends: ClassVar[dict[torch.device, Any]] = {}
    gather: Callable[..., Any]
    device: torch.device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.device in self.ends:
            torch.get_device_module(self.device).current_stream(self.device).wait_event(self.ends[self.device])
        return self.gather(*args, **kwargs)


class _Partition(FlatShard):
    """This rank's slice of a parameter, which DeepSpeed stores on the device, on the host or in a file."""

    def admit(self, name: str, param: Any) -> None:
        if hasattr(param, "comm"):
            raise UnsupportedError(
                f"parameter {name!r} is sharded by MiCS (mics_shard_size), whose groups of ranks would each train a "
                "separate model. Remove it. To gather within a node, use zero_hpz_partition_size"
            )
        super().admit(name, param)
        if not isinstance(param.all_gather_coalesced, _AfterWrites):
            param.all_gather_coalesced = _AfterWrites(param.all_gather_coalesced, param.device)

    def groups_of(self, param: Any) -> tuple[list[dist.ProcessGroup], torch.device]:
        return [param.ds_process_group], param.device

    def span(self, param: Any) -> Span:
        return span_of_rank(self.ranks_of(param).rank, tuple(param.ds_shape), param.ds_tensor.ds_numel)

    def version(self, param: Any) -> tuple[Any, ...]:
        return (param.ds_tensor._version,)

    def stored(self, param: Any) -> Tensor:
        return param.ds_tensor  # type: ignore[no-any-return]

    def read(self, param: Any) -> Tensor:
        _swap_in(param)
        shard: Tensor = param.ds_tensor.detach()[: self.span(param).held]
        return shard.to(param.device, non_blocking=not _in_file(param))

    def write(self, param: Any, shard: Tensor) -> None:
        stored = param.ds_tensor
        if stored.data_ptr() != shard.data_ptr():
            _swap_in(param)
            stored.detach()[: shard.numel()].copy_(shard, non_blocking=not _in_file(param))
        if _in_file(param):
            param.nvme_swapper.swap_out_and_release([param])
        if param.device.type != "cpu":
            writing = torch.get_device_module(param.device).current_stream(param.device)
            _AfterWrites.ends[param.device] = writing.record_event()
        param.ds_secondary_tensor = None  # the copy for hpZ is outdated; the next gather creates a new one

    def full_tensor(self, param: Any) -> Tensor:
        full = super().full_tensor(param)
        _free_buffer(param)
        return full

    def fill(self, param: Tensor, full: Tensor) -> None:
        super().fill(param, full)
        self.release(param)

    def release(self, param: Any) -> None:
        if param.ds_status.name == "AVAILABLE":
            param.ds_active_sub_modules.clear()
            param.partition()


class _ReduceScatter(Reducer):
    """Reduce-scatters the gradients of each micro-batch, and accumulates the shards.

    A reduce-scatter is launched when its gradient is complete, and waited for when the next gradient is complete. So it
    overlaps with backward, and two gradients exist at a time.
    """

    def __init__(self, shard: FlatShard) -> None:
        self._shard = shard
        self.drop()

    def drop(self) -> None:
        self._in_flight: ReadyGradients = ()

    def reduce(self, record: ParamEntry, grad: Tensor) -> ReadyGradients:
        ranks = self._shard.ranks_of(record.param)
        launched = ranks.reduce_scatter_mean(grad.contiguous().view(-1), record.span)
        before, self._in_flight = self._in_flight, self._wait(record, launched)
        return before

    def flush(self) -> ReadyGradients:
        return self._in_flight

    def _wait(self, record: ParamEntry, launched: Callable[[], Tensor]) -> ReadyGradients:
        """Waits for a reduce-scatter. In the last micro-batch, yields the sum over micro-batches."""
        summed = super().reduce(record, launched())
        del launched  # it references the full gradient
        yield from summed


class Zero3(Placement):
    """Parameters created under `deepspeed.zero.Init`, or converted by `deepspeed.initialize`.

    This rank's slice is updated on the compute device, even if DeepSpeed stores it on the host or in a file.
    Parameters that are still gathered at the end of a step have outdated weights and are released. Parameters that
    DeepSpeed keeps gathered (`stage3_param_persistence_threshold`) are gathered again, many per collective.
    """

    name = "zero3"

    def __init__(self) -> None:
        shard = _Partition()
        super().__init__(shard, _ReduceScatter(shard))

    def adopt(self, records: Collection[ParamEntry], model: nn.Module | None) -> None:
        # DeepSpeed 0.19, runtime/zero/stage3.py, _link_all_hp_params: its optimizer marks its parameters
        if any(hasattr(record.param, "_z3_optimizer") for record in records):
            raise UnsupportedError(
                "DeepSpeed has an optimizer for these parameters, which would update them too. Omit 'optimizer' in its "
                "configuration and pass none to deepspeed.initialize(model=model, config=...)"
            )

    @torch.no_grad()
    def free_copies(self, records: Collection[ParamEntry], *, updated: bool) -> None:
        params: list[Any] = [record.param for record in records]
        for param in params:
            if updated and param.ds_status.name == "INFLIGHT" and param.requires_grad:
                raise StepError(
                    f"DeepSpeed was still gathering a parameter of shape {list(param.ds_shape)} when the step ended, "
                    "and would continue with the weights from before the step. Set stage3_prefetch_bucket_size to 0"
                )
            param.ds_active_sub_modules.clear()  # backward has ended, so hooks of these modules will not run
            if not param.ds_persist:
                self.shard.release(param)
        if updated:
            for some in _packed(record.param for record in records if record.claimed):
                self._renew(some)

    def _renew(self, params: list[Any]) -> None:
        """Gathers parameters of one dtype into DeepSpeed's full tensors, in one collective."""
        ranks = self.shard.ranks_of(params[0])
        assert ranks is not None
        shards = []
        sizes = []
        for param in params:
            span = self.shard.span(param)
            shards.append(torch.nn.functional.pad(self.shard.read(param), (0, span.size - span.held)))
            sizes.append(span.size)
        full = ranks.all_gather(torch.cat(shards), sum(sizes)).view(ranks.world_size, -1)
        for param, slices in zip(params, full.split(sizes, dim=1), strict=True):
            if param.ds_status.name == "AVAILABLE":
                param.data.copy_(slices.flatten()[: param.ds_numel].view(param.ds_shape))
            _free_buffer(param)


def _packed(params: Iterable[Any]) -> Iterable[list[Any]]:
    """Packs the parameters that DeepSpeed keeps gathered into lists of one dtype and about `_BLOCK` elements."""
    packs: dict[tuple[torch.dtype, int], list[Any]] = {}
    sizes = Counter[torch.dtype]()
    for param in params:
        if param.ds_persist:
            dtype = param.ds_tensor.dtype
            packs.setdefault((dtype, sizes[dtype] // _BLOCK), []).append(param)
            sizes[dtype] += param.ds_numel
    return packs.values()


def _in_file(param: Any) -> bool:
    """Returns whether DeepSpeed stores this rank's slice on NVMe."""
    return param.nvme_swapper is not None and str(param.ds_tensor.final_location).endswith("nvme")


def _free_buffer(param: Any) -> None:
    """Frees the buffer with this rank's slice from a file, because the number of buffers is limited."""
    if _in_file(param):
        param.nvme_swapper.remove_partition_and_release_buffers([param])


def _swap_in(param: Any) -> None:
    """Loads this rank's slice from its file if it is not in memory."""
    if param.ds_tensor.status.name == "INFLIGHT":
        param.nvme_swapper.synchronize_reads()
    if param.ds_tensor.status.name == "NOT_AVAILABLE":
        param.nvme_swapper.swap_in([param], async_op=False)


def gathered(*params: Tensor | None) -> AbstractContextManager[Any]:
    """Returns a context in which these parameters are gathered, even if DeepSpeed has partitioned them."""
    partitioned = [param for param in params if param is not None and not param.numel()]
    if not partitioned:
        return nullcontext()
    import deepspeed

    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(partitioned)
    return context
