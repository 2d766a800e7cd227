"""The settings of a fused optimizer as trainers and YAML files hold them."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from lowmem.optimizer import FusedOptimizer
from lowmem.step.loss_scaler import DynamicScale


@dataclass(frozen=True)
class FusedConfig:
    """The settings of a `FusedOptimizer` but for parameters and learning rate, as trainers and YAML files hold them.

    `hyper` holds hyperparameters of the rule; `log_norms` has a trainer log the norm of each parameter's gradient.
    Settings are checked when the config is made.

    Raises:
        ConfigError, UnsupportedError: as `FusedOptimizer` would.
    """

    rule: str = "adalomo"
    policy: str = "auto"
    clip_norm: float | None = None
    norm_type: float = 2.0
    clip_value: float | None = None
    loss_scale: float | Literal["dynamic"] | DynamicScale | None = None
    replay: str = "auto"
    store: str | None = None
    store_dir: str | None = None
    accumulation_dtype: str = "float32"
    rounding: str = "nearest"
    compile: str | bool = "auto"
    seed: int = 0
    batching: bool = True
    log_norms: bool = False
    hyper: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.build([{"params": []}], lr=1e-3)

    def build(self, params: Iterable[Any], **hyper: Any) -> FusedOptimizer:
        """The optimizer over `params`; `hyper` (lr, weight_decay, ...) gives way to this config's own `hyper`."""
        settings = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("hyper", "log_norms")}
        return FusedOptimizer(params, **settings, **{**hyper, **self.hyper})
