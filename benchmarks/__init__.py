"""Benchmarks against other optimizers. Run from the repository root: `python -m benchmarks.step`."""
