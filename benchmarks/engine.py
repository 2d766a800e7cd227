"""The only access to lowmem's internals in benchmarks/."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from torch import Tensor

import lowmem
from lowmem.placements import Ranks, release
from lowmem.step.compiled import has_compiler

__all__ = ["has_compiler", "reduce_scatter_as_nccl", "release", "update_one"]


def update_one(opt: lowmem.FusedOptimizer, param: Tensor, grad: Tensor) -> None:
    """Updates one parameter as its hook does, but without a backward pass."""
    opt._cycle.step += 1
    opt._updates.begin(opt._cycle.step)
    opt._updates.put(opt._records[param], grad, None)


@contextmanager
def reduce_scatter_as_nccl() -> Iterator[None]:
    """Makes lowmem call reduce-scatter as on NCCL. On gloo it calls all-reduce itself and takes its shard."""
    reduce_scatter_mean = Ranks.reduce_scatter_mean

    def as_on_nccl(self: Ranks, tensor: Tensor, size: int) -> Callable[[], Tensor]:
        self._scatters_by_reducing = False
        return reduce_scatter_mean(self, tensor, size)

    with mock.patch.object(Ranks, "reduce_scatter_mean", as_on_nccl):
        yield
