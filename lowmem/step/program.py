"""Programs, which define the update and the storage of one kind of parameters. Created when a parameter is claimed."""

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lowmem.errors import UnsupportedError
from lowmem.placements import in_group
from lowmem.placements.base import ParamEntry, Shard
from lowmem.placements.ranks import Ranks
from lowmem.rules import ParamSpec, UpdateRule
from lowmem.step.results import Result
from lowmem.tiles.layout import Extent, Layout, Span, grouped
from lowmem.tiles.storage import (
    FLOAT32,
    ROUNDED_DTYPES,
    SMALLEST_GROUPED,
    TABLE,
    Float,
    Storage,
    StoredTensor,
    of_state,
    of_weight,
    part_name,
)
from lowmem.tiles.stored import StoredTiles
from lowmem.tiles.sweep import Sweep

logger = logging.getLogger(__name__)


class TensorSpec(NamedTuple):
    """Spec of one stored tensor of a state or a weight, whose storage may have several tensors.

    extent, extra: see `StateSpec`.  group: number of elements of a row per value; 0 if the extent is not full.
    """

    dtype: torch.dtype
    extent: Extent = "full"
    group: int = 1
    extra: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Program:
    """The update of all parameters that have the same group, shape, dtype and device.

    Attributes:
        rule, spec: the rule and the spec of the parameters.
        span: the elements of each parameter on this rank.  layout: their rectangles.
        ranks: the ranks that each parameter is sharded over; None if it is not sharded.
        weight: the storage of the weight.  states: the storages of states that have the parameter's size, by name.
        state_storage: the option that selects these storages; None if the rule fixes every dtype.
        members: number of parameters that it updates at once, as a stack.
        compiled: its compiled code by kind of arguments; None where compilation is not possible.
    """

    rule: UpdateRule
    spec: ParamSpec
    span: Span
    layout: Layout
    ranks: Ranks | None
    weight: Storage
    states: Mapping[str, Storage]
    state_storage: str | None
    members: int = 1
    compiled: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)
    _stacked: dict[int, "Program"] = field(default_factory=dict, init=False, repr=False)

    @functools.cached_property
    def extra_names(self) -> tuple[str, ...]:
        """Names of the tensors that store the weight together with the parameter, or instead of it."""
        return tuple(part.name for part in self.weight.parts if part.name)

    @functools.cached_property
    def tensor_specs(self) -> dict[str, TensorSpec]:
        """The specs of a parameter's stored tensors, by name: `extra_names` and its states."""
        specs = {part.name: TensorSpec(part.dtype, group=part.group) for part in self.weight.parts if part.name}
        for name, state in self.spec.states.items():
            if state.extent == "full":
                parts = self.states[name].parts
                specs |= {part_name(name, part.name): TensorSpec(part.dtype, group=part.group) for part in parts}
            else:
                dtype = state.dtype if isinstance(state.dtype, torch.dtype) else torch.float32
                specs[name] = TensorSpec(dtype, state.extent, 0, state.extra)
        return specs

    @functools.cached_property
    def created(self) -> list[str]:
        """Names of the tensors that are created before the first update. A quantized weight already has its parts."""
        existing = self.extra_names if self.weight.is_quantized else ()
        return [name for name in self.tensor_specs if name not in existing]

    def shape_of(self, tensor: TensorSpec, shape: Sequence[int] | None = None) -> tuple[int, ...]:
        """Returns the logical shape of a stored tensor, for the full parameter, or for a shard of this shape."""
        if tensor.extent == "full":
            return grouped(self.span.shape if shape is None else shape, tensor.group)
        return self.spec.view.state_shape(tensor.extent, self.span.shape) + tensor.extra

    def stacked(self, count: int) -> "Program":
        """Returns the program that updates `count` such parameters as one."""
        if count not in self._stacked:
            if self.ranks is None:
                layout = Layout.of((count, *self.span.shape), self.spec.view.stacked())
            else:
                layout = self.layout.lines(count)
            self._stacked[count] = replace(self, layout=layout, members=count)
        return self._stacked[count]

    @functools.cached_property
    def small_states(self) -> dict[str, TensorSpec]:
        """The specs of the states that do not have the size of the parameter, by name."""
        return {name: tensor for name, tensor in self.tensor_specs.items() if tensor.extent != "full"}

    @functools.cached_property
    def group(self) -> int:
        """The largest number of elements of a row that a storage encodes together."""
        return max(storage.group for storage in (self.weight, *self.states.values()))

    @functools.cached_property
    def draws(self) -> bool:
        """True if any storage uses random numbers."""
        return any(storage.draws for storage in (self.weight, *self.states.values()))

    def full_states(self, states: Mapping[str, Tensor]) -> dict[str, StoredTensor]:
        """Returns the states that have the parameter's size, with their storages. states: the tensors of all states."""
        return {
            name: StoredTensor(storage, tuple(states[part_name(name, part.name)] for part in storage.parts))
            for name, storage in self.states.items()
        }

    def run(self, tiles: StoredTiles, states: dict[str, Any]) -> Result:
        """Updates parameters tile by tile. A third-party optimizer puts its new states into `states`."""
        if not self.rule.materializes:
            states = {name: states[name] for name in self.small_states} | self.full_states(states)
        sweep = Sweep(tiles)
        sizes = self.rule.update(sweep, self.spec, states)
        return Result(sweep.square_sums, sizes)


def make_program(placed: ParamEntry, rule: UpdateRule, group: Mapping[str, Any], shard: Shard) -> Program:
    """Creates the program of a parameter from the current settings of its group.

    A storage with groups requires that rows and shards consist of complete groups. Parameters with fewer than
    `SMALLEST_GROUPED` elements, mostly vectors, have float32 states and stochastic rounding instead.

    Raises:
        UnsupportedError: its rule or a storage does not support the parameter.
    """
    span, dtype, states = placed.span, placed.param.dtype, dict[str, Storage]()

    def fitting(storage: Storage, other: Storage) -> Storage:
        if storage.group > 1 and span.numel < SMALLEST_GROUPED:
            return other
        if not spec.view.has_groups(span.shape, storage.group) or span.size % storage.group:
            raise UnsupportedError(
                f"cannot be stored in groups of {storage.group} elements per row, because its rows or shards are not "
                f"divisible by {storage.group}. Put it in a separate param group with another rounding or state_storage"
            )
        return storage

    rounding = rounding_of(rule, group, dtype)
    try:
        rule.admit(placed.name, placed.param, group)
        spec = rule.spec(placed.name, span.shape, group)
        layout = shard.layout(placed, spec.view)
        if (quantized := shard.quantized(placed.param)) is not None:
            _require_quantizable(rule, rounding)
        small = Float(dtype, draws=dtype in ROUNDED_DTYPES)
        weight = fitting(weight_storage(rounding, dtype), small) if quantized is None else quantized.format
        chosen = group["state_storage"]
        if chosen == "auto":  # states are as precise as their weight
            chosen = "float32" if any(part.dtype == torch.float32 for part in weight.parts) else "bfloat16"
        for name, state in spec.states.items():
            if state.extent != "full":
                continue
            if state.dtype is None:
                states[name] = fitting(of_state(chosen, state.signed), FLOAT32)
            else:
                states[name] = Float(dtype if state.dtype == "weight" else state.dtype)
    except UnsupportedError as error:
        raise UnsupportedError(f"parameter {placed.name!r} of shape {list(span.shape)} {error}") from None
    if rounding == "nearest" and dtype in ROUNDED_DTYPES:
        _warn_of_lost_updates(dtype, rule.name if rule.materializes else None)
    state_storage = chosen if any(state.follows_state_storage for state in spec.states.values()) else None
    return Program(rule, spec, span, layout, shard.ranks_of(placed.param), weight, states, state_storage)


def _require_quantizable(rule: UpdateRule, rounding: str) -> None:
    """Raises `UnsupportedError` for rules and roundings that do not support quantized weights."""
    if rule.materializes:
        raise UnsupportedError(
            f"is quantized, but {rule.name} needs an ordinary matrix. Use a rule of lowmem, such as 'adalomo'"
        )
    if rounding in TABLE and rounding != "stochastic":
        raise UnsupportedError(
            f"is quantized, and does not support rounding={rounding!r}, only stochastic rounding. Rounding to nearest "
            "would lose most updates, which are smaller than half the distance between two quantized values. Omit "
            "rounding"
        )


def weight_storage(rounding: str, dtype: torch.dtype) -> Storage:
    """Returns the storage of a weight. A rule with a custom rounding returns values that the dtype represents."""
    return of_weight(rounding if rounding in TABLE else "nearest", dtype)


def rounding_of(rule: UpdateRule, group: Mapping[str, Any], dtype: torch.dtype) -> str:
    """Returns the rounding of a group's weights of this dtype. "auto" is the rule's default."""
    return rule.rounding(group, dtype) if group["rounding"] == "auto" else str(group["rounding"])


@functools.cache
def _warn_of_lost_updates(dtype: torch.dtype, cls: str | None) -> None:
    """Warns once per process about weights rounded to nearest. cls: the third-party optimizer class, if any."""
    if in_group() and dist.get_rank() > 0:
        return
    logger.warning(
        "%s weights with rounding 'nearest'%s lose every update smaller than about %.2g %% of the weight, which is "
        "most updates at usual fine-tuning learning rates. Set rounding='stochastic', which is unbiased, so small "
        "updates accumulate. It needs %s",
        str(dtype).removeprefix("torch."), f", unless {cls} itself rounds differently," if cls else "",
        25 * torch.finfo(dtype).eps, "a float32 copy of one parameter at a time" if cls else "no more memory",
    )  # fmt: skip
