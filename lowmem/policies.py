"""When an update happens, and the life cycle of a step that every policy obeys."""

import sys

import torch

from lowmem.errors import ConfigError, StepError, UnsupportedError

POLICIES = ("immediate",)

_NESTED = (
    "a plain loss.backward() with reentrant activation checkpointing runs one backward inside another, and a step "
    "cannot tell where it ends. Use checkpoint(..., use_reentrant=False), or opt.backward(loss)"
)


def choose(policy: str, *, clip_norm: float | None) -> str:
    """The policy asked for; with `auto` the cheapest that is exact for what was asked.

    Raises:
        ConfigError: there is no such policy.
        UnsupportedError: the policy cannot keep the promise that was asked of it.
    """
    if policy not in ("auto", *POLICIES):
        raise ConfigError(f"policy {policy!r} is unknown; known are auto, {', '.join(POLICIES)}")
    if clip_norm is not None:
        raise UnsupportedError(
            f"clip_norm={clip_norm!r}: policy 'immediate' updates a parameter before the norm over all gradients is "
            "known, so it cannot clip by it. Leave clip_norm out (in a Hugging Face trainer: max_grad_norm=0) and use "
            "clip_value; 'adalomo' also normalises each update by itself (clip_threshold)."
        )
    return "immediate"


def refuse_norm(policy: str, option: str | None) -> None:
    """Raises `UnsupportedError` if a rule's `option` needs the norm over all gradients and the policy has none."""
    if option is not None:
        raise UnsupportedError(
            f"{option}: clipping by the norm over all gradients takes a policy that knows it before the first update "
            f"('two_pass' or 'deferred', which are not available yet); {policy!r} updates each parameter in backward. "
            "Leave the option out; clip_value, and the rule's own update clipping, work."
        )


class StepCycle:
    """One step: idle → open while a backward runs → idle; torn when a backward died after it had moved weights.

    `begin` is explicit in `FusedOptimizer.backward`, or implied by the first hook of a plain `loss.backward()`.

    Attributes:
        step: the number of this step, or of the last one.
        moved: whether an update of it has begun.
    """

    def __init__(self) -> None:
        self.step = 0
        self.moved = False
        self.torn: str | None = None
        self._graph_task: int | None = None  # of a plain backward: tells a new one from the one that was begun
        self._open = False
        self._explicit = False
        self._fired: set[str] = set()
        self._backwards = 0  # since the last `stepped`
        self._loop_steps = False  # the training loop calls `optimizer.step()`

    @property
    def idle(self) -> bool:
        """No step is open."""
        return not self._open

    def begin(self, explicit: bool) -> None:
        """Opens a step.

        Raises:
            StepError: the step before is torn or still open, or this backward would have to accumulate.
        """
        self._notice_death()
        self.refuse_torn("train on")
        if self._open:
            raise StepError("a backward began inside another one's step; let the first one finish")
        if self._loop_steps and self._backwards:
            raise StepError(
                "a second backward before step(): policy 'immediate' has updated the weights in the first one and "
                "cannot accumulate gradients. Use gradient_accumulation_steps=1 with a larger batch."
            )
        if not explicit and _inside_custom_backward():
            raise StepError(_NESTED)
        self._open, self._explicit = True, explicit
        self._graph_task = torch._C._current_graph_task_id()
        self._fired.clear()
        self.moved = False
        self._backwards += 1
        self.step += 1

    def fired(self, name: str) -> bool:
        """Notes a parameter's finished gradient; True if this hook opened the step itself (a plain backward).

        Raises:
            StepError: the parameter's hook fired twice, or the backward before this one died.
        """
        self._notice_death()
        opened = not self._open
        if opened:
            self.begin(explicit=False)
        if name in self._fired:
            raise StepError(
                f"parameter {name!r} got its gradient in two parts within one backward, and the first part has been "
                "applied already. Reentrant activation checkpointing of a module whose weight is used elsewhere "
                "(tied or shared) does this: use checkpoint(..., use_reentrant=False)."
            )
        self._fired.add(name)
        return opened

    def has_fired(self, name: str) -> bool:
        """Whether a parameter got its gradient in the step that is open, or the last one."""
        return name in self._fired

    def end(self) -> None:
        """Closes the step.

        Raises:
            StepError: no parameter got a gradient.
        """
        self._open = False
        if not self._fired:
            self._undo()
            raise StepError(
                "no parameter of this optimizer got a gradient: the loss does not depend on them, or all are frozen"
            )

    def fail(self, reason: str) -> None:
        """A backward died: nothing happened yet if no update has begun, else the step is torn."""
        self._open = False
        if self.moved:
            done = len(self._fired)
            self.torn = f"step {self.step} is torn: {reason} after {done} parameter(s) had got their gradient"
        else:
            self._undo()

    def _notice_death(self) -> None:
        """A plain backward that dies tells nobody: it is found out by the next one."""
        if self._open and not self._explicit and torch._C._current_graph_task_id() != self._graph_task:
            self.fail(_NESTED if _inside_custom_backward() else "a plain loss.backward() ended with an error")

    def _undo(self) -> None:
        self.step -= 1
        self._backwards -= 1

    def stepped(self) -> None:
        """The training loop called `optimizer.step()`."""
        self._loop_steps = True
        self._backwards = 0

    def refuse_torn(self, intention: str) -> None:
        """Raises `StepError` if the weights are a mixture of two steps."""
        if self.torn is not None:
            raise StepError(
                f"cannot {intention}: {self.torn}, so the weights are a mixture of two steps. Load a checkpoint "
                "(load_state_dict), or accept them as they are with accept_torn_step()."
            )

    def refuse_open(self, intention: str) -> None:
        """Raises `StepError` while a backward runs or if one has torn the step."""
        self._notice_death()
        self.refuse_torn(intention)
        if self._open:
            raise StepError(f"cannot {intention} in the middle of step {self.step}: its backward is still running")

    def reset(self, step: int) -> None:
        """A clean state at `step`: after loading, or on the user's word."""
        self.step = step
        self.torn = None
        self._open = False
        self._backwards = 0


def _inside_custom_backward() -> bool:
    """Whether a Python autograd function's backward is on the stack: then this backward runs inside another."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is torch.autograd.function.BackwardCFunction.apply.__code__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
