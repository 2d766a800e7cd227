"""The 8-bit formats: moments in groups and weights with 8 bits of residual, compared with FlashOptim's definitions in
float64 (arXiv:2602.23349, github.com/databricks/flashoptim), and what updates rely on.
"""

import math

import numpy as np
import pytest
import torch
from support.devices import seeded

import lowmem
from lowmem.step.compiled import has_compiler
from lowmem.tiles import graph, rounding
from lowmem.tiles.storage import Compensated, Moment, Uniform

SIGNED = pytest.mark.parametrize("signed", [True, False], ids=["mean", "square"])
HALVES = [torch.bfloat16, torch.float16]


# -- definitions of FlashOptim -----------------------------------------------------------------------------------------


def companded(x):
    return 2 * x / (1 + np.abs(x))


def expanded(y):
    return y / (2 - np.abs(y))


def quantised(value, signed):
    """Codes and scales of groups [..., 32]: of g companded, of g² linear in the root. Theirs has a code for zero."""
    value = value if signed else np.sqrt(value)
    scale = np.maximum(np.abs(value).max(-1, keepdims=True), 1e-12)
    codes = np.floor((companded(value / scale) * 127 if signed else value / scale * 255) + 0.5)
    with np.errstate(over="ignore"):
        return codes, scale.astype(np.float16).astype(np.float64)


def dequantised(codes, scale, signed):
    return expanded(codes / 127) * scale if signed else (codes / 255 * scale) ** 2


def as_bfloat16(value):
    """float32 numbers rounded to the nearest of bfloat16, ties to even."""
    pattern = value.view(np.uint32)
    with np.errstate(over="ignore"):
        pattern = (pattern + (0x7FFF + (pattern >> 16 & 1))) & np.uint32(0xFFFF0000)
    return pattern.view(np.float32)


def half_spacing(narrow, precision):
    """Half of the distance to the next number of so many bits after the point, float64; narrow: normal numbers."""
    return np.exp2(np.frexp(narrow.astype(np.float64))[1] - 1.0 - precision - 1.0)


def corrected(value, narrow, precision, residual):
    """127·clamp(e/h, ±1) of e = θ - θ', which residuals are the nearest integers of, and θ' + ρ·h/127 in float64."""
    half = half_spacing(narrow, precision)
    return 127 * np.clip((value.astype(np.float64) - narrow) / half, -1, 1), narrow + residual * half / 127


def test_companding_and_its_inverse():
    x = np.linspace(-1, 1, 10_001)
    assert np.abs(expanded(companded(x)) - x).max() < 1e-15
    codes = np.arange(-127, 128)
    assert (np.rint(127 * companded(expanded(codes / 127))) == codes).all()


# -- moments -----------------------------------------------------------------------------------------------------------


def stored_as(held, value, bits=1 << 15):
    """The tensors of a storage for a value; bits: random bits of its elements."""
    bits = torch.as_tensor(bits, dtype=torch.int32).expand(value.shape)
    encoded = held.encode(value, Uniform(lambda count: bits << count - 16))
    return tuple(new.to(part.dtype) for new, part in zip(encoded, held.parts, strict=True))


def there_and_back(held, value, bits=1 << 15):
    return held.decode(stored_as(held, value, bits))


def table(signed, scale=1.0):
    """The values of all codes in a group of this scale, float64, in the order of codes: of -127 to 127, or 0 to 255."""
    codes = np.arange(-127, 128) if signed else np.arange(256)
    return (codes / (254 - np.abs(codes)) if signed else ((codes + 1) / 256) ** 2) * scale


def half_step(value, signed, scale):
    """Half of the way between codes in the domain in which they have equal distances: in which it was rounded."""
    return scale / 254 if signed else np.sqrt(scale) / 512


def in_codes(value, signed, scale):
    """Values in the domain in which codes have equal distances."""
    return companded(value / scale) * scale if signed else np.sqrt(value)


def random_groups(signed, count=2000, size=32):
    """Groups of many sizes, with values of many sizes in each; float32."""
    source = seeded(0)
    value = torch.randn(count, size, generator=source) * torch.randn(count, size, generator=source).exp()
    value *= 10 ** (torch.rand(count, 1, generator=source) * 40 - 30)
    return value if signed else value.abs()


@SIGNED
@pytest.mark.parametrize("size", [32, 64])
def test_every_code_has_its_value(signed, size):
    held = Moment(signed, size)
    codes = torch.arange(-127, 128) if signed else torch.arange(256)
    codes = torch.cat([codes, torch.zeros(-len(codes) % size, dtype=torch.long)])
    for scale in (1.0, 1.5 * 2.0**-100, 2.0**100):
        scales = torch.full((len(codes) // size,), scale, dtype=torch.bfloat16)
        found = held.decode((codes.to(held.parts[0].dtype), scales)).cpu()
        expected = table(signed, scale)
        np.testing.assert_allclose(found[: len(expected)].double(), expected, rtol=3e-7)
        assert (np.diff(found[: len(expected)]) > 0).all()
    assert held.bytes_per_element == 1 + 2 / size


def test_means_have_the_codes_of_flashoptim():
    """Where the scale is a power of two, which both hold exactly, grids are the same and so are codes. A value within
    float32 rounding of the middle between two codes may take the other one.
    """
    value = torch.rand(4000, 32) * 2 - 1
    value = value.sign() * value.abs() ** 3
    value[:, 7] = torch.where(torch.rand(4000) < 0.5, -1.0, 1.0)
    value *= 2.0 ** torch.randint(-12, 12, (4000, 1))
    codes, scale = stored_as(Moment(True, draws=False), value)
    expected, their_scale = quantised(value.double().cpu().numpy(), True)
    assert (scale.double().cpu().numpy() == their_scale).all()
    level = 127 * companded(value.double().cpu().numpy() / their_scale)
    clear = np.abs(level - np.floor(level) - 0.5) > 1e-4
    assert clear.mean() > 0.999
    assert (codes.cpu().numpy()[clear] == expected[clear]).all()
    assert np.abs(codes.cpu().numpy() - expected).max() <= 1
    found = Moment(True).decode((codes, scale)).double().cpu().numpy()
    np.testing.assert_allclose(found[clear], dequantised(expected, their_scale, True)[clear], rtol=1e-6)


@SIGNED
def test_nearest_is_within_half_a_step(signed):
    """Of our grid, whose scale is the largest value rounded up to bfloat16, and no more than a little further from the
    value than FlashOptim's. Their scale is rounded to nearest in float16, ours up in bfloat16: up to 2⁻⁷ too large. A
    square below the smallest code, (1/256)² of the scale, takes that one; FlashOptim would store zero below (1/510)².
    """
    value = random_groups(signed)
    value = value[value.abs().amax(-1) > 1e-30]
    codes, scale = stored_as(Moment(signed, draws=False), value)
    exact, scale = value.double().cpu().numpy(), scale.double().cpu().numpy()
    largest = np.abs(exact).max(-1, keepdims=True)
    assert (scale >= largest).all()
    assert (scale <= largest * (1 + 2**-7)).all()
    found = Moment(signed).decode((codes, torch.as_tensor(scale).bfloat16())).double().cpu().numpy()
    if not signed:
        lowest = np.broadcast_to(scale / 65536, exact.shape)
        below = exact < lowest
        assert (found[below] == lowest[below]).all()
        exact = np.maximum(exact, lowest)
    error = np.abs(in_codes(found, signed, scale) - in_codes(exact, signed, scale))
    assert (error <= half_step(exact, signed, scale) * 1.001).all()


@SIGNED
def test_orders_are_kept(signed):
    """A larger value never decodes to a smaller one, whatever the random bits, if they are the same."""
    scale = 1.7
    value = torch.linspace(-scale if signed else 0, scale, 31 * 4000)
    groups = torch.cat([value.view(-1, 31), torch.full((4000, 1), scale)], 1)
    for held, bits in [(Moment(signed, draws=False), 0), *((Moment(signed), bits) for bits in (0, 1, 1 << 15, 65535))]:
        found = there_and_back(held, groups, bits)[:, :31].flatten()
        assert (found.diff() >= 0).all()
        assert len(found.unique()) >= 250


@SIGNED
@pytest.mark.parametrize("case", ["zeros", "largest codes", "random", "small", "mixed"])
@pytest.mark.parametrize("draws", [False, True])
def test_round_trips_as_flashoptim_asks(signed, case, draws):
    """The bounds of its own test of quantization: an angle, and a mean error of 1.6 half bins of a linear grid."""
    for seed in range(10):
        source = seeded(seed)
        value = torch.randn(64, 32, generator=source)
        if case == "zeros":
            value = torch.zeros(64, 32)
        elif case == "largest codes":
            value = torch.full((64, 32), 127.0 if signed else 255.0)
        elif case == "small":
            value = torch.rand(64, 32, generator=source) * 0.01
        elif case == "mixed":
            value[:32] *= 0.1
            value[32:] *= 2.0
        value = value if signed else value.abs()
        bits = torch.randint(1 << 16, value.shape, generator=source)
        found = there_and_back(Moment(signed, draws=draws), value, bits)
        if case == "zeros":
            assert not found.any()
            continue
        assert torch.cosine_similarity(value.flatten(), found.flatten(), dim=0) > 0.9999
        assert (found - value).abs().mean() <= value.abs().max() / 255 * 1.6


@SIGNED
@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("fraction", [0.0, 1e-3, 0.3, 0.5, 0.97])
def test_the_mean_over_all_random_bits_is_the_value(signed, size, fraction):
    """Between every two codes: the mean over the 2¹⁶ equally likely draws is exact up to what 16 bits can say, 2⁻¹⁶ of
    the distance, and float32 rounding. 5 standard errors of a million draws would be 160 times as much.
    """
    scale = 1.5 * 2.0**-20
    grid = table(signed, scale)
    low, high = grid[:-1], grid[1:]
    within = low + fraction * (high - low)
    values = torch.as_tensor(np.append(within, scale)).float()  # the largest itself too
    values = torch.cat([values, torch.zeros(-len(values) % (size - 1))]).view(-1, size - 1)
    groups = torch.cat([values, torch.full((len(values), 1), scale)], 1)
    count, total = 1 << 16, torch.zeros(groups.shape, dtype=torch.float64)
    least, most = torch.full(groups.shape, math.inf), torch.full(groups.shape, -math.inf)
    for bits in torch.arange(count, dtype=torch.int32).view(64, -1, 1, 1):
        found = there_and_back(Moment(signed, size), groups.expand(len(bits), -1, -1).contiguous(), bits)
        total += found.double().sum(0)
        least, most = least.minimum(found.amin(0)), most.maximum(found.amax(0))
    mean = (total / count)[:, :-1].flatten()[: len(grid)].cpu().numpy()
    exact = values.flatten()[: len(grid)].double().cpu().numpy()
    distance = np.append(high - low, high[-1] - low[-1])
    assert (np.abs(mean - exact) <= 4 * 2**-16 * distance).all()
    if fraction:  # which float32 may hold as a little less than 0
        least, most = (end[:, :-1].flatten()[: len(low)].double().cpu().numpy() for end in (least, most))
        np.testing.assert_allclose(least, low, rtol=3e-7)
        np.testing.assert_allclose(most, high, rtol=3e-7)
    assert (total[:, -1] / count == scale).all()


@SIGNED
def test_unbiased_with_the_bits_of_updates(signed):
    """Within 5 standard errors, for values at borders, in between, and next to the largest."""
    repeats, scale = 100_000, 1.0
    grid = table(signed, scale)
    low = np.concatenate([[0, 1, 2, 64, 126, 127, 200, 253], [255 - 2]])[: 8 if signed else 9].clip(0, len(grid) - 2)
    fraction = np.linspace(0.05, 0.95, len(low))
    values = grid[low] + fraction * (grid[low + 1] - grid[low])
    group = torch.zeros(32)
    group[: len(values)], group[31] = torch.as_tensor(values).float(), scale
    random = rounding.mix(rounding.mix(torch.arange(repeats * 32, dtype=torch.int32) + 1)).view(repeats, 32)
    for half in (0, 1):
        found = there_and_back(Moment(signed), group.expand(repeats, 32), rounding.random_bits(random, half, 16))
        error = (found.double().mean(0)[: len(values)].cpu().numpy() - values) / (grid[low + 1] - grid[low])
        assert (np.abs(error) <= 5 * np.sqrt(fraction * (1 - fraction) / repeats)).all()


@SIGNED
def test_zeros_stay_zeros(signed):
    held = Moment(signed)
    for bits in (0, 65535):
        codes, scale = stored_as(held, torch.zeros(3, 64), bits)
        assert not codes.any()
        assert not scale.any()
        assert not held.decode((codes, scale)).any()
        assert not there_and_back(held, -torch.zeros(3, 64), bits).any()
    assert not held.decode(tuple(torch.zeros(64 // part.group, dtype=part.dtype) for part in held.parts)).any()


def test_a_mean_of_zero_stays_zero_among_others():
    value = torch.zeros(4, 32)
    value[:, 3], value[:, 4] = torch.tensor([1.0, -1.0, 1e-30, 1e30]), -0.0
    for bits in (0, 65535):
        found = there_and_back(Moment(True), value, bits)
        assert torch.equal(found != 0, value != 0)
        assert not found.signbit()[:, 4].any()


def test_a_square_is_never_zero_in_a_group_that_is_not():
    """A second moment of zero would make an enormous step. Down to subnormals, of which the smallest is 2⁻¹⁴⁹."""
    value = torch.zeros(200, 32)
    value[:, 5] = torch.logspace(-44.8, 38, 200, dtype=torch.float64).float()
    value[:, 6] = value[:, 5] * 1e-12
    for held, bits in [(Moment(False, draws=False), 0), (Moment(False), 0), (Moment(False), 65535)]:
        assert (there_and_back(held, value, bits) > 0).all()


def test_sizes_that_float16_loses():
    """The means of a group of 1e-30 are held; FlashOptim's scales are float16 and at least 1e-12, of which nothing is
    left there."""
    value = torch.linspace(0.1, 1, 32).view(1, 32) * 1e-30
    for signed in (True, False):
        held = Moment(signed, draws=False)
        found = there_and_back(held, value)
        assert stored_as(held, value)[1].item() > 0
        torch.testing.assert_close(found, value, rtol=0.02, atol=0)
    assert not dequantised(*quantised(value.double().cpu().numpy(), True), True).any()
    assert not dequantised(*quantised(value.double().cpu().numpy() ** 0.5 * 1e-5, True), True).any()


@SIGNED
def test_one_huge_and_others_tiny(signed):
    """The huge one is exact. The others are a smallest code or nothing; at random their mean is what they are, a square
    at least the smallest code."""
    value = torch.full((1, 32), 1e-6)
    value[0, 9] = 2.0**10
    for bits in (0, 1 << 15, 65535):
        found = there_and_back(Moment(signed), value, bits)
        assert found[0, 9] == 2.0**10
        assert len(np.unique(np.delete(found[0].cpu().numpy(), 9))) == 1
    smallest = 2.0**10 / (253 if signed else 65536)
    assert there_and_back(Moment(signed, draws=False), value)[0, 0] == (0 if signed else smallest)
    every = torch.arange(1 << 16, dtype=torch.int32).view(-1, 1)
    mean = there_and_back(Moment(signed), value.expand(1 << 16, 32), every).double().mean(0)[0].item()
    if signed:  # 16 random bits have no smaller chance than 2⁻¹⁶
        assert 0 <= mean <= smallest * 2**-16 * 1.001
    else:
        assert mean == smallest


@SIGNED
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("draws", [False, True])
def test_what_is_not_finite_shows(signed, bad, draws):
    """In all of its group, and in no other."""
    value = torch.rand(3, 32)
    value[1, 4] = bad if signed else abs(bad)
    found = there_and_back(Moment(signed, draws=draws), value)
    assert not found[1].isfinite().any() or (signed and not found[1, 4].isfinite() and found[1].isnan().any())
    assert found[[0, 2]].isfinite().all()


@SIGNED
def test_the_largest_numbers(signed):
    """Up to the largest of bfloat16; a float32 above it is infinite there, and shows."""
    largest = torch.finfo(torch.bfloat16).max
    value = torch.linspace(0.2, 1, 32).view(1, 32) * 2.0**125
    torch.testing.assert_close(there_and_back(Moment(signed, draws=False), value), value, rtol=0.02, atol=0)
    value[0, 3] = largest
    assert there_and_back(Moment(signed, draws=False), value).isfinite().all()
    value[0, 3] = torch.finfo(torch.float32).max
    assert not there_and_back(Moment(signed, draws=False), value).isfinite().any()


@SIGNED
def test_subnormals_become_smaller_at_most(signed):
    """A group whose largest value is below 2⁻¹²⁶ is held as less than it is, of its own sign: no update feels that."""
    value = torch.logspace(-44, -38, 300, dtype=torch.float64).float()
    value = torch.cat([value, -value]).view(-1, 1) if signed else value.view(-1, 1)
    value = value * torch.linspace(0.1, 1, 32)
    for held, bits in [(Moment(signed, draws=False), 0), (Moment(signed), 0), (Moment(signed), 65535)]:
        found = there_and_back(held, value, bits)
        assert found.isfinite().all()
        assert (found * value.sign() >= 0).all()
        assert (found.abs().amax(-1) <= value.abs().amax(-1) * (1 + 2.0**-7) + 2.0**-133).all()


def test_a_mean_that_was_decoded_has_the_same_codes():
    held = Moment(True, draws=False)
    codes, scale = stored_as(held, random_groups(True))
    again = stored_as(held, held.decode((codes, scale)))
    assert torch.equal(again[0], codes)
    assert torch.equal(again[1], scale)


def test_a_square_that_was_decoded_changes_once_at_most():
    """The largest square of a group may round to code 254, if its scale was rounded up by so much. The next scale is
    that value rounded up, which may be smaller by one spacing of bfloat16; codes then are others, values within half a
    step what they were. After that nothing changes.
    """
    held = Moment(False, draws=False)
    value = random_groups(False)
    value = value[value.amax(-1) > 1e-30]
    codes, scale = stored_as(held, value)
    assert set(codes.amax(-1).tolist()) == {254, 255}
    once = stored_as(held, held.decode((codes, scale)))
    full = codes.amax(-1) == 255
    assert torch.equal(once[0][full], codes[full])
    assert torch.equal(once[1][full], scale[full])
    before, after = held.decode((codes, scale)).sqrt(), held.decode(once).sqrt()
    assert ((after - before).abs() <= before.amax(-1, keepdim=True) / 512 * 1.01).all()
    for _ in range(3):
        once = stored_as(held, held.decode(once))
    for _ in range(3):
        again = stored_as(held, held.decode(once))
        assert torch.equal(again[0], once[0])
        assert torch.equal(again[1], once[1])


@SIGNED
def test_averages_over_many_steps(signed):
    """3000 steps of a running mean with β = 0.999, of which one changes much less than a code: rounded at random it is
    where float32 is, within 5 standard errors, and rounded to nearest it is not. The noise of the roundings that it
    remembers is a sixth of the mean, at these sizes of a group.
    """
    source = seeded(0)
    size = torch.rand(256, 32, generator=source) + 0.1
    means = {"float32": torch.zeros(256, 32), "8bit": torch.zeros(256, 32), "8bit_nearest": torch.zeros(256, 32)}
    for step in range(3000):
        grad = size * (torch.rand(256, 32, generator=source) + 0.5)
        for name, mean in means.items():
            mean = mean * 0.999 + (grad if signed else grad**2) * 0.001
            if name != "float32":
                bits = rounding.mix(torch.arange(mean.numel(), dtype=torch.int32) + step * 100_003)
                bits = rounding.random_bits(rounding.mix(bits), 0, 16).view(mean.shape)
                mean = there_and_back(Moment(signed, draws=name == "8bit"), mean, bits)
            means[name] = mean
    wrong = {name: ((mean - means["float32"]) / means["float32"]) for name, mean in means.items()}
    assert wrong["8bit"].square().mean().sqrt() < 0.2
    for name, unbiased in (("8bit", True), ("8bit_nearest", False)):
        limit = 5 * wrong[name].std() / math.sqrt(wrong[name].numel())
        assert (abs(wrong[name].mean()) <= limit) == unbiased


# -- weights with a residual -------------------------------------------------------------------------------------------


def tails(exponent, sign, head=7):
    """Numbers with this exponent and all tails of 16 bits: with the first, second and last of the bits before them."""
    heads = np.array([0, 1, (1 << head) - 1], dtype=np.uint32)[:, None] << np.uint32(23 - head)
    every = np.arange(1 << (23 - head), dtype=np.uint32)
    pattern = (np.uint32(exponent) << np.uint32(23)) | heads | every | np.uint32((sign < 0) << 31)
    return pattern.flatten().view(np.float32)


def test_residuals_of_bfloat16_are_those_of_flashoptim():
    """Rounded to nearest, for all tails of 16 bits and every exponent: the same weight and residual, and what is
    decoded is within 1/508 of a spacing, and half of float32's last bit, of the value.

    Where a spacing is below 2⁻¹²⁶ or above 2¹⁰⁰, residuals are of that spacing: they correct less, and never make the
    weight worse. Weights of such sizes do not occur.
    """
    held = Compensated(torch.bfloat16, 8)
    for exponent in range(1, 255):
        for sign in (1, -1) if exponent % 16 == 7 else (1,):
            value = tails(exponent, sign)
            stored, residual = stored_as(held, torch.as_tensor(value))
            found = held.decode((stored, residual)).double().cpu().numpy()
            narrow = as_bfloat16(value)
            finite = np.isfinite(narrow)
            assert (stored.float().cpu().numpy() == narrow).all()
            value, narrow, found, residual = (each[finite] for each in (value, narrow, found, residual.cpu().numpy()))
            without, error = np.abs(value.astype(np.float64) - narrow), np.abs(value - found)
            assert (error <= without).all()
            assert (error[without == 0] == 0).all()
            if 8 <= exponent < 234:
                expected, exact = corrected(value, narrow, 7, residual)
                assert (np.abs(residual - expected) <= 0.51).all()  # that which is nearest when decoded to float32
                half = half_spacing(narrow, 7)
                last = np.spacing(np.abs(value)).astype(np.float64)
                assert (np.abs(found - exact) <= 0.51 * np.spacing(np.abs(found).astype(np.float32))).all()
                assert (error <= half / 254 + last).all()
                assert (error.max() >= half.min() / 254 * 0.9) and np.abs(residual).max() == 127


def test_residuals_of_float16_are_those_of_flashoptim():
    held = Compensated(torch.float16, 8)
    for exponent in range(127 - 14, 127 + 16):
        for sign in (1, -1):
            value = tails(exponent, sign, head=10)
            stored, residual = stored_as(held, torch.as_tensor(value))
            narrow = value.astype(np.float16).astype(np.float64) if exponent < 142 else stored.double().cpu().numpy()
            finite = np.isfinite(narrow)
            value, narrow = value[finite], narrow[finite]
            assert (narrow == value.astype(np.float16)).all()
            expected, exact = corrected(value, narrow, 10, residual.cpu().numpy()[finite])
            assert (np.abs(residual.cpu().numpy()[finite] - expected) <= 0.53).all()
            found = held.decode((stored, residual)).double().cpu().numpy()[finite]
            assert (np.abs(found - exact) <= np.spacing(np.abs(value))).all()
    value = torch.linspace(-(2.0**-14), 2.0**-14, 100_001)  # subnormals have one spacing, 2⁻²⁴
    stored, residual = stored_as(held, value)
    assert torch.equal(stored, value.half())
    assert (held.decode((stored, residual)) - value).abs().max() <= 2.0**-24 / 508 + 2.0**-38


@pytest.mark.parametrize("dtype", HALVES)
def test_residuals_of_what_is_not_finite(dtype):
    value = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, 3.4e38, -3.4e38, 0.0, -0.0])
    stored, residual = stored_as(Compensated(dtype, 8), value)
    assert not residual.any()
    torch.testing.assert_close(stored, value.to(dtype), rtol=0, atol=0, equal_nan=True)
    found = Compensated(dtype, 8).decode((stored, residual))
    torch.testing.assert_close(found, value.to(dtype).float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(stored.signbit()[2:], value.signbit()[2:])


@pytest.mark.parametrize(("dtype", "head"), [(torch.bfloat16, 7), (torch.float16, 10)])
@pytest.mark.parametrize("exponent", [117, 127, 130])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_mean_of_residuals_is_the_value(dtype, head, exponent, sign):
    """The mean over all 2²³ random numbers, of which so many at the beginning round up as bisection finds."""
    value, held, count = torch.as_tensor(tails(exponent, sign, head)), Compensated(dtype, 8), 1 << 23

    def under(numbers):
        stored, residual = held.encode(value, Uniform(lambda _: numbers.int().expand(value.shape)))
        return held.decode((stored.to(dtype), residual.to(torch.int8))).double()

    up, down = under(torch.tensor(0)), under(torch.tensor(count - 1))
    least, most = torch.zeros(value.shape, dtype=torch.int64), torch.full(value.shape, count)
    while (least < most).any():
        middle = (least + most) // 2
        goes_up = under(middle.clamp(max=count - 1)) == up
        least, most = torch.where(goes_up, middle + 1, least).clamp(max=count), torch.where(goes_up, most, middle)
        least = torch.where(least > most, most, least)
    mean = down + (up - down) * (least.double() / count)
    assert ((mean - value).abs() <= (up - down).abs() * 2**-22).all()
    assert ((up - down).abs() > 0).float().mean() > 0.9


@pytest.mark.parametrize("bits", [0, 1 << 15, 0xFFFF])
@pytest.mark.parametrize("dtype", HALVES)
def test_a_weight_that_was_decoded_has_the_same_codes(dtype, bits):
    source = seeded(0)
    value = torch.randn(200_000, generator=source) * 10 ** (torch.rand(200_000, generator=source) * 4 - 3)
    stored, residual = stored_as(Compensated(dtype, 8), value)
    again = stored_as(Compensated(dtype, 8), Compensated(dtype, 8).decode((stored, residual)), bits)
    # half a spacing away is the middle of two weights, of which the other one may be taken, with the opposite residual;
    # if that is a power of two, it has twice the spacing, and residuals twice as far apart
    same = (again[0] == stored) & (again[1] == residual)
    assert same[residual.abs() < 127].all()
    found, expected = (Compensated(dtype, 8).decode(parts) for parts in (again, (stored, residual)))
    torch.testing.assert_close(found, expected, rtol=torch.finfo(dtype).eps / 254 * 1.01, atol=0)


# -- compiled ----------------------------------------------------------------------------------------------------------

SHAPES = [(64, 64), (1000, 192)]  # the second in several tiles


def trained(compile, **options):
    source = seeded(0)
    dtype = torch.bfloat16 if "rounding" in options else torch.float32
    params = [torch.nn.Parameter(torch.randn(shape, generator=source).to(dtype)) for shape in SHAPES]
    opt = lowmem.FusedOptimizer(params, lr=1e-2, compile=compile, batching=False, **options)
    for _ in range(4):
        opt.backward(sum((p * torch.randn(p.shape, generator=source).to(dtype)).float().sum() for p in params))
    return params, opt


@pytest.mark.cpu_only("the simulated GPU has no compiler")
@pytest.mark.skipif(not has_compiler("cpu"), reason="no C++ compiler")
@pytest.mark.parametrize(
    "options",
    [
        {"rule": "adamw", "state_storage": "8bit", "rounding": "compensated8"},
        {"rule": "adamw", "state_storage": "8bit_64", "rounding": "stochastic"},
        {"rule": "adamw", "state_storage": "8bit_nearest"},
        {"rule": "lion", "state_storage": "8bit", "rounding": "compensated8"},
    ],
    ids=lambda options: " ".join(options.values()),
)
def test_compiled_updates_are_those_by_tiles(options):
    """Compiled code may fuse a multiplication with an addition, after which a value on the border of two codes may take
    the other one. Also the random bits are the same: with others, half of the codes would differ.
    """
    got, want = (trained(compile, **options) for compile in (True, False))
    assert all(any(found is not None for found in r.program.compiled.values()) for r in got[1]._records.values())
    saved, expected = (opt.named_state_dict()["state"] for _, opt in (got, want))
    for n, (ours, its) in enumerate(zip(got[0], want[0], strict=True)):
        states, its_states = saved[f"param{n}"], expected[f"param{n}"]
        assert states.keys() == its_states.keys()
        assert states["exp_avg"].dtype == torch.int8
        for name, state in its_states.items():
            assert (states[name] != state).float().mean() < 1e-3
            if name in ("exp_avg", "exp_avg_sq"):
                # a scale that is one spacing of bfloat16 larger moves the largest codes by one, beside the rounding
                assert (states[name].int() - state.int()).abs().max() <= 2
        torch.testing.assert_close(ours, its, rtol=2**-7 if ours.dtype == torch.bfloat16 else 0, atol=1e-6)
        assert ours.dtype == torch.float32 or (ours != its).float().mean() < 1e-3


@pytest.mark.cpu_only("the simulated GPU has no compiler")
@pytest.mark.skipif(not has_compiler("cpu"), reason="no C++ compiler")
@SIGNED
def test_compiled_code_shows_what_is_not_finite(signed):
    value = random_groups(signed, count=8)
    value[1, 3], value[3, 4], value[5] = math.nan, math.inf, 0.0

    def held(value):
        codes, scale = Moment(signed, draws=False).encode(value, Uniform.half(value))
        return codes.to(torch.int8 if signed else torch.uint8), scale.bfloat16()

    codes, scale = torch.compile(held, fullgraph=True)(value)
    found, expected = Moment(signed).decode((codes, scale)), Moment(signed).decode(held(value))
    assert not found[1].isfinite().any()
    assert not found[3].isfinite().all()
    assert not found[5].any()
    rest = [0, 2, 4, 6, 7]
    torch.testing.assert_close(found[rest], expected[rest], rtol=0.03, atol=0)


@pytest.mark.cpu_only("the simulated GPU has no compiler")
@pytest.mark.skipif(not has_compiler("cpu"), reason="no C++ compiler")
@pytest.mark.parametrize("dtype", HALVES)
def test_residuals_compiled(dtype):
    """Zeros have a residual of zero, and not the integer that vector code makes of NaN."""
    value = torch.cat([torch.zeros(32), torch.logspace(-44, 4, 500, dtype=torch.float64).float(), torch.randn(500)])

    def held(value):
        stored, residual = Compensated(dtype, 8).encode(value, Uniform.half(value))
        return stored.to(dtype), residual.to(torch.int8)

    sizes = graph.Sizes()
    args = [sizes.tensor((sizes.size(1024),), torch.float32, value.device)]
    run = graph.compiled(graph.trace(lambda value: [*held(value)], args), sizes, args)
    for found, expected in zip(run(value), held(value), strict=True):
        assert torch.equal(found, expected)
        assert not found[:32].any()
