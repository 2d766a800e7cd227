"""Benchmarks against other optimizers. Each command runs from the repository root, as in `python -m benchmarks.step`."""
