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
    return stored.float() + residual * (_half_spacing(stored.float()) * 2.0**-15)


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
    cut = (value - wide) / (_half_spacing(wide) * 2.0**-15)
    return stored, torch.where(wide.isfinite(), cut.round(), 0).to(torch.int16)


def narrow_stochastically(value: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """A float32 tile rounded up or down at random so that the mean is the value; `bits` is int32, 32 random bits each.

    Values that `dtype` holds exactly, infinities and NaN come out as they are.
    """
    if dtype == torch.bfloat16:
        raised = (value.view(torch.int32) + (bits & _LOW16)) & ~_LOW16
        return torch.where(value.isfinite(), raised.view(torch.float32), value).to(dtype)
    spacing = _half_spacing(value)
    scaled = value / spacing  # a power of two: exact, and so is the fraction below
    low = scaled.floor()
    up = (bits & 0xFFFFFF).float() * 2.0**-24 < scaled - low
    return torch.where(value.isfinite(), (low + up) * spacing, value).to(dtype)


def nearest(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A float32 tile rounded to the nearest value of `dtype`, ties to even, still float32.

    In bits and powers of two: a compiler takes a cast there and back for no change at all.
    """
    if dtype == torch.bfloat16:
        bits = value.view(torch.int32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & ~_LOW16).view(torch.float32)
        return torch.where(value.isfinite(), rounded, value)
    if dtype == torch.float16:
        spacing = _half_spacing(value)
        rounded = (value / spacing).round() * spacing
        return torch.where(rounded.abs() > 65504, value * torch.inf, rounded)
    return value


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
    bits = (value.abs() + 1e-30).view(torch.int32)
    part, low = (bits & _LOW16).float() * 2.0**-16, bits & ~_LOW16
    nearest_is_low = (part < 0.5) | ((part == 0.5) & ((low >> 16) & 1 == 0))
    up = torch.where(nearest_is_low, part > threshold, 1.0 - part <= threshold)
    return ((low + (up.int() << 16)).view(torch.float32) * value.sign()).to(torch.bfloat16)


def _half_spacing(value: Tensor) -> Tensor:
    """The spacing of float16 around a float32 value (2⁻²⁴ among its subnormals), as float32."""
    exponent = (value.view(torch.int32) >> 23) & 0xFF
    return ((exponent.clamp(min=113) - 10) << 23).view(torch.float32)


def noise_key(seed: int, step: int, name: str) -> int:
    """A 31-bit key for one parameter at one step."""
    digest = hashlib.blake2b(f"{seed}/{step}/{name}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


def mix(x: Tensor) -> Tensor:
    """An int32 bijection whose output bits look random (Wellons' lowbias32); used as a counter-based generator."""
    x = x ^ ((x >> 16) & _LOW16)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * -0x7B935975  # 0x846CA68B as a signed number
    return x ^ ((x >> 16) & _LOW16)
