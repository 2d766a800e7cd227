"""Tests Tensor2Tensor's Adafactor: step sizes, noise, and simulated quantization."""

from pathlib import Path

import pytest
import torch
from golden.load_golden import load_case
from support.devices import seeded

import lowmem
from lowmem.errors import UnsupportedError
from lowmem.rules.adafactor_t2t import golden_ratio_noise

GOLDEN = Path(__file__).parent.parent / "golden"


def make_optimizer(start, **options):
    """Returns a parameter and an optimizer whose first normalized update is the sign of the gradient."""
    param = torch.nn.Parameter(start.clone())
    return param, lowmem.FusedOptimizer([("w", param)], rule="adafactor_t2t", **options)


def test_small_weights_move_by_a_thousandth(give_gradients):
    param, opt = make_optimizer(torch.zeros(3), lr=0.5)
    give_gradients(opt, (param, torch.ones(3)))
    torch.testing.assert_close(param.detach(), torch.full((3,), -0.5e-3))


@pytest.mark.parametrize(("dtype", "seed"), [(torch.float16, 34), (torch.bfloat16, 15)])
def test_the_size_of_16_bit_weights_is_computed_in_their_dtype(give_gradients, dtype, seed):
    """Squares, their mean, its root and the minimum are all rounded, and the seeds are chosen so that each rounding
    matters. One weight is zero and so shows its update exactly; bfloat16 is rounded to nearest in the first step."""

    def rounded(x):
        return x.to(dtype).double()

    def stored(start, lr):
        param, opt = make_optimizer(start, lr=lr)
        give_gradients(opt, (param, torch.ones(7, dtype=dtype)))
        return param[1].double()

    start = torch.randn(7, generator=seeded(seed)).to(dtype)
    start[1] = 0.0
    square = start.double().square()
    size = rounded(rounded(rounded(square).mean()).sqrt())
    coarser = [square.mean(), rounded(square).mean(), rounded(square.mean())]
    others = [rounded(mean.sqrt()) for mean in coarser] + [rounded(rounded(square).mean()).sqrt()]
    assert stored(start, lr=0.3) == rounded(-0.3 * size)
    assert all(rounded(-0.3 * other) != rounded(-0.3 * size) for other in others)

    least = torch.tensor(1e-3)
    assert stored(torch.zeros(7, dtype=dtype), lr=0.7) == rounded(-0.7 * rounded(least))
    assert rounded(-0.7 * least) != rounded(-0.7 * rounded(least))


@pytest.mark.parametrize("name", ["t2t_o01_default", "t2t_o12_late_step"])
def test_noise_equals_its_source_bit_for_bit(name):
    case = load_case(GOLDEN, name)
    recorded = case.tensors["aux/quantization_noise"]
    first = case.entry["initial_step"] + 1
    ours = torch.tensor([golden_ratio_noise(step) for step in range(first, first + case.steps)])
    assert torch.equal(ours.cpu(), recorded)


def test_other_roundings_draw_noise_per_element(give_gradients):
    """With `auto`, all elements share one noise value, as in Tensor2Tensor. With `stochastic`, each has its own."""
    for rounding, values in (("auto", 1), ("stochastic", 2)):
        param, opt = make_optimizer(
            torch.ones(500).bfloat16(), lr=2.0**-9, rounding=rounding, multiply_by_parameter_scale=False
        )
        give_gradients(opt, (param, torch.ones(500).bfloat16()))
        assert param.unique().numel() == values


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_simulated_quantization_needs_float32_weights(dtype):
    with pytest.raises(UnsupportedError, match=rf"'w' of shape \[2, 3\] is {dtype}, but simulated_quantize_bits"):
        make_optimizer(torch.zeros(2, 3, dtype=dtype), simulated_quantize_bits=8)
