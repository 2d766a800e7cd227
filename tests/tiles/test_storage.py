"""Roundings: what compensated rounding splits it gives back, stochastic rounding is unbiased and repeatable."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lowmem
from lowmem.tiles import rounding, storage
from lowmem.tiles.layout import Layout, View
from lowmem.tiles.stored import StoredTiles
from lowmem.tiles.sweep import Sweep

HALVES = [torch.bfloat16, torch.float16]
LARGEST = {torch.bfloat16: torch.finfo(torch.bfloat16).max, torch.float16: torch.finfo(torch.float16).max}
# the last two NaN have every bit of their mantissa set: adding to it would reach exponent and sign
NOT_FINITE = torch.tensor([0x7F800000, -0x800000, 0x7FC00000, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)


def same_bits(a, b):
    integer = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.view(integer), b.view(integer))


def floats_of_all_kinds():
    """Each exponent and sign with edge and random mantissas: zeros, subnormals, ties, the largest; no Inf or NaN."""
    mantissas = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x17FFF, 0x18000, 0x7FFFFF, 0x7F8000, 0x7F7FFF])
    mantissas = torch.cat([mantissas, torch.randint(1 << 23, (500,))])
    bits = ((torch.arange(255) << 23)[:, None] + mantissas).flatten().int()
    return torch.cat([bits, bits | -(1 << 31)]).view(torch.float32)


def stored_as(held, value, random=1 << 15):
    """The tensors of a storage for a value; random: bits of every draw."""
    encoded = held.encode(
        value, storage.Uniform(lambda count: torch.full(value.shape, random << count - 16, dtype=torch.int32))
    )
    return tuple(new.to(part.dtype) for new, part in zip(encoded, held.parts, strict=True))


# -- compensated ---------------------------------------------------------------------------------------------------


def assert_split_is_exact(value):
    stored, high, low = stored_as(storage.Compensated(torch.bfloat16), value)
    assert (stored.dtype, high.dtype, low.dtype) == (torch.bfloat16, torch.int8, torch.uint8)
    assert same_bits(rounding.widen(stored, high, low), value)
    residual = (high.short() << 8) + low
    assert same_bits(residual, value.view(torch.int16).view(*value.shape, 2)[..., 0].contiguous())


def test_bfloat16_split_is_exact():
    """Weight and residual hold every finite float32; the residual is its low 16 bits."""
    value = floats_of_all_kinds()
    assert_split_is_exact(value)
    representable = value.abs() <= LARGEST[torch.bfloat16]
    stored, *_ = stored_as(storage.Compensated(torch.bfloat16), value)
    nearest = value[representable].bfloat16()
    tie = (value[representable].view(torch.int32) & 0xFFFF) == 0x8000
    assert same_bits(stored[representable][~tie], nearest[~tie])  # a tie goes away from zero, torch's to even


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=50))
def test_bfloat16_split_of_any_float(values):
    assert_split_is_exact(torch.tensor(values, dtype=torch.float32))


def test_float16_split_keeps_what_it_promises():
    """Exact for a normal float16, whose 10 bits and 16 of residual hold float32's 23; below 2⁻¹⁴ within 2⁻⁴⁰."""
    value = floats_of_all_kinds()
    value = value[value.abs() < 65520]  # what does not round to infinity
    stored, high, low = stored_as(storage.Compensated(torch.float16), value)
    assert same_bits(stored, value.half())
    error = (rounding.widen(stored, high, low).double() - value.double()).abs()
    normal = value.abs() >= 2**-14
    assert error[normal].max() == 0
    assert error[~normal].max() <= 2**-40


@pytest.mark.parametrize("dtype", HALVES)
def test_split_passes_on_what_is_not_finite(dtype):
    stored, high, low = stored_as(storage.Compensated(dtype), NOT_FINITE)
    assert not high.any()
    assert not low.any()
    torch.testing.assert_close(rounding.widen(stored, high, low), NOT_FINITE, equal_nan=True)


# -- stochastic ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("dtype", HALVES)
def test_stochastic_is_unbiased(dtype, number):
    """The mean of N draws is within 5 standard errors of the value, for values at every fraction and size, and both
    neighbours are met. A rounding with fraction f has the variance f(1-f) of a coin."""
    repeats = 200_000
    smallest = 2.0**-24 if dtype == torch.float16 else 2.0**-133  # subnormals
    for size, fraction in [(1.0, 0.1), (1.0, 0.5), (-3.0, 0.9), (1e-3, 0.01), (300.0, 0.3), (smallest * 4, 0.25)]:
        low = torch.tensor(size, dtype=dtype)
        high = torch.nextafter(low, torch.tensor(math.copysign(math.inf, size), dtype=dtype))
        value = (low.double() + fraction * (high.double() - low.double())).float()
        fraction = ((value.double() - low.double()) / (high.double() - low.double())).item()  # as float32 can hold it
        word = rounding.mix(rounding.mix(torch.arange(repeats, dtype=torch.int32) + 1))
        bits = rounding.random_bits(word, number, 16)
        drawn = rounding.narrow_stochastically(value.expand(repeats), dtype, bits).to(dtype)
        went_up = (drawn == high).double()
        assert ((drawn == low) | (drawn == high)).all()
        assert abs(went_up.mean().item() - fraction) <= 5 * math.sqrt(fraction * (1 - fraction) / repeats)


@pytest.mark.cpu_only("every bit pattern is read, that of unwritten memory too")
@pytest.mark.parametrize("dtype", HALVES)
def test_stochastic_leaves_exact_values(dtype):
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    drawn = rounding.narrow_stochastically(
        every.float(), dtype, torch.randint(1 << 16, every.shape, dtype=torch.int32)
    ).to(dtype)
    finite = every.isfinite()
    assert torch.equal(drawn[finite], every[finite])
    torch.testing.assert_close(drawn[~finite], every[~finite], equal_nan=True)


@pytest.mark.parametrize("dtype", HALVES)
def test_nearest_is_a_cast_there_and_back(dtype):
    """Up to 2¹⁰⁰ in bfloat16, from where on some of the rounding is left to a cast."""
    value = floats_of_all_kinds()
    value = torch.cat([value[value.abs() < 2.0**100] if dtype == torch.bfloat16 else value, NOT_FINITE])
    rounded = rounding.nearest(value, dtype)
    torch.testing.assert_close(rounded, value.to(dtype).float(), rtol=0, atol=0, equal_nan=True)


def test_noise_looks_random():
    """Each of 32 bits is a fair coin and independent of the same bit of the neighbour, within 5 standard errors of 2¹⁸
    coins; keys are all different."""
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
def test_bits_of_the_tensors_of_an_update_are_independent(count):
    """None of the upper 16 bits of one agrees with one of another more often than two coins do, within 5 standard
    errors of 2¹⁸ pairs, and their numbers do not correlate."""
    word = rounding.mix(rounding.mix(torch.arange(512, dtype=torch.int32) + 77)[:, None] + torch.arange(512))
    word = word.to(torch.int32)
    draws = [rounding.random_bits(word, number, count) for number in range(4)]
    planes = [
        torch.stack([(draw >> i & 1) * 2 - 1 for i in range(count - 16, count)]).flatten(1).float() for draw in draws
    ]
    limit = 5 / math.sqrt(word.numel())
    for one, other in itertools.combinations(planes, 2):
        assert (one @ other.T / word.numel()).abs().max() <= limit
    for one, other in itertools.combinations(draws, 2):
        pair = torch.stack([rounding.fraction(draw, count).flatten() for draw in (one, other)])
        assert torch.corrcoef(pair)[0, 1].abs() <= limit


def shifted(t):
    return {"param": t.param + t.grad}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [(1, 1, 700), (1, 37, 19), (4, 5, 30)])
def test_noise_is_of_the_element(dtype, shape):
    """The same element gets the same bits whatever tile it lies in, and others under another key."""

    def run(tile, key):
        torch.manual_seed(0)
        param, grad = torch.randn(shape).to(dtype), (1e-3 * torch.randn(shape)).to(dtype)
        layout = Layout.of(shape, View.matrix(3))
        weight = storage.Held(storage.of_weight("stochastic", dtype), (param,))
        Sweep(StoredTiles(layout, weight, grad, keys=lambda: [key], tile=tile)).apply(shifted)
        return param

    whole = run(1 << 20, key=5)
    assert all(torch.equal(run(tile, key=5), whole) for tile in (1, 7, 64, 100))
    assert not torch.equal(run(1 << 20, key=6), whole)


# -- through the optimizer -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
def test_small_steps_move_16_bit_weights(dtype, give_gradients):
    """200 steps, each a thousandth of a weight's spacing at most: nearest stalls, the others go where float32 goes."""
    start = 1 + torch.rand(64, 64)
    start = start.to(dtype)
    grad = torch.ones(64, 64, dtype=dtype)
    lr = torch.finfo(dtype).eps * 1e-3
    moved = {}
    for name in ("nearest", "stochastic", "compensated", "compensated8", "master", "float32"):
        weight = start.float() if name == "float32" else start.clone()
        param = torch.nn.Parameter(weight)
        options = {} if name == "float32" else {"rounding": name}
        opt = lowmem.FusedOptimizer([("w", param)], rule="lomo", lr=lr, **options)
        for _ in range(200):
            give_gradients(opt, (param, grad.to(param.dtype)))
        state = opt.named_state_dict()["state"].get("w", {})
        held = state.get("weight32", param.detach().float())
        residual = [state[name] for name in ("residual", "residual_low") if name in state]
        widen = rounding.widen if len(residual) == 2 else rounding.widen8
        held = widen(param.detach(), *residual) if residual else held
        moved[name] = held.double() - start.double()
    assert moved["nearest"].abs().max() == 0
    # bfloat16 keeps all of float32; float16's residual has 2 bits more than float32 at this size
    torch.testing.assert_close(moved["compensated"], moved["float32"], rtol=0, atol=0)
    torch.testing.assert_close(moved["master"], moved["float32"], rtol=0, atol=0)
    # 0.2 of a spacing on average over 4096 weights, whose mean has a standard error of 0.4/64 of a spacing
    mean = moved["stochastic"].mean().item()
    assert abs(mean - moved["float32"].mean().item()) <= 5 * 0.4 / 64 * torch.finfo(dtype).eps
    assert np.sign(mean) == -1
    # a residual is one of 254 parts of a spacing
    mean = moved["compensated8"].mean().item()
    assert abs(mean - moved["float32"].mean().item()) <= 5 * 0.4 / 64 * torch.finfo(dtype).eps / 254
