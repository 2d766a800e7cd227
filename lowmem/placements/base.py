"""Placements: where this rank stores its shard of each parameter, and how gradients are reduced to that shard.

The classes in this file implement the placement on one device, and are the base classes of the others.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lowmem.errors import RankError, UnsupportedError
from lowmem.placements.agreement import Group, first_failure, require_equal_settings
from lowmem.placements.ranks import Ranks, in_group, on_rank
from lowmem.placements.wrappers import require_unwrapped
from lowmem.tiles.layout import Layout, Span, View
from lowmem.tiles.quantized import QuantizedWeight, plain, tensors_of

# Reference count of a storage with one tensor. The expression that counts adds the second reference.
_ONE_TENSOR = 2


@dataclass(eq=False)
class ParamEntry:
    """A parameter of an optimizer.

    Attributes:
        name, param: the parameter.
        span: the elements on this rank.
        claimed: whether the optimizer has determined how to update it, and is the only optimizer that does.
    """

    name: str
    param: Tensor
    span: Span
    claimed: bool = field(default=False, init=False)

    @property
    def trained(self) -> bool:
        """True if a gradient would update the parameter: it is claimed and not frozen."""
        return self.claimed and self.param.requires_grad

    @property
    def reached(self) -> bool:
        """True if the graph of the running backward reaches the parameter. It is False if reentrant checkpointing or
        `fully_shard` hides the parameter from the graph.
        """
        if not self.trained:
            return False
        # as in torch 2.13, autograd/graph.py, register_multi_grad_hook
        try:
            return torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(self.param).node)
        except RuntimeError:  # in torch.autograd.grad, which returns gradients to its caller
            return False


ReadyGradients = Iterable[tuple[ParamEntry, Tensor]]


class Shard:
    """Reads and writes this rank's shard of a parameter. In this class, the shard is the full parameter.

    Attributes:
        sharded: whether ranks have different elements of a parameter.
        moves: whether weights and states leave the device between uses. If so, updates are not batched.
        process_groups: the groups that together connect all ranks that train one model, in the same order on every
            rank. If the model is sharded, they are known when `ranks_of` has been called for its parameters.
    """

    sharded: ClassVar[bool] = False
    moves: ClassVar[bool] = False
    process_groups: Collection[Group] = ()

    def ranks_of(self, param: Tensor) -> Ranks | None:
        """Returns the ranks that a parameter is sharded over, or None if this rank has the full parameter."""
        return None

    def admit(self, name: str, param: Tensor) -> None:
        """Raises `UnsupportedError` if a parameter cannot be updated in its placement."""

    def span(self, param: Tensor) -> Span:
        """Returns the range of a parameter's elements on this rank."""
        return Span(tuple(param.shape), 0, param.numel(), param.numel())

    def form(self, param: Tensor) -> tuple[Any, ...]:
        """Returns the properties that its update depends on and that `model.to` or `param.data = ...` may change."""
        return param.dtype, param.device, param.shape, param.stride()

    def version(self, param: Tensor) -> tuple[Any, ...]:
        """Returns a value that changes when the weight is modified or replaced, except in-place through `.data`."""
        return param._version, param.untyped_storage()._cdata

    def quantized(self, param: Tensor) -> QuantizedWeight | None:
        """Returns the shard of a quantized parameter, or None if the parameter is not quantized."""
        return param if isinstance(param, QuantizedWeight) else None

    def stored(self, param: Tensor) -> Tensor:
        """Returns the tensor that stores the shard between uses of the parameter."""
        return param

    def read(self, param: Tensor) -> Tensor:
        """Returns the shard on the compute device, sharing the parameter's memory if possible."""
        return param.detach()

    def write(self, param: Tensor, shard: Tensor) -> None:
        """Writes back a shard that `read` returned and the caller modified."""
        if isinstance(param, QuantizedWeight):  # autograd does not see that its parts were modified
            torch.autograd.graph.increment_version(param)

    def keep(self, param: Tensor, states: dict[Any, Any]) -> dict[Any, Any]:
        """Returns the states of a parameter, with tensors moved to where they are stored between uses."""
        return states

    def lend(self, param: Tensor, states: dict[Any, Any]) -> AbstractContextManager[dict[Any, Any]]:
        """Returns a context in which states are on the compute device, and may be modified or added."""
        return nullcontext(states)

    def gather(self, param: Tensor, shard: Tensor, span: Span) -> Tensor:
        """Gathers a tensor that is sharded like a parameter, such as an optimizer state. Every rank calls it."""
        return shard

    def cut(self, full: Tensor, span: Span) -> Tensor:
        """Returns this rank's shard of a full tensor."""
        return full

    def full_tensor(self, param: Tensor) -> Tensor:
        """Returns the full parameter, not quantized. Every rank calls it."""
        return plain(self.gather(param, self.read(param), self.span(param)))

    def fill(self, param: Tensor, full: Tensor) -> None:
        """Copies a full tensor into a parameter. Each rank copies its shard."""
        shard = self.read(param)
        shard.copy_(self.cut(full, self.span(param)))
        self.write(param, shard)

    def release(self, param: Tensor) -> None:
        """Frees the gathered copy of a parameter, if there is one."""

    def settle(self) -> None:
        """Waits until weights and states are back where they are stored between uses."""

    def layout(self, record: ParamEntry, view: View) -> Layout:
        """Returns the rectangles of the shard. Raises `UnsupportedError` if the parameter cannot be viewed this way."""
        layout = Layout.of(record.span.shape, view)
        try:
            layout.views(tensors_of(self.stored(record.param))[0])
        except RuntimeError:
            raise UnsupportedError(
                f"has strides {record.param.stride()}, which cannot be viewed as {list(layout.shape)} without a copy. "
                "Make it contiguous first: param.data = param.data.contiguous()"
            ) from None
        return layout


def _only(record: ParamEntry, grad: Tensor) -> Tensor:
    return grad


@dataclass(frozen=True)
class MicroBatch:
    """One backward of a step. Its gradients are accumulated over the micro-batches of the step.

    Attributes:
        add: accumulates the gradient of a parameter. Returns the sum in the last micro-batch, and None before. By
            default, the step has one micro-batch.
        last: whether this is the last micro-batch of the step.
        earlier: parameter name → function that reads the sum of the earlier micro-batches; empty before the last one.
        wide: whether sums are float32 or wider.
    """

    add: Callable[[ParamEntry, Tensor], Tensor | None] = _only
    last: bool = True
    earlier: Mapping[str, Callable[[], Tensor]] = field(default_factory=dict)
    wide: bool = False


class Reducer:
    """Accumulates gradients over micro-batches and reduces them to the shards that they update, in an order that suits
    the placement. In this class, there is nothing to reduce.
    """

    def take(self, param: Tensor) -> Tensor:
        """Removes the gradient from a parameter. Its memory is not shared, so the caller may modify it."""
        grad = param.grad
        assert grad is not None
        param.grad = None
        if grad.layout != torch.strided:
            return grad.to_dense()
        # the gradients of a and b in a.view(-1) + b.view(-1) are views of one tensor; gradients are modified in place
        shared = torch._C._storage_Use_Count(grad.untyped_storage()._cdata) > _ONE_TENSOR
        return grad.clone() if shared else grad

    def begin(self, records: Collection[ParamEntry], micro_batch: MicroBatch) -> None:
        """Called before each backward. `records` are all parameters that may get a gradient in it."""
        self._micro_batch = micro_batch

    def reduce(self, record: ParamEntry, grad: Tensor) -> ReadyGradients:
        """Takes a gradient, and returns gradients that are ready (this one or others): summed over micro-batches,
        averaged over ranks, and cut to this rank's shard.
        """
        total = self._micro_batch.add(record, grad)
        return () if total is None else ((record, total),)

    def skip(self, record: ParamEntry) -> ReadyGradients:
        """Called if backward reaches a parameter without producing a gradient. Returns gradients that are ready."""
        return ()

    def flush(self) -> ReadyGradients:
        """Called after each backward. Returns the remaining gradients."""
        return ()

    def drop(self) -> None:
        """Discards the gradients in flight after a failed backward."""


class Placement:
    """Determines where parameters are stored and how their gradients are reduced. In this class, each parameter is on
    one device; different parameters may be on different devices.

    Attributes:
        name: the value of the option `placement`.
    """

    name: ClassVar[str] = "local"

    def __init__(self, shard: Shard, reducer: Reducer) -> None:
        self.shard = shard
        self.reducer = reducer

    def adopt(self, records: Collection[ParamEntry], model: nn.Module | None) -> None:
        """Called when an optimizer is created for these parameters, with the model if the user passed it.

        Raises:
            UnsupportedError: the parameters have another optimizer, or the model is required and was not passed.
        """
        if in_group():
            require_unwrapped([record.param for record in records])
        if "torch.distributed.fsdp" not in sys.modules:
            return
        # torch 2.13, distributed/_composable_state.py: the modules that fully_shard has sharded
        from torch.distributed._composable_state import _module_state_mapping

        params = {record.param for record in records}
        if any(not params.isdisjoint(module.parameters()) for module in list(_module_state_mapping)):
            raise UnsupportedError(
                "the model is sharded by fully_shard, and a forward without a backward left these parameters gathered. "
                "Call reshard() on every FSDPModule before model.named_parameters()"
            )

    def confirm(self, records: Collection[ParamEntry], settings: Mapping[str, Any]) -> None:
        """Called before the first backward, and before the first backward with a new param group, by every rank.

        Raises:
            ConfigError: ranks that train one model have different settings.
            UnsupportedError: the parameters were wrapped or sharded after the optimizer was created.
        """
        if in_group() and not self.shard.sharded:
            require_unwrapped([record.param for record in records])
        require_equal_settings(settings, self.shard.process_groups)

    def agree(self, failure: str | None) -> str | None:
        """Returns the failure of this rank, or the first failure of all ranks that train one model, on every rank."""
        return first_failure(failure, self.shard.process_groups)

    @contextmanager
    def raise_together(self) -> Iterator[None]:
        """If the block raises on one rank, the other ranks raise `RankError`. Every rank enters this context."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        failure = self.agree(None if error is None else f"{type(error).__name__}{on_rank()}: {error}")
        if error is not None:
            raise error
        if failure is not None:
            raise RankError(failure)

    def drifted(self, records: Collection[ParamEntry], step: int) -> list[str]:
        """Returns names of parameters that should be equal on all ranks but differ in a sample. Every rank calls it."""
        return []

    def free_copies(self, records: Collection[ParamEntry], *, updated: bool) -> None:
        """Called by every rank after each micro-batch, with `updated` after the updates of a step. Frees gathered
        copies of weights, or refreshes outdated copies.
        """
