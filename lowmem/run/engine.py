"""Checks DeepSpeed's configuration with DeepSpeed itself, before there are ranks."""

from typing import Any

from lowmem.errors import ConfigError, did_you_mean
from lowmem.run.source import reason, shortened

_BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


class _Reads(dict[str, Any]):
    """A dictionary that remembers which keys are asked for."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.names: set[Any] = set()

    def get(self, name: Any, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)

    def __getitem__(self, name: Any) -> Any:
        self.names.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: Any) -> bool:
        self.names.add(name)
        return super().__contains__(name)


def check_deepspeed(config: dict[str, Any]) -> None:
    """Raises `ConfigError` for what DeepSpeed refuses, and for keys that it does not read.

    "auto" is left to transformers, and so are batch sizes, which depend on the number of ranks.
    """
    from deepspeed.runtime.config import DeepSpeedConfig

    own = _without_auto({name: value for name, value in config.items() if name not in _BATCH_SIZES})
    reads = _Reads({**own, "train_micro_batch_size_per_gpu": 1})
    try:
        DeepSpeedConfig(reads)
    except Exception as error:  # it documents none
        raise ConfigError(f"trainer.deepspeed: DeepSpeed refuses this configuration: {reason(error)}") from error
    for name in config.keys() - reads.names - {*_BATCH_SIZES}:
        hint = did_you_mean(name, map(str, reads.names)) if len(name) < 100 else ""
        raise ConfigError(f"trainer.deepspeed: DeepSpeed does not know the key '{shortened(name)}'.{hint} Delete it.")


def _without_auto(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: _without_auto(item) for name, item in value.items() if item != "auto"}
