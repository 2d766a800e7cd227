"""Roundings of float32 tiles to 16 bits: to nearest, at random, and with what was cut off; and random bits for them.
They give float32 numbers that the narrower dtype holds.

Random bits come from a counter (seed, step, parameter, element), never from a generator: an element gets the same bits
whatever the tile, the rank or a resume in between, and the random state that dropout uses does not change.
"""

import hashlib
import struct

import torch
from torch import Tensor

_LOW16 = 0xFFFF
_EXPONENT = 0x7F800000

# float32 has whole numbers around this one: adding it writes a small one into the low bits.
_WHOLE = 1.5 * 2.0**23


def bits(value: Tensor) -> Tensor:
    """The bits of float32 numbers, int32."""
    return value.view(torch.int32)


def number(pattern: Tensor) -> Tensor:
    """The float32 numbers that have these bits."""
    return pattern.view(torch.float32)


def whole(value: Tensor) -> Tensor:
    """Whole float32 numbers below 2²² as int32. Compiled code on a CPU has no vector instruction for the conversion."""
    return bits(value + _WHOLE) - 0x4B400000


def widen(stored: Tensor, high: Tensor, low: Tensor) -> Tensor:
    """The float32 value that `split` encoded."""
    residual = high.float() * 256 + low.float()
    if stored.dtype == torch.bfloat16:
        return number(bits(stored.float()) + whole(residual))
    return stored.float() + residual * (spacing(stored.float(), stored.dtype) * 2.0**-15)


def split(value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """A float32 tile as (stored weight, residual in 16 bits): compensated rounding. The residual is two numbers, int8
    and uint8: compiled code on a CPU has no vector instructions for 16-bit integers.

    bfloat16: the weight is the nearest one (ties away from zero) and the residual is the float32's own low 16 bits, so
    `widen` gives the value back to the last bit. float16: the residual counts 2⁻¹⁵ of the weight's spacing, exact for
    normal float16 and within 2⁻⁴⁰ below 2⁻¹⁴. A value that is not finite has a zero residual.
    """
    if dtype == torch.bfloat16:
        known = value == value  # NaN differs from itself
        stored = torch.where(known, number((bits(value) + 0x8000) & ~_LOW16), value)
        residual = number((bits(value) << 16 >> 16) + 0x4B400000) - _WHOLE  # `whole` the other way
    else:
        stored = nearest(value, dtype)
        known = stored.isfinite()
        residual = ((value - stored) / (spacing(stored, dtype) * 2.0**-15)).round()
    residual = torch.where(known, residual, 0.0)
    high = (residual * 2.0**-8).floor()
    return stored, high, residual - high * 256


def widen8(stored: Tensor, residual: Tensor) -> Tensor:
    """The float32 value that `split8` encoded."""
    wide = stored.float()
    return wide + residual.float() * (_unit(wide, stored.dtype) * (1 / 254))


def split8(value: Tensor, dtype: torch.dtype, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """A float32 tile as (nearest weight, residual in 8 bits): what rounding cut off, in 127ths of half the weight's
    spacing (FlashOptim, arXiv:2602.23349), up or down at random so that the mean of what `widen8` gives is the value.
    `uniform` is between 0 and 1. A value that `widen8` has given comes out as it went in.

    A value that is not finite has a zero residual.
    """
    stored = nearest(value, dtype)
    unit = _unit(stored, dtype)
    # the inverse of a power of two: both have the bits of 1.0, twice, together; 254 times it may be infinite
    down = ((value - stored) * number(0x7F000000 - bits(unit)) * 254).floor().clamp(-127, 126)
    low, high = (stored + residual * (unit * (1 / 254)) for residual in (down, down + 1))  # as `widen8` does
    residual = torch.where(uniform * (high - low) < value - low, down + 1, down)
    return stored, torch.where(stored.abs() < torch.inf, residual, 0.0)


def _unit(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """`spacing`, but at least the smallest normal number, which has an inverse."""
    return spacing(stored, dtype, 2.0**-126)


def spacing(value: Tensor, dtype: torch.dtype, least: float = 0.0) -> Tensor:
    """The distance of neighbours in bfloat16 or float16 around a float32 value, or `least`: a power of two, float32.
    From 2¹⁰⁷ on it stays what it is there.
    """
    precision, smallest = (2.0**-7, 2.0**-133) if dtype == torch.bfloat16 else (2.0**-10, 2.0**-24)
    return (number(bits(value) & _EXPONENT) * precision).clamp(max(smallest, least), 2.0**100)


def narrow_stochastically(value: Tensor, dtype: torch.dtype, random: Tensor) -> Tensor:
    """A float32 tile rounded up or down at random so that the mean is the value; `random` is int32 in [0, 2¹⁶).

    Values that `dtype` holds exactly, infinities and NaN come out as they are.
    """
    if dtype == torch.bfloat16:  # added to the bits that are cut off, what is random carries into the others
        return torch.where(value == value, number((bits(value) + (_LOW16 - random)) & ~_LOW16), value)
    gap = spacing(value, dtype)
    much = gap * _WHOLE  # float32 has just this spacing around so much: adding it rounds to a multiple
    near = (value + much) - much
    low = torch.where(near > value, near - gap, near)
    return torch.where(fraction(random, 16) * gap < value - low, low + gap, low)


def raised(value: Tensor) -> Tensor:
    """Non-negative float32 numbers rounded up to the next one of bfloat16, still float32."""
    return torch.where(value < torch.inf, number((bits(value) + _LOW16) & ~_LOW16), value)


def nearest(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A float32 tile rounded to the nearest value of `dtype`, ties to even, still float32.

    Not by a cast: a compiler takes a cast there and back for no change at all.
    """
    if dtype == torch.float32:
        return value
    if dtype == torch.bfloat16:
        rounded = number((bits(value) + (0x7FFF + (bits(value) >> 16 & 1))) & ~_LOW16)
        return torch.where(value == value, rounded, value)
    gap = spacing(value, dtype)
    rounded = (value / gap).round() * gap
    return torch.where(rounded.abs() > 65504, value * torch.inf, rounded)


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


def random_bits(word: Tensor, number: int, count: int) -> Tensor:
    """The bits that a random int32 word has for the tensor of this number: numbers in [0, 2ᶜᵒᵘⁿᵗ), from 16 bits on.

    The lower half, the upper half, and the upper half of the word times an odd number, which depends on all of it: any
    two of them are as good as independent. Of more bits the others come last: each half takes some of the other one.
    """
    if number == 0:
        low = word & _LOW16
        return low if count == 16 else low << count - 16 | word >> 48 - count & (1 << count - 16) - 1
    if number > 1:  # powers of 2³² over the golden ratio, as a signed number
        word = word * ((pow(0x9E3779B9, number - 1, 1 << 32) + (1 << 31)) % (1 << 32) - (1 << 31))
    return word >> 32 - count & (1 << count) - 1


def fraction(random: Tensor, count: int) -> Tensor:
    """Numbers in [0, 2ᶜᵒᵘⁿᵗ) as float32 between 0 and 1: the middles of so many equal parts, at most 2²³."""
    return number(random << 23 - count | 0x3F800000) - (1 - 2.0 ** -(count + 1))


def mix(x: Tensor) -> Tensor:
    """An int32 bijection whose output bits look random (Wellons' lowbias32); used as a counter-based generator."""
    x = x ^ ((x >> 16) & _LOW16)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * -0x7B935975  # 0x846CA68B as a signed number
    return x ^ ((x >> 16) & _LOW16)
