"""A parameter as placements see it."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lowmem.tiles.layout import Span


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
