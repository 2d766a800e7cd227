"""The share of weights that a step changes, measured on a sample. Rounding to nearest may leave most unchanged."""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowmem.step.record import ParamRecord
from lowmem.tiles.layout import cut
from lowmem.tiles.storage import Held

# The number of sampled parameters, and the approximate number of elements of each.
PARAMETERS = 8
ELEMENTS = 1 << 10


class Sample(NamedTuple):
    """Elements of a weight before its update, and which of them have a gradient."""

    where: tuple[slice, ...]
    before: Tensor
    has_gradient: Tensor


class Changes:
    """Counts the sampled elements of weights that updates change, among those that have a gradient.

    Args:
        records: of all parameters.
        device: of the reported share.
    """

    def __init__(self, records: Mapping[Tensor, ParamRecord], device: torch.device) -> None:
        self._records = records
        self._sampled: set[ParamRecord] = set()
        self._counts = torch.zeros(2, dtype=torch.int64, device=device)  # in this step: changed, and counted
        self._counted = False

    def before(self, records: Sequence[ParamRecord], weight: Held, grad: Tensor) -> Sample | None:
        """Samples a weight, or a stack of weights, before its update. Returns None if it is not in the sample."""
        if not self._sampled:
            trained = [record for record in self._records.values() if record.trained]
            self._sampled.update(trained[:: -(-len(trained) // PARAMETERS) or 1])
        if self._sampled.isdisjoint(records):
            return None
        where = _where(weight.parts[0].shape, weight.storage.is_quantized)
        return Sample(where, _sampled(weight, where).clone(), grad[where] != 0)

    def after(self, sample: Sample, weight: Held) -> None:
        """Counts the changes after the update of a sampled weight."""
        changed = (_sampled(weight, sample.where) != sample.before) & sample.has_gradient
        counts = torch.stack((changed.sum(), sample.has_gradient.sum()))
        self._counts.add_(counts.to(self._counts.device))
        self._counted = True

    def take(self) -> Tensor:
        """Returns the share for the step that ends, a float32 scalar; NaN if no sampled element had a gradient."""
        share = self._counts[0] / self._counts[1]
        self._counts.zero_()
        if not self._counted:
            self._sampled.clear()  # no sampled parameter was updated (all are frozen), so the next step samples others
        self._counted = False
        return share


def _sampled(weight: Held, where: tuple[slice, ...]) -> Tensor:
    """The sampled elements of a weight, dequantized if it is quantized."""
    if not weight.storage.is_quantized:
        return weight.parts[0][where]
    pairs = zip(weight.parts, weight.storage.parts, strict=True)
    return weight.storage.decode(tuple(cut(tensor, where, part.group) for tensor, part in pairs))


@functools.cache
def _where(shape: torch.Size, in_codes: bool = False) -> tuple[slice, ...]:
    """Slices that select about `ELEMENTS` evenly spaced elements of a tensor, or complete groups if it is quantized."""
    if in_codes:
        *lines, columns = shape
        return *(slice(size // 2, size // 2 + 1) for size in lines), slice(0, min(ELEMENTS, columns))
    along = max(1, round(ELEMENTS ** (1 / max(1, len(shape)))))
    steps = [max(1, size // along) for size in shape]
    return tuple(slice(step // 2, None, step) for step in steps)
