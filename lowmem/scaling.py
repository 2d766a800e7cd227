"""Loss scaling: what the loss is multiplied with before backward, and the gradient divided by as it is read."""

import math

from lowmem.errors import ConfigError, UnsupportedError


def static_scale(loss_scale: float | str | None) -> float | None:
    """The fixed loss scale asked for, or None. 0 and 1 mean none.

    Raises:
        ConfigError: not a number ≥ 0.
        UnsupportedError: "dynamic".
    """
    if loss_scale is None:
        return None
    if loss_scale == "dynamic":
        raise UnsupportedError(
            'loss_scale="dynamic" is not available; give a number (1024 is AdaLomo\'s own), '
            "or train in bfloat16, which needs none"
        )
    if isinstance(loss_scale, str | bool) or not math.isfinite(loss_scale) or loss_scale < 0:
        raise ConfigError(f"loss_scale={loss_scale!r} is not a number >= 0 (0 or None: no scaling)")
    return None if loss_scale in (0, 1) else float(loss_scale)
