"""The device that tests run on: the default device, which is a simulated GPU where conftest.py has set it so."""

import torch


def seeded(seed: int) -> torch.Generator:
    """Returns a random generator of the default device."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)
