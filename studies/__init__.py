"""Measures the effect of rules, learning rates and storage formats on the loss: `python -m studies`."""
