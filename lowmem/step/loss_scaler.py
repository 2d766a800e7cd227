"""Loss scaling: what the loss is multiplied with before backward, and the gradient divided by as it is read."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowmem.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class DynamicScale:
    """A loss scale that finds its own size, by the rule of `torch.amp.GradScaler`.

    It starts at `init_scale`. It is multiplied by `growth_factor` after `growth_interval` steps without an overflow,
    and by `backoff_factor` after an overflow, but never falls below `min_scale`. With `hysteresis` above 1, that many
    overflows have to occur since it last grew before it backs off, as in Megatron.

    Raises:
        ConfigError: a value out of range.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 1.0
    hysteresis: int = 1

    def __post_init__(self) -> None:
        for name, fine, wanted in (
            ("min_scale", _is_scale, "a number > 0 that float32 holds"),
            ("init_scale", lambda value: _is_scale(value) and value >= self.min_scale, "a finite number >= min_scale"),
            ("growth_factor", lambda value: _is_number(value) and value > 1, "a number > 1"),
            ("backoff_factor", lambda value: _is_number(value) and 0 < value < 1, "a number between 0 and 1"),
            ("growth_interval", _is_count, "a whole number >= 1"),
            ("hysteresis", _is_count, "a whole number >= 1"),
        ):
            value = getattr(self, name)
            if not fine(value):
                raise ConfigError(f"loss_scale.{name}={value!r} is not {wanted}")


class LossScale:
    """The loss scale of an optimizer: none, fixed or dynamic. It lives on the device; nobody waits for it.

    Args:
        wanted: None, 0 or 1: no scaling. A number. "dynamic", or a `DynamicScale`.
        device: where it lives.

    Raises:
        ConfigError: something else.
    """

    def __init__(self, wanted: "float | str | DynamicScale | None", device: torch.device) -> None:
        self.rule = DynamicScale() if wanted == "dynamic" else wanted if isinstance(wanted, DynamicScale) else None
        first = self.rule.init_scale if self.rule else _fixed(wanted)
        self._scale: Tensor | None = None
        if first is not None:
            self._scale = torch.full((), first, dtype=torch.float32, device=device)
        self._good = torch.zeros((), dtype=torch.int32, device=device)  # steps since the last overflow or growth
        self._patience = torch.full_like(self._good, self.rule.hysteresis if self.rule else 1)
        self._inverses: dict[torch.device, Tensor] = {}

    @property
    def dynamic(self) -> bool:
        """Whether it changes by itself."""
        return self.rule is not None

    @property
    def value(self) -> Tensor | None:
        """The scale that the next loss is multiplied with: a float32 scalar that stays as it is; None: no scaling."""
        return self._scale

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss times the scale."""
        return loss if self._scale is None else loss * self._scale.to(loss.device)

    def inverse(self, device: torch.device) -> Tensor | None:
        """What scaled gradients are multiplied with: a float32 scalar on `device`, or None."""
        if self._scale is None:
            return None
        if device not in self._inverses:
            self._inverses[device] = self._scale.double().reciprocal().float().to(device)
        return self._inverses[device]

    def update(self, finite: Tensor) -> None:
        """Learns from a step: whether every gradient was finite, a boolean scalar."""
        if self.rule is None:
            return
        assert self._scale is not None
        finite = finite.to(self._scale.device)
        good = torch.where(finite, self._good + 1, 0)
        patience = torch.where(finite, self._patience, (self._patience - 1).clamp(min=0))
        due, tired = (
            good >= self.rule.growth_interval,
            ~finite & (patience == 0),
        )  # a saved count may be beyond the interval
        exact = self._scale.double()  # GradScaler multiplies in float64
        grown = (exact * self.rule.growth_factor).float()
        grown = torch.where(grown.isfinite(), grown, self._scale)
        shrunk = (exact * self.rule.backoff_factor).float().clamp(min=self.rule.min_scale)
        self._scale = torch.where(due, grown, torch.where(tired, shrunk, self._scale))
        self._good = torch.where(due, 0, good).to(torch.int32)
        self._patience = torch.where(due, self.rule.hysteresis, patience).to(torch.int32)
        self._inverses.clear()

    def at_least(self) -> Tensor | None:
        """Whether a dynamic scale cannot back off any further: a boolean scalar."""
        return None if self.rule is None or self._scale is None else self._scale <= self.rule.min_scale

    def state_dict(self) -> dict[str, float] | None:
        """What a dynamic scale has come to; None for one that does not change."""
        if self.rule is None:
            return None
        assert self._scale is not None
        return {"scale": float(self._scale), "good": int(self._good), "patience": int(self._patience)}

    def check_saved(self, saved: Mapping[str, Any] | None) -> None:
        """Raises `CheckpointError` if `load_state_dict` would; changes nothing."""
        for name in ("scale", "good", "patience"):
            if self.rule is not None and saved is not None and name not in saved:
                raise CheckpointError(f"the saved loss scale has no {name!r}")

    def load_state_dict(self, saved: Mapping[str, Any] | None) -> None:
        """Continues from what `state_dict` gave; a run that had none begins anew.

        Raises:
            CheckpointError: something is missing in it.
        """
        if self.rule is None or saved is None:
            return
        assert self._scale is not None
        self.check_saved(saved)
        scale, good, patience = saved["scale"], saved["good"], saved["patience"]
        self._scale = torch.full_like(self._scale, scale)
        self._good, self._patience = torch.full_like(self._good, good), torch.full_like(self._patience, patience)
        self._inverses.clear()


def _fixed(wanted: Any) -> float | None:
    if wanted is None:
        return None
    if not _is_number(wanted) or (wanted != 0 and not _is_scale(wanted)):
        raise ConfigError(f"loss_scale={wanted!r} is neither a number >= 0 (0: none) nor 'dynamic' nor a DynamicScale")
    return None if wanted in (0, 1) else float(wanted)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_scale(value: Any) -> bool:
    """Whether it and its inverse are numbers of float32."""
    limits = torch.finfo(torch.float32)
    return _is_number(value) and limits.tiny <= value <= limits.max


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 1 and int(value) == value
