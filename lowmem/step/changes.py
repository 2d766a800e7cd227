"""Measures the share of weights that a step changes, on a sample. Rounding to nearest may leave most unchanged."""

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lowmem.step.record import Operands, ParamRecord
from lowmem.tiles.layout import cut
from lowmem.tiles.storage import StoredTensor

# Number of sampled parameters, approximate number of sampled elements of each, and steps per measurement.
PARAMETERS = 8
ELEMENTS = 1 << 10
EVERY = 20


class Changes:
    """Counts how many sampled elements with a nonzero gradient are changed by updates. It measures every 20th step and
    the first two, because a warmup may start with a learning rate of 0.

    Args:
        records: the records of all parameters.
        device: the device of the reported share.

    Attributes:
        is_due: whether this step is measured.
    """

    def __init__(self, records: Mapping[Tensor, ParamRecord], device: torch.device) -> None:
        self._records = records
        self._sampled: set[ParamRecord] = set()
        self._counts: list[Tensor] = []  # per update: numbers of changed and of counted elements
        self._share = torch.full((), torch.nan, device=device)  # share in the last measured step
        self._step, self.is_due = 1, True

    def watch(self, operands: Operands) -> Callable[[], None] | None:
        """Samples a weight, or a stack of weights, before its update. Returns a function to call after the update,
        which counts the changes, or None if the weight is not in the sample.
        """
        if not self.is_due:
            return None
        records, weight, grad = operands.records, operands.weight, operands.grad
        if not self._sampled:
            trained = [record for record in self._records.values() if record.trained]
            self._sampled.update(trained[:: -(-len(trained) // PARAMETERS) or 1])
        if self._sampled.isdisjoint(records):
            return None
        where = _where(weight.parts[0].shape, weight.storage.is_quantized)
        before, has_gradient = _elements(weight, where).clone(), grad[where] != 0

        def count() -> None:
            changed = (_elements(weight, where) != before) & has_gradient
            self._counts.append(torch.stack((changed.sum(), has_gradient.sum())))

        return count

    def take(self) -> Tensor:
        """Returns the share of changed weights in this step, or in the last measured step, as a float32 scalar. It is
        NaN if no sampled element had a nonzero gradient.
        """
        if self._counts:
            changed, counted = torch.stack([count.to(self._share.device) for count in self._counts]).sum(0)
            self._share, self.is_due = changed / counted, False
        self._step += 1
        self.is_due |= self._step == 2 or self._step % EVERY == 0
        self._sampled.clear()  # if none was updated, all are frozen, so the next step samples other parameters
        self._counts.clear()
        return self._share


def _elements(weight: StoredTensor, where: tuple[slice, ...]) -> Tensor:
    """Returns the sampled elements of a weight, dequantized if it is quantized."""
    return weight.map(functools.partial(cut, where)).decode() if weight.storage.is_quantized else weight.parts[0][where]


@functools.cache
def _where(shape: torch.Size, quantized: bool = False) -> tuple[slice, ...]:
    """Returns slices of about `ELEMENTS` evenly spaced elements of a tensor, or of complete groups if `quantized`."""
    if quantized:
        *lines, columns = shape
        return *(slice(size // 2, size // 2 + 1) for size in lines), slice(0, min(ELEMENTS, columns))
    along = max(1, round(ELEMENTS ** (1 / max(1, len(shape)))))
    steps = [max(1, size // along) for size in shape]
    return tuple(slice(step // 2, None, step) for step in steps)
