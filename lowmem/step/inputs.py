"""The values that the updates of a step read besides the tensors of their parameters."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lowmem.step.clipping import Clipping, Decision
from lowmem.step.cycle import StepCycle
from lowmem.step.parameters import Parameters
from lowmem.step.record import AddedGroup, Operands, ParamRecord
from lowmem.tiles.rounding import noise_key
from lowmem.tiles.stored import StoredTiles
from lowmem.tiles.sweep import Reading, Scalars
from lowmem.tiles.transfers import to_device


@dataclass(frozen=True, eq=False)
class StepValues:
    """The values of a step on a device."""

    numbers: Tensor  # numbers of all groups, float64
    names: Mapping[AddedGroup, tuple[str, ...]]  # names of each group's numbers
    offsets: Mapping[AddedGroup, int]  # index of each group's first number
    keys: Tensor  # keys of the parameters' random bits, int32
    key_indices: Mapping[ParamRecord, int]  # index of the key of each parameter whose storages use random bits
    version: int  # changes with `names` and `key_indices`
    reading: Reading  # how gradients are read unless a decision is made before the updates

    @functools.cached_property
    def scalars(self) -> Mapping[AddedGroup, Scalars]:
        """The numbers by group."""
        lengths = [len(names) for names in self.names.values()]
        parts = zip(self.names.items(), self.numbers.float().split(lengths), self.numbers.split(lengths), strict=True)
        return {group: Scalars(names, single, double) for (group, names), single, double in parts}

    @functools.cached_property
    def key_of(self) -> Mapping[ParamRecord, Tensor]:
        """The keys by parameter, as scalars."""
        return dict(zip(self.key_indices, self.keys.unbind(), strict=True))


class StepInputs:
    """Computes the values of each step, and copies them to the devices of the parameters.

    Args:
        parameters, cycle, clipping: the parameters, life cycle and clipping of the optimizer.
    """

    def __init__(self, parameters: Parameters, cycle: StepCycle, clipping: Clipping) -> None:
        self._parameters, self._cycle, self._clipping = parameters, cycle, clipping
        self._numbers: dict[AddedGroup, Mapping[str, float]] = {}
        self._positions: tuple[Any, ...] = ()
        self._version = 0
        self._by_device: dict[torch.device, StepValues] = {}

    def begin(self, step: int) -> None:
        """Begins a micro-batch: every rule computes the numbers of its groups, or raises."""
        self._numbers = {group: group.rule.scalars(group.live, step) for group in self._parameters.groups}
        self._by_device.clear()

    def on(self, device: torch.device) -> StepValues:
        """Returns the values on a device. They are copied there all at once, when they are first needed."""
        if device not in self._by_device:
            numbers = [number for of_group in self._numbers.values() for number in of_group.values()]
            offsets = accumulate(map(len, self._numbers.values()), initial=0)
            drawing = [each for each in self._parameters.records.values() if each.claimed and each.program.draws]
            keys = [noise_key(self._cycle.seed, self._cycle.step, each.name) for each in drawing]
            names = {group: tuple(of_group) for group, of_group in self._numbers.items()}
            if (positions := (names, drawing)) != self._positions:
                self._positions, self._version = positions, self._version + 1
            self._by_device[device] = StepValues(
                to_device(numbers, torch.float64, device),
                names,
                dict(zip(self._numbers, offsets, strict=False)),  # there is one more offset than groups
                to_device(keys, torch.int32, device),
                {record: n for n, record in enumerate(drawing)},
                self._version,
                Reading(*self._clipping.factors(device)),
            )
        return self._by_device[device]

    def reading(self, records: Sequence[ParamRecord], grad: Tensor, decision: Decision | None) -> Reading:
        """Returns how the gradients of parameters are read. grad: the gradient of the first one."""
        if decision is None:
            return self.on(grad.device).reading
        return self._clipping.reading(records, grad, decision)

    def tiles(self, operands: Operands, decision: Decision | None, *, tile: int | None = None) -> StoredTiles:
        """Returns the tiles of a parameter, or of a stack of parameters. tile: see `StoredTiles`."""
        records, grad = operands.records, operands.grad
        program, values, keys = operands.program, self.on(grad.device), None
        if program.draws:
            of_each = [values.key_of[record] for record in records]
            keys = of_each[0] if len(of_each) == 1 else torch.stack(of_each)[:, None]
        return StoredTiles(
            program.layout,
            operands.weight,
            grad,
            self.reading(records, grad, decision),
            values.scalars[records[0].group],
            members=len(records),
            keys=keys,
            ranks=program.ranks,
            tile=tile,
        )
