"""From reduced gradients to sweeps: a large parameter by itself, small ones in stacks."""

import functools
import importlib.util
import logging
import os
import shutil
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowmem.errors import ConfigError, StepError, UnsupportedError
from lowmem.options import FusedConfig
from lowmem.placements import Placement, in_group
from lowmem.placements.base import Shard
from lowmem.placements.record import ParamRecord
from lowmem.rules import ForeignRule, UpdateRule
from lowmem.step.changes import Changes
from lowmem.step.clipping import Clipping, Decision
from lowmem.step.cycle import StepCycle
from lowmem.step.stacks import Arenas, Stack, gather, scatter
from lowmem.step.whole import WholeUpdates
from lowmem.tiles.gradients import ComputedGradient, Gradient
from lowmem.tiles.graph import Compiler, try_compiler
from lowmem.tiles.layout import Layout
from lowmem.tiles.storage import ROUNDED_DTYPES, Held, Nearest, Storage, noise_key, of_state, of_weight, part_name
from lowmem.tiles.sweep import Reading, Sweep, begin_storage

logger = logging.getLogger(__name__)

# With fewer trainable elements compilation takes longer than it saves.
COMPILE_FROM = 1 << 25

# Elements up to which a parameter is small: launching its update takes longer than the update. Where small parameters
# are stacked they are not compiled, so that alone or in a stack they get the same bits, and torch sums so few elements
# in one order only.
SMALL = 1 << 14

# Elements per tile in a plan for a GPU, where there is next to nothing to keep in a tile of compiled code.
PLANNED_TILE = 1 << 16

# Elements in a stack: the gradients that wait for it are part of the memory of "one gradient".
STACK = 1 << 18


class Updates:
    """Runs the rules of parameters whose gradients are reduced.

    Args:
        state: parameter → its states, made before its first update.
        cycle: the life cycle of the step.
        placement: where parameters are.
        clipping: what happens to gradients as they are read.
        changes: counts the weights that updates change.
        config: of the optimizer.
        compiled: update large parameters by compiled code.
    """

    def __init__(
        self,
        state: MutableMapping[Tensor, dict[str, Any]],
        cycle: StepCycle,
        placement: Placement,
        clipping: Clipping,
        changes: Changes,
        config: FusedConfig,
        compiled: bool,
    ) -> None:
        self.state, self.cycle, self.seed = state, cycle, config.seed
        self._shard, self.clipping, self.changes = placement.shard, clipping, changes
        self._compiled, self._batching = compiled, config.batching
        self._whole = WholeUpdates() if compiled and not placement.shard.sharded else None
        self._stacks: dict[tuple[Any, ...], Stack] = {}  # by what their parameters have in common
        self.arenas = Arenas()

    def put(self, record: ParamRecord, grad: Gradient, decision: Decision | None) -> None:
        """Updates a parameter, or lets its gradient wait until a stack of such parameters is full."""
        if grad.dtype not in record.stacks:
            record.stacks[grad.dtype] = self._stack_of(record, grad)
        stack = record.stacks[grad.dtype]
        if stack is None:
            if record.param not in self.state:
                self.begin_state(record)
            self._update_one(record, grad, decision)
            return
        assert isinstance(grad, Tensor)  # a small gradient is never computed as it is read
        stack.records.append(record)
        stack.grads.append(grad)
        if len(stack.records) >= stack.full:
            self._update_stack(stack, decision)

    def _stack_of(self, record: ParamRecord, grad: Gradient) -> Stack | None:
        """The stack that a parameter joins with gradients of this dtype, if it is not updated by itself."""
        size, param, spec = record.span.numel, record.param, record.spec
        if isinstance(grad, ComputedGradient) or size > SMALL or not self._batching:
            return None
        assert spec is not None and record.layout is not None  # settled when it was hooked
        # shards of parameters like this one have to be one tile when they are stacked, on every rank
        if not record.rule.stackable or (self._shard.sharded and not record.layout.one_line):
            return None
        like = id(record.group), record.span.shape, param.dtype, grad.dtype, param.device, spec
        return self._stacks.setdefault(like, Stack(min(STACK // size, spec.together or STACK)))

    def put_zeros(self, records: Iterable[ParamRecord], decision: Decision | None) -> None:
        """Updates parameters that got no gradient as if it were zero, where their rule asks for it."""
        for record in records:
            if record.rule.every_parameter and record.trained and not self.cycle.has_fired(record.name):
                shard, _ = self._shard.read(record.param, {})
                self.put(record, shard.new_zeros(()).expand(shard.shape), decision)

    def flush(self, decision: Decision | None) -> None:
        """Updates stacks that are not full: no gradient will arrive in this step."""
        for stack in self._stacks.values():
            if stack.records:
                self._update_stack(stack, decision)

    def drop(self) -> None:
        """Forgets gradients that wait for a stack: their backward failed."""
        for stack in self._stacks.values():
            stack.empty()

    def begin_state(self, record: ParamRecord) -> None:
        """Makes the states of a parameter before its first update."""
        storage, (shard, _) = record.storage, self._shard.read(record.param, {})
        assert storage is not None and record.layout is not None
        tensors = {
            name: shard.new_zeros(record.shape_of(kept, shard.shape), dtype=kept.dtype)
            for name, kept in record.tensors.items()
        }
        record.extra = tuple(tensors.pop(part.name) for part in storage.parts[1:])
        if record.extra:
            begin_storage(record.layout, Held(storage, (shard, *record.extra)))
        self.state[record.param] = tensors

    def _update_one(self, record: ParamRecord, grad: Gradient, decision: Decision | None) -> None:
        assert record.layout is not None and record.spec is not None
        shard, states = self._shard.read(record.param, self.state[record.param])
        weight = (shard, *record.extra)
        reading = self.clipping.reading([record], grad, decision)
        self.cycle.moved.add(record.name)
        sample = self.changes.before([record], shard, grad)
        small = self._batching and record.span.numel <= SMALL  # has the same bits alone as in a stack
        # a dispatch mode looks at each operation, and compiled code has none to show
        whole = None if small or Compiler.failure or torch._C._len_torch_dispatch_stack() else self._whole
        if (
            whole is None
            or not isinstance(grad, Tensor)
            or not whole.update(record, weight, grad, states, reading, self.cycle.step, self.seed)
        ):
            layout = record.layout if isinstance(grad, Tensor) else grad.layout(record.spec.view)
            self._sweep([record], layout, weight, grad, states, reading)
        if sample is not None:
            self.changes.after(sample, shard)
        self._shard.write(record.param, shard, states)

    @torch.no_grad()
    def _update_stack(self, stack: Stack, decision: Decision | None) -> None:
        """Updates parameters as one: their tensors are stacked, and written back to where they were."""
        records, grads = stack.empty()
        for record in records:
            if record.param not in self.state:
                self.begin_state(record)
        if len(records) == 1:
            self._update_one(records[0], grads[0], decision)
            return
        first = records[0]
        states = [self.state[record.param] for record in records]
        arena = self.arenas.find(records, states)
        kept = gather(records, states) if arena is None else arena.stacked
        params = [record.param for record in records]
        in_place = not self._shard.sharded  # parameters that are complete, which need not be read one by one
        shards = params if in_place else [self._shard.read(param, {})[0] for param in params]
        weight = torch.stack(shards)
        if (layout := stack.layouts.get(len(records))) is None:
            assert first.spec is not None and first.layout is not None
            stacked = first.spec.view.stacked()
            layout = Layout.of(tuple(weight.shape), stacked) if in_place else first.layout.lines(len(records))
            stack.layouts[len(records)] = layout
        extra = tuple(kept[name] for name in first.extra_names)
        state = {name: kept[name] for name in states[0]}
        grad = torch.stack(grads)
        self.cycle.moved.update(record.name for record in records)
        sample = self.changes.before(records, weight, grad)
        self._sweep(records, layout, (weight, *extra), grad, state, self.clipping.reading(records, grad, decision))
        if sample is not None:
            self.changes.after(sample, weight)
        torch._foreach_copy_(shards, weight.unbind())
        for param, shard in () if in_place else zip(params, shards, strict=True):
            self._shard.write(param, shard, {})
        if arena is None:
            scatter(kept, records, states)

    def _sweep(
        self,
        records: Sequence[ParamRecord],
        layout: Layout,
        weight: tuple[Tensor, ...],
        grad: Gradient,
        state: dict[str, Any],
        reading: Reading,
    ) -> None:
        first, step = records[0], self.cycle.step
        assert first.storage is not None
        # a dispatch mode (fake tensors, a memory tracker) looks at each operation, and compiled code has none to show
        compiled = self._compiled and Compiler.failure is None and weight[0].numel() > SMALL
        planned = compiled and weight[0].device.type == "meta"  # a GPU's compiled code has no temporaries of a tile
        sweep = Sweep(
            layout,
            Held(first.storage, weight),
            grad,
            reading,
            members=len(records),
            noise_keys=lambda: [noise_key(self.seed, step, record.name) for record in records],
            step=step,
            across=self._shard.ranks_of(first.param),
            compiled=compiled and not torch._C._len_torch_dispatch_stack(),
            tile=PLANNED_TILE if planned else None,
        )
        named: dict[str, Any] = state
        if first.state_storages:
            named = dict(state)
            for name, storage in first.state_storages.items():
                parts = tuple(named.pop(part_name(name, part.name)) for part in storage.parts)
                named[name] = Held(storage, parts)
        sizes = first.rule.update(sweep, first.spec, named, first.group, step)
        for record, square_sum in zip(records, sweep.square_sums.unbind(), strict=True):
            record.square_sum = square_sum
        for record, size in zip(records, () if sizes is None else sizes.unbind(), strict=sizes is not None):
            record.size = size


def settle(record: ParamRecord, shard: Shard) -> None:
    """Decides how a parameter is updated and stored, by what its group says now.

    A storage with groups holds parameters whose rows consist of complete groups, also when they are sharded. Others,
    mostly vectors, are held as float32 states, and weights rounded to the nearest value.

    Raises:
        UnsupportedError: its rule cannot update it.
    """
    record.span = shard.span(record.param)
    group, shape, dtype = record.group, record.span.shape, record.param.dtype
    try:
        record.rule.admit(record.param, group)
        record.spec = spec = record.rule.spec(record.name, shape, group)
        record.layout = shard.layout(record, spec.view)
    except UnsupportedError as error:
        raise UnsupportedError(f"parameter {record.name!r} of shape {list(shape)} {error}") from None
    record.stacks.clear()
    record.whole.clear()

    def fitting(storage: Storage, other: Storage) -> Storage:
        fits = spec.view.has_groups(shape, storage.group) and record.span.size % storage.group == 0
        return storage if fits else other

    rounding = rounding_of(record.rule, group, dtype)
    if rounding == "nearest" and dtype in ROUNDED_DTYPES:
        _warn_of_lost_updates(dtype, record.rule.name if isinstance(record.rule, ForeignRule) else None)
    record.storage = fitting(of_weight(rounding, dtype), Nearest(dtype))
    record.state_storages = {}
    for name, state in spec.states.items():
        if state.extent == "full":
            if state.dtype is None:
                chosen = fitting(of_state(group["state_storage"], state.signed), Nearest(torch.float32))
            else:
                chosen = Nearest(dtype if state.dtype == "weight" else state.dtype)
            record.state_storages[name] = chosen


def refuse_misfits(record: ParamRecord, state: Mapping[str, Any], shard: Shard) -> None:
    """Raises `StepError` if a parameter has changed so that its states, or a residual or master copy, do not fit it."""
    assert record.form is not None
    was, now = record.form[:3], shard.form(record.param)[:3]
    trial = replace(record, state_storages={}, stacks={}, whole={})
    settle(trial, shard)
    expected, shape = trial.tensors, trial.span.shape
    # a residual or a master copy is that of one weight, and what a foreign class keeps may be
    of_weight = trial.extra_names or record.extra_names or not state.keys() <= expected.keys()
    if was != now and (of_weight or was[1:2] != now[1:2] or expected != record.tensors or shape != record.span.shape):
        raise StepError(
            f"parameter {record.name!r} has changed from {was} to {now}, and its optimizer state does not fit it. Make "
            "the optimizer after model.to(...), or convert the model back, or load a state that fits"
        )


def rounding_of(rule: UpdateRule, group: Mapping[str, Any], dtype: torch.dtype) -> str:
    """The rounding of a group's weights of this dtype, where "auto" is that of its rule."""
    return rule.rounding(group, dtype) if group["rounding"] == "auto" else str(group["rounding"])


def weights_in_words(records: Iterable[ParamRecord]) -> str:
    """The dtypes of weights, with their rounding."""
    held = ((r.param.dtype, rounding_of(r.rule, r.group, r.param.dtype)) for r in records)
    return ", ".join(
        f"{str(dtype).removeprefix('torch.')} ({f'rounding {how}' if dtype in ROUNDED_DTYPES else 'exact'})"
        for dtype, how in dict.fromkeys(held)
    )


@functools.cache
def _warn_of_lost_updates(dtype: torch.dtype, cls: str | None) -> None:
    """Warns of weights that are rounded to the nearest value, once per process. cls: of another package, if it is."""
    if in_group() and dist.get_rank() > 0:
        return
    logger.warning(
        "%s weights with rounding 'nearest'%s lose every update smaller than about %.2g %% of the weight, at the usual "
        "learning rates of fine-tuning most of them. Set rounding='stochastic', which loses none and needs %s",
        str(dtype).removeprefix("torch."), f", unless {cls} itself does otherwise," if cls else "",
        25 * torch.finfo(dtype).eps, "a float32 copy of one parameter at a time" if cls else "no more memory",
    )  # fmt: skip


def takes_computed(record: ParamRecord, placement: Placement) -> bool:
    """Whether a parameter can be updated with a gradient that is computed as it is read."""
    span, reducer = record.span, placement.reducer
    matrix = len(span.shape) == 2 and span.numel > SMALL and record.param.is_contiguous()
    becomes_shard = placement.shard.sharded  # of the tensor that it is reduced to
    return matrix and reducer.takes_computed and (becomes_shard or not record.rule.needs_dense_gradient)


def decide_compilation(requested: bool | str, records: Collection[ParamRecord]) -> bool:
    """Whether to compile: as requested, or with "auto" where it pays.

    Raises:
        ConfigError: it is True where there is no compiler that works.
    """
    devices = {record.param.device.type for record in records}
    if requested is True and not torch._C._len_torch_dispatch_stack():
        for device in devices - {"meta"}:
            try:
                try_compiler(device)
            except Exception as error:
                raise ConfigError(f"compile=True, but compiling for {device!r} fails; use 'auto': {error}") from error
    size = sum(r.span.held for r in records if r.param.requires_grad)
    return requested is True or (requested == "auto" and size >= COMPILE_FROM and all(map(has_compiler, devices)))


def has_compiler(device: str) -> bool:
    """Whether there is what compiles for a type of device."""
    if device == "cpu":
        return any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++") if name)
    return device == "meta" or importlib.util.find_spec("triton") is not None  # "meta" is a GPU that is planned for
