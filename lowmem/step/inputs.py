"""What the updates of a step read besides the tensors of their parameters."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from lowmem.step.clipping import Clipping, Decision
from lowmem.step.cycle import StepCycle
from lowmem.step.parameters import Parameters
from lowmem.step.program import Program
from lowmem.step.record import AddedGroup, ParamRecord
from lowmem.tiles.rounding import noise_key
from lowmem.tiles.storage import StoredTensor
from lowmem.tiles.stored import StoredTiles
from lowmem.tiles.sweep import Reading, Scalars
from lowmem.tiles.transfers import to_device


@dataclass(frozen=True, eq=False)
class StepValues:
    """The values of a step on a device.

    numbers: the numbers of all groups, float64.  places: index of each group's first number.  names: of its numbers.
    keys: the keys of the parameters' random bits, int32.  drawing: index of the key of each parameter that has one.
    reading: how gradients are read if there is no decision before the updates.
    """

    numbers: Tensor
    places: Mapping[AddedGroup, int]
    names: Mapping[AddedGroup, tuple[str, ...]]
    keys: Tensor
    drawing: Mapping[ParamRecord, int]
    reading: Reading

    @functools.cached_property
    def scalars(self) -> Mapping[AddedGroup, Scalars]:
        """The numbers by group."""
        lengths = [len(names) for names in self.names.values()]
        of_each = zip(self.names.items(), self.numbers.float().split(lengths), self.numbers.split(lengths), strict=True)
        return {group: Scalars(names, *numbers) for (group, names), *numbers in of_each}

    @functools.cached_property
    def key_of(self) -> Mapping[ParamRecord, Tensor]:
        """The keys by parameter, as scalars."""
        return dict(zip(self.drawing, self.keys.unbind(), strict=True))


class StepInputs:
    """Computes the values of each step, and copies them to the devices of the parameters.

    Args:
        parameters, cycle, clipping: the parameters, life cycle and clipping of the optimizer.
    """

    def __init__(self, parameters: Parameters, cycle: StepCycle, clipping: Clipping) -> None:
        self._parameters, self._cycle, self._clipping = parameters, cycle, clipping
        self._numbers: dict[AddedGroup, Mapping[str, float]] = {}
        self._sent: dict[torch.device, StepValues] = {}

    def begin(self, step: int) -> None:
        """Begins a step: every rule computes the numbers of its groups, or raises."""
        self._numbers = {group: group.rule.scalars(group.live, step) for group in self._parameters.groups}
        self._sent.clear()

    def on(self, device: torch.device) -> StepValues:
        """Returns the values on a device. They are copied there all at once, when they are first needed."""
        if device not in self._sent:
            drawing = [each for each in self._parameters.records.values() if each.claimed and each.program.draws]
            keys = [noise_key(self._cycle.seed, self._cycle.step, each.name) for each in drawing]
            starts = accumulate(map(len, self._numbers.values()), initial=0)
            self._sent[device] = StepValues(
                to_device([*chain(*(each.values() for each in self._numbers.values()))], torch.float64, device),
                dict(zip(self._numbers, starts, strict=False)),
                {group: tuple(numbers) for group, numbers in self._numbers.items()},
                to_device(keys, torch.int32, device),
                {record: n for n, record in enumerate(drawing)},
                Reading(*self._clipping.factors(device)),
            )
        return self._sent[device]

    def reading(self, records: Sequence[ParamRecord], grad: Tensor, decision: Decision | None) -> Reading:
        """Returns how the gradients of parameters are read. grad: the gradient of the first one."""
        if decision is None:
            return self.on(grad.device).reading
        return self._clipping.reading(records, grad, decision)

    def tiles(
        self,
        records: Sequence[ParamRecord],
        held: StoredTensor,
        grad: Tensor,
        decision: Decision | None,
        *,
        tile: int | None = None,
    ) -> StoredTiles:
        """Returns the tiles of a parameter, or of a stack of parameters."""
        program, sent, keys = program_of(records), self.on(grad.device), None
        if program.draws:
            each = [sent.key_of[record] for record in records]
            keys = each[0] if len(each) == 1 else torch.stack(each)[:, None]
        return StoredTiles(
            program.layout,
            held,
            grad,
            self.reading(records, grad, decision),
            sent.scalars[records[0].group],
            members=len(records),
            keys=keys,
            across=program.ranks,
            tile=tile,
        )


def program_of(records: Sequence[ParamRecord]) -> Program:
    """Returns the program of a parameter, or of a stack of parameters."""
    program = records[0].program
    return program if len(records) == 1 else program.stacked(len(records))
