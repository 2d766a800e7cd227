"""Formats of weights and states, by name: `FORMAT` or `FORMAT, STORAGE states`.

"float32" are float32 weights, other names are roundings of bfloat16 weights: lowmem's, and the ones of this file.
"""

import functools
import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowmem import storage
from lowmem.tiles.storage import FLOAT32, Integer, Shown, Uniform, of_state, of_weight


class Unpacked(Integer):
    """`Integer` that holds its multiples as float32 numbers: the same values. Compiled code on a CPU is slow at packing
    bits.
    """

    _low = 0

    @functools.cached_property
    def parts(self) -> tuple[storage.Part, ...]:  # type: ignore[override]
        return storage.Part("codes", torch.float32), storage.Part("unit", torch.bfloat16, self.size)


class Fresh(Unpacked):
    """One whose groups take another scale at each update."""

    def update(self, value: Tensor, uniform: Uniform, stored: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.encode(value, uniform)


@dataclass(frozen=True)
class Linear(storage.Storage):
    """8-bit integers at equal distances, with a scale for every 32 elements of a row: what `8bit` is compared with."""

    dtype: torch.dtype
    signed: bool

    @property
    def parts(self) -> tuple[storage.Part, ...]:  # type: ignore[override]
        codes = torch.int8 if self.signed else torch.uint8
        return storage.Part("", codes), storage.Part("scale", torch.float32, 32)

    @property
    def most(self) -> int:
        return 127 if self.signed else 255

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        code, scale = stored
        return (code.float().unflatten(-1, (-1, 32)) * (scale / self.most).unsqueeze(-1)).flatten(-2)

    def encode(self, value: Tensor, uniform: storage.Uniform) -> tuple[Tensor, ...]:
        groups = value.unflatten(-1, (-1, 32))
        scale = groups.abs().amax(-1)
        return (groups / scale.clamp(min=1e-38).unsqueeze(-1) * self.most).round().flatten(-2), scale


BITS = {"int8": 8, "int10": 10, "int12": 12}
STORAGES: dict[str, storage.Maker] = {
    "8bit_linear": Linear,
    **{name: lambda dtype, signed, bits=bits: Unpacked(bits) for name, bits in BITS.items()},
    **{f"{name}, fresh units": lambda dtype, signed, bits=bits: Fresh(bits) for name, bits in BITS.items()},
    **{
        f"{name}, groups of {size}": lambda dtype, signed, bits=bits, size=size: Unpacked(bits, size)
        for (name, bits), size in itertools.product(BITS.items(), (32, 128))
    },
}


class Format(NamedTuple):
    """How weights and states are stored.

    Attributes:
        matrices: "float32", or the rounding of bfloat16 weights.
        embedding, vectors: another rounding of the embedding, which is the head too, and of vectors.
        states: the `state_storage`.
        compiled: whether updates are; None leaves it to the optimizer.
    """

    matrices: str
    embedding: str = ""
    vectors: str = ""
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
                other = self.vectors if param.dim() == 1 else self.embedding if "embed" in name else ""
                named.setdefault(other or self.options["rounding"], []).append((name, param))
        return [{"params": params, "rounding": rounding} for rounding, params in named.items()]

    def bytes_per_element(self, states: int) -> float:
        """Bytes of an element of a matrix, without what the parameter shows, and of so many states."""
        moments = sum(of_state(self.states, signed=not place).bytes_per_element for place in range(states))
        if self.matrices == "float32":
            return FLOAT32.bytes_per_element + moments
        held = of_weight(self.matrices, torch.bfloat16)
        if isinstance(held, Shown):
            assert isinstance(held.held, Integer)
            held = Integer(held.held.bits, held.held.size)
        return held.bytes_per_element + moments


SPECIAL = {
    "float32, not compiled": Format("float32", compiled=False),
    "int10, vectors to nearest": Format("int10", vectors="nearest"),
    "int10, embedding bfloat16": Format("int10", embedding="stochastic", vectors="stochastic"),
}


def format_of(name: str) -> Format:
    for storage_name, maker in STORAGES.items():
        if storage_name not in (*storage.roundings(), *storage.state_storages()):
            storage.register(storage_name)(maker)
    if name in SPECIAL:
        return SPECIAL[name]
    weights, _, states = name.removesuffix(" states").rpartition(", ") if name.endswith(" states") else (name, "", "")
    return Format(weights, vectors="stochastic" * (weights in STORAGES), states=states or "float32")
