"""Storage: how float32 values are held between two sweeps.

A storage says which tensors hold a float32 tensor, how a tile of them is decoded to float32, and how a float32 tile is
encoded. Weights, optimizer states and waiting gradients all have one. A rule never learns which.

    @lowmem.storage.register("int8_64")
    @dataclass(frozen=True)
    class Int8(Storage):
        dtype: torch.dtype
        signed: bool

Random bits come from a counter (seed, step, parameter, element), never from a generator: an element gets the same bits
whatever the tile, the rank or a resume in between, and the random state that dropout uses does not change.
"""

import functools
import hashlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from lowmem.errors import ConfigError

ROUNDED_DTYPES = (torch.bfloat16, torch.float16)
STORED_DTYPES = (torch.float32, *ROUNDED_DTYPES)

# Groups may not cross the tiles that a row is cut into, and those are multiples of this many elements.
LARGEST_GROUP = 1024


class Part(NamedTuple):
    """One of the tensors of a storage: its dtype, and of how many elements of a row it holds one value."""

    name: str
    dtype: torch.dtype
    group: int = 1


# Gives random float32 numbers in [0, 1) in the shape of a tile, one per element.
Uniform = Callable[[], Tensor]


class Storage(ABC):
    """The way in which a float32 tensor is stored: a format, and the rounding into it. Subclasses are formats, and
    frozen dataclasses: equal ones share compiled code.

    Attributes:
        parts: the tensors. The first one has an element for each element of the float32 tensor. Zeros in all of them
            decode to zeros.
        draws: `encode` draws random numbers.
    """

    parts: tuple[Part, ...]
    draws: bool = False

    @abstractmethod
    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        """The float32 values [..., n] of tiles of the parts: [..., n / group] each."""

    @abstractmethod
    def encode(self, value: Tensor, uniform: Uniform) -> tuple[Tensor, ...]:
        """Tiles of the parts for float32 values [..., n]."""

    @property
    def bytes_per_element(self) -> float:
        """Bytes of all parts per element."""
        return sum(part.dtype.itemsize / part.group for part in self.parts)

    @functools.cached_property
    def group(self) -> int:
        """Elements of a row that are encoded together."""
        return max(part.group for part in self.parts)

    @property
    def is_cast(self) -> bool:
        """Returns whether encoding is a cast to the dtype of the only part."""
        return False


@dataclass(frozen=True)
class Float(Storage):
    """A float dtype: rounded to the nearest value, ties to even, or up or down at random so that the mean is the value.
    float32 holds every result exactly.
    """

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
        return (narrow_stochastically(value, self.dtype, uniform()) if self.draws else value.to(self.dtype),)


FLOAT32 = Float(torch.float32)


@dataclass(frozen=True)
class Compensated(Storage):
    """Kahan summation: what rounding to the nearest value cut off is stored too, in 16 bits."""

    dtype: torch.dtype

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:  # type: ignore[override]
        return Part("", self.dtype), Part("residual", torch.int16)

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        return widen(*stored)

    def encode(self, value: Tensor, uniform: Uniform) -> tuple[Tensor, ...]:
        return split(value, self.dtype)


@dataclass(frozen=True)
class Shown(Storage):
    """A weight that another storage holds; the parameter shows its value to the model, in the parameter's dtype."""

    dtype: torch.dtype
    held: Storage
    name: str = "codes"  # of the first part of `held`

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:  # type: ignore[override]
        return Part("", self.dtype), *(part._replace(name=part.name or self.name) for part in self.held.parts)

    @property
    def draws(self) -> bool:  # type: ignore[override]
        return self.held.draws

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        return self.held.decode(stored[1:])

    def encode(self, value: Tensor, uniform: Uniform) -> tuple[Tensor, ...]:
        held = self.held.encode(value, uniform)
        return self.held.decode(held).to(self.dtype), *held


# Makes a storage for tensors of a dtype; `signed` says whether they may be negative.
Maker = Callable[[torch.dtype, bool], Storage]
MakerType = TypeVar("MakerType", bound=Maker)

# By the names that `rounding` and `state_storage` take.
TABLE: dict[str, Maker] = {
    "nearest": lambda dtype, signed: Float(dtype),
    "stochastic": lambda dtype, signed: Float(dtype, draws=True),
    "compensated": lambda dtype, signed: Compensated(dtype),
    "master": lambda dtype, signed: FLOAT32,
}
_FLOATS = frozenset(TABLE)  # float32 holds every result exactly, and needs none of them

# Dtypes by the names that `state_storage` takes too: float32 as it is, the others rounded stochastically.
STATE_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in STORED_DTYPES}


def register(name: str) -> Callable[[MakerType], MakerType]:
    """Adds a storage to the table, for `rounding` and `state_storage`: a class, or a function that returns a `Storage`.
    It is called with a dtype, that of the parameter or bfloat16 for a state, and whether values may be negative.

    Raises:
        ConfigError: the name is taken, or a group of the storage does not divide 1,024.
    """

    def enter(maker: MakerType) -> MakerType:
        if name in TABLE or name in STATE_DTYPES:
            raise ConfigError(f"storage {name!r} is registered already; choose another name")
        if LARGEST_GROUP % maker(torch.bfloat16, True).group:
            raise ConfigError(f"storage {name!r}: the size of a group must divide {LARGEST_GROUP}")
        TABLE[name] = maker
        return maker

    return enter


def roundings() -> list[str]:
    """Names that `rounding` takes."""
    return list(TABLE)


def state_storages() -> list[str]:
    """Names that `state_storage` takes."""
    return [*STATE_DTYPES, *(name for name in TABLE if name != "master")]


@functools.cache
def of_state(name: str, signed: bool = True, dtype: torch.dtype = torch.bfloat16) -> Storage:
    """The storage of a tensor, by its name."""
    name, dtype = ("stochastic", STATE_DTYPES[name]) if name in STATE_DTYPES else (name, dtype)
    return FLOAT32 if name in _FLOATS and dtype == torch.float32 else TABLE[name](dtype, signed)


@functools.cache
def of_weight(rounding: str, dtype: torch.dtype) -> Storage:
    """The storage of a weight, whose first part is the parameter, of this dtype."""
    held = of_state(rounding, True, dtype)
    if held.parts[0].dtype == dtype:
        return held
    return Shown(dtype, held, "weight32" if held == FLOAT32 else "codes")


class Held(NamedTuple):
    """A weight, or a state of its size, as a sweep reads and writes it: its storage and the tensors of that."""

    storage: Storage
    parts: tuple[Tensor, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first part."""
        return self.storage.parts[0].dtype

    def decode(self) -> Tensor:
        """The float32 values."""
        return self.storage.decode(self.parts)


def part_name(state: str, part: str) -> str:
    """The name under which one tensor of a state's storage is kept and saved."""
    return f"{state}.{part}" if part else state


# -- rounding ----------------------------------------------------------------------------------------------------------

_LOW16 = 0xFFFF


def widen(stored: Tensor, residual: Tensor) -> Tensor:
    """The float32 value that `split` encoded."""
    if stored.dtype == torch.bfloat16:
        return (stored.float().view(torch.int32) + residual).view(torch.float32)
    return stored.float() + residual * (spacing(stored.float(), stored.dtype) * 2.0**-15)


def split(value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A float32 tile as (stored weight, int16 residual): compensated rounding.

    bfloat16: the weight is the nearest one (ties away from zero) and the residual is the float32's own low 16 bits, so
    `widen` gives the value back to the last bit. float16: the residual counts 2⁻¹⁵ of the weight's spacing, exact for
    normal float16 and within 2⁻⁴⁰ below 2⁻¹⁴. A value that is not finite has a zero residual.
    """
    if dtype == torch.bfloat16:
        bits, finite = value.view(torch.int32), value.isfinite()
        rounded = ((bits + 0x8000) & ~_LOW16).view(torch.float32)
        return torch.where(finite, rounded, value).to(dtype), torch.where(finite, bits, 0).to(torch.int16)
    stored = value.to(dtype)
    wide = stored.float()
    cut = (value - wide) / (spacing(wide, dtype) * 2.0**-15)
    return stored, torch.where(wide.isfinite(), cut.round(), 0).to(torch.int16)


def spacing(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance of neighbours in bfloat16 or float16 around a float32 value: a power of two, float32. From 2¹⁰⁰ on
    it stays what it is there: too small, and what is left over is rounded by the cast.

    By arithmetic, for compiled code on a CPU has no vector instruction that looks at a float's bits: adding between 3/4
    and 3/2 of its last place raises a float32 by one. Values are raised first, so that this much of them is a number.
    """
    size = (value.abs() * 2.0**27).clamp(max=2.0**126)
    last_place = (size + size * (1.5 * 2.0**-24)) - size
    more_bits, least = (16, 2.0**-133) if dtype == torch.bfloat16 else (13, 2.0**-24)
    return (last_place * 2.0 ** (more_bits - 27)).clamp(min=least)


def narrow_stochastically(value: Tensor, dtype: torch.dtype, noise: Tensor) -> Tensor:
    """A float32 tile rounded up or down at random so that the mean is the value; `noise` is float32 in [0, 1).

    Values that `dtype` holds exactly, infinities and NaN come out as they are.
    """
    gap = spacing(value, dtype)
    # float32 has just this spacing around so much: adding it rounds to a multiple, in less time than a division takes
    much = gap * (1.5 * 2.0**23)
    near = (value + much) - much
    low = torch.where(near > value, near - gap, near)
    return torch.where(noise * gap < value - low, low + gap, low).to(dtype)  # exact up to the cast


def nearest(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A float32 tile rounded to the nearest value of `dtype`, ties to even, still float32.

    In powers of two: a compiler takes a cast there and back for no change at all.
    """
    if dtype == torch.float32:
        return value
    gap = spacing(value, dtype)
    rounded = (value / gap).round() * gap
    return torch.where(rounded.abs() > 65504, value * torch.inf, rounded) if dtype == torch.float16 else rounded


def nearest_number(value: float, dtype: torch.dtype) -> float:
    """`nearest`, for a number of Python's."""
    if dtype == torch.float16:
        return float(struct.unpack("<e", struct.pack("<e", value))[0])
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    if dtype == torch.bfloat16:
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & ~_LOW16
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def noise_key(seed: int, step: int, name: str) -> int:
    """A 31-bit key for one parameter at one step."""
    digest = hashlib.blake2b(f"{seed}/{step}/{name}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


def uniform(bits: Tensor, half: int) -> Tensor:
    """The lower (0) or upper (1) 16 bits of random int32 values as float32 in [0, 1)."""
    return ((bits >> (16 * half)) & _LOW16).float() * 2.0**-16


def mix(x: Tensor) -> Tensor:
    """An int32 bijection whose output bits look random (Wellons' lowbias32); used as a counter-based generator."""
    x = x ^ ((x >> 16) & _LOW16)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * -0x7B935975  # 0x846CA68B as a signed number
    return x ^ ((x >> 16) & _LOW16)
