"""Formats of weights and states, by name: `FORMAT` or `FORMAT, STORAGE states`.

"float32" are float32 weights, other names are roundings of bfloat16 weights: lowmem's, and the ones of this file.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowmem.tiles import storage
from lowmem.tiles.storage import of_state, of_weight


class Unpacked(storage.Integer):
    """`Integer` that holds its multiples as float32 numbers: the same values. Compiled code on a CPU is slow at packing
    bits.
    """

    _low = 0

    @property
    def bytes_per_element(self) -> float:
        return storage.Integer(self.bits, self.size).bytes_per_element

    @functools.cached_property
    def parts(self) -> tuple[storage.Part, ...]:  # type: ignore[override]
        return storage.Part("codes", torch.float32), storage.Part("unit", torch.bfloat16, self.size)


class Fresh(Unpacked):
    """One whose groups take another scale at each update."""

    def update(self, value: Tensor, uniform: storage.Uniform, stored: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.encode(value, uniform)


STORAGES: dict[str, storage.Maker] = {
    **{name: lambda dtype, signed, bits=bits: Unpacked(bits) for name, bits in storage.WEIGHT_FORMATS.items()},
    "int8, fresh units": lambda dtype, signed: Fresh(8),
}


class Format(NamedTuple):
    """How weights and states are stored.

    Attributes:
        matrices: "float32", or the rounding of bfloat16 weights; vectors next to integers are rounded stochastically.
        states: the `state_storage`.
        compiled: whether updates are; None leaves it to the optimizer.
    """

    matrices: str
    states: str = "float32"
    compiled: bool | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Of `FusedOptimizer`."""
        rounding = "nearest" if self.matrices == "float32" else self.matrices
        compiled = {} if self.compiled is None else {"compile": self.compiled}
        return {"rounding": rounding, "state_storage": self.states, **compiled}

    def parameters(self, model: Any) -> list[Any]:
        """The trained parameters of a model, a group for each rounding."""
        named: dict[str, list[Any]] = {}
        for name, param in model.named_parameters():
            if param.requires_grad:
                vector = param.dim() == 1 and self.matrices in STORAGES
                named.setdefault("stochastic" if vector else self.options["rounding"], []).append((name, param))
        return [{"params": params, "rounding": rounding} for rounding, params in named.items()]

    def bytes_per_element(self, states: int) -> float:
        """Bytes of an element of a matrix, without what the parameter shows, and of so many states."""
        moments = sum(of_state(self.states, signed=not place).bytes_per_element for place in range(states))
        held = of_weight(self.options["rounding"], torch.float32 if self.matrices == "float32" else torch.bfloat16)
        return getattr(held, "held", held).bytes_per_element + moments


def format_of(name: str) -> Format:
    for storage_name, maker in STORAGES.items():
        if storage_name not in (*storage.roundings(), *storage.state_storages()):
            storage.register(storage_name)(maker)
    if name == "float32, not compiled":
        return Format("float32", compiled=False)
    weights, _, states = name.removesuffix(" states").rpartition(", ") if name.endswith(" states") else (name, "", "")
    return Format(weights, states or "float32")
