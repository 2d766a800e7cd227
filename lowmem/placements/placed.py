"""A parameter as a placement knows it."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lowmem.tiles.layout import Span


@dataclass(eq=False)
class Placed:
    """A parameter, its name, and which elements of it are on this rank.

    claimed: an optimizer has decided how it is updated, and no other one updates it.
    """

    name: str
    param: Tensor
    span: Span
    claimed: bool = field(default=False, init=False)

    @property
    def trained(self) -> bool:
        """Returns whether it is updated when it gets a gradient: it is not frozen."""
        return self.claimed and self.param.requires_grad

    @property
    def reached(self) -> bool:
        """Returns whether the running backward updates it. Parameters that reentrant checkpointing or `fully_shard`
        hides from the graph are not reached.
        """
        if not self.trained:
            return False
        # torch 2.13, autograd/graph.py, register_multi_grad_hook asks for the gradients of a backward in this way
        try:
            return torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(self.param).node)
        except RuntimeError:  # torch.autograd.grad returns the gradient to its caller
            return False
