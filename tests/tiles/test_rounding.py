"""Tests rounding to 16 bits, and the random bits of elements."""

import itertools
import math

import numpy as np
import pytest
import torch

from lowmem.tiles import rounding
from lowmem.tiles.storage import Compensated, Uniform

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
# the mantissas of the last two NaN are all ones: adding to them would carry into exponent and sign
NOT_FINITE = torch.tensor([0x7F800000, -0x800000, 0x7FC00000, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)


def same_bits(a, b):
    integer = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.view(integer), b.view(integer))


def floats_of_all_kinds():
    """Returns finite floats of all exponents and both signs, including zeros, subnormals, ties and the largest."""
    mantissas = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x17FFF, 0x18000, 0x7FFFFF, 0x7F8000, 0x7F7FFF])
    mantissas = torch.cat([mantissas, torch.randint(1 << 23, (500,))])
    bits = ((torch.arange(255) << 23)[:, None] + mantissas).flatten().int()
    return torch.cat([bits, bits | -(1 << 31)]).view(torch.float32)


@HALVES
def test_rounding_to_nearest_equals_a_cast(dtype):
    """For bfloat16, this holds up to 2¹⁰⁰. Above, a cast does part of the rounding."""
    value = floats_of_all_kinds()
    value = torch.cat([value[value.abs() < 2.0**100] if dtype == torch.bfloat16 else value, NOT_FINITE])
    rounded = rounding.nearest(value, dtype)
    torch.testing.assert_close(rounded, value.to(dtype).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.cpu_only("every bit pattern is read, also the one of unwritten memory")
@HALVES
def test_stochastic_rounding_keeps_representable_numbers(dtype):
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    for number in (0, 0xFFFF):
        random = torch.full(every.shape, number, dtype=torch.int32)
        drawn = rounding.narrow_stochastically(every.float(), dtype, random).to(dtype)
        torch.testing.assert_close(drawn, every, rtol=0, atol=0, equal_nan=True)


def split(value, dtype):
    storage = Compensated(dtype)
    encoded = storage.encode(value, Uniform.half(value))
    return [new.to(part.dtype) for new, part in zip(encoded, storage.parts, strict=True)]


def test_bfloat16_and_its_residual_are_the_bits_of_a_float32():
    """The weight is the nearest bfloat16, with ties away from zero, and the residual is the low 16 bits."""
    value = floats_of_all_kinds()
    stored, high, low = split(value, torch.bfloat16)
    assert same_bits(rounding.widen(stored, high, low), value)
    pattern = value.view(torch.int32)
    assert same_bits((high.short() << 8) + low, pattern.short())
    clear = (pattern & 0xFFFF != 0x8000) & (value.abs() <= torch.finfo(torch.bfloat16).max)
    assert same_bits(stored[clear], value[clear].bfloat16())


def test_float16_and_its_residual():
    """Float16's 10 bits and the residual's 16 hold float32's 23, so normal values are exact, others within 2⁻⁴⁰."""
    value = floats_of_all_kinds()
    value = value[value.abs() < 65520]  # larger ones round to infinity
    stored, high, low = split(value, torch.float16)
    assert same_bits(stored, value.half())
    error = (rounding.widen(stored, high, low).double() - value.double()).abs()
    normal = value.abs() >= 2**-14
    assert error[normal].max() == 0
    assert error[~normal].max() <= 2**-40


@HALVES
@pytest.mark.parametrize("bits", [8, 16])
def test_the_residual_of_a_non_finite_value_is_zero(bits, dtype):
    value = NOT_FINITE if bits == 16 else torch.cat([NOT_FINITE, torch.tensor([3.4e38, -3.4e38])])
    storage = Compensated(dtype, bits)
    stored, *residual = storage.encode(value, Uniform.half(value))
    assert not any(part.any() for part in residual)
    parts = [part.to(each.dtype) for part, each in zip((stored, *residual), storage.parts, strict=True)]
    torch.testing.assert_close(storage.decode(parts), value.to(dtype).float(), rtol=0, atol=0, equal_nan=True)


def test_noise_looks_random():
    """Each of 32 bits is a fair coin and independent of the same bit of its neighbor, within 5 standard errors of 2¹⁸
    coins. All keys differ."""
    rows = rounding.mix(torch.arange(512, dtype=torch.int32) + rounding.noise_key(0, 1, "w"))
    bits = rounding.mix(rows[:, None] + torch.arange(512, dtype=torch.int32))
    limit = 5 * 0.5 / math.sqrt(bits.numel())
    planes = torch.stack([(bits >> i) & 1 for i in range(32)]).double()
    assert (planes.mean((1, 2)) - 0.5).abs().max() <= limit
    for axis in (1, 2):
        agree = (planes == planes.roll(1, axis)).double().mean((1, 2))
        assert (agree - 0.5).abs().max() <= limit
    keys = {rounding.noise_key(seed, step, name) for seed in range(5) for step in range(50) for name in "ab"}
    assert len(keys) == 500
    assert all(0 <= key < 1 << 31 for key in keys)


@pytest.mark.parametrize("count", [16, 23])
def test_random_bits_of_an_update_are_fair_and_independent(count):
    """The upper 16 bits of different draws agree no more often than coins do, within 5 standard errors of 2¹⁸ pairs,
    and the draws do not correlate as numbers."""
    word = rounding.mix(rounding.mix(torch.arange(512, dtype=torch.int32) + 77)[:, None] + torch.arange(512))
    word = word.to(torch.int32)
    draws = [rounding.random_bits(word, number, count) for number in range(4)]
    planes = [
        torch.stack([(draw >> i & 1) * 2 - 1 for i in range(count - 16, count)]).flatten(1).float() for draw in draws
    ]
    limit = 5 / math.sqrt(word.numel())
    assert max(plane.mean(1).abs().max() for plane in planes) <= limit
    for one, other in itertools.combinations(planes, 2):
        assert (one @ other.T / word.numel()).abs().max() <= limit
    for one, other in itertools.combinations(draws, 2):
        pair = torch.stack([rounding.fraction(draw, count).flatten() for draw in (one, other)])
        assert torch.corrcoef(pair)[0, 1].abs() <= limit


@pytest.mark.parametrize("count", [16, 23])
def test_random_numbers_are_the_middles_of_equal_intervals(count):
    every = torch.arange(1 << count, dtype=torch.int32)
    expected = (np.arange(1 << count) + 0.5) / (1 << count)
    assert torch.equal(rounding.fraction(every, count).double(), torch.as_tensor(expected))
