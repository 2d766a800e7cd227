"""Studies the effect of rules, learning rates and formats on the loss: `python -m studies`."""
