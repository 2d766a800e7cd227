"""torchao's tests of int8 training (test/prototype/test_quantized_training.py), applied to lowmem's weights."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowmem
from lowmem.tiles.storage import WEIGHT_FORMATS, Integer, Uniform

FORMATS = pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
SIZE = 64  # torchao uses 32, but lowmem does not quantize such small weights


def linears(weight_format, bias=True):
    """Returns a linear layer and its quantized copy. Both have the dequantized values."""
    plain = nn.Linear(SIZE, SIZE, bias=bias)
    held = lowmem.quantize_(copy.deepcopy(plain), weight_format)
    plain.weight.data = held.weight.dequantize()
    return plain, held


@FORMATS
def test_stochastic_rounding(weight_format):
    torch.manual_seed(0)
    value = torch.randn(SIZE)
    samples = value.expand(100_000, SIZE)
    format = Integer(WEIGHT_FORMATS[weight_format])
    parts = format.encode(samples, Uniform(lambda count: torch.randint(1 << count, samples.shape, dtype=torch.int32)))
    mean = format.decode(tuple(part.to(each.dtype) for part, each in zip(parts, format.parts, strict=True))).mean(0)
    # torchao allows 1e-4. Half a standard error of this mean of int8 numbers is scale / 2 / 316. Allow four of them.
    error = 4 * parts[-1].max().item() / 2 / len(samples) ** 0.5
    torch.testing.assert_close(mean, value, atol=error, rtol=0)


@FORMATS
@pytest.mark.parametrize("leading", [(), (2,), (2, 4)])
@pytest.mark.parametrize("bias", [False, True])
def test_forward_and_backward(weight_format, leading, bias):
    torch.manual_seed(0)
    plain, held = linears(weight_format, bias)
    value, grad = torch.randn(*leading, SIZE), torch.randn(*leading, SIZE)
    inputs = [value.clone().requires_grad_() for _ in range(2)]
    outputs = [layer(each) for layer, each in zip((plain, held), inputs, strict=True)]
    torch.testing.assert_close(*outputs)
    for output in outputs:
        output.backward(grad)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    for one, other in zip(plain.parameters(), held.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@FORMATS
def test_training(weight_format):
    """Losses stay within 0.3 % of float32 over five AdamW updates."""
    torch.manual_seed(0)
    plain, held = linears(weight_format)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    ours = lowmem.FusedOptimizer(held.named_parameters(), model=held, rule="adamw", lr=1e-3, weight_decay=1e-2)
    for _ in range(5):
        value, labels = torch.randn(4, SIZE), torch.randint(10, (4,))
        loss = F.cross_entropy(plain(value), labels)
        loss.backward()
        theirs.step()
        theirs.zero_grad()
        found = F.cross_entropy(held(value), labels)
        ours.backward(found)
        assert abs(found.item() - loss.item()) < 3e-3 * loss.item()
