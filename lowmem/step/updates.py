"""From finished gradients to sweeps: a large parameter at once, small ones in stacks of their like."""

import functools
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lowmem.placements.local import Local
from lowmem.placements.record import ParamRecord
from lowmem.rules import OwnClip, Plan, UpdateRule
from lowmem.step.clipping import Clipping, Decision
from lowmem.step.cycle import StepCycle
from lowmem.tiles.layout import Layout
from lowmem.tiles.storage import ROUNDED_DTYPES, noise_key
from lowmem.tiles.sweep import Sweep

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
        placement: where parameters live.
        clipping: what gradients are multiplied with and clamped to as they are read.
        rounding, seed: how results become stored weights.
        batching: stack small parameters of equal plan, shape, dtype, device and group.
        compiled: run sweeps of large parameters through torch.compile.

    Attributes:
        decision: what has been settled about the step; None where nothing is known before the first update.
    """

    def __init__(
        self,
        rule: UpdateRule,
        state: MutableMapping[Tensor, dict[str, Any]],
        cycle: StepCycle,
        *,
        placement: Local,
        clipping: Clipping,
        rounding: str,
        seed: int,
        batching: bool,
        compiled: bool,
    ) -> None:
        self.rule, self.state, self.cycle = rule, state, cycle
        self.rounding, self.seed = rounding, seed
        self.decision: Decision | None = None
        self.placement, self._clipping = placement, clipping
        self._compiled = compiled
        self._batching = batching and rule.stackable
        self._kinds: dict[tuple[Any, ...], int] = {}  # of small parameters, numbered: a number is quick to look up
        self._waiting: dict[int, list[tuple[ParamRecord, Tensor]]] = {}

    def put(self, record: ParamRecord, grad: Tensor) -> None:
        """Updates a parameter by its gradient, or lets it wait for its like until a stack is full."""
        if record.param not in self.state:
            self._begin_state(record)
        size = record.span.numel
        if size > SMALL or not self._batching or not self._stackable(record):
            self._update_one(record, grad)
            return
        assert record.plan is not None  # settled when it was hooked
        kind = record.alike.get(grad.dtype)
        if kind is None:
            like = (
                id(record.group),
                record.span.shape,
                record.param.dtype,
                grad.dtype,
                record.param.device,
                record.plan,
            )
            kind = record.alike[grad.dtype] = self._kinds.setdefault(like, len(self._kinds))
        waiting = self._waiting.setdefault(kind, [])
        waiting.append((record, grad))
        if len(waiting) >= min(STACK // size, record.plan.together or STACK):
            self._update_stack(self._waiting.pop(kind))

    def put_zeros(self, records: Iterable[ParamRecord]) -> None:
        """Updates parameters that got no gradient as if it were zero, where the rule wants every parameter."""
        for record in records if self.rule.every_parameter else ():
            if record.handle is not None and not self.cycle.has_fired(record.name):
                piece = self.placement.read(record.param)
                self.put(record, piece.new_zeros(()).expand(piece.shape))

    def flush(self) -> None:
        """Updates those that still wait: no gradient will come any more."""
        while self._waiting:
            self._update_stack(self._waiting.popitem()[1])

    def drop(self) -> None:
        """Forgets those that wait: their backward died."""
        self._waiting.clear()

    def kept(self, plan: Plan, record: ParamRecord) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Logical shape and dtype of everything that is kept for a parameter, by name."""
        shape, dtype = record.span.shape, record.param.dtype
        found = {
            name: (plan.view.kept(spec.extent, shape) + spec.extra, spec.dtype or dtype)
            for name, spec in plan.states.items()
            if not spec.master or dtype != torch.float32
        }
        if self._keeps_residual(record):
            found[RESIDUAL] = shape, torch.int16
        return found

    def is_cut(self, name: str, record: ParamRecord) -> bool:
        """Whether a state has an element for each of its parameter's, and so is cut as that is."""
        return name == RESIDUAL or self.rule.is_full(name, cast(Plan, record.plan))

    def _keeps_residual(self, record: ParamRecord) -> bool:
        return self.rounding == "compensated" and record.param.dtype in ROUNDED_DTYPES

    def _begin_state(self, record: ParamRecord) -> None:
        plan, piece = cast(Plan, record.plan), self.placement.read(record.param)
        if self._keeps_residual(record):
            record.residual = torch.zeros_like(piece, dtype=torch.int16)
        state = self.state[record.param] = {}
        kept = self.kept(plan, record)
        for name, spec in plan.states.items():
            if name not in kept:
                continue
            if spec.master:
                state[name] = piece.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
                continue
            full = spec.extent == "full"
            shape = tuple(piece.shape) if full else plan.view.kept(spec.extent, record.span.shape)
            state[name] = piece.new_zeros(shape + spec.extra, dtype=spec.dtype or piece.dtype)

    def _stackable(self, record: ParamRecord) -> bool:
        """Whether pieces of parameters like this one are one tile when they are stacked, on every rank."""
        return self.placement.ranks is None or cast(Layout, record.layout).one_line

    def _update_one(self, record: ParamRecord, grad: Tensor) -> None:
        assert record.layout is not None  # settled when it was hooked
        piece = self.placement.read(record.param)
        self._sweep([record], record.layout, piece, grad, record.residual, self.state[record.param])
        self.placement.write(record.param, piece)

    def _update_stack(self, waiting: Sequence[tuple[ParamRecord, Tensor]]) -> None:
        """Updates parameters as one: everything that is theirs is stacked, and put back where it was."""
        records, grads = [record for record, _ in waiting], [grad for _, grad in waiting]
        if len(records) == 1:
            self._update_one(records[0], grads[0])
            return
        first = records[0]
        params, states = (
            [self.placement.read(record.param) for record in records],
            [self.state[record.param] for record in records],
        )
        residuals = [record.residual for record in records if record.residual is not None]
        param, residual = torch.stack(params), torch.stack(residuals) if residuals else None
        state = {name: torch.stack([own[name] for own in states]) for name in states[0]}
        if self.placement.ranks is None:
            layout = Layout.of(tuple(param.shape), cast(Plan, first.plan).view.stacked())
        else:
            layout = cast(Layout, first.layout).lines(len(records))
        self._sweep(records, layout, param, torch.stack(grads), residual, state)
        torch._foreach_copy_(params, param.unbind())
        for record, piece in zip(records, params, strict=True):
            self.placement.write(record.param, piece)
        for name, stack in state.items():
            torch._foreach_copy_([own[name] for own in states], stack.unbind())
        if residual is not None:
            torch._foreach_copy_(residuals, residual.unbind())

    def _sweep(
        self,
        records: Sequence[ParamRecord],
        layout: Layout,
        param: Tensor,
        grad: Tensor,
        residual: Tensor | None,
        state: dict[str, Any],
    ) -> None:
        first, step = records[0], self.cycle.step
        self.cycle.moved = True
        # a dispatch mode (fake tensors, a memory tracker) looks at each operation, and torch.compile has none to show
        compiled = self._compiled and param.numel() > SMALL and not torch._C._len_torch_dispatch_stack()
        sweep = Sweep(
            layout,
            param,
            grad,
            residual=residual,
            **self._reading(records, grad),
            members=len(records),
            noise_keys=lambda: [noise_key(self.seed, step, record.name) for record in records],
            stochastic=self.rounding == "stochastic",
            across=self.placement.ranks,
            compiled=compiled,
        )
        measured = self.rule.update(sweep, first.plan, state, first.group, step) or {}
        for record, square_sum in zip(records, sweep.square_sums.unbind(), strict=True):
            record.square_sum = square_sum
        for i, record in enumerate(records if measured else ()):
            record.measured = {name: values[i] for name, values in measured.items()}

    def _reading(self, records: Sequence[ParamRecord], grad: Tensor) -> dict[str, Any]:
        """What a gradient goes through on its way into the rule."""
        device, decision = grad.device, self.decision
        factor, limit = self._clipping.scale.inverse(device), self._clipping.limit(device)
        if decision is None:
            return {"factor": factor, "limit": limit}
        own = decision.own.get(id(records[0].group), OwnClip())
        parts = [part.to(device) for part in (decision.factor, own.factor) if part is not None]
        reading = {
            "clip": functools.reduce(torch.mul, parts) if parts else None,
            "own_clip": None if own.apart is None else own.apart.to(device),
            "finite": decision.finite.to(device),
        }
        if decision.prepared:
            zero = torch.zeros((), dtype=torch.float32, device=device)
            norms = [decision.measured[s.name].raw if s.name in decision.measured else zero for s in records]
            reading["square_sums"] = torch.stack(norms).square()
        if decision.prepared and grad.dtype == torch.float32:
            return reading
        return {"factor": factor, "limit": limit, **reading}
