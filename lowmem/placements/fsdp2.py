"""PyTorch FSDP2: `fully_shard` shards each parameter along its first dimension (rows) and reduces gradients."""

from collections.abc import Collection
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate
from torch.distributed.tensor.placement_types import Shard as ShardPlacement

from lowmem.errors import StepError, UnsupportedError
from lowmem.placements.base import MicroBatch, ParamEntry, Placement, Reducer
from lowmem.placements.sharded import FlatShard, span_of_rank
from lowmem.tiles.layout import Span
from lowmem.tiles.quantized import QuantizedWeight


class _Rows(FlatShard):
    """This rank's rows of a DTensor: ceil(rows / world size) rows, or fewer or none on the last ranks."""

    def admit(self, name: str, param: Tensor) -> None:
        kinds = [kind for kind in cast(DTensor, param).placements if type(kind) is not Replicate]
        if kinds != [ShardPlacement(0)]:
            raise UnsupportedError(
                f"parameter {name!r} is placed as {kinds}, but lowmem only updates parameters that are sharded once, "
                "in dimension 0. Omit shard_placement_fn and tensor parallelism"
            )
        mesh = cast(DTensor, param).device_mesh
        if self.quantized(param) is not None and param.device.type != mesh.device_type:
            raise UnsupportedError(
                f"parameter {name!r} is quantized, and FSDP2 cannot gather it from the host. Omit CPUOffloadPolicy (in "
                "a trainer: fsdp_config.cpu_offload), or quantize_"
            )
        super().admit(name, param)

    def groups_of(self, param: Any) -> tuple[list[dist.ProcessGroup], torch.device]:
        mesh = param.device_mesh
        kinds = param.placements
        dims = sorted(range(len(kinds)), key=lambda dim: type(kinds[dim]) is Replicate)  # the sharded dim is the first
        return [mesh.get_group(dim) for dim in dims], torch.device(mesh.device_type)

    def span(self, param: Any) -> Span:
        ranks = self.ranks_of(param)
        shape = tuple(param.shape)
        rows = -(-shape[0] // ranks.world_size)
        return span_of_rank(ranks.rank, shape, rows * torch.Size(shape[1:]).numel())

    def version(self, param: Any) -> tuple[Any, ...]:
        return param._version, param._local_tensor._version

    def quantized(self, param: Any) -> QuantizedWeight | None:
        return super().quantized(self.read(param))

    def stored(self, param: Any) -> Tensor:
        return param.detach().to_local()  # type: ignore[no-any-return]

    def read(self, param: Any) -> Tensor:
        return self.stored(param).view(-1)


class _FSDPReducer(Reducer):
    """A reducer for gradients that FSDP2 has averaged and cut before their hooks run. modules: the FSDP2 modules."""

    def __init__(self) -> None:
        self.modules: list[Any] = []

    def begin(self, records: Collection[ParamEntry], micro_batch: MicroBatch) -> None:
        super().begin(records, micro_batch)
        states = [module._get_fsdp_state() for module in self.modules]
        # torch 2.13, distributed/fsdp/_fully_shard/_fsdp_state.py. In earlier versions a module has one group or None
        groups: list[Any] = []
        for state in states:
            groups += getattr(state, "_fsdp_param_groups", [getattr(state, "_fsdp_param_group", None)])
        reduces = [group.reduce_grads for group in groups if group is not None]
        if reduces and not any(reduces):
            raise StepError(
                "set_requires_gradient_sync(False) was called, so FSDP2 keeps the gradients of this backward, and no "
                "parameter gets one. Remove the call. To accumulate gradients, write `with opt.accumulate():`"
            )

    def take(self, param: Tensor) -> Tensor:
        grad = cast(DTensor, param.grad)
        param.grad = None
        shard = grad.to_local()
        if shard.device.type != grad.device_mesh.device_type:
            # before torch 2.13, FSDP2 calls hooks during the copy (_fully_shard/_fsdp_collectives.py, foreach_reduce)
            torch.accelerator.current_stream().synchronize()
        return shard.view(-1)


class FSDP2(Placement):
    """Parameters of `fully_shard` modules, sharded over one mesh dimension and possibly replicated over others.

    Modules that are still gathered at the end of a step (`set_reshard_after_backward(False)`) have the weights from
    before the step, so they are resharded. This is why the model is required.
    """

    name = "fsdp2"
    reducer: _FSDPReducer

    def __init__(self) -> None:
        super().__init__(_Rows(), _FSDPReducer())

    def adopt(self, records: Collection[ParamEntry], model: nn.Module | None) -> None:
        if model is None:
            raise UnsupportedError(
                "the parameters are sharded by fully_shard, whose modules are resharded after each step. Pass the "
                "model: FusedOptimizer(model.named_parameters(), model=model, ...)"
            )
        earlier = self.reducer.modules
        self.reducer.modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in self.reducer.modules:
            if module not in earlier:  # those were hooked when an earlier param group was added
                module.register_forward_pre_hook(_start_anew, prepend=True)
        self.free_copies(records, updated=True)
        params = set(model.parameters())
        if strange := [record.name for record in records if record.param not in params]:
            raise UnsupportedError(
                f"parameter {strange[0]!r} is not a parameter of the sharded model: either a forward without a "
                "backward left it sharded in another way (reshard_after_forward), or it belongs to another model. "
                "Call reshard() on every FSDPModule before model.named_parameters()"
            )

    def free_copies(self, records: Collection[ParamEntry], *, updated: bool) -> None:
        if updated:
            for module in self.reducer.modules:
                module.reshard()


def _start_anew(module: Any, args: Any) -> None:
    """Called before each forward. Resets FSDP2 after a failed backward, because it would ignore later gradients."""
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:
        return
    # torch 2.13, distributed/fsdp/_fully_shard/_fsdp_state.py: this flag is set while a backward runs
    state = module._get_fsdp_state()
    if not state._is_root or not state._state_ctx.post_backward_final_callback_queued:
        return
    if not hasattr(module, "reset_iter_state"):
        raise StepError(
            "a backward has failed, and FSDP2 in this version of torch then ignores gradients. Resume from a "
            "checkpoint in a new process, or install torch 2.13 or newer"
        )
    module.reset_iter_state()
