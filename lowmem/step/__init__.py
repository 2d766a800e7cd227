"""One training step, from finished gradients to its report; saving and loading."""
