"""Tensor2Tensor's Adafactor (arXiv:1804.04235) in float64 NumPy, transcribed from its source and golden/README.md."""

from dataclasses import KW_ONLY, dataclass

import numpy as np


def golden_ratio_noise(step):
    """Returns the step times the golden ratio, modulo 1, as a sum of one float32 term per bit of the step."""
    ratio = (5**0.5 - 1) / 2
    total = np.float32(0)
    for bit in range(30):
        total += np.float32(ratio * 2**bit % 1.0) * (step >> bit & 1)
    return total % np.float32(1)


@dataclass
class AdafactorT2T:
    """The states of one parameter. `step` returns the updated weight.

    decay_rate: a constant decay of the second moment, which replaces `decay_type`.
    factor_stacks: whether a tensor with three dimensions is a stack of separate matrices, if factored=True.
    slack: allowed error per element: one quantum where float32 rounding may select the adjacent quantum.
    """

    shape: tuple
    _: KW_ONLY
    lr: float | None = None
    multiply_by_parameter_scale: bool = True
    decay_type: str = "pow"
    memory_exponent: float = 0.8
    beta2: float = 0.999
    decay_rate: float | None = None
    beta1: float = 0.0
    clipping_threshold: float | None = 1.0
    factored: bool = True
    factor_stacks: bool = True
    simulated_quantize_bits: int | None = None
    clip_value: float = np.inf

    def __post_init__(self):
        self.steps, self.slack = 0, 0.0
        stack = 1 if self.factored and self.factor_stacks and len(self.shape) == 3 else 0
        self.dims = tuple(range(stack, len(self.shape)))  # without the dimension of a stack
        matrix = self.factored and len(self.shape) == 2 + stack
        self.averaged = {"vr": (-1,), "vc": (-2,)} if matrix else {"v": ()}
        # averaged dimensions have size 1
        zeros = np.zeros(self.shape)
        self.moments = {name: zeros.mean(axes, keepdims=True) for name, axes in self.averaged.items()}
        if self.beta1:
            self.moments["m"] = zeros

    def rms(self, x):
        return np.sqrt(np.mean(np.square(x), axis=self.dims, keepdims=True))

    def step(self, weight, grad):
        self.steps += 1
        grad = np.clip(grad, -self.clip_value, self.clip_value)
        decay = self.decay()
        square = np.square(grad) + 1e-30
        for name, axes in self.averaged.items():
            mean = np.mean(square, axis=axes, keepdims=True)
            self.moments[name] = decay * self.moments[name] + (1.0 - decay) * mean
        change = grad / np.sqrt(self.second_moment())
        if self.clipping_threshold is not None:
            change = change / np.maximum(1.0, self.rms(change) / self.clipping_threshold)
        change = self.size(weight) * change
        if self.beta1:
            self.moments["m"] = change = self.beta1 * self.moments["m"] + (1.0 - self.beta1) * change
        return self.quantized(weight - change) if self.simulated_quantize_bits else weight - change

    def decay(self):
        if self.decay_rate is not None:
            return self.decay_rate
        if self.decay_type == "adam":
            return self.beta2 * (1.0 - self.beta2 ** (self.steps - 1)) / (1.0 - self.beta2**self.steps)
        return 1.0 - self.steps**-self.memory_exponent

    def second_moment(self):
        if "v" in self.moments:
            return self.moments["v"]
        row, col = self.moments["vr"], self.moments["vc"]
        return row / row.mean(-2, keepdims=True) * col

    def size(self, weight):
        lr = self.lr
        if lr is None:
            lr = min(self.steps**-0.5, 0.01) * (1.0 if self.multiply_by_parameter_scale else 0.05)
        return lr * np.maximum(self.rms(weight), 1e-3) if self.multiply_by_parameter_scale else lr

    def quantized(self, weight):
        if len(self.shape) < 2 or self.shape[-1] == 1:
            return weight
        largest = np.abs(weight).max(-1, keepdims=True) + 1e-9
        quantum = largest / (2 ** (self.simulated_quantize_bits - 1) - 1)
        multiple = weight / quantum + golden_ratio_noise(self.steps)
        to_next = np.abs(multiple - np.round(multiple))
        self.slack = np.where(to_next <= 2e-6 * (1.0 + np.abs(multiple)), quantum, 0.0)
        return np.floor(multiple) * quantum

    def states(self):
        return {name: np.squeeze(state, self.averaged.get(name, ())) for name, state in self.moments.items()}
