"""Studies of quality: what rules, learning rates and formats do to the loss: `python -m studies`."""
