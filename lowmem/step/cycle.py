"""The life cycle of a step. A loop whose steps would differ from ordinary training raises an error."""

import logging
import sys

import torch

from lowmem.errors import StepError

logger = logging.getLogger(__name__)

_NESTED = (
    "a plain loss.backward() with reentrant activation checkpointing runs one backward inside another, so lowmem "
    "cannot tell where the step ends. Use checkpoint(..., use_reentrant=False), or opt.backward(loss)"
)

_EXPLICIT = -1  # no graph task has this number


class StepCycle:
    """The state of a step.

        idle ── begin ──► open: a backward runs ── end ──► idle, or waiting for the next micro-batch
                              └── fail ──► idle, as if the step had not begun; torn if an update had begun

    A step may have several backwards: micro-batches, or a measuring and an updating pass. `begin` is called by
    `FusedOptimizer.backward`, or by the first hook of a plain `loss.backward()`.

    Attributes:
        step: the number of this step, or of the last one.
        seed: the seed of stochastic rounding. The random numbers also depend on the step.
        moved: whether an update has begun in the running backward.
        waiting: the number of micro-batches that have ended in an unfinished step.
        last: whether the running or latest backward completes its step.
        loop_steps: whether the training loop calls `optimizer.step()`.
        torn: the reason why training cannot continue, if a step failed after its first update.
    """

    def __init__(self, seed: int) -> None:
        self.step, self.seed = 0, seed
        self.waiting = 0
        self.moved = False
        self.last = True
        self.loop_steps = False
        self.torn: str | None = None
        self._running: int | None = None  # the graph task of a plain backward that is open, or _EXPLICIT
        self._fired: dict[str, int] = {}  # parameters with a gradient in this step, with the last backward that had it
        self._backward = 0  # the number of this backward
        self._steps = 0  # number of steps since the last `stepped`

    @property
    def idle(self) -> bool:
        """True if no backward is running, or a plain one has failed."""
        return self._running not in (_EXPLICIT, torch._C._current_graph_task_id())

    def begin(self, last: bool, *, explicit: bool = False, nests: bool = False) -> None:
        """Opens a step, or the next micro-batch of a waiting step.

        Args:
            last: whether this backward completes the step.
            explicit: whether `FusedOptimizer.backward` runs it.
            nests: whether it will run nested backwards.

        Raises:
            StepError: see `require_can_begin`; or this backward would run inside another, or contain other backwards.
        """
        self.require_can_begin()
        if nests or (not explicit and _inside_custom_backward()):
            raise StepError(_NESTED)
        self._running, self.last = _EXPLICIT if explicit else torch._C._current_graph_task_id(), last
        self._backward += 1
        if not self.waiting:
            self._fired.clear()
            self.moved = False
            self._steps += 1
            self.step += 1

    def require_can_begin(self) -> None:
        """Raises `StepError` if the last step is torn or open, or the next backward would have to accumulate."""
        self._require_not_torn("train on")
        if self._running is not None:
            raise StepError("a backward started inside the step of another backward. Let the first one finish")
        if self.loop_steps and self._steps and not self.waiting:
            raise StepError(
                "a second backward before step(), or a gradient in .grad: the first backward has already updated the "
                "weights. To accumulate gradients, run every backward of a step except the last inside `with "
                "opt.accumulate():`."
            )

    def fired(self, name: str, *, in_parts: bool) -> None:
        """Records a complete gradient. Raises `StepError` for a parameter's second gradient, unless `in_parts`."""
        if self._fired.get(name) == self._backward and not in_parts:
            raise StepError(
                f"parameter {name!r} got its gradient in two parts within one backward, and the first part has already "
                "been used as the complete gradient. Reentrant activation checkpointing of a module with a tied or "
                "shared weight causes this, as does a loss that caches gradients. Use checkpoint(..., "
                "use_reentrant=False), or policy='deferred'."
            )
        self.notice(name)

    def notice(self, name: str) -> None:
        """Records a gradient that at least one rank has."""
        self._fired[name] = self._backward

    def has_fired(self, name: str) -> bool:
        """Returns whether a parameter got a gradient in the open step, or in the last one."""
        return name in self._fired

    def next_pass(self) -> None:
        """Called after a measuring pass, before the second backward of the same step."""
        self.require_gradients()
        self._backward += 1

    def missed(self) -> set[str]:
        """Returns the parameters that got a gradient in this step, but not in its latest backward."""
        return {name for name, backward in self._fired.items() if backward != self._backward}

    def end(self) -> None:
        """Called when a micro-batch has ended, or the updates of a step are done."""
        self._running = None
        self.waiting = 0 if self.last else self.waiting + 1
        self.moved = False

    def require_gradients(self) -> None:
        """Raises `StepError` if no parameter got a gradient."""
        if not self._fired:
            raise StepError(
                "no parameter of this optimizer got a gradient: the loss does not depend on them, all are frozen, the "
                "first pass of 'two_pass' does not reach them, or fully_shard was called after the optimizer was "
                "created. With reentrant activation checkpointing, set use_reentrant=False. With a loss that caches "
                "gradients (Cached...Loss), set policy='deferred' (in a trainer, fused=FusedConfig(...))"
            )

    def fail(self, reason: str) -> None:
        """Called when a backward has failed. The step is torn if an update had begun; otherwise it is undone."""
        self._running = None
        if self.moved:
            count = len(self._fired) - len(self.missed())
            self.tear(
                f"{reason} after {count} parameter(s) got their gradient, so some weights may be from this step and "
                "others from the one before"
            )
        else:
            self._undo()

    def tear(self, reason: str) -> None:
        """Prevents training from continuing with the weights of this step."""
        self.torn = f"step {self.step} is torn: {reason}"

    def detect_failure(self) -> bool:
        """Ends the step of a plain backward that has failed, which autograd does not report: it is no longer the
        running one. Returns whether there was one.
        """
        if self._running is None or not self.idle:
            return False
        if self.waiting:
            logger.warning("a backward failed, and the %d micro-batch(es) before it were dropped", self.waiting)
        self.fail(_NESTED if _inside_custom_backward() else "a plain loss.backward() ended with an error")
        return True

    def _undo(self) -> None:
        self.step -= 1
        self._steps -= 1
        self.waiting = 0

    def settle(self, skipped: bool, replayed: bool) -> None:
        """Called when the host knows how the last step ended. A skipped step does not count.

        Args:
            skipped: whether nothing was updated.
            replayed: False if a second pass did not compute the same gradients as the first.
        """
        if not replayed:
            self.tear(
                "its second pass computed other gradients than the first, so they were clipped by a wrong norm. The "
                "model or the loss is not deterministic. Use policy='deferred'"
            )
        self.step -= skipped

    def stepped(self) -> None:
        """Called by `optimizer.step()`. Raises `StepError` if several backwards before it were steps."""
        backwards, self._steps = self._steps, 0
        if backwards > 1:
            raise StepError(
                f"{backwards} backwards came before this step(), and each of them has updated the weights. To "
                "accumulate gradients, run every backward of a step except the last inside `with opt.accumulate():`."
            )
        self.loop_steps |= backwards > 0

    def discard(self) -> None:
        """Called by `optimizer.zero_grad()`: drops the micro-batches of an unfinished step. Raises `StepError` if a
        gradient that would be dropped has updated the weights.
        """
        if self.waiting:
            self._undo()
        elif self.loop_steps and self._steps:
            raise StepError(
                "zero_grad() before step(): it would drop a gradient that backward has already used to update the "
                "weights. Run a backward that should not update them inside `with opt.paused():`"
            )

    def _require_not_torn(self, intention: str) -> None:
        """Raises `StepError` if the last step is torn."""
        if self.torn is not None:
            raise StepError(
                f"cannot {intention}: {self.torn}. Load a checkpoint (load_state_dict), or keep the weights as they "
                "are with accept_torn_step()."
            )

    def require_idle(self, intention: str) -> None:
        """Raises `StepError` in the middle of a step, or if one is torn."""
        self._require_not_torn(intention)
        if self._running is not None:
            raise StepError(f"cannot {intention} in the middle of step {self.step}: its backward is still running")
        if self.waiting:
            raise StepError(
                f"cannot {intention} in the middle of step {self.step}: {self.waiting} micro-batch(es) have been "
                "accumulated, but the last backward of the step, outside `with opt.accumulate():`, has not run"
            )

    def accept_torn(self) -> None:
        """Continues from the weights as they are, although the last step may be torn."""
        self.torn = self._running = None
        self._steps = self.waiting = 0


def _inside_custom_backward() -> bool:
    """Returns whether the backward of a Python autograd function has started this one (FSDP2 runs hooks within it)."""
    frame = sys._getframe()
    begun = False
    while frame is not None:
        begun |= frame.f_code in (torch.autograd.backward.__code__, torch.autograd.grad.__code__)
        if begun and frame.f_code is torch.autograd.function.BackwardCFunction.apply.__code__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
