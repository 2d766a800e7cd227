"""Storage: how float32 values are held between two sweeps.

A storage says which tensors hold a float32 tensor, how a tile of them is decoded to float32, and how a float32 tile is
encoded. Weights, optimizer states and waiting gradients all have one. A rule never learns which.

    @lowmem.storage.register("int8_64")
    @dataclass(frozen=True)
    class Int8(Storage): ...

Random bits come from a counter (seed, step, parameter, element), never from a generator: an element gets the same bits
whatever the tile, the rank or a resume in between, and the random state that dropout uses does not change.
"""

import functools
import hashlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, TypeVar

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


class Random(NamedTuple):
    """What encoding may draw from.

    uniform: gives float32 in [0, 1) in the shape of the tile, one number per element.  shared: float32 scalar in [0, 1)
    that all elements of a step have in common.
    """

    uniform: Callable[[], Tensor]
    shared: Tensor | None


class Storage(ABC):
    """How a float32 tensor is held. Subclasses are frozen dataclasses: equal ones share compiled code.

    Attributes:
        parts: the tensors. The first one has an element for each element of the float32 tensor. Zeros in all of them
            decode to zeros.
        noise: "element" if `encode` draws a number per element, "step" if it draws one per step.
    """

    parts: tuple[Part, ...]
    noise: ClassVar[Literal["element", "step"] | None] = None

    @abstractmethod
    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        """The float32 values [..., n] of tiles of the parts: [..., n / group] each."""

    @abstractmethod
    def encode(self, value: Tensor, random: Random) -> tuple[Tensor, ...]:
        """Tiles of the parts for float32 values [..., n]."""

    @property
    def bytes_per_element(self) -> float:
        """Bytes of all parts per element."""
        return sum(part.dtype.itemsize / part.group for part in self.parts)

    @functools.cached_property
    def group(self) -> int:
        """Elements of a row that are encoded together."""
        return max(part.group for part in self.parts)


@dataclass(frozen=True)
class Float(Storage):
    """A storage whose first part is the tensor itself in a float dtype; `more` are the others."""

    dtype: torch.dtype
    more: ClassVar[tuple[Part, ...]] = ()

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:  # type: ignore[override]
        return Part("", self.dtype), *self.more

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        return stored[0].float()


class Nearest(Float):
    """Rounded to the nearest value, ties to even. float32 holds every result exactly."""

    def encode(self, value: Tensor, random: Random) -> tuple[Tensor, ...]:
        return (value.to(self.dtype),)


class Stochastic(Float):
    """Rounded up or down at random, so that the mean is the value."""

    noise = "element"

    def encode(self, value: Tensor, random: Random) -> tuple[Tensor, ...]:
        return (narrow_stochastically(value, self.dtype, random.uniform()),)


class GoldenRatio(Float):
    """bfloat16 rounded up where what is cut off exceeds a threshold that all elements of a step share and that runs
    evenly through [0, 1) over the steps, as in Tensor2Tensor (its `adafactor.py`). float16 is rounded to the nearest.
    """

    noise = "step"

    def encode(self, value: Tensor, random: Random) -> tuple[Tensor, ...]:
        if self.dtype != torch.bfloat16:
            return (value.to(self.dtype),)
        assert random.shared is not None
        return (narrow_past(value, random.shared),)


class Compensated(Float):
    """Kahan summation: what rounding to the nearest value cut off is kept too, in 16 bits."""

    more = (Part("residual", torch.int16),)

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        return widen(*stored)

    def encode(self, value: Tensor, random: Random) -> tuple[Tensor, ...]:
        return split(value, self.dtype)


class Master(Float):
    """Rounded to the nearest value, together with a float32 copy."""

    more = (Part("weight32", torch.float32),)

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        return stored[1]

    def encode(self, value: Tensor, random: Random) -> tuple[Tensor, ...]:
        return value.to(self.dtype), value


@dataclass(frozen=True)
class Shown(Storage):
    """A weight that another storage holds; the parameter shows its value to the model, in the parameter's dtype."""

    dtype: torch.dtype
    held: Storage

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:  # type: ignore[override]
        return Part("", self.dtype), *(part._replace(name=part.name or "codes") for part in self.held.parts)

    @property
    def noise(self) -> Literal["element", "step"] | None:  # type: ignore[override]
        return self.held.noise

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        return self.held.decode(stored[1:])

    def encode(self, value: Tensor, random: Random) -> tuple[Tensor, ...]:
        held = self.held.encode(value, random)
        return self.held.decode(held).to(self.dtype), *held


@dataclass(frozen=True)
class FromParameter(Storage):
    """Reads a weight from its parameter alone and encodes it for another storage: the first time."""

    parts: tuple[Part, ...]
    held: Storage

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        return stored[0].float()

    def encode(self, value: Tensor, random: Random) -> tuple[Tensor, ...]:
        half = torch.full_like(value, 0.5)  # not at random: the weight stays what it is, as far as it can be held
        return self.held.encode(value, Random(lambda: half, half[..., :1]))


StorageClass = TypeVar("StorageClass", bound=type[Storage])
TABLE: dict[str, type[Storage]] = {
    "nearest": Nearest,
    "stochastic": Stochastic,
    "compensated": Compensated,
    "master": Master,
    "golden_ratio": GoldenRatio,
}

# Dtypes by name, in which a state may be held: float32 as it is, the others rounded stochastically.
STATE_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in STORED_DTYPES}


def register(name: str) -> Callable[[StorageClass], StorageClass]:
    """Adds a storage to the table, for `rounding` and `state_storage`. It is constructed with `signed`: whether what it
    holds may be negative.

    Raises:
        ConfigError: the name is taken, or a group of the storage does not divide 1,024.
    """

    def enter(cls: StorageClass) -> StorageClass:
        if name in TABLE or name in STATE_DTYPES:
            raise ConfigError(f"storage {name!r} is registered already; choose another name")
        if LARGEST_GROUP % cls(signed=True).group:  # type: ignore[call-arg]
            raise ConfigError(f"storage {name!r}: the size of a group must divide {LARGEST_GROUP}")
        TABLE[name] = cls
        return cls

    return enter


def roundings() -> list[str]:
    """Names that `rounding` takes."""
    return list(TABLE)


def state_storages() -> list[str]:
    """Names that `state_storage` takes."""
    return [*STATE_DTYPES, *(name for name, cls in TABLE.items() if not issubclass(cls, Float))]


@functools.cache
def of_weight(rounding: str, dtype: torch.dtype) -> Storage:
    """The storage of a weight whose parameter has this dtype. One that holds every result exactly needs no rounding."""
    cls = TABLE[rounding]
    if not issubclass(cls, Float):
        return Shown(dtype, cls(signed=True))  # type: ignore[call-arg]
    return cls(dtype) if dtype in ROUNDED_DTYPES else Nearest(dtype)


@functools.cache
def of_state(name: str, signed: bool) -> Storage:
    """The storage of an elementwise state."""
    if name not in STATE_DTYPES:
        return TABLE[name](signed=signed)  # type: ignore[call-arg]
    dtype = STATE_DTYPES[name]
    return Stochastic(dtype) if dtype in ROUNDED_DTYPES else Nearest(dtype)


class Held(NamedTuple):
    """A state of the parameter's size as a sweep reads and writes it: its storage and the tensors of that."""

    storage: Storage
    parts: tuple[Tensor, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first part."""
        return self.storage.parts[0].dtype


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


def narrow_past(value: Tensor, threshold: Tensor) -> Tensor:
    """A float32 tile as bfloat16: not the nearest, but the other of its two neighbours, where the distance from the
    nearest is a larger part of the spacing than `threshold`.

    With a threshold that runs evenly over [0, 1) the mean is the value. As Tensor2Tensor has it (its `adafactor.py`).
    """
    size = value.abs() + 1e-30
    gap = spacing(size, torch.bfloat16)
    scaled = size / gap
    low = scaled.floor()
    part = scaled - low
    from_low = torch.where(part > threshold, low + 1.0, low)
    from_high = torch.where(1.0 - part <= threshold, low + 1.0, low)
    return (torch.where(scaled.round() == low, from_low, from_high) * gap * value.sign()).to(torch.bfloat16)


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


@functools.lru_cache(maxsize=1)
def golden_ratio_noise(step: int) -> float:
    """(step times the golden ratio) mod 1 in float32, bit by bit of `step`, to the bits of Tensor2Tensor's."""
    phi, noise = (5**0.5 - 1) / 2, 0.0
    for i in range(30):
        part = nearest_number((phi * 2**i) % 1.0, torch.float32)
        noise = nearest_number(noise + part * (step >> i & 1), torch.float32)
    return noise % 1.0
