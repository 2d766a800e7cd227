"""AdamW (arXiv:1711.05101) in float64 NumPy, transcribed from the paper and torch.optim.AdamW's documentation."""

from dataclasses import KW_ONLY, dataclass

import numpy as np


@dataclass
class AdamW:
    """The states of one parameter. `step` returns the updated weight."""

    shape: tuple
    _: KW_ONLY
    lr: float
    betas: tuple = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_value: float = np.inf

    def __post_init__(self):
        self.steps = 0
        self.exp_avg, self.exp_avg_sq = np.zeros(self.shape), np.zeros(self.shape)

    def step(self, weight, grad):
        self.steps += 1
        beta1, beta2 = self.betas
        grad = np.clip(grad, -self.clip_value, self.clip_value)
        self.exp_avg = beta1 * self.exp_avg + (1.0 - beta1) * grad
        self.exp_avg_sq = beta2 * self.exp_avg_sq + (1.0 - beta2) * np.square(grad)
        mean = self.exp_avg / (1.0 - beta1**self.steps)
        root = np.sqrt(self.exp_avg_sq / (1.0 - beta2**self.steps))
        return weight * (1.0 - self.lr * self.weight_decay) - self.lr * mean / (root + self.eps)

    def states(self):
        return {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
