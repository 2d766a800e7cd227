"""A forward computed a second time with the same random numbers."""

import random
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

REPLAYS = ("auto", "graph", "forward")


def repeatable(forward: Callable[[], Tensor], devices: Iterable[torch.device]) -> Callable[[], Tensor]:
    """`forward` that draws the same random numbers in every call: those that it would draw now."""
    state = RandomState(devices)

    def again() -> Tensor:
        state.restore()
        return forward()

    return again


class RandomState:
    """The state of every generator that a forward may draw from: Python's, torch's, and those of the devices in use."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._python = random.getstate()
        self._torch = torch.get_rng_state()
        others = {device for device in devices if device.type != "cpu"}
        self._devices = {device: torch.get_device_module(device).get_rng_state(device) for device in others}

    def restore(self) -> None:
        """Puts them back as they were."""
        random.setstate(self._python)
        torch.set_rng_state(self._torch)
        for device, state in self._devices.items():
            torch.get_device_module(device).set_rng_state(state, device)
