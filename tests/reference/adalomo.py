"""AdaLomo (arXiv:2310.10195, algorithm 1) in float64 NumPy, transcribed from the paper and golden/README.md."""

import math

import numpy as np


def rms(x):
    return math.sqrt(np.mean(np.square(x)))


class AdaLomo:
    """The states of one parameter. `step` returns the updated weight.

    A tensor with three dimensions is a stack of separate matrices. With more dimensions, it is a matrix [out, rest].
    """

    def __init__(
        self, shape, *, lr, eps=(1e-30, 1e-3), clip_threshold=1.0, decay_rate=-0.8, weight_decay=0.0, clip_value=np.inf
    ):
        self.shape, self.lr, self.eps = shape, lr, eps
        self.clip_threshold, self.decay_rate = clip_threshold, decay_rate
        self.weight_decay, self.clip_value = weight_decay, clip_value
        self.steps = 0
        self.slices = []
        if len(shape) == 3:
            options = {k: v for k, v in vars(self).items() if k not in ("shape", "steps", "slices")}
            self.slices = [AdaLomo(shape[1:], **options) for _ in range(shape[0])]
        elif len(shape) >= 2:
            self.row, self.col = np.zeros(shape[0]), np.zeros(math.prod(shape[1:]))
        else:
            self.moment = np.zeros(shape)

    def step(self, weight, grad):
        if self.slices:
            for matrix in self.slices:
                matrix.lr = self.lr
            return np.stack([matrix.step(w, g) for matrix, w, g in zip(self.slices, weight, grad, strict=True)])
        self.steps += 1
        beta2 = 1.0 - self.steps**self.decay_rate
        grad = np.clip(grad, -self.clip_value, self.clip_value)
        change = grad / np.sqrt(self.second_moment(np.square(grad), beta2))
        change /= max(1.0, rms(change) / self.clip_threshold)
        size = self.lr * max(self.eps[1], rms(weight))
        return weight * (1.0 - size * self.weight_decay) - size * change

    def second_moment(self, square, beta2):
        def average(old, new):
            return beta2 * old + (1.0 - beta2) * (new + self.eps[0])

        if len(self.shape) < 2:
            self.moment = average(self.moment, square)
            return self.moment
        matrix = square.reshape(self.shape[0], -1)
        self.row = average(self.row, matrix.mean(1))
        self.col = average(self.col, matrix.mean(0))
        return (np.outer(self.row, self.col) / self.row.mean()).reshape(self.shape)

    def states(self):
        if self.slices:
            stacked = [matrix.states() for matrix in self.slices]
            return {name: np.stack([states[name] for states in stacked]) for name in stacked[0]}
        if len(self.shape) < 2:
            return {"exp_avg_sq": self.moment}
        return {"exp_avg_sq_row": self.row, "exp_avg_sq_col": self.col.reshape(self.shape[1:])}
