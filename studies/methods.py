"""The table of methods: rules with their options, and the learning rate near which a search for the best one begins."""

from typing import Any, NamedTuple


class Method(NamedTuple):
    """A rule with its options.

    Attributes:
        lr: near the best one where a small model learns much in few updates.
        relative: the learning rate is relative to the size of the weights.
        adapters: only low-rank adapters are trained, which have this share of the elements.
        states: number of states as large as the weight.
    """

    rule: str
    lr: float
    options: dict[str, Any] = {}  # noqa: RUF012
    relative: bool = False
    adapters: float = 0.0
    states: int = 0


NO_DECAY = {"weight_decay": 0.0}
CLIPPED = {"clip_norm": 1.0, "store": "device"}
SMALL_MATRICES, NOT_RELATIVE = {"min_dim_size_to_factor": 32}, {"multiply_by_parameter_scale": False}
# T5X's rule with momentum, which takes one byte per weight in 8 bits; and Tensor2Tensor's, with AdamW's second moment.
MOMENTUM = {**SMALL_MATRICES, "beta1": 0.9}
MOMENTUM_T2T = {"beta1": 0.9, "decay_type": "adam", "dtype_momentum": "float32"}
MOMENTUM_NAME = "adafactor, momentum"
METHODS = {
    "adalomo": Method("adalomo", 3e-2, relative=True),
    "adamw": Method("adamw", 3e-3, NO_DECAY, states=2),
    "adafactor": Method("adafactor", 3e-2, SMALL_MATRICES, relative=True),
    "adafactor_t2t": Method("adafactor_t2t", 3e-2, relative=True),
    "lion": Method("lion", 3e-4, NO_DECAY, states=1),
    "lomo": Method("lomo", 1.0, CLIPPED),
    "lans": Method("lans", 1e-2, relative=True, states=2),
    "scaled_adam": Method("scaled_adam", 3e-2, relative=True, states=2),
    MOMENTUM_NAME: Method("adafactor", 1e-2, MOMENTUM, relative=True, states=1),
    f"{MOMENTUM_NAME}, lr not relative": Method("adafactor", 3e-3, {**MOMENTUM, **NOT_RELATIVE}, states=1),
    f"{MOMENTUM_NAME}, β₂ 0.999": Method("adafactor_t2t", 1e-2, {**MOMENTUM_T2T, "beta2": 0.999}, True, states=1),
    f"{MOMENTUM_NAME}, β₂ 0.95": Method("adafactor_t2t", 1e-2, {**MOMENTUM_T2T, "beta2": 0.95}, True, states=1),
    "adamw, β₂ 0.95": Method("adamw", 3e-3, {**NO_DECAY, "betas": (0.9, 0.95)}, states=2),
    "adalomo, u not clipped": Method("adalomo", 3e-2, {"clip_threshold": 1e30}, True),
    "adalomo, ε₂ 0.1": Method("adalomo", 3e-2, {"eps": (1e-30, 0.1)}, True),
    "adalomo, ε₂ 1e-6": Method("adalomo", 3e-2, {"eps": (1e-30, 1e-6)}, True),
    "adalomo, ε₁ 1e-8": Method("adalomo", 3e-2, {"eps": (1e-8, 1e-3)}, True),
    "adafactor, lr not relative": Method("adafactor", 3e-3, {**SMALL_MATRICES, **NOT_RELATIVE}),
    "lomo, not clipped": Method("lomo", 1.0),
    "lora": Method("adamw", 3e-2, NO_DECAY, adapters=0.036),
}
