"""Rounds float32 tiles to 16 bits: to nearest, stochastically, or compensated by a residual.
Rounded values are float32 numbers that the narrower dtype can represent.

Random bits come from a counter (seed, step, parameter, element), not from a generator. So an element gets the same
bits for every tile size, on every rank and after resuming, and the random state for dropout does not change.
"""

import hashlib
import struct

import torch
from torch import Tensor

_LOW16 = 0xFFFF
_EXPONENT = 0x7F800000

# float32 numbers near this one are integers, so adding it moves a small integer into the low bits.
_WHOLE = 1.5 * 2.0**23


def bits(value: Tensor) -> Tensor:
    """Returns the bits of float32 numbers as int32."""
    return value.view(torch.int32)


def number(pattern: Tensor) -> Tensor:
    """Returns the float32 numbers with these int32 bits."""
    return pattern.view(torch.float32)


def whole(value: Tensor) -> Tensor:
    """Converts integers below 2²² from float32 to int32. Compiled CPU code cannot vectorize a cast."""
    return bits(value + _WHOLE) - 0x4B400000


def widen(stored: Tensor, high: Tensor, low: Tensor) -> Tensor:
    """Undoes `split`."""
    residual = high.float() * 256 + low.float()
    if stored.dtype == torch.bfloat16:
        return number(bits(stored.float()) + whole(residual))
    return stored.float() + residual * (spacing(stored.float(), stored.dtype) * 2.0**-15)


def split(value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Splits a float32 tile into (stored weight, 16-bit residual) for compensated rounding. The residual is an int8 and
    a uint8 number, because compiled CPU code cannot vectorize 16-bit integers.

    bfloat16: the weight is rounded to nearest (ties away from zero), and the residual is the low 16 bits of the float32
    number, so `widen` restores every bit. float16: the residual is in multiples of 2⁻¹⁵ of the weight's spacing, exact
    for normal float16 and within 2⁻⁴⁰ below 2⁻¹⁴. Values that are not finite have a zero residual.
    """
    if dtype == torch.bfloat16:
        known = value == value  # NaN differs from itself
        stored = torch.where(known, number((bits(value) + 0x8000) & ~_LOW16), value)
        residual = number((bits(value) << 16 >> 16) + 0x4B400000) - _WHOLE  # the inverse of `whole`
    else:
        stored = nearest(value, dtype)
        known = stored.isfinite()
        residual = ((value - stored) / (spacing(stored, dtype) * 2.0**-15)).round()
    residual = torch.where(known, residual, 0.0)
    high = (residual * 2.0**-8).floor()
    return stored, high, residual - high * 256


def widen8(stored: Tensor, residual: Tensor) -> Tensor:
    """Undoes `split8`."""
    wide = stored.float()
    return wide + residual.float() * (_unit(wide, stored.dtype) * (1 / 254))


def split8(value: Tensor, dtype: torch.dtype, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Splits a float32 tile into (nearest weight, 8-bit residual). The residual is in 127ths of half the weight's
    spacing (FlashOptim, arXiv:2602.23349), rounded stochastically by `uniform` in (0, 1) so that the mean of `widen8`
    is the value. Splitting a result of `widen8` is lossless. Values that are not finite have a zero residual.
    """
    stored = nearest(value, dtype)
    unit = _unit(stored, dtype)
    # the bits of a power of two and of its inverse add up to twice the bits of 1.0; 254 times the inverse may overflow
    down = ((value - stored) * number(0x7F000000 - bits(unit)) * 254).floor().clamp(-127, 126)
    low, high = (stored + residual * (unit * (1 / 254)) for residual in (down, down + 1))  # as in `widen8`
    residual = torch.where(uniform * (high - low) < value - low, down + 1, down)
    return stored, torch.where(stored.abs() < torch.inf, residual, 0.0)


def _unit(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Like `spacing`, but at least the smallest normal number, so that it has an inverse."""
    return spacing(stored, dtype, 2.0**-126)


def spacing(value: Tensor, dtype: torch.dtype, least: float = 0.0) -> Tensor:
    """Returns the distance between adjacent bfloat16 or float16 numbers at a float32 value: a power of two, at
    least `least`, and constant for values above 2¹⁰⁷.
    """
    precision, smallest = (2.0**-7, 2.0**-133) if dtype == torch.bfloat16 else (2.0**-10, 2.0**-24)
    return (number(bits(value) & _EXPONENT) * precision).clamp(max(smallest, least), 2.0**100)


def narrow_stochastically(value: Tensor, dtype: torch.dtype, random: Tensor) -> Tensor:
    """Rounds a float32 tile stochastically, so that the mean is the value. random: int32 in [0, 2¹⁶).

    Values that `dtype` represents exactly, infinities and NaN are unchanged.
    """
    if dtype == torch.bfloat16:  # random bits are added to the low bits, and may carry into the high bits
        return torch.where(value == value, number((bits(value) + (_LOW16 - random)) & ~_LOW16), value)
    gap = spacing(value, dtype)
    much = gap * _WHOLE  # float32 numbers near it have the spacing `gap`, so adding it rounds to a multiple
    near = (value + much) - much
    low = torch.where(near > value, near - gap, near)
    return torch.where(fraction(random, 16) * gap < value - low, low + gap, low)


def raised(value: Tensor) -> Tensor:
    """Rounds non-negative float32 numbers up to bfloat16; the result is float32."""
    return torch.where(value < torch.inf, number((bits(value) + _LOW16) & ~_LOW16), value)


def nearest(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds a float32 tile to the nearest value of `dtype`, ties to even; the result is float32.

    It does not use casts, because a compiler may remove a cast to a dtype and back.
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
    """Like `nearest`, for a Python number."""
    if dtype == torch.float16:
        return float(struct.unpack("<e", struct.pack("<e", value))[0])
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    if dtype == torch.bfloat16:
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & ~_LOW16
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def noise_key(seed: int, step: int, name: str) -> int:
    """Returns a 31-bit seed for one parameter in one step."""
    digest = hashlib.blake2b(f"{seed}/{step}/{name}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


def random_bits(word: Tensor, number: int, count: int) -> Tensor:
    """Returns random numbers in [0, 2**count), count >= 16, for tensor `number` from a random int32 word.

    Tensor 0 uses the lower half of the word and tensor 1 the upper half. Others use the upper half of the word times an
    odd number, which depends on all bits of the word. Any two of them are practically independent. Bits after the
    first 16 come from the other half.
    """
    if number == 0 and count == 16:
        return word & _LOW16
    if number == 0:
        return (word & _LOW16) << (count - 16) | _bits_of(word, 48 - count, count - 16)
    if number > 1:
        factor = pow(0x9E3779B9, number - 1, 1 << 32)  # powers of 2³² / golden ratio
        word = word * ((factor + (1 << 31)) % (1 << 32) - (1 << 31))  # as a signed number
    return _bits_of(word, 32 - count, count)


def _bits_of(word: Tensor, first: int, count: int) -> Tensor:
    """Returns `count` bits of int32 words, from bit `first` on."""
    return (word >> first) & ((1 << count) - 1)


def fraction(random: Tensor, count: int) -> Tensor:
    """Converts numbers in [0, 2**count) to float32 in (0, 1): the centers of 2**count equal intervals. count <= 23."""
    return number(random << 23 - count | 0x3F800000) - (1 - 2.0 ** -(count + 1))


def mix(x: Tensor) -> Tensor:
    """Hashes int32 numbers bijectively (Wellons' lowbias32), for counter-based random numbers."""
    x = x ^ ((x >> 16) & _LOW16)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * -0x7B935975  # 0x846CA68B as a signed number
    return x ^ ((x >> 16) & _LOW16)
