"""The share of weights that a step changes, on a sample: rounding to the nearest value may leave most as they are."""

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowmem.step.record import ParamRecord
from lowmem.tiles.gradients import Gradient
from lowmem.tiles.layout import cut
from lowmem.tiles.storage import ROUNDED_DTYPES, Held

logger = logging.getLogger(__name__)

# Parameters that are sampled, and about so many elements of each.
PARAMETERS = 8
ELEMENTS = 1 << 10

# A run with nearest rounding is warned about once so many steps in a row have changed less than this share of weights,
# at a learning rate that does not rise and is at least half of its peak (docs/how-to/choosing.md).
STEPS = 20
LITTLE = 0.05


class Sample(NamedTuple):
    """Elements of a weight before its update, and which of them have a gradient."""

    where: tuple[slice, ...]
    before: Tensor
    has_gradient: Tensor
    nearest: bool


class Changes:
    """Counts which sampled elements of the weights an update changes, among those that have a gradient.

    Args:
        records: of every parameter, live.
        device: where shares are reported.
    """

    def __init__(self, records: Mapping[Tensor, ParamRecord], device: torch.device) -> None:
        self._records = records
        self._sampled: set[ParamRecord] = set()
        # in this step, of others and of those rounded to nearest: int64 [2, changed and counted]
        self._counts = torch.zeros(2, 2, dtype=torch.int64, device=device)
        self._counted = False
        self._peak = self._rate = 0.0  # learning rates: the highest one, and that of the last step
        self._steady = False  # the last step was neither of a warmup nor late in a decay
        self._steps = 0  # in a row that have changed little
        self._warned = False

    def before(self, records: Sequence[ParamRecord], weight: Held, grad: Gradient) -> Sample | None:
        """Samples a weight, or a stack of them, whose update begins; None if it is not one of the sampled ones."""
        if not self._sampled:
            trained = [record for record in self._records.values() if record.trained]
            dense = [record for record in trained if not record.computes] or trained
            self._sampled.update(dense[:: -(-len(dense) // PARAMETERS)])
        if self._sampled.isdisjoint(records) or not isinstance(grad, Tensor):
            return None
        where = _where(weight.parts[0].shape, weight.storage.in_codes)
        nearest = weight.storage.is_cast and weight.dtype in ROUNDED_DTYPES
        return Sample(where, _sampled(weight, where).clone(), grad[where] != 0, nearest)

    def after(self, sample: Sample, weight: Held) -> None:
        """The weight that `before` sampled is updated."""
        changed = (_sampled(weight, sample.where) != sample.before) & sample.has_gradient
        counts = torch.stack((changed.sum(), sample.has_gradient.sum()))
        self._counts[int(sample.nearest)].add_(counts.to(self._counts.device))
        self._counted = True

    def take(self, groups: Sequence[Mapping[str, Any]]) -> tuple[Tensor, Tensor]:
        """The shares of a step that ends, float32 scalars: of all samples, and of those that are rounded to the nearest
        value. NaN where no sampled element had a gradient. The learning rate of the first group stands for the
        schedule.
        """
        share, of_nearest = (changed / counted for changed, counted in (self._counts.sum(0), self._counts[1]))
        self._counts.zero_()
        if not self._counted:
            self._sampled.clear()  # those parameters are frozen: the next step samples others
        self._counted = False
        rate = groups[0].get("lr")
        rate, before = rate if isinstance(rate, float) else 0.0, self._rate
        self._rate, self._peak = rate, max(rate, self._peak)
        self._steady = self._peak / 2 <= rate <= before
        return share, of_nearest

    def watch(self, share: float) -> None:
        """Warns once if rounding to the nearest value keeps a run from learning; `share` is that of the last step, of
        weights that are rounded so.
        """
        if not self._steady:
            return
        self._steps = self._steps + 1 if share < LITTLE else 0
        if self._steps >= STEPS and not self._warned:
            self._warned = True
            logger.warning(
                "each of the last %d steps changed less than %d %% of the weights that had a gradient, the last one "
                "%.1f %%: rounding 'nearest' drops every update smaller than half the spacing of 16-bit numbers, so "
                "that little is learned. Use rounding='stochastic', which is unbiased, or a higher learning rate",
                STEPS,
                100 * LITTLE,
                100 * share,
            )


def _sampled(weight: Held, where: tuple[slice, ...]) -> Tensor:
    """The elements of a weight that the model sees, or the values of its codes."""
    if not weight.storage.in_codes:
        return weight.parts[0][where]
    pairs = zip(weight.parts, weight.storage.parts, strict=True)
    return weight.storage.decode(tuple(cut(tensor, where, part.group) for tensor, part in pairs))


@functools.cache
def _where(shape: torch.Size, in_codes: bool = False) -> tuple[slice, ...]:
    """About `ELEMENTS` evenly spaced elements of a tensor, of which they are a view; of codes some complete groups."""
    if in_codes:
        *lines, columns = shape
        return *(slice(size // 2, size // 2 + 1) for size in lines), slice(0, min(ELEMENTS, columns))
    along = max(1, round(ELEMENTS ** (1 / max(1, len(shape)))))
    steps = [max(1, size // along) for size in shape]
    return tuple(slice(step // 2, None, step) for step in steps)
