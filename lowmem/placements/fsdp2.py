"""PyTorch FSDP2: `fully_shard` cuts each parameter into blocks of its first dimension, and reduces its gradient."""

import contextlib
import gc
from collections.abc import Collection
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from lowmem.errors import UnsupportedError
from lowmem.placements.ranks import Ranks
from lowmem.placements.record import ParamRecord
from lowmem.placements.sharded import Sharded, held_by
from lowmem.tiles.layout import Span


class FSDP2(Sharded):
    """Parameters of `fully_shard` modules, over one dimension of a mesh; others of it may replicate them.

    FSDP2 averages and cuts a gradient before its hook is run, so nothing is left to reduce. What it has still gathered
    when the step is over (`set_reshard_after_backward(False)`) is cut again: it is the weights of the step before.

    Raises:
        UnsupportedError: a parameter is sharded in another dimension than its first.
    """

    name = "fsdp2"

    def __init__(self) -> None:
        self._modules: list[FSDPModule] = []

    def admit(self, name: str, param: Tensor) -> None:
        kinds = [kind for kind in cast(DTensor, param).placements if type(kind) is not Replicate]
        if kinds != [Shard(0)]:
            raise UnsupportedError(
                f"parameter {name!r} is placed as {kinds}; lowmem updates parameters that are sharded once, in "
                "dimension 0. Leave shard_placement_fn and tensor parallelism out"
            )
        super().admit(name, param)

    def adopt(self, records: Collection[ParamRecord]) -> None:
        own = {record.param for record in records}
        for found in gc.get_objects():
            if issubclass(type(found), FSDPModule) and not own.isdisjoint(found.parameters()):
                self._modules.append(found)
            if type(found).__name__ == "FSDPParam" and getattr(found, "_sharded_post_forward_param", None) in own:
                raise UnsupportedError(
                    "a forward without a backward has left these parameters cut in another way "
                    "(reshard_after_forward). Call reshard() on every FSDPModule before the optimizer is made"
                )

    def settle(self, records: Collection[ParamRecord]) -> None:
        for module in self._modules:
            module.reshard()

    def died(self) -> None:
        for module in self._modules:
            with contextlib.suppress(RuntimeError):  # of the outermost one alone; torch before 2.13 has no such way
                getattr(module, "reset_iter_state", module.reshard)()

    def _ranks_of(self, param: Any) -> Ranks:
        mesh = param.device_mesh
        return Ranks(mesh.get_group(param.placements.index(Shard(0))), torch.device(mesh.device_type))

    def span(self, param: Any) -> Span:
        ranks = self.ranks or self._ranks_of(param)
        shape = tuple(param.shape)
        rows = -(-shape[0] // ranks.count)
        return held_by(ranks.rank, shape, rows * torch.Size(shape[1:]).numel())

    def read(self, param: Any) -> Tensor:
        return cast(Tensor, param.detach().to_local()).view(-1)

    def take(self, param: Tensor) -> Tensor:
        grad = cast(DTensor, super().take(param))
        return grad.to_local().view(-1)
