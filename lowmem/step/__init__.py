"""One training step, from finished gradients to its report."""
