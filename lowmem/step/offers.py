"""Contributions to gradients that layers offer during backward, to be computed as they are read."""

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lowmem.step.cycle import StepCycle
from lowmem.tiles.gradients import Contribution

Offered = Sequence[Contribution]


class _Running(dict[Tensor, list[Contribution]]):
    """The contributions of one backward, by parameter.

    Attributes:
        task: the graph task of the backward. Its thread may hold the contributions for a moment after it has failed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.task = torch._C._current_graph_task_id()

    def __call__(self) -> None: ...


class Offers:
    """The contributions that one optimizer has accepted in the running backward.

    Only autograd refers to them, by a callback at the end of the backward. So a failed backward leaves none, and a
    backward inside another one adds to them.
    """

    def __init__(self, cycle: StepCycle) -> None:
        self._cycle = cycle
        self._weak: Callable[[], _Running | None] = lambda: None

    def add(self, param: Tensor, contribution: Contribution) -> None:
        """Accepts a contribution to the gradient of a parameter."""
        if (running := self._running()) is None:
            running = _Running()
            self._weak = weakref.ref(running)
            torch.autograd.Variable._execution_engine.queue_callback(running)  # type: ignore[attr-defined]
        running.setdefault(param, []).append(contribution.copy())

    def take(self, param: Tensor) -> Offered:
        """Returns the contributions to the gradient of a parameter, and forgets them."""
        running = self._running()
        return [] if running is None else running.pop(param, [])

    def drop(self) -> None:
        """Forgets the contributions of a failed backward."""
        self._weak = lambda: None

    def _running(self) -> _Running | None:
        """The contributions of the running backward or of one around it, but not of a plain one that has failed."""
        running = self._weak()
        failed = running is not None and running.task != torch._C._current_graph_task_id() and self._cycle.idle
        return None if failed else running
