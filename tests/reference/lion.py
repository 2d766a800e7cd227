"""Lion (arXiv:2302.06675, program 1) in float64 NumPy, transcribed from the paper."""

from dataclasses import KW_ONLY, dataclass

import numpy as np


@dataclass
class Lion:
    """The states of one parameter. `step` returns the updated weight.

    slack: allowed error per element, where float32 rounding may flip the sign of an update.
    """

    shape: tuple
    _: KW_ONLY
    lr: float
    betas: tuple = (0.9, 0.99)
    weight_decay: float = 0.0
    clip_value: float = np.inf

    def __post_init__(self):
        self.exp_avg = np.zeros(self.shape)

    def step(self, weight, grad):
        beta1, beta2 = self.betas
        grad = np.clip(grad, -self.clip_value, self.clip_value)
        ahead, size = beta1 * self.exp_avg + (1.0 - beta1) * grad, beta1 * abs(self.exp_avg) + (1.0 - beta1) * abs(grad)
        self.slack = np.where(abs(ahead) <= 1e-6 * size, 2.0 * self.lr, 0.0)
        change = np.sign(ahead)
        self.exp_avg = beta2 * self.exp_avg + (1.0 - beta2) * grad
        return weight - self.lr * (change + self.weight_decay * weight)

    def states(self):
        return {"exp_avg": self.exp_avg}
