"""From finished gradients to sweeps: a large parameter at once, small ones in stacks of their like."""

from collections.abc import MutableMapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lowmem.layout import Layout
from lowmem.placements.local import Local
from lowmem.policies import StepCycle
from lowmem.rounding import ROUNDED_DTYPES, noise_key
from lowmem.rules import Plan, UpdateRule
from lowmem.slots import Slot
from lowmem.sweep import Sweep

# The saved name of what compensated rounding keeps.
RESIDUAL = "residual"

# Elements up to which a parameter is small: launching its update takes longer than the update. Small parameters are
# never compiled, so that alone or in a stack they get the same bits, and torch sums so few elements in one order only.
SMALL = 1 << 14

# Elements in a stack: what waits in it is part of the memory of "one gradient".
STACK = 1 << 18


class Updates:
    """Runs a rule on parameters whose gradients are finished.

    Args:
        rule: the rule.
        state: parameter → its states, made before its first update.
        cycle: the step that updates are of.
        rounding, seed: how results become stored weights.
        factor: what gradients are multiplied with as they are read.
        limit: what they are then clamped to, ± this.
        batching: stack small parameters of equal plan, shape, dtype, device and group.
        compiled: run sweeps of large parameters through torch.compile.
    """

    def __init__(
        self,
        rule: UpdateRule,
        state: MutableMapping[Tensor, dict[str, Any]],
        cycle: StepCycle,
        *,
        rounding: str,
        seed: int,
        factor: float | None,
        limit: float | None,
        batching: bool,
        compiled: bool,
    ) -> None:
        self.rule, self.state, self.cycle = rule, state, cycle
        self.rounding, self.seed = rounding, seed
        self._compiled = compiled
        self._factor, self._limit = factor, limit
        self._batching = batching and rule.stackable
        self._constants: dict[torch.device, tuple[Tensor | None, Tensor | None]] = {}
        self._waiting: dict[tuple[Any, ...], list[tuple[Slot, Tensor]]] = {}

    def put(self, slot: Slot, grad: Tensor, placement: Local) -> None:
        """Updates a parameter by its gradient, or lets it wait for its like until a stack is full."""
        if slot.param not in self.state:
            self.state[slot.param] = self._new_state(slot, placement)
        size = slot.param.numel()
        if size > SMALL or not self._batching:
            self._update_one(slot, grad)
            return
        assert slot.plan is not None  # settled when it was hooked
        like = (id(slot.group), slot.param.shape, slot.param.dtype, slot.param.device, slot.plan)
        waiting = self._waiting.setdefault(like, [])
        waiting.append((slot, grad))
        if len(waiting) >= min(STACK // size, slot.plan.together or STACK):
            self._update_stack(self._waiting.pop(like))

    def flush(self) -> None:
        """Updates those that still wait: backward has ended."""
        while self._waiting:
            self._update_stack(self._waiting.popitem()[1])

    def drop(self) -> None:
        """Forgets those that wait: their backward died."""
        self._waiting.clear()

    def kept(self, plan: Plan, param: Tensor) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of everything that is kept for a parameter, by name."""
        shape = tuple(param.shape)
        found = {
            name: (plan.view.kept(spec.extent, shape) + spec.extra, spec.dtype or param.dtype)
            for name, spec in plan.states.items()
            if not spec.master or param.dtype != torch.float32
        }
        if self._keeps_residual(param):
            found[RESIDUAL] = shape, torch.int16
        return found

    def _keeps_residual(self, param: Tensor) -> bool:
        return self.rounding == "compensated" and param.dtype in ROUNDED_DTYPES

    def _new_state(self, slot: Slot, placement: Local) -> dict[str, Any]:
        plan, param = cast(Plan, slot.plan), slot.param
        if self._keeps_residual(param):
            slot.residual = torch.zeros_like(param, dtype=torch.int16)
        kept = self.kept(plan, param)
        return {name: placement.new_state(spec, param, plan.view) for name, spec in plan.states.items() if name in kept}

    def _update_one(self, slot: Slot, grad: Tensor) -> None:
        assert slot.layout is not None  # settled when it was hooked
        self._sweep([slot], slot.layout, slot.param, grad, slot.residual, self.state[slot.param])

    def _update_stack(self, waiting: Sequence[tuple[Slot, Tensor]]) -> None:
        """Updates parameters as one: everything that is theirs is stacked, and put back where it was."""
        slots, grads = [slot for slot, _ in waiting], [grad for _, grad in waiting]
        if len(slots) == 1:
            self._update_one(slots[0], grads[0])
            return
        params, states = [slot.param.detach() for slot in slots], [self.state[slot.param] for slot in slots]
        residuals = [slot.residual for slot in slots if slot.residual is not None]
        param, residual = torch.stack(params), torch.stack(residuals) if residuals else None
        state = {name: torch.stack([own[name] for own in states]) for name in states[0]}
        layout = Layout.whole(tuple(param.shape), cast(Plan, slots[0].plan).view.stacked())
        self._sweep(slots, layout, param, torch.stack(grads), residual, state)
        torch._foreach_copy_(params, param.unbind())
        for name, stack in state.items():
            torch._foreach_copy_([own[name] for own in states], stack.unbind())
        if residual is not None:
            torch._foreach_copy_(residuals, residual.unbind())

    def _sweep(
        self,
        slots: Sequence[Slot],
        layout: Layout,
        param: Tensor,
        grad: Tensor,
        residual: Tensor | None,
        state: dict[str, Any],
    ) -> None:
        first, step = slots[0], self.cycle.step
        self.cycle.moved = True
        factor, limit = self._factor_and_limit(param.device)
        # a dispatch mode (fake tensors, a memory tracker) looks at each operation, and torch.compile has none to show
        compiled = self._compiled and first.param.numel() > SMALL and not torch._C._len_torch_dispatch_stack()
        sweep = Sweep(
            layout,
            param,
            grad,
            residual=residual,
            factor=factor,
            limit=limit,
            noise_keys=[noise_key(self.seed, step, slot.name) for slot in slots],
            stochastic=self.rounding == "stochastic",
            compiled=compiled,
        )
        measured = self.rule.update(sweep, first.plan, state, first.group, step) or {}
        for i, slot in enumerate(slots):
            slot.square_sum = sweep.square_sums[i]
            slot.measured = {name: values[i] for name, values in measured.items()}

    def _factor_and_limit(self, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        if device not in self._constants:

            def constant(value: float | None) -> Tensor | None:
                return None if value is None else torch.full((), value, dtype=torch.float32, device=device)

            self._constants[device] = constant(self._factor), constant(self._limit)
        return self._constants[device]
