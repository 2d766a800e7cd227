"""MXNet's LANS (arXiv:2006.13484) in float64 NumPy, transcribed from its source and golden/README.md."""

from dataclasses import KW_ONLY, dataclass

import numpy as np


@dataclass
class Lans:
    """The states of one parameter. `step` returns the updated weight.

    variant: "fused" is MXNet's kernel. In "step", the second part of the update decays the weight that the first part
        has updated, and a trust ratio that is not positive and finite is replaced by 1.
    multi_precision: keeps a float32 copy; `step` receives the stored 16-bit weight, whose norm "fused" uses.
    """

    shape: tuple
    _: KW_ONLY
    lr: float
    wd: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-6
    lower_bound: float | None = None
    upper_bound: float | None = None
    clip_gradient: float | None = None
    rescale_grad: float = 1.0
    lr_mult: float = 1.0
    wd_mult: float = 1.0
    begin_num_update: int = 0
    multi_precision: bool = False
    variant: str = "fused"
    clip_value: float = np.inf

    def __post_init__(self):
        self.steps = self.begin_num_update
        self.mean, self.var = np.zeros(self.shape), np.zeros(self.shape)
        self.weight = None

    def step(self, weight, grad):
        self.steps += 1
        stored = weight
        if self.multi_precision and self.weight is not None:
            weight = self.weight
        lr, wd = self.lr * self.lr_mult, self.wd * self.wd_mult
        grad = self.normalized(np.clip(grad, -self.clip_value, self.clip_value))
        self.mean = self.beta1 * self.mean + (1.0 - self.beta1) * grad
        self.var = self.beta2 * self.var + (1.0 - self.beta2) * np.square(grad)
        mean = self.mean / (1.0 - self.beta1**self.steps)
        denominator = np.sqrt(self.var / (1.0 - self.beta2**self.steps)) + self.epsilon
        size = np.linalg.norm(stored if self.variant == "fused" else weight)
        if self.lower_bound is not None:
            size = np.maximum(size, self.lower_bound)
        if self.upper_bound is not None:
            size = np.minimum(size, self.upper_bound)
        first = mean / denominator + wd * weight
        moved = weight - lr * self.ratio(size, first) * self.beta1 * first
        second = grad / denominator + wd * (moved if self.variant == "step" else weight)
        self.weight = moved - lr * self.ratio(size, second) * (1.0 - self.beta1) * second
        return self.weight

    def normalized(self, grad):
        grad = grad * self.rescale_grad
        norm = np.linalg.norm(grad)
        if norm != 0:
            grad = grad / norm
        return grad if self.clip_gradient is None else np.clip(grad, -self.clip_gradient, self.clip_gradient)

    def ratio(self, size, change):
        norm = np.linalg.norm(change)
        if size == 0 or norm == 0:
            return 1.0
        ratio = size / norm
        return 1.0 if self.variant == "step" and not 0 < ratio < np.inf else ratio

    def states(self):
        master = {"weight32": self.weight} if self.multi_precision else {}
        return {"mean": self.mean, "var": self.var, **master}
