"""Whether sweeps are compiled: where there is a compiler, and enough to win."""

import importlib.util
import os
import shutil
from collections.abc import Collection

from lowmem.errors import ConfigError
from lowmem.slots import Slot

# With fewer trainable elements the seconds that compilation takes are longer than what it saves.
COMPILE_FROM = 1 << 25


def decide(wanted: bool | str, slots: Collection[Slot]) -> bool:
    """Whether to compile: as asked, or with "auto" where it pays.

    Raises:
        ConfigError: it is none of True, False and "auto", or True where there is no compiler.
    """
    if wanted not in (True, False, "auto"):
        raise ConfigError(f"compile={wanted!r}; allowed are True, False and 'auto'")
    if wanted is False:
        return False
    devices = {slot.param.device.type for slot in slots}
    missing = next((device for device in devices if not has_compiler(device)), None)
    if missing is not None:
        if wanted is True:
            raise ConfigError(f"compile=True, but there is no compiler for {missing!r}; use compile=False")
        return False
    return wanted is True or sum(slot.span.held for slot in slots if slot.param.requires_grad) >= COMPILE_FROM


def has_compiler(device: str) -> bool:
    """Whether torch.compile has what it needs for a type of device."""
    if device == "cpu":
        return any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++") if name)
    return importlib.util.find_spec("triton") is not None
