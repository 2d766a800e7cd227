"""The results of updates, as vectors over parameters."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lowmem.placements.base import ParamEntry
from lowmem.tiles.sweep import Reading
from lowmem.tiles.transfers import to_device


class Result(NamedTuple):
    """The result of an update of one or several parameters."""

    square_sums: Tensor  # squared norms of the unscaled, unclipped gradients, float64 [members]
    sizes: Tensor | None  # see `UpdateRule.update`

    @classmethod
    def of(cls, results: Mapping[Any, Tensor], reading: Reading) -> "Result":
        """Returns the result of compiled code, which does not compute `square_sums` if they are already measured."""
        measured = reading.square_sums
        return cls(results["square_sums"] if measured is None else measured, results.get("sizes"))


class Results:
    """The results of all updates of a step."""

    def __init__(self) -> None:
        self._updates = list[tuple[Sequence[ParamEntry], Result]]()

    def clear(self) -> None:
        """Called when a step begins."""
        self._updates.clear()

    def add(self, members: Sequence[ParamEntry], result: Result) -> None:
        """Adds the result of an update. members: its parameters."""
        self._updates.append((members, result))

    @property
    def sized(self) -> set[ParamEntry]:
        """The parameters whose updates returned `sizes`."""
        return {each for members, result in self._updates if result.sizes is not None for each in members}

    def gather(
        self, name: Literal["square_sums", "sizes"], members: Sequence[ParamEntry], device: torch.device
    ) -> Tensor:
        """Combines the results of parameters, in this order, as a tensor [members] on a device."""
        updates = [(of_each, getattr(result, name)) for of_each, result in self._updates]
        vectors = [(of_each, vector) for of_each, vector in updates if vector is not None]
        updated = [each for of_each, _ in vectors for each in of_each]
        values = torch.cat([vector.view(-1).to(device) for _, vector in vectors])
        if updated == members:
            return values
        positions = {each: n for n, each in enumerate(updated)}
        return values[to_device([positions[each] for each in members], torch.int64, device)]
