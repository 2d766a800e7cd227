"""LOMO (arXiv:2306.09782, algorithm 1) in float64 NumPy: stochastic gradient descent with decoupled weight decay."""

import numpy as np


class Lomo:
    """The update of one parameter. `step` returns the updated weight."""

    def __init__(self, shape, *, lr, weight_decay=0.0, clip_value=np.inf):
        self.lr, self.weight_decay, self.clip_value = lr, weight_decay, clip_value

    def step(self, weight, grad):
        grad = np.clip(grad, -self.clip_value, self.clip_value)
        return weight - self.lr * self.weight_decay * weight - self.lr * grad

    def states(self):
        return {}
