"""Loss scaling: the loss is multiplied by it before backward, and gradients are divided by it as they are read."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lowmem.errors import CheckpointError
from lowmem.options import DynamicScale, initial_scale


class LossScaler:
    """The loss scale of an optimizer: none, fixed or dynamic. It is a tensor on the device, and the host never waits.

    Args:
        requested: None, 0 or 1: no scaling. A number. "dynamic", or a `DynamicScale`.
        device: of the scale.

    Attributes:
        dynamic: it changes by itself.
        value: what the next loss is multiplied by, a float32 scalar that is never changed in place; None: no scaling.

    Raises:
        ConfigError: something else.
    """

    def __init__(self, requested: "float | str | DynamicScale | None", device: torch.device) -> None:
        requested = DynamicScale() if requested == "dynamic" else requested
        self._dynamic = requested if isinstance(requested, DynamicScale) else None
        self.dynamic = self._dynamic is not None
        first = initial_scale(requested)
        self.value: Tensor | None = None
        if first is not None:
            self.value = torch.full((), first, dtype=torch.float32, device=device)
        self._good = torch.zeros((), dtype=torch.int32, device=device)  # steps since the last overflow or growth
        self._patience = torch.full_like(self._good, self._dynamic.hysteresis if self._dynamic else 1)
        self._inverses: dict[torch.device, Tensor] = {}

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss times the scale."""
        return loss if self.value is None else loss * self.value.to(loss.device)

    def inverse(self, device: torch.device) -> Tensor | None:
        """What scaled gradients are multiplied with: a float32 scalar on `device`, or None."""
        if self.value is None:
            return None
        if device not in self._inverses:
            self._inverses[device] = self.value.double().reciprocal().float().to(device)
        return self._inverses[device]

    def update(self, finite: Tensor) -> None:
        """Learns from a step: whether every gradient was finite, a boolean scalar."""
        if self._dynamic is None:
            return
        assert self.value is not None
        finite = finite.to(self.value.device)
        good = torch.where(finite, self._good + 1, 0)
        patience = torch.where(finite, self._patience, (self._patience - 1).clamp(min=0))
        due = good >= self._dynamic.growth_interval  # a saved count may be beyond the interval
        exhausted = ~finite & (patience == 0)
        exact = self.value.double()  # GradScaler multiplies in float64
        grown = (exact * self._dynamic.growth_factor).float()
        grown = torch.where(grown.isfinite(), grown, self.value)
        shrunk = (exact * self._dynamic.backoff_factor).float().clamp(min=self._dynamic.min_scale)
        self.value = torch.where(due, grown, torch.where(exhausted, shrunk, self.value))
        self._good = torch.where(due, 0, good).to(torch.int32)
        self._patience = torch.where(due, self._dynamic.hysteresis, patience).to(torch.int32)
        self._inverses.clear()

    def at_minimum(self) -> Tensor | None:
        """Whether a dynamic scale cannot back off any further: a boolean scalar."""
        return None if self._dynamic is None or self.value is None else self.value <= self._dynamic.min_scale

    def state_dict(self) -> dict[str, float] | None:
        """The current scale and its counters; None for a scale that does not change."""
        if self._dynamic is None:
            return None
        assert self.value is not None
        return {"scale": float(self.value), "good": int(self._good), "patience": int(self._patience)}

    def check_saved(self, saved: Mapping[str, Any] | None) -> None:
        """Raises `CheckpointError` if `load_state_dict` would; changes nothing."""
        for name in ("scale", "good", "patience"):
            value = saved.get(name) if self._dynamic is not None and saved is not None else 1
            if not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise CheckpointError(f"the saved loss scale has {name}={value!r}, which is not a number >= 0")

    def load_state_dict(self, saved: Mapping[str, Any] | None) -> None:
        """Continues from what `state_dict` returned; without it the scale starts from `init_scale`.

        Raises:
            CheckpointError: something is missing in it.
        """
        if self._dynamic is None or saved is None:
            return
        assert self.value is not None
        self.check_saved(saved)
        scale, good, patience = saved["scale"], saved["good"], saved["patience"]
        self.value = torch.full_like(self.value, scale)
        self._good, self._patience = torch.full_like(self._good, good), torch.full_like(self._patience, patience)
        self._inverses.clear()
