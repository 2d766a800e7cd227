"""How float32 results become stored weights: `nearest`, `stochastic`, `compensated`.

Pure elementwise functions of one tile. float32 weights hold every result exactly, so all three agree there.
Random bits come from a counter (seed, step, parameter, element), never from a generator: the same bits fall on the
same element whatever the tile, the rank or a resume in between, and dropout's random state is left alone.
"""

import hashlib
import struct
from typing import Literal

import torch
from torch import Tensor

Rounding = Literal["nearest", "stochastic", "compensated"]
ROUNDINGS: tuple[Rounding, ...] = ("nearest", "stochastic", "compensated")
ROUNDED_DTYPES = (torch.bfloat16, torch.float16)
STORED_DTYPES = (torch.float32, *ROUNDED_DTYPES)

_LOW16 = 0xFFFF


def widen(stored: Tensor, residual: Tensor | None = None) -> Tensor:
    """The float32 value of a stored tile; with an int16 `residual`, the value that `split` took apart."""
    if residual is None:
        return stored.float()
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
    scaled = value / gap  # a power of two: exact, and so is the fraction below
    low = scaled.floor()
    return (torch.where(noise < scaled - low, low + 1.0, low) * gap).to(dtype)


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


def noise(bits: Tensor, half: int) -> Tensor:
    """The lower (0) or upper (1) 16 bits of random int32 as float32 in [0, 1)."""
    return ((bits >> (16 * half)) & _LOW16).float() * 2.0**-16


def mix(x: Tensor) -> Tensor:
    """An int32 bijection whose output bits look random (Wellons' lowbias32); used as a counter-based generator."""
    x = x ^ ((x >> 16) & _LOW16)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * -0x7B935975  # 0x846CA68B as a signed number
    return x ^ ((x >> 16) & _LOW16)
