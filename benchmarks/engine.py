"""The functions of benchmarks/ that use lowmem's internals."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

from torch import Tensor, fx

import lowmem
from lowmem.kernels import Kernels
from lowmem.placements import Ranks, shard_of
from lowmem.step import compiled, updates
from lowmem.step.compiled import has_compiler
from lowmem.tiles import stages
from lowmem.tiles.layout import Span

__all__ = ["has_compiler", "reduce_scatter_as_nccl", "shard_of", "update_one", "without_computing"]


def update_one(opt: lowmem.FusedOptimizer, param: Tensor, grad: Tensor) -> None:
    """Updates one parameter as its hook does, without a backward pass."""
    opt._cycle.step += 1
    opt._updates.begin(opt._cycle.step)
    opt._updates.put(opt._records[param], grad, None)


@contextmanager
def without_computing(*, kernels: bool = False, waiting: bool = False) -> Iterator[None]:
    """Replaces compiled code by functions that return the results of their first call, and kernel launches by nothing.
    No compiler is required.

    Args:
        kernels: whether CPU tensors are updated by the code for GPUs.
        waiting: whether large gradients are collected and updated together, as on a GPU with free memory.
    """

    def first_results(graph: fx.GraphModule, sizes: Any, example: Sequence[Any]) -> Callable[..., Any]:
        results = list[Any]()

        def run(*args: Any) -> Any:
            if not results:
                results.append(graph(*args))
            return results[0]

        return run

    replaced = {
        "_TRACED": {}, "missing_compiler": lambda device, tries: None, "KERNELS": {"cpu", "cuda"} if kernels else set()
    }  # fmt: skip
    launches = {"compile": lambda self: None, "launch": lambda self, launch, args: None}
    with (
        mock.patch.object(stages, "compiled", first_results),
        mock.patch.multiple(compiled, **replaced),
        mock.patch.multiple(Kernels, **launches),
        mock.patch.object(updates, "unused_memory", lambda device, peak: 1 << 40) if waiting else nullcontext(),
    ):
        yield


@contextmanager
def reduce_scatter_as_nccl() -> Iterator[None]:
    """Makes lowmem call reduce-scatter, as with NCCL. With gloo, it would call all-reduce and select the shard."""
    reduce_scatter_mean = Ranks.reduce_scatter_mean

    def with_nccl(self: Ranks, tensor: Tensor, span: Span) -> Callable[[], Tensor]:
        self._scatters_by_reducing = False
        return reduce_scatter_mean(self, tensor, span)

    with mock.patch.object(Ranks, "reduce_scatter_mean", with_nccl):
        yield
