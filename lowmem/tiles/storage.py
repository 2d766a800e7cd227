"""Storage: how float32 values are stored between two sweeps.

A storage defines the tensors that store a float32 tensor, and converts tiles to and from float32. Weights, optimizer
states and gradients each have a storage, which is hidden from rules. `register` adds a storage.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from lowmem.errors import ConfigError
from lowmem.tiles.graph import materialize
from lowmem.tiles.rounding import fraction, narrow_stochastically, nearest, raised, split, split8, widen, widen8

ROUNDED_DTYPES = (torch.bfloat16, torch.float16)
STORED_DTYPES = (torch.float32, *ROUNDED_DTYPES)

# Groups may not cross tiles. The tiles of a row are multiples of this many elements.
LARGEST_GROUP = 1024

# Parameters with fewer elements use float32 states and stochastic rounding instead of storages with groups. Their
# shards might not be divisible into groups, and a state must have the same format for any number of ranks.
SMALLEST_GROUPED = 1 << 12


class Part(NamedTuple):
    """One tensor of a storage: its dtype, and the number of consecutive elements of a row that share one value."""

    name: str
    dtype: torch.dtype
    group: int = 1


@dataclass(frozen=True)
class Uniform:
    """Random numbers for a tile, one per element: float32 between 0 and 1, odd multiples of 2⁻²⁴. A value between two
    integers is rounded up where `uniform() < value - value.floor()`.

    Attributes:
        bits: returns random bits, 16 to 23 per element, as int32.
    """

    bits: Callable[[int], Tensor]

    def __call__(self) -> Tensor:
        return fraction(self.bits(23), 23)

    @classmethod
    def half(cls, value: Tensor) -> "Uniform":
        """Returns 0.5 for every element of `value`, which makes stochastic rounding round to nearest."""
        return cls(lambda count: torch.full_like(value, 1 << count - 1, dtype=torch.int32))


class Storage(ABC):
    """A format that stores a float32 tensor, and the rounding to it. Each format is a subclass and a frozen dataclass.
    Equal storages share compiled code.

    Attributes:
        parts: the stored tensors. The first has an element for each float32 value. Zeros in all parts store zeros.
        draws: whether `encode` uses random numbers.
    """

    parts: tuple[Part, ...]
    draws: bool = False

    @abstractmethod
    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        """Returns float32 values [..., n], given a tile [..., n / group] of each part."""

    @abstractmethod
    def encode(self, value: Tensor, uniform: Uniform) -> tuple[Tensor, ...]:
        """Encodes float32 values [..., n]. The returned dtypes may be wider than `Part.dtype`."""

    def update(self, value: Tensor, uniform: Uniform, stored: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Like `encode`, but also takes the tiles that store the previous value."""
        return self.encode(value, uniform)

    @property
    def bytes_per_element(self) -> float:
        """Number of bytes per element, over all parts."""
        return sum(part.dtype.itemsize / part.group for part in self.parts)

    @functools.cached_property
    def group(self) -> int:
        """Number of consecutive elements of a row that are encoded together."""
        return max(part.group for part in self.parts)

    @property
    def is_quantized(self) -> bool:
        """True if quantized values replace the tensor itself, so that all parts have names."""
        return bool(self.parts[0].name)

    @property
    def is_cast(self) -> bool:
        """True if the only part stores the value cast to its dtype."""
        return False


@dataclass(frozen=True)
class Float(Storage):
    """A float dtype, rounded to nearest (ties to even) or stochastically (unbiased). float32 is exact."""

    dtype: torch.dtype
    draws: bool = False

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:  # type: ignore[override]
        return (Part("", self.dtype),)

    @property
    def is_cast(self) -> bool:
        return not self.draws

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        return stored[0].float()

    def encode(self, value: Tensor, uniform: Uniform) -> tuple[Tensor, ...]:
        return (narrow_stochastically(value, self.dtype, uniform.bits(16)) if self.draws else value,)


FLOAT32 = Float(torch.float32)


@dataclass(frozen=True)
class Compensated(Storage):
    """Kahan summation: also stores the residual of rounding to nearest, in 16 bits, or in 8 bits that are rounded
    stochastically (about 16 bits of precision with bfloat16). A bfloat16 zero decodes to zero.
    """

    dtype: torch.dtype
    bits: int = 16

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:  # type: ignore[override]
        low = (Part("residual_low", torch.uint8),) if self.bits == 16 else ()
        return Part("", self.dtype), Part("residual", torch.int8), *low

    @property
    def draws(self) -> bool:  # type: ignore[override]
        return self.bits == 8

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        value = widen(*stored) if self.bits == 16 else widen8(stored[0], stored[1])
        if self.dtype == torch.float16:  # a float16 zero has a residual, which accumulates smaller numbers
            return value
        return torch.where(stored[0] == 0, 0.0, value)  # a masked weight may still have its earlier residual

    def encode(self, value: Tensor, uniform: Uniform) -> tuple[Tensor, ...]:
        return split(value, self.dtype) if self.bits == 16 else split8(value, self.dtype, uniform())


@dataclass(frozen=True)
class Moment(Storage):
    """Running means of g or g² in 8 bits, in groups along a row. Each group has a bfloat16 scale: its largest value,
    rounded up. Codes are finer for small values: a mean of g, x = m/scale, is companded to 2x/(1+|x|)
    (FlashOptim, arXiv:2602.23349), and a mean of g² is stored as its square root.

    A code of g² represents at least 1/256 of the largest root, because zero would make the step m/√v enormous. A group
    of zeros decodes to zeros. Stochastic rounding is unbiased in the value, not in the code. Otherwise a mean of g²
    with a β₂ of 0.999 would accumulate the bias of the square root a thousand times.
    """

    signed: bool
    size: int = 32
    draws: bool = True

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:  # type: ignore[override]
        return Part("", torch.int8 if self.signed else torch.uint8), Part("scale", torch.bfloat16, self.size)

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        code, scale = stored[0].float().unflatten(-1, (-1, self.size)), stored[1].float().unsqueeze(-1)
        fraction = code / (254 - code.abs()) if self.signed else ((code + 1) * 2.0**-8).square()
        return (fraction * scale).flatten(-2)

    def encode(self, value: Tensor, uniform: Uniform) -> tuple[Tensor, ...]:
        scale = raised(value.unflatten(-1, (-1, self.size)).abs().amax(-1))
        least = scale.clamp(min=2.0**-126).unsqueeze(-1)
        if self.signed:  # part: the fraction of the distance from one code's value to the next
            fraction = value.unflatten(-1, (-1, self.size)) * (1 / least)
            size = fraction.abs().clamp(max=1)
            level = size * (254 / (1 + size))
            low = level.floor()
            part, whole = (level - low) * (253 - low) * (1 + size), 254
        else:  # the square root, as the rule also computes it
            level = (value.sqrt().unflatten(-1, (-1, self.size)) * (256 / least.sqrt()) - 1).clamp(0, 255)
            low = level.floor()
            part, whole = (level - low) * (level + low + 2), 2 * low + 3
        if self.draws:
            code = torch.where(uniform().unflatten(-1, (-1, self.size)) * whole < part, low + 1, low)
        else:
            code = level.round()
        if self.signed:
            code = torch.where(fraction < 0, -code, code)
        return code.flatten(-2), scale


@dataclass(frozen=True)
class Integer(Storage):
    """Integers with 8, 10 or 12 bits, rounded stochastically, times a bfloat16 scale per group along a row (the part
    "unit"). The low 2 or 4 bits are packed separately: a byte has the low bits of elements that are a quarter of the
    group apart (10 bits), or half a group apart (12 bits).

        12 bits, a group of 64: codes int8 [64], high bits │ low uint8 [32], elements 0 and 32, 1 and 33, … │ unit [1]

    The scale of a group does not change while its largest element is at least 3/4 of the largest multiple. So elements
    without an update keep every bit, and elements with a small update are rarely rounded.
    """

    bits: int
    size: int = 64

    draws = True

    def __str__(self) -> str:
        return f"int{self.bits} in groups of {self.size}"

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:  # type: ignore[override]
        low = (Part("low", torch.uint8, 8 // self._low),) if self._low else ()
        return Part("codes", torch.int8), *low, Part("unit", torch.bfloat16, self.size)

    @property
    def _low(self) -> int:
        """Number of bits per element that are packed separately."""
        return self.bits - 8

    @property
    def _planes(self) -> tuple[int, int]:
        """Number of elements per byte of low bits, and number of these bytes per group."""
        per_byte = 8 // self._low if self._low else 1
        return per_byte, self.size // per_byte

    def _shifts(self, device: torch.device) -> Tensor:
        """Returns the positions of low bits in a byte, int32 [elements per byte, 1]."""
        return torch.arange(0, 8, self._low, dtype=torch.int32, device=device).unsqueeze(-1)

    @property
    def _most(self) -> int:
        """Largest multiple of the scale."""
        return (1 << self.bits - 1) - 1

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        code, unit = stored[0].float().unflatten(-1, (-1, *self._planes)), stored[-1].float()
        if self._low:
            packed = stored[1].int().unflatten(-1, (-1, 1, self._planes[1]))
            code = code * 2.0**self._low + (packed >> self._shifts(unit.device) & (1 << self._low) - 1).float()
        return (code * unit[..., None, None]).flatten(-3)

    def encode(self, value: Tensor, uniform: Uniform) -> tuple[Tensor, ...]:
        return self._encoded(value, uniform, raised(self._least_unit(value)))

    def update(self, value: Tensor, uniform: Uniform, stored: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        least, unit = self._least_unit(value), stored[-1].float()
        fits = (least <= unit) & (least >= 0.75 * unit)
        return self._encoded(value, uniform, torch.where(fits, unit, raised(least * (1 + 1 / 16))))

    def _least_unit(self, value: Tensor) -> Tensor:
        return value.unflatten(-1, (-1, self.size)).abs().amax(-1) / self._most

    def _encoded(self, value: Tensor, uniform: Uniform, unit: Tensor) -> tuple[Tensor, ...]:
        unit = unit.clamp(min=2.0**-126)  # a normal number, also for a group of zeros
        groups = value.unflatten(-1, (-1, self.size)) / unit.unsqueeze(-1)
        groups = groups.clamp(-self._most, self._most)  # after an inexact division, the scale may be too small
        down = groups.floor()
        whole = torch.where(uniform().unflatten(-1, (-1, self.size)) < groups - down, down + 1, down)
        if not self._low:
            return whole.flatten(-2), unit
        code = (whole * 2.0**-self._low).floor()
        low = materialize((whole - code * 2.0**self._low).to(torch.uint8)).unflatten(-1, self._planes)
        packed = (low.float() * (1 << self._shifts(unit.device)).float()).sum(-2)
        return code.flatten(-2), packed.flatten(-2), unit


@dataclass(frozen=True)
class RoundedCopy(Storage):
    """Stores a weight in the storage `held`. The parameter is a copy that is rounded to its dtype. If an element of the
    parameter differs from this copy, something else has modified it, and its value replaces the stored one.
    """

    dtype: torch.dtype
    held: Storage
    name: str = "codes"  # name of the first part of `held`

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:  # type: ignore[override]
        return Part("", self.dtype), *(part._replace(name=part.name or self.name) for part in self.held.parts)

    @property
    def draws(self) -> bool:  # type: ignore[override]
        return self.held.draws

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        value, param = self.held.decode(stored[1:]), stored[0].float()
        return torch.where(nearest(value, self.dtype) == param, value, param)

    def encode(self, value: Tensor, uniform: Uniform) -> tuple[Tensor, ...]:
        return self._shown(self.held.encode(value, uniform))

    def update(self, value: Tensor, uniform: Uniform, stored: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self._shown(self.held.update(value, uniform, stored[1:]))

    def _shown(self, held: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.held.decode(held), *held


# Creates a storage, given the dtype of a tensor and whether its values may be negative (`signed`).
Maker = Callable[[torch.dtype, bool], Storage]
MakerType = TypeVar("MakerType", bound=Maker)

# Storages that `rounding` accepts, by name. `state_storage` accepts only those that `register` has added.
TABLE: dict[str, Maker] = {
    "nearest": lambda dtype, signed: Float(dtype),
    "stochastic": lambda dtype, signed: Float(dtype, draws=True),
    "compensated": lambda dtype, signed: Compensated(dtype),
    "compensated8": lambda dtype, signed: Compensated(dtype, 8),
    "master": lambda dtype, signed: FLOAT32,
}
_OF_WEIGHTS = frozenset(TABLE)  # names that only `rounding` accepts. float32 weights are exact with any of them

# Storages that only `state_storage` accepts, by name.
MOMENTS: dict[str, Maker] = {
    "8bit": lambda dtype, signed: Moment(signed),
    "8bit_64": lambda dtype, signed: Moment(signed, 64),
    "8bit_nearest": lambda dtype, signed: Moment(signed, draws=False),
}

# Formats of `lowmem.quantize_`, from name to number of bits.
WEIGHT_FORMATS = {"int8": 8, "int10": 10, "int12": 12}

# Dtypes that `state_storage` also accepts, by name. 16-bit states are rounded stochastically.
STATE_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in STORED_DTYPES}


def register(name: str) -> Callable[[MakerType], MakerType]:
    """Adds a storage to the table, for `rounding` and `state_storage`: a class, or a function that returns a `Storage`.
    It is called with a dtype (the parameter's dtype, or bfloat16 for a state) and whether values may be negative.
    Registration also calls it, once for each combination.

    Raises:
        ConfigError: the name is taken, or a group size of the storage does not divide 1,024.
    """

    def enter(maker: MakerType) -> MakerType:
        if name in roundings() or name in state_storages():
            raise ConfigError(f"storage {name!r} is already registered. Choose another name")
        made = (maker(dtype, signed) for dtype in STORED_DTYPES for signed in (True, False))
        if any(LARGEST_GROUP % storage.group for storage in made):
            raise ConfigError(f"storage {name!r}: the group size must divide {LARGEST_GROUP}")
        TABLE[name] = maker
        return maker

    return enter


def roundings() -> list[str]:
    """Returns the names that `rounding` accepts."""
    return list(TABLE)


def state_storages() -> list[str]:
    """Returns the names that `state_storage` accepts."""
    return [*STATE_DTYPES, *MOMENTS, *(name for name in TABLE if name not in _OF_WEIGHTS)]


@functools.cache
def of_state(name: str, signed: bool = True, dtype: torch.dtype = torch.bfloat16) -> Storage:
    """Returns the storage of an optimizer state, given a name that `state_storage` accepts."""
    name, dtype = ("stochastic", STATE_DTYPES[name]) if name in STATE_DTYPES else (name, dtype)
    maker = MOMENTS.get(name) or TABLE[name]
    return FLOAT32 if name in _OF_WEIGHTS and dtype == torch.float32 else maker(dtype, signed)


@functools.cache
def of_weight(rounding: str, dtype: torch.dtype) -> Storage:
    """Returns the storage of a weight with this dtype. Its first part is the parameter."""
    held = of_state(rounding, True, dtype)
    if held.parts[0].dtype == dtype and not held.is_quantized:
        return held
    return RoundedCopy(dtype, held, "weight32" if held == FLOAT32 else "codes")


class StoredTensor(NamedTuple):
    """A weight or full-size state as a sweep reads and writes it: its storage and the stored tensors."""

    storage: Storage
    parts: tuple[Tensor, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor itself, or float32 if it is quantized."""
        return torch.float32 if self.storage.is_quantized else self.storage.parts[0].dtype

    def decode(self) -> Tensor:
        """Returns the float32 values."""
        return self.storage.decode(self.parts)

    def map(self, change: Callable[[Tensor, int], Tensor]) -> "StoredTensor":
        """Returns the tensors `change(tensor, group)`. group: number of elements per value of the tensor."""
        pairs = zip(self.parts, self.storage.parts, strict=True)
        return StoredTensor(self.storage, tuple([change(tensor, part.group) for tensor, part in pairs]))


def part_name(state: str, part: str) -> str:
    """Returns the name under which a part of a state's storage is saved."""
    return f"{state}.{part}" if part else state
