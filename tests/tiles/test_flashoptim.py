"""Compares the 8-bit formats with FlashOptim's definitions in float64 (arXiv:2602.23349,
github.com/databricks/flashoptim), and tests the limits of their ranges.
"""

import numpy as np
import pytest
import torch
from support.devices import seeded
from test_storage import LAST, decoded, store

from lowmem.tiles.storage import Compensated, Moment

SIGNED = pytest.mark.parametrize("signed", [True, False], ids=["mean", "square"])


def companded(x):
    return 2 * x / (1 + np.abs(x))


def expanded(y):
    return y / (2 - np.abs(y))


def quantized(value, signed):
    """FlashOptim's codes and scales of groups [..., 32]: g companded, g² linear in its root, with a code for zero."""
    value = value if signed else np.sqrt(value)
    scale = np.maximum(np.abs(value).max(-1, keepdims=True), 1e-12)
    codes = np.floor((companded(value / scale) * 127 if signed else value / scale * 255) + 0.5)
    with np.errstate(over="ignore"):
        return codes, scale.astype(np.float16).astype(np.float64)


def dequantized(codes, scale, signed):
    return expanded(codes / 127) * scale if signed else (codes / 255 * scale) ** 2


def exact(tensor):
    return tensor.double().cpu().numpy()


def groups_of_all_sizes(signed, count=2000):
    """Returns float32 groups of 32 whose scales, and whose values within a group, vary widely."""
    source = seeded(0)
    value = torch.randn(count, 32, generator=source) * torch.randn(count, 32, generator=source).exp()
    value *= 10 ** (torch.rand(count, 1, generator=source) * 40 - 30)
    value = value[value.abs().amax(-1) > 1e-30]
    return value if signed else value.abs()


def test_codes_of_means_equal_flashoptim():
    """Scales are powers of two, which both implementations represent exactly, so all codes are equal, except that
    float32 rounding may change the code of a value halfway between two codes.
    """
    value = torch.rand(4000, 32) * 2 - 1
    value = value.sign() * value.abs() ** 3
    value[:, 7] = torch.where(torch.rand(4000) < 0.5, -1.0, 1.0)
    value *= 2.0 ** torch.randint(-12, 12, (4000, 1))
    codes, scale = store(Moment(True, draws=False), value)
    expected, their_scale = quantized(exact(value), True)
    assert (exact(scale) == their_scale).all()
    level = 127 * companded(exact(value) / their_scale)
    clear = np.abs(level - np.floor(level) - 0.5) > 1e-4
    assert clear.mean() > 0.999
    assert (exact(codes)[clear] == expected[clear]).all()
    assert np.abs(exact(codes) - expected).max() <= 1
    actual = exact(Moment(True).decode((codes, scale)))
    np.testing.assert_allclose(actual[clear], dequantized(expected, their_scale, True)[clear], rtol=1e-6)


@SIGNED
def test_a_scale_is_the_largest_value_rounded_up(signed):
    """FlashOptim rounds scales to the nearest float16, which turns a group of 1e-30 into zeros."""
    value = groups_of_all_sizes(signed)
    _, scale = store(Moment(signed, draws=False), value)
    largest = value.abs().amax(-1, keepdim=True)
    assert ((scale >= largest) & (scale.float() <= largest * (1 + 2**-7))).all()
    tiny = np.linspace(0.1, 1, 32)[None] * (1e-30 if signed else 1e-35)
    assert not dequantized(*quantized(tiny, signed), signed).any()


def test_a_square_is_only_zero_in_a_group_of_zeros():
    """A second moment of zero would cause an enormous step. The test includes subnormals down to about 2⁻¹⁴⁹."""
    value = torch.zeros(200, 32)
    value[:, 5] = torch.logspace(-44.8, 38, 200, dtype=torch.float64).float()
    value[:, 6] = value[:, 5] * 1e-12
    for storage, number in [(Moment(False, draws=False), 0), (Moment(False), 0), (Moment(False), LAST)]:
        assert (decoded(storage, value, number) > 0).all()


def tails(exponent, sign, precision):
    """Returns numbers with this exponent, the first, second or last leading `precision` bits, and every tail."""
    heads = np.array([0, 1, (1 << precision) - 1], dtype=np.uint32)[:, None] << np.uint32(23 - precision)
    every = np.arange(1 << (23 - precision), dtype=np.uint32)
    pattern = (np.uint32(exponent) << np.uint32(23)) | heads | every | np.uint32((sign < 0) << 31)
    return pattern.flatten().view(np.float32)


# Precision, exponents, and the exponents whose residuals are relative to the weight's spacing.
FORMATS = [
    (torch.bfloat16, 7, [*range(1, 12), *range(12, 230, 11), *range(230, 255)], range(8, 234)),
    (torch.float16, 10, range(113, 143), range(113, 143)),
]


@pytest.mark.parametrize(("dtype", "precision", "exponents", "usual"), FORMATS, ids=["bfloat16", "float16"])
def test_residuals_equal_flashoptim(dtype, precision, exponents, usual):
    """With rounding to nearest, weights and residuals equal FlashOptim's for all tails: 127·e/h of e = θ - θ', where h
    is half a spacing. Decoded values are within 1/508 of a spacing, plus float32 rounding.

    Where a bfloat16 spacing is below 2⁻¹²⁶ or above 2¹⁰⁰, residuals use that limit instead. They correct less there and
    never make a weight less accurate. Weights of such sizes do not occur.
    """
    storage = Compensated(dtype, 8)
    for exponent in exponents:
        for sign in (1, -1) if exponent % 16 == 7 else (1,):
            value = torch.as_tensor(tails(exponent, sign, precision))
            stored, residual = store(storage, value)
            assert torch.equal(stored, value.to(dtype))
            parts = [value, stored, residual, storage.decode((stored, residual))]
            value, narrow, residual, actual = (exact(part[stored.isfinite()]) for part in parts)
            without, error = np.abs(value - narrow), np.abs(value - actual)
            assert (error <= without).all()
            if exponent in usual:
                half = np.exp2(np.frexp(narrow)[1] - 1.0 - precision - 1.0)
                last = np.spacing(np.abs(value).astype(np.float32)).astype(np.float64)
                assert (np.abs(residual - 127 * np.clip((value - narrow) / half, -1, 1)) <= 0.53).all()
                assert (np.abs(actual - (narrow + residual * half / 127)) <= last).all()
                assert (error <= half / 254 + last).all()
                assert np.abs(residual).max() == 127
