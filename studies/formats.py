"""Storage formats of weights and states. Their names are `WEIGHTS` or `WEIGHTS, STORAGE states`.

`WEIGHTS` is float32, the rounding of bfloat16 weights, or one of lowmem's weight formats.
"""

from typing import Any, NamedTuple

import torch

import lowmem
from lowmem.tiles.storage import WEIGHT_FORMATS, of_state, of_weight


class Format(NamedTuple):
    """The storage formats of weights and of optimizer states."""

    weights: str
    states: str

    def optimizer(self, model: Any, rule: str, **options: Any) -> lowmem.FusedOptimizer:
        """Converts the weights of a float32 model to this format and returns an optimizer for them."""
        if self.weights != "float32":
            for param in model.parameters():  # buffers, such as rotary frequencies, remain float32
                param.data = param.data.bfloat16()
        if self.weights in WEIGHT_FORMATS:
            lowmem.quantize_(model, self.weights)
        trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        return lowmem.FusedOptimizer(trained, rule, rounding=self.rounding, state_storage=self.states, **options)

    @property
    def rounding(self) -> str:
        """The argument `rounding` of `FusedOptimizer`."""
        if self.weights == "float32":
            return "nearest"
        return "stochastic" if self.weights in WEIGHT_FORMATS else self.weights

    def bytes_per_element(self, states: int) -> float:
        """Returns the bytes per element of a weight matrix with this number of full-size states."""
        moments = sum(of_state(self.states, signed=n == 0).bytes_per_element for n in range(states))
        if self.weights in WEIGHT_FORMATS:
            return WEIGHT_FORMATS[self.weights] / 8 + 2 / 64 + moments  # includes a scale per 64 elements
        dtype = torch.float32 if self.weights == "float32" else torch.bfloat16
        return of_weight(self.rounding, dtype).bytes_per_element + moments


def format_of(name: str) -> Format:
    """Parses the name of a format."""
    if not name.endswith(" states"):
        return Format(name, "float32")
    weights, _, states = name.removesuffix(" states").rpartition(", ")
    return Format(weights, states)
