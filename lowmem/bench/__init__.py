"""Peers side by side: a training step by this package and by others, in one run."""
