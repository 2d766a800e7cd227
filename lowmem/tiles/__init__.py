"""Computes updates on float32 tiles of stored tensors."""
