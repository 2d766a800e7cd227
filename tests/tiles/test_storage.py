"""Tests the properties of all storages, with one table of storages and one test per property."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from lowmem.tiles.storage import Compensated, Float, Integer, Moment, Uniform, roundings, state_storages

HALVES = (torch.bfloat16, torch.float16)
SIZES = (32, 64, 128)

# Every storage format, with its bytes per element.
STORAGES = {
    **{Float(dtype): 2.0 for dtype in HALVES},
    **{Float(dtype, draws=True): 2.0 for dtype in HALVES},
    **{Compensated(dtype): 4.0 for dtype in HALVES},
    **{Compensated(dtype, 8): 3.0 for dtype in HALVES},
    **{Moment(signed, draws=False): 1 + 2 / 32 for signed in (True, False)},
    **{Moment(signed, size): 1 + 2 / size for signed in (True, False) for size in (32, 64)},
    **{Integer(bits, size): bits / 8 + 2 / size for bits in (8, 10, 12) for size in SIZES},
}
DRAWING = [storage for storage in STORAGES if storage.draws]
GROUPED = [storage for storage in STORAGES if storage.group > 1]
# Values on the border between two codes may change once in 8-bit residuals and squares: see test_flashoptim.py.
STAYING = [
    storage
    for storage in STORAGES
    if not (isinstance(storage, Compensated) and storage.bits == 8)
    and not (isinstance(storage, Moment) and (storage.draws or not storage.signed))
]
each = partial(pytest.mark.parametrize, "storage", ids=repr)

NUMBERS = 1 << 23  # possible random numbers of an element
MIDDLE, LAST = NUMBERS // 2, NUMBERS - 1
LENGTH = 128  # row length, which every group size divides


def store(storage, value, number=MIDDLE, stored=None):
    """Returns the tensors that store a value, rounded with one random number, or with one per element."""
    number = torch.as_tensor(number, dtype=torch.int32).expand(value.shape)
    uniform = Uniform(lambda count: number >> 23 - count)
    parts = storage.encode(value, uniform) if stored is None else storage.update(value, uniform, stored)
    tensors = tuple(part.to(spec.dtype) for part, spec in zip(parts, storage.parts, strict=True))
    if not storage.is_cast and value.isfinite().all():  # every part fits its dtype exactly
        assert all(torch.equal(tensor.float(), part.float()) for tensor, part in zip(tensors, parts, strict=True))
    return tensors


def decoded(storage, *args):
    return storage.decode(store(storage, *args))


def signed(storage):
    return getattr(storage, "signed", True)


def random_rows(storage, rows=4):
    value = torch.randn(rows, LENGTH)
    return value if signed(storage) else value.abs()


def in_groups(storage, value, largest):
    """Splits a line of values into groups [n, group]. Each begins with the largest value, which sets its scale."""
    if storage.group == 1:
        return value, lambda groups: groups
    rest = storage.group - 1
    rows = torch.cat([value, value.new_zeros(-len(value) % rest)]).view(-1, rest)
    groups = torch.cat([torch.full_like(rows[:, :1], largest), rows], 1)
    return groups, lambda groups: groups[:, 1:].flatten()[: len(value)]


@each(STORAGES)
def test_bytes_per_element(storage):
    value = random_rows(storage)
    nbytes = sum(part.nbytes for part in store(storage, value))
    assert nbytes / value.numel() == storage.bytes_per_element == STORAGES[storage]


# -- values between two representable ones -----------------------------------------------------------------------------


def neighbours(storage, scale):
    """Returns representable values, the next larger ones, and the largest value of a group, in float64."""
    if isinstance(storage, Moment):
        codes = np.arange(-127, 128) if storage.signed else np.arange(1, 257)
        values = (codes / (254 - np.abs(codes)) if storage.signed else (codes / 256) ** 2) * scale
        return values[:-1], values[1:], scale
    if isinstance(storage, Integer):
        largest = 2 ** (storage.bits - 1) - 1
        values = np.arange(-largest, largest + 1) * scale
        return values[:-1], values[1:], largest * scale
    smallest = 2.0**-24 if storage.dtype == torch.float16 else 2.0**-133
    low = torch.tensor([1.0, -3.0, 1e-3, 300.0, 60000.0, smallest * 4], dtype=storage.dtype)
    low, high = low.double().cpu().numpy(), torch.nextafter(low, low * torch.inf).double().cpu().numpy()
    if isinstance(storage, Compensated):  # 254 steps per spacing, but none for subnormals
        parts = low[:4, None] + (high - low)[:4, None] * np.arange(255) / 254
        low, high = parts[:, :-1].flatten(), parts[:, 1:].flatten()
    return low, high, None


def error_of_a_chance(storage, scale):
    """Returns the allowed error of the probability of rounding up, which comes from float32 rounding."""
    if isinstance(storage, Moment):
        return 2.0**-14
    if isinstance(storage, Integer) and math.frexp(scale)[0] != 0.5:
        return 2.0**-11  # multiples of such a scale have 12 fractional bits
    return 2.0**-16 if isinstance(storage, Float) else 2.0**-22


def first_numbers(storage, groups, first):
    """Returns by bisection how many random numbers, from 0 on, round each element as 0 does."""
    least, most = torch.zeros(groups.shape, dtype=torch.int32), torch.full(groups.shape, NUMBERS, dtype=torch.int32)
    for _ in range(24):
        middle = (least + most) // 2
        same = decoded(storage, groups, middle.clamp(max=LAST)) == first
        least, most = torch.where(same, middle + 1, least).clamp(max=NUMBERS), torch.where(same, most, middle)
    return least


@each(DRAWING)
@pytest.mark.parametrize("scale", [2.0**-10, 1.5 * 2.0**-20])
def test_the_mean_over_all_random_numbers_is_the_value(storage, scale):
    """Both neighbors of a value occur, and the mean over the 2²³ equally likely random numbers is unbiased."""
    low, high, largest = neighbours(storage, scale)
    fractions = np.array([0.0, 1e-3, 0.05, 0.3, 0.5, 0.95])[:, None]
    value = torch.as_tensor(low + fractions * (high - low)).float().flatten()
    groups, without_largest = in_groups(storage, value, largest)
    first, last = (decoded(storage, groups, number) for number in (0, LAST))
    count = first_numbers(storage, groups, first)
    first, last, count = (without_largest(tensor).double().view(len(fractions), -1) for tensor in (first, last, count))
    mean = last + (first - last) * (count / NUMBERS)
    distance = torch.as_tensor(np.abs(high - low))
    limit = error_of_a_chance(storage, scale) * distance
    assert ((mean - value.double().view(mean.shape)).abs() <= limit).all()
    extremes = torch.stack([first, last])[:, 2:]  # a small fraction may round to 0 or less in float32
    for end, expected in ((extremes.amin(0), np.minimum(low, high)), (extremes.amax(0), np.maximum(low, high))):
        expected = torch.as_tensor(expected).expand(end.shape)
        torch.testing.assert_close(end, expected, rtol=3e-7, atol=0)


@each([Moment(True, draws=False), Moment(False, draws=False)])
def test_rounding_to_nearest(storage):
    low, high, largest = neighbours(storage, 1.5)
    for fraction, expected in ((0.3, low), (0.97, high)):
        value = torch.as_tensor(low + fraction * (high - low)).float()
        groups, without_largest = in_groups(storage, value, largest)
        actual = without_largest(decoded(storage, groups)).double()
        torch.testing.assert_close(actual, torch.as_tensor(expected), rtol=3e-7, atol=0)


@each(STORAGES)
def test_storage_is_monotonic(storage):
    """A larger value is never stored as a smaller one, if both use the same random number."""
    largest = 1.7
    line = torch.linspace(-largest if signed(storage) else 0, largest, 100_000)
    groups, without_largest = in_groups(storage, line, largest)
    for number in (0, 1, MIDDLE, LAST):
        actual = without_largest(decoded(storage, groups, number))
        assert (actual.diff() >= 0).all()
        assert len(actual.unique()) >= 250


# -- values that stay --------------------------------------------------------------------------------------------------


@each(STAYING)
def test_storing_twice_does_not_change_a_bit(storage):
    """This holds for all random numbers and group sizes, and for every significand of a bfloat16 scale."""
    significands = torch.arange(128, 256)[:, None] * 2.0**-7
    for exponent in (-10, 0, 10) if getattr(storage, "dtype", None) == torch.float16 else (-100, 0, 100):
        stored = store(storage, random_rows(storage, 128) * significands * 2.0**exponent)
        value = storage.decode(stored)
        for number in (0, MIDDLE, LAST, torch.randint(NUMBERS, value.shape)):
            assert all(map(torch.equal, store(storage, value, number, stored), stored))


@each(STORAGES)
@pytest.mark.parametrize("number", [0, LAST])
def test_zeros_stay_zeros(storage, number):
    """This holds in groups of zeros, and for signed formats in all other groups, too."""
    value = random_rows(storage)
    value[1], value[2], value[3, 4] = 0.0, -0.0, 0.0
    nothing = tuple(torch.zeros(4, LENGTH // part.group, dtype=part.dtype) for part in storage.parts)
    assert not storage.decode(nothing).any()
    for stored in (None, nothing, store(storage, value)):
        actual = decoded(storage, value, number, stored)
        assert not actual[1:3].any() and actual[3].any()
        assert actual[3, 4] == 0 or not signed(storage)


@each([Compensated(torch.bfloat16), Compensated(torch.bfloat16, 8)])
def test_a_masked_weight_is_zero(storage):
    """A mask applied through `.data` leaves the residual in place, which must not revive the weight."""
    weight, *residual = store(storage, random_rows(storage))
    assert not storage.decode((torch.zeros_like(weight), *residual)).any()


@each(STORAGES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_value_affects_only_its_group(storage, bad):
    """The group recovers once its values are finite."""
    value = random_rows(storage)
    spoilt, number = value.clone(), torch.randint(NUMBERS, value.shape)
    spoilt[1, 7] = bad if signed(storage) else abs(bad)
    stored = store(storage, value)
    broken = store(storage, spoilt, number, stored)
    actual, expected = storage.decode(broken), decoded(storage, value, number, stored)
    assert not actual[1, 7].isfinite()
    start = 7 // storage.group * storage.group
    actual[1, start : start + storage.group] = expected[1, start : start + storage.group] = 0.0
    assert torch.equal(actual, expected)
    healed = decoded(storage, value, number, broken)
    assert ((healed - value).abs() <= value.abs().amax(-1, keepdim=True) / 60).all()


@each(GROUPED)
@pytest.mark.parametrize("exponent", [-119, -100, -30, 0, 100, 126])
def test_groups_of_any_size(storage, exponent):
    """A float16 scale would lose the smallest and the largest groups."""
    value = torch.linspace(-1.0 if signed(storage) else 0.0, 1.0, LENGTH)[torch.randperm(LENGTH)] * 2.0**exponent
    for number in (0, MIDDLE, LAST):
        actual = decoded(storage, value, number)
        assert ((actual - value).abs().view(-1, storage.group) <= 2.0**exponent / 60).all()


# -- integers ----------------------------------------------------------------------------------------------------------

INTEGERS = [storage for storage in STORAGES if isinstance(storage, Integer)]


def packed(storage, whole, scale):
    """Packs multiples of a scale in plain Python. Elements that share a byte are evenly spaced in their group."""
    low, lows = storage.bits - 8, []
    for group in whole.view(-1, storage.size).tolist() if low else ():
        apart = storage.size * low // 8
        for first in range(apart):
            lows.append(sum((number % (1 << low)) << low * place for place, number in enumerate(group[first::apart])))
    codes = torch.tensor([number >> low for number in whole.tolist()], dtype=torch.int8)
    scales = torch.full((len(whole) // storage.size,), scale).bfloat16()
    return codes, *([torch.tensor(lows, dtype=torch.uint8)] if low else []), scales


@each(INTEGERS)
def test_every_multiple_is_packed_and_decoded(storage):
    largest = 2 ** (storage.bits - 1) - 1
    groups, _ = in_groups(storage, torch.arange(-largest, largest + 1), largest)
    parts = packed(storage, groups.flatten(), 2.0**-10)
    value = storage.decode(parts)
    assert torch.equal(value, groups.flatten() * 2.0**-10)
    assert all(map(torch.equal, store(storage, value), parts))


@each(INTEGERS)
def test_scales_stay_while_the_largest_element_fits(storage):
    largest, scale = 2 ** (storage.bits - 1) - 1, 2.0**-8 * 1.25
    stored = packed(storage, torch.zeros(storage.size, dtype=torch.int64), scale)

    def updated(top):
        value = torch.zeros(storage.size)
        value[3], value[4] = -top, top / 3
        new = store(storage, value, MIDDLE, stored)
        assert (storage.decode(new) - value).abs().max() < new[-1].item()
        return new[-1].item()

    top = torch.tensor(largest * scale)
    assert updated(top) == updated(torch.nextafter(0.75 * top, top)) == updated(0.8 * top) == scale
    for other in (torch.nextafter(top, 2 * top), 0.74 * top, 3 * top, 1e-3 * top, 1e30 * top, 1e-30 * top):
        fresh = updated(other)
        assert fresh != scale
        assert 15 / 16 * (1 - 2**-7) * largest <= other.item() / fresh <= 16 / 17 * largest  # some room to grow


@each(INTEGERS)
def test_values_too_small_for_a_normal_scale(storage):
    """Such values are rounded stochastically to multiples of the smallest normal number."""
    least = 2.0**-126
    value = torch.linspace(-3 * least, 3 * least, storage.size)
    numbers = torch.arange(0, NUMBERS, 1 << 11, dtype=torch.int32)[:, None]
    mean = decoded(storage, value.expand(len(numbers), -1), numbers).double().mean(0)
    assert ((mean - value.double()) / least).abs().max() < 2**-11


def test_roundings_of_weights_store_no_states():
    assert not {"nearest", "stochastic", "compensated", "compensated8", "master"} & {*state_storages()}
    assert {"nearest", "stochastic", "compensated", "compensated8", "master"} <= {*roundings()}
