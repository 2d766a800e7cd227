"""Random generators on the default device, which conftest.py may set to a GPU."""

import torch


def seeded(seed: int) -> torch.Generator:
    """Returns a random generator on the default device."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)
