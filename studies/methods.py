"""The table of methods: rules with their options, and the learning rate near which a search for the best one begins."""

from typing import Any, NamedTuple


class Method(NamedTuple):
    """`variant`: a rule without one of its parts, or with another constant."""

    rule: str
    lr: float
    options: dict[str, Any] = {}  # noqa: RUF012
    variant: bool = False


NO_DECAY = {"weight_decay": 0.0}
CLIPPED = {"clip_norm": 1.0, "store": "device"}
SMALL_MATRICES, NOT_RELATIVE = {"min_dim_size_to_factor": 32}, {"multiply_by_parameter_scale": False}
METHODS = {
    "adalomo": Method("adalomo", 3e-2),
    "adamw": Method("adamw", 3e-3, NO_DECAY),
    "adafactor": Method("adafactor", 3e-2, SMALL_MATRICES),
    "adafactor_t2t": Method("adafactor_t2t", 3e-2),
    "lion": Method("lion", 3e-4, NO_DECAY),
    "lomo": Method("lomo", 1.0, CLIPPED),
    "lans": Method("lans", 1e-2),
    "scaled_adam": Method("scaled_adam", 3e-2),
    "adamw, β₂ 0.95": Method("adamw", 3e-3, {**NO_DECAY, "betas": (0.9, 0.95)}, True),
    "adalomo, u not clipped": Method("adalomo", 3e-2, {"clip_threshold": 1e30}, True),
    "adalomo, ε₂ 0.1": Method("adalomo", 3e-2, {"eps": (1e-30, 0.1)}, True),
    "adalomo, ε₂ 1e-6": Method("adalomo", 3e-2, {"eps": (1e-30, 1e-6)}, True),
    "adalomo, ε₁ 1e-8": Method("adalomo", 3e-2, {"eps": (1e-8, 1e-3)}, True),
    "adafactor, lr not relative": Method("adafactor", 3e-3, {**SMALL_MATRICES, **NOT_RELATIVE}, True),
    "lomo, not clipped": Method("lomo", 1.0, {}, True),
}
RULES = [name for name, method in METHODS.items() if not method.variant]
