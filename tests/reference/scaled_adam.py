"""icefall's ScaledAdam (arXiv:2310.11230) without clipping, in float64 NumPy, transcribed from its source."""

import math
from dataclasses import KW_ONLY, dataclass

import numpy as np


def rms(x):
    return np.sqrt(np.mean(np.square(x)))


@dataclass
class ScaledAdam:
    """The states of one parameter. `step` returns the updated weight. A missing gradient counts as zeros.

    reach: upper bounds of the states that are computed from the sum of w·g, by name.
    slack: allowed error per element, because cancellation in the float32 sum of w·g makes the update less accurate.
    """

    shape: tuple
    _: KW_ONLY
    lr: float
    betas: tuple = (0.9, 0.98)
    scalar_lr_scale: float = 0.1
    eps: float = 1e-8
    param_min_rms: float = 1e-5
    param_max_rms: float = 3.0
    scalar_max: float = 10.0
    size_update_period: int = 4
    clip_value: float = np.inf

    def __post_init__(self):
        self.steps = 0
        self.scalar = math.prod(self.shape) == 1
        self.delta, self.exp_avg_sq = np.zeros(self.shape), np.zeros(self.shape)
        self.param_rms, self.scale_exp_avg_sq = np.zeros(()), np.zeros(())
        self.scale_grads = np.zeros(self.size_update_period)
        self.reach = {"scale_grads": 0.0, "scale_exp_avg_sq": 0.0}
        self.slack = 0.0

    def step(self, weight, grad):
        self.steps += 1
        beta1, beta2 = self.betas
        self.slack *= beta1
        grad = np.zeros(self.shape) if grad is None else np.clip(grad, -self.clip_value, self.clip_value)
        self.exp_avg_sq = beta2 * self.exp_avg_sq + (1.0 - beta2) * np.square(grad)
        correction = 1.0 - beta2**self.steps
        if self.scalar:
            change = -self.lr * self.scalar_lr_scale * grad / (np.sqrt(self.exp_avg_sq / correction) + self.eps)
        else:
            growth = self.growth(weight, grad)
            if correction >= 0.99:
                correction = 1.0
            direction = grad / (np.sqrt(self.exp_avg_sq / correction) + self.eps)
            change = growth * weight - self.lr * max(self.param_rms, self.param_min_rms) * direction
        self.delta = beta1 * self.delta + (1.0 - beta1) * change
        # a scalar is clamped before it is updated
        return (np.clip(weight, -self.scalar_max, self.scalar_max) if self.scalar else weight) + self.delta

    def growth(self, weight, grad):
        """Returns the relative growth of the weight. It is learned once per period, and zero in the other steps."""
        period = self.size_update_period
        if self.steps == 1:
            self.param_rms = rms(weight)
        self.scale_grads[(self.steps - 1) % period] = np.sum(weight * grad)
        uncancelled = np.linalg.norm(weight) * np.linalg.norm(grad)
        self.reach = {name: max(old, uncancelled**i) for i, (name, old) in enumerate(self.reach.items(), start=1)}
        if self.steps % period:
            return 0.0
        self.param_rms = rms(weight)
        if self.steps == 1:
            return 0.0
        beta2 = self.betas[1] ** period
        self.scale_exp_avg_sq = beta2 * self.scale_exp_avg_sq + (1.0 - beta2) * np.mean(np.square(self.scale_grads))
        lr = self.lr * self.scalar_lr_scale
        if self.param_rms > self.param_max_rms:
            return -lr * period
        if self.param_rms < self.param_min_rms:
            return 0.0
        correction = 1.0 - beta2 ** (self.steps // period)
        gain = lr * np.sqrt(correction) / (np.sqrt(self.scale_exp_avg_sq) + self.eps)
        self.slack += (1.0 - self.betas[0]) * gain * 1e-6 * period * self.reach["scale_grads"] * np.abs(weight)
        return -gain * self.scale_grads.sum()

    def states(self):
        names = ["delta", "exp_avg_sq"]
        if not self.scalar:
            names += ["param_rms", "scale_exp_avg_sq", "scale_grads"]
        return {name: getattr(self, name) for name in names}
