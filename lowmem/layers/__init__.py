"""Computations of a model whose gradients or activations never exist as a whole."""
