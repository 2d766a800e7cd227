"""Layers that avoid materializing full gradients and activations."""
