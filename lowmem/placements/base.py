"""Placements: where the shard of each parameter is on this rank, and how gradients are reduced to it.

The classes here are the placement on one device, and the base classes of the others.
"""

import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from lowmem.errors import RankError, UnsupportedError
from lowmem.placements.ranks import Ranks, in_group, on_rank
from lowmem.tiles.layout import Layout, Span, View
from lowmem.tiles.quantized import QuantizedWeight, plain, tensors_of

# References to a storage if it has one tensor. The expression that counts them holds the second one.
_ONE_TENSOR = 2


@dataclass(eq=False)
class Placed:
    """A parameter of an optimizer.

    Attributes:
        name, param: the parameter.
        span: its elements on this rank.
        claimed: its optimizer has decided how to update it, and is the only one that does.
    """

    name: str
    param: Tensor
    span: Span
    claimed: bool = field(default=False, init=False)

    @property
    def trained(self) -> bool:
        """Returns whether a gradient would update the parameter: it is claimed and not frozen."""
        return self.claimed and self.param.requires_grad

    @property
    def reached(self) -> bool:
        """Returns whether the graph of the running backward reaches the parameter. A parameter that reentrant
        checkpointing or `fully_shard` hides from the graph is not reached.
        """
        if not self.trained:
            return False
        # torch 2.13, autograd/graph.py, register_multi_grad_hook asks for the gradients of a backward in this way
        try:
            return torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(self.param).node)
        except RuntimeError:  # torch.autograd.grad returns the gradient to its caller
            return False


Reduced = Iterator[tuple[Placed, Tensor]]


class Shard:
    """Reads and writes this rank's shard of a parameter. Here, the shard is the full parameter.

    Attributes:
        sharded: ranks have different elements of a parameter.
        moves: weights and states leave the device between two uses, so that gradients cannot wait there.
    """

    sharded: ClassVar[bool] = False
    moves: ClassVar[bool] = False

    def ranks_of(self, param: Tensor) -> Ranks | None:
        """Returns the ranks that hold a shard of a parameter; None if this rank has the full parameter."""
        return None

    def admit(self, name: str, param: Tensor) -> None:
        """Raises `UnsupportedError` for a parameter that cannot be updated in its placement."""

    def span(self, param: Tensor) -> Span:
        """Returns the range of a parameter's elements that is on this rank."""
        return Span(tuple(param.shape), 0, param.numel(), param.numel())

    def form(self, param: Tensor) -> tuple[Any, ...]:
        """Returns the properties that decide its update, and that `model.to(...)` or `param.data = ...` may change."""
        return param.dtype, param.device, param.shape, param.stride()

    def version(self, param: Tensor) -> tuple[Any, ...]:
        """Returns a value that changes when the weight is edited in place or replaced, except in place by `.data`."""
        return param._version, param.untyped_storage()._cdata

    def quantized(self, param: Tensor) -> QuantizedWeight | None:
        """Returns the shard of a quantized parameter; None if it is not quantized."""
        return param if isinstance(param, QuantizedWeight) else None

    def stored(self, param: Tensor) -> Tensor:
        """Returns the tensor that holds the shard between two uses of the parameter."""
        return param

    def read(self, param: Tensor) -> Tensor:
        """Returns the shard on the device that computes, sharing the parameter's memory if possible."""
        return param.detach()

    def write(self, param: Tensor, shard: Tensor) -> None:
        """Writes the shard back, which `read` returned and the caller has changed."""
        if isinstance(param, QuantizedWeight):  # autograd does not see that its parts have changed
            torch.autograd.graph.increment_version(param)

    def keep(self, param: Tensor, states: dict[Any, Any]) -> dict[Any, Any]:
        """Returns the states of a parameter, with their tensors where they are between two uses."""
        return states

    def lend(self, param: Tensor, states: dict[Any, Any]) -> AbstractContextManager[dict[Any, Any]]:
        """Returns a context in which states are on the device that computes, and may be changed or added."""
        return nullcontext(states)

    def gather(self, param: Tensor, shard: Tensor, span: Span) -> Tensor:
        """Gathers a tensor that is sharded like a parameter, such as an optimizer state. Every rank calls it."""
        return shard

    def cut(self, full: Tensor, span: Span) -> Tensor:
        """Returns this rank's shard of a full tensor."""
        return full

    def full_tensor(self, param: Tensor) -> Tensor:
        """Returns the full parameter, not quantized. Every rank calls it."""
        return plain(param.detach())

    @torch.no_grad()
    def fill(self, param: Tensor, full: Tensor) -> None:
        """Copies a full tensor into a parameter. Each rank takes its shard."""
        param.copy_(full)

    def release(self, param: Tensor) -> None:
        """Frees the gathered copy of a parameter, if there is one."""

    def layout(self, record: Placed, view: View) -> Layout:
        """Returns the rectangles of the shard. Raises `UnsupportedError` if the parameter has no view of that kind."""
        layout, param = Layout.of(record.span.shape, view), record.param
        try:
            layout.views(tensors_of(self.stored(param))[0])
        except RuntimeError:
            raise UnsupportedError(
                f"has strides {param.stride()}, which cannot be viewed as {list(layout.shape)} without a copy. Make "
                "it contiguous first: param.data = param.data.contiguous()"
            ) from None
        return layout


@dataclass(frozen=True)
class MicroBatch:
    """One backward of a step. Its gradients are added to the sums over the micro-batches of the step.

    Attributes:
        add: adds a gradient to the sum of its parameter. Returns the sum in the last micro-batch, None before it.
        last: the step ends with this one.
        earlier: parameter name → reads the sum of the earlier micro-batches; empty before the last one.
        wide: sums are float32 or wider.
    """

    add: Callable[[Placed, Tensor], Tensor | None]
    last: bool = True
    earlier: Mapping[str, Callable[[], Tensor]] = field(default_factory=dict)
    wide: bool = False


class Reducer:
    """Sums the gradients of micro-batches, and brings each one to the shard that it updates, in an order that suits its
    placement. Here there is nothing to reduce.
    """

    def take(self, param: Tensor) -> Tensor:
        """Removes the gradient from a parameter. Nothing else uses its elements, which the caller may change."""
        grad = param.grad
        assert grad is not None
        param.grad = None
        if grad.layout != torch.strided:
            return grad.to_dense()
        # torch hands two views of one tensor to a.view(-1) + b.view(-1); gradients are changed in place
        shared = torch._C._storage_Use_Count(grad.untyped_storage()._cdata) > _ONE_TENSOR
        return grad.clone() if shared else grad

    def begin(self, records: Collection[Placed], micro_batch: MicroBatch) -> None:
        """Called before each backward. `records` are all parameters that may get a gradient in it."""
        self._micro_batch = micro_batch

    def reduce(self, record: Placed, grad: Tensor) -> Reduced:
        """Takes a gradient. Yields gradients that are ready, this one or others: summed over micro-batches, averaged
        over ranks, and cut to this rank's shard.
        """
        total = self._micro_batch.add(record, grad)
        del grad
        if total is not None:
            yield record, total

    def skip(self, record: Placed) -> Reduced:
        """Called if the backward reaches a parameter without producing a gradient. Yields gradients that are ready."""
        yield from ()

    def flush(self) -> Reduced:
        """Called after each backward. Yields the remaining gradients."""
        yield from ()

    def drop(self) -> None:
        """Forgets the gradients in flight, after their backward has failed."""


class Placement:
    """Where parameters are, and how their gradients get there.

    Attributes:
        name: the value of the option `placement`.
        several: several ranks train one model.
    """

    name: ClassVar[str]
    several: ClassVar[bool] = False

    def __init__(self, shard: Shard, reducer: Reducer) -> None:
        self.shard, self.reducer = shard, reducer

    def adopt(self, records: Collection[Placed], model: nn.Module | None) -> None:
        """Called when an optimizer is created for these parameters, with the model if the user passed it.

        Raises:
            UnsupportedError: something else would update them, too, or the model is needed and was not passed.
        """
        if in_group():
            refuse_wrapped(records)
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

    def confirm(self, records: Collection[Placed], settings: Mapping[str, Any]) -> None:
        """Called before the first backward, and before the first one with a new param group. Every rank calls it.

        Raises:
            ConfigError: ranks that train one model have different settings.
            UnsupportedError: the parameters were wrapped or sharded after the optimizer was created.
        """
        if in_group():
            refuse_wrapped(records)

    def agree(self, failure: str | None) -> str | None:
        """Returns the failure of this rank; of ranks that train one model, the first one. Every rank calls it."""
        return failure

    @contextmanager
    def together(self) -> Iterator[None]:
        """If the block raises on one rank, raises on all of them: `RankError` on the others. Every rank enters it."""
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

    def drifted(self, records: Collection[Placed], step: int) -> list[str]:
        """Returns names of parameters that ranks should have alike and do not, judging by a sample of their elements.
        Every rank calls it.
        """
        return []

    def settle(self) -> None:
        """Waits until weights and states are where they are between two uses."""

    def free_copies(self, records: Collection[Placed], *, updated: bool) -> None:
        """Called after each micro-batch, with `updated` after the updates of a step. Frees copies of weights, or renews
        those that are outdated. Every rank calls it.
        """


class Local(Placement):
    """Full parameters on one device, or on several devices, each parameter on one of them."""

    name = "local"

    def __init__(self) -> None:
        super().__init__(Shard(), Reducer())


WRAPPED = (
    "the model is inside DistributedDataParallel, which also averages gradients, so they would be averaged twice. "
    "Remove the wrapper: the hooks of this optimizer average over ranks. With Accelerate, write model = "
    "accelerator.prepare_model(model, evaluation_mode=True)"
)

_ENGINE = (
    "the model is inside a DeepSpeed engine of ZeRO stage 1 or 2, which reduces gradients in its own buckets and "
    "would find none. Use the model without the engine, because the hooks of this optimizer average over ranks, or "
    "set stage 3 without an optimizer, and create this one after deepspeed.initialize"
)

_LATER = (
    "{} sharded the model after its optimizer was created. The optimizer refers to the original parameters and would "
    "update nothing. Call {} first, then FusedOptimizer(model.named_parameters(), model=model, ...)"
)

# Attributes of a parameter that was converted (DeepSpeed 0.19, runtime/zero/partition_parameters.py), linked to a flat
# copy (utils/mixed_precision_linkage.py), or replaced (torch 2.12, distributed/fsdp/_fully_shard/_fsdp_param.py)
_MARKS = {
    "ds_id": _LATER.format("deepspeed.initialize", "deepspeed.initialize(model=model, config=...)"),
    "_hp_mapping": _ENGINE,
    "_fsdp_orig_uid": _LATER.format("fully_shard", "fully_shard(model)"),
}

_DDP: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def _note(module: nn.Module, name: str, submodule: Any) -> None:
    """Called when a module gets a submodule. DistributedDataParallel leaves no other trace before its first use."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        _DDP.add(module)


register_module_module_registration_hook(_note)


def refuse_wrapped(records: Collection[Placed]) -> None:
    """Raises `UnsupportedError` if parameters are in a wrapper, or were sharded after their optimizer was created."""
    params = {record.param for record in records}
    if any(not params.isdisjoint(module.parameters()) for module in _DDP):
        raise UnsupportedError(WRAPPED)
    for mark, message in _MARKS.items():
        if any(hasattr(param, mark) for param in params):
            raise UnsupportedError(message)
