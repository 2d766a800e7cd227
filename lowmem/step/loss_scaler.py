"""Loss scaling: the loss is multiplied by the scale before backward, and gradients are divided by it when read."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lowmem.errors import CheckpointError
from lowmem.options import DynamicScale

LARGEST = torch.finfo(torch.float32).max


class LossScaler:
    """The loss scale of an optimizer: none, fixed or dynamic. It is a device tensor, so the host never waits for it.

    Args:
        requested: a number, "dynamic" or a `DynamicScale`. None, 0 and 1 mean no scaling.
        device: the device of the scale.

    Attributes:
        dynamic: how the scale adapts to overflows; None if it does not.
        value: the factor of the next loss, a float32 scalar; None without scaling. Steps change it in place, so that
            its memory is not freed while another stream reads it.
    """

    def __init__(self, requested: "float | str | DynamicScale | None", device: torch.device) -> None:
        requested = DynamicScale() if requested == "dynamic" else requested
        self.dynamic = requested if isinstance(requested, DynamicScale) else None
        self.value: Tensor | None = None
        self._inverse: Tensor | None = None
        first: Any = requested if self.dynamic is None else self.dynamic.init_scale
        if self.dynamic or first not in (None, 0, 1):
            self.value = torch.full((), first, dtype=torch.float32, device=device)
            self._inverse = self.value.double().reciprocal().float()
        self._good = torch.zeros((), dtype=torch.int32, device=device)  # steps since the last overflow or growth
        self._patience = torch.full_like(self._good, self.dynamic.hysteresis if self.dynamic else 1)

    def _set(self, value: Tensor, good: Tensor, patience: Tensor) -> None:
        assert self.value is not None and self._inverse is not None
        self.value.copy_(value)
        self._inverse.copy_(self.value.double().reciprocal())
        self._good.copy_(good)
        self._patience.copy_(patience)

    def scaled(self, loss: Tensor) -> Tensor:
        """Returns the loss times the scale."""
        return loss if self.value is None else loss * self.value.to(loss.device)

    def inverse(self, device: torch.device) -> Tensor | None:
        """Returns the factor that unscales gradients, a float32 scalar on `device`, or None."""
        return None if self._inverse is None else self._inverse.to(device)

    def update(self, finite: Tensor) -> None:
        """Adapts a dynamic scale after a step.

        Args:
            finite: whether all gradients of the step were finite, a boolean scalar.
        """
        if self.dynamic is None or self.value is None:
            return
        finite = finite.to(self.value.device)
        good = torch.where(finite, self._good + 1, 0)
        patience = torch.where(finite, self._patience, (self._patience - 1).clamp(min=0))
        due = good >= self.dynamic.growth_interval  # a saved count may be beyond the interval
        exhausted = ~finite & (patience == 0)
        exact = self.value.double()  # GradScaler multiplies in float64
        grown = (exact * self.dynamic.growth_factor).float()
        grown = torch.where(grown.isfinite(), grown, self.value)
        shrunk = (exact * self.dynamic.backoff_factor).float().clamp(min=self.dynamic.min_scale)
        self._set(
            torch.where(due, grown, torch.where(exhausted, shrunk, self.value)),
            torch.where(due, 0, good),
            torch.where(due, self.dynamic.hysteresis, patience),
        )

    def can_back_off(self) -> Tensor | None:
        """Returns whether a dynamic scale is above its minimum, a boolean scalar; None if the scale is not dynamic."""
        return None if self.dynamic is None or self.value is None else self.value > self.dynamic.min_scale

    def state_dict(self) -> dict[str, float] | None:
        """Returns the scale and its counters; None for a scale that does not change."""
        if self.dynamic is None or self.value is None:
            return None
        return {"scale": float(self.value), "good": int(self._good), "patience": int(self._patience)}

    def check_saved(self, saved: Mapping[str, Any] | None) -> None:
        """Raises `CheckpointError` unless `load_state_dict` can load the saved values."""
        if self.dynamic is None or saved is None:
            return
        for name in ("scale", "good", "patience"):
            value = saved.get(name)
            valid = isinstance(value, int | float) and 0 <= value <= LARGEST and (value > 0 or name != "scale")
            if not valid:
                raise CheckpointError(f"the saved loss scale has {name}={value!r}, which is not a valid number")

    def load_state_dict(self, saved: Mapping[str, Any] | None) -> None:
        """Continues from the result of `state_dict`. Without it, the scale starts from `init_scale`."""
        if self.dynamic is None or self.value is None:
            return
        saved = saved or {"scale": self.dynamic.init_scale, "good": 0, "patience": self.dynamic.hysteresis}
        self._set(*(torch.tensor(saved[name], dtype=torch.float64) for name in ("scale", "good", "patience")))
