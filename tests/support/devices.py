"""The default device, on which tests run. It is a simulated GPU if conftest.py has set it."""

import torch


def seeded(seed: int) -> torch.Generator:
    """Returns a random generator on the default device."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)
