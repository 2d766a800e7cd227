"""A parameter record: one parameter and what the engine knows about it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowmem.errors import StepError
from lowmem.rules import ParamSpec, UpdateRule
from lowmem.tiles.layout import Extent, Layout, Span, grouped
from lowmem.tiles.storage import Storage, part_name


class Kept(NamedTuple):
    """A tensor that is kept for a parameter: a state, or a part of the storage of one or of the weight.

    extent, extra: as in `StateSpec`.  group: elements of a row of which it has one value; 0 if the extent is not full.
    """

    dtype: torch.dtype
    extent: Extent = "full"
    group: int = 1
    extra: tuple[int, ...] = ()


@dataclass(eq=False)
class ParamRecord:
    """One parameter of a `FusedOptimizer`.

    Attributes:
        group: its parameter group, the live one that schedulers edit.
        rule: of the group.
        span: which elements of it are on this rank.
        spec, layout: how it is updated and in which rectangles, once it is hooked.
        storage: of the weight.  state_storages: of its states of the parameter's size.
        form: what `Shard.form` was when this was decided; None: it is decided before the next step.
        extra: the other tensors of the weight's storage, which has the parameter first; () before its first update.
        computes: its gradient may be one that is computed as it is read.
        stacks: the stack that it joins, by gradient dtype; None if it is updated by itself.
        whole: compiled updates for it, by what they are special to.
        claimed: its optimizer has decided how it is updated, and no other one updates it.
        square_sum: of its last gradient, a float64 scalar.
        size: what its rule weights the norm of that by.
    """

    name: str
    param: Tensor
    group: dict[str, Any]
    rule: UpdateRule
    span: Span
    spec: ParamSpec | None = None
    layout: Layout | None = None
    storage: Storage | None = None
    state_storages: dict[str, Storage] = field(default_factory=dict)
    form: tuple[Any, ...] | None = None
    extra: tuple[Tensor, ...] = ()
    stacks: dict[torch.dtype, Any] = field(default_factory=dict)
    whole: dict[Any, Any] = field(default_factory=dict)
    computes: bool = False
    claimed: bool = False
    square_sum: Tensor | None = None
    size: Tensor | None = None

    @property
    def trained(self) -> bool:
        """Whether it is updated when it gets a gradient: it is not frozen."""
        return self.claimed and self.param.requires_grad

    @property
    def extra_names(self) -> tuple[str, ...]:
        """Names of the other tensors of the weight's storage."""
        assert self.storage is not None  # chosen when it was hooked
        return tuple(part.name for part in self.storage.parts[1:])

    @property
    def tensors(self) -> dict[str, Kept]:
        """The tensors that are kept for it, by name: the other ones of its storage, and its states."""
        assert self.spec is not None and self.storage is not None
        tensors = {part.name: Kept(part.dtype, group=part.group) for part in self.storage.parts[1:]}
        for name, state in self.spec.states.items():
            if state.extent == "full":
                parts = self.state_storages[name].parts
                tensors |= {part_name(name, part.name): Kept(part.dtype, group=part.group) for part in parts}
            else:
                dtype = state.dtype if isinstance(state.dtype, torch.dtype) else torch.float32
                tensors[name] = Kept(dtype, state.extent, 0, state.extra)
        return tensors

    def shape_of(self, kept: Kept, shape: Sequence[int] | None = None) -> tuple[int, ...]:
        """The logical shape of one of them. One of the parameter's size has that of a shard, if `shape` is given."""
        assert self.spec is not None
        if kept.extent == "full":
            return grouped(self.span.shape if shape is None else shape, kept.group)
        return self.spec.view.state_shape(kept.extent, self.span.shape) + kept.extra

    @property
    def reached(self) -> bool:
        """Whether the running backward updates it. Parameters that reentrant checkpointing or `fully_shard` hides from
        the graph are not reached.
        """
        if not self.trained:
            return False
        # torch 2.13, autograd/graph.py, register_multi_grad_hook asks for the gradients of a backward in this way
        try:
            return torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(self.param).node)
        except RuntimeError:  # torch.autograd.grad returns the gradient to its caller
            return False

    def refuse_leftover(self) -> None:
        """Raises `StepError` if the parameter has a gradient that the next one would be added to."""
        if self.param.grad is not None and self.trained:
            raise StepError(
                f"parameter {self.name!r} has a gradient in .grad already, which this step would add to its own. "
                "Call zero_grad() first; nothing can accumulate in .grad, because gradients are freed in the hooks."
            )


def listed(group: dict[str, Any], first: int) -> dict[str, Any]:
    """A parameter group whose `params` can be iterated more than once; numbered from `first` where it has no names."""
    params = group["params"]
    params = [params] if isinstance(params, Tensor) else params if isinstance(params, set) else list(params)
    if "param_names" not in group and not any(isinstance(item, tuple) for item in params):
        params = [(f"param{first + i}", param) for i, param in enumerate(params)]
    return {**group, "params": params}
