"""T5X's Adafactor (arXiv:1804.04235) in float64 NumPy, transcribed from its source and golden/README.md."""

from dataclasses import KW_ONLY, dataclass

import numpy as np


@dataclass
class Adafactor:
    """The states of one parameter. `step` returns the updated weight.

    rule: ROW, COLUMN, BATCH or NONE for each dimension. By default (None), the larger dimension of a matrix is COLUMN,
    and a tensor with three dimensions is a stack of separate matrices. factored=False disables this heuristic.
    """

    shape: tuple
    _: KW_ONLY
    lr: float
    factored: bool = True
    multiply_by_parameter_scale: bool = True
    beta1: float | None = None
    decay_rate: float = 0.8
    step_offset: int = 0
    clipping_threshold: float | None = 1.0
    weight_decay_rate: float | None = None
    min_dim_size_to_factor: int = 128
    epsilon1: float = 1e-30
    epsilon2: float = 1e-3
    weight_decay_rate_lr_exponent: float | None = None
    max_parameter_scale: float | None = None
    skip_nan_updates: bool = False
    rule: tuple | None = None
    clip_value: float = np.inf

    def __post_init__(self):
        self.steps = 0
        if self.rule is None:
            self.rule = self.heuristic()
        rows, cols = self.dims("ROW"), self.dims("COLUMN")
        self.averaged = {"v_row": cols, "v_col": rows} if rows or cols else {"v": ()}
        # averaged dimensions have size 1
        zeros = np.zeros(self.shape)
        self.moments = {name: zeros.mean(axes, keepdims=True) for name, axes in self.averaged.items()}
        if self.beta1 is not None:
            self.moments["m"] = zeros

    def heuristic(self):
        if not self.factored:
            return ("NONE",) * len(self.shape)
        stack = ("BATCH",) if len(self.shape) == 3 else ()
        dims = self.shape[len(stack) :]
        if len(dims) > 2:
            raise ValueError(f"shape {self.shape} requires a rule")
        if len(dims) < 2 or min(dims) < self.min_dim_size_to_factor:
            return (*stack, *("NONE" for _ in dims))
        return (*stack, "ROW", "COLUMN") if dims[0] <= dims[1] else (*stack, "COLUMN", "ROW")

    def dims(self, *kinds):
        return tuple(dim for dim, kind in enumerate(self.rule) if kind in kinds)

    def rms(self, x):
        return np.sqrt(np.mean(np.square(x), axis=self.dims("ROW", "COLUMN", "NONE"), keepdims=True))

    def step(self, weight, grad):
        self.steps += 1
        grad = np.clip(grad, -self.clip_value, self.clip_value)
        mixing = np.float64(self.steps - self.step_offset) ** -self.decay_rate
        square = np.square(grad) + self.epsilon1
        new = {
            name: (1.0 - mixing) * self.moments[name] + mixing * np.mean(square, axis=axes, keepdims=True)
            for name, axes in self.averaged.items()
        }
        change = grad / np.sqrt(self.second_moment(**new))
        if self.clipping_threshold is not None:
            change = change / np.maximum(1.0, self.rms(change) / self.clipping_threshold)
        change = self.lr * change
        if self.multiply_by_parameter_scale:
            change = change * np.clip(self.rms(weight), self.epsilon2, self.max_parameter_scale)
        if self.beta1 is not None:
            new["m"] = change = self.beta1 * self.moments["m"] + (1.0 - self.beta1) * change
        self.moments = {name: self.unless_nan(new[name], old) for name, old in self.moments.items()}
        decay = self.weight_decay_rate or 0.0
        if self.weight_decay_rate_lr_exponent:
            decay = (self.weight_decay_rate or 1.0) * self.lr**self.weight_decay_rate_lr_exponent
        return self.unless_nan((1.0 - decay) * weight - change, weight)

    def second_moment(self, v=None, v_row=None, v_col=None):
        return v if v_row is None else v_row / v_row.mean(self.dims("ROW"), keepdims=True) * v_col

    def unless_nan(self, new, old):
        return np.where(np.isnan(new), old, new) if self.skip_nan_updates else new

    def states(self):
        """Returns the states. v_row has the dimensions BATCH, NONE, ROW in this order; v_col BATCH, NONE, COLUMN."""
        states = dict(self.moments)
        for name, kind in {"v_row": "ROW", "v_col": "COLUMN"}.items():
            if name in states:
                dims = self.dims("BATCH") + self.dims("NONE") + self.dims(kind)
                ordered = states[name].transpose(dims + self.averaged[name])
                states[name] = ordered.reshape([self.shape[dim] for dim in dims])
        return states
