"""Autograd and torch functions treat a quantized weight like an ordinary matrix with its values."""

import copy
import os
from itertools import product

import pytest
import torch
from safetensors.torch import save_file
from support.compiled import compiles
from support.devices import seeded
from support.nets import through_file
from support.products import in_turn, pairwise
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lowmem
from lowmem.layers.head import linear_cross_entropy
from lowmem.tiles.quantized import QuantizedWeight, plain
from lowmem.tiles.storage import Integer


def pair(bits=10, dtype=torch.bfloat16, shape=(96, 128), size=64):
    """Returns a quantized weight and an ordinary parameter with the same values."""
    torch.manual_seed(0)
    quantized = nn.Parameter(QuantizedWeight.of(torch.randn(shape).to(dtype), Integer(bits, size)))
    return quantized, nn.Parameter(plain(quantized))


@pytest.mark.parametrize(("bits", "dtype"), in_turn([8, 10, 12], [torch.bfloat16, torch.float32, torch.float16]))
def test_each_element_is_rounded_to_the_nearest_value(bits, dtype):
    torch.manual_seed(0)
    weight = torch.randn(96, 128).to(dtype)
    quantized = QuantizedWeight.of(weight, Integer(bits))
    decoded = quantized.format.decode(quantized.parts)
    unit = quantized.parts[-1].float().repeat_interleave(64, 1)
    assert ((decoded - weight.float()).abs() <= unit / 2).all()
    largest = weight.float().unflatten(1, (2, 64)).abs().amax(-1)
    assert (unit[:, ::64] <= largest / (2 ** (bits - 1) - 1) * (1 + 2**-7)).all()  # the codes use their whole range
    assert torch.equal(quantized.dequantize(), decoded.to(dtype))
    nbytes = sum(part.nbytes for part in quantized.parts)
    assert nbytes == 96 * 128 * (bits / 8 + 2 / 64)


grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm  # torch 2.9 has the second
OFFSETS = torch.tensor([3, 3, 9, 16], dtype=torch.int32)  # tokens sorted by expert; the second expert has none
IDS = torch.tensor([[0, 3, 3], [95, 7, 0]])
LABELS = torch.arange(0, 80, 4)


def biased(x, w):
    return F.linear(x, w, x.sum() * torch.linspace(-1, 1, 96).to(x.dtype))


def under_autocast(dtype):
    def linear(x, w):
        with torch.autocast(x.device.type, dtype):
            return F.linear(x, w)

    return linear


def embedding(padding):
    return lambda x, w: F.embedding(IDS, w, padding) * x


def head(smoothing):
    return lambda x, w: linear_cross_entropy(x, w, LABELS, label_smoothing=smoothing, memory=1 << 15)  # several tiles


# The shapes of an input and of a weight, and an output.
USES = {
    **{f"linear, {tokens}": ((*tokens, 128), (96, 128), F.linear) for tokens in [(5,), (2, 3, 7), (), (0,), (2, 0)]},
    **{f"with a bias, {tokens}": ((*tokens, 128), (96, 128), biased) for tokens in [(5,), (2, 3, 7), (), (2, 0)]},
    **{f"embedding, {padding}": ((), (96, 128), embedding(padding)) for padding in (None, 3, -1)},
    **{f"head, {smoothing}": ((20, 128), (96, 128), head(smoothing)) for smoothing in (0.0, 0.1)},
    "autocast to bfloat16": ((6, 128), (96, 128), under_autocast(torch.bfloat16)),
    "autocast to float16": ((6, 128), (96, 128), under_autocast(torch.float16)),
    "a cast": ((6, 128), (96, 128), lambda x, w: F.linear(x.bfloat16(), w.bfloat16())),
    "by rows": ((16, 96), (96, 128), lambda x, w: x @ w),
    "by columns": ((16, 128), (96, 128), lambda x, w: x @ w.t()),
    "on the left": ((96, 128), (96, 128), lambda x, w: F.linear(w, x)),
    "added": ((16, 96), (96, 128), lambda x, w: torch.addmm(torch.ones(128, dtype=x.dtype), x, w)),  # Conv1D
    "one column": ((128,), (96, 128), lambda x, w: w @ x),
    "batched": ((4, 5, 96), (4, 96, 128), torch.bmm),
    "one expert": ((5, 128), (4, 96, 128), lambda x, w: F.linear(x, w[torch.tensor(2)])),
    "an expert for each row": (
        (3, 128), (4, 96, 128), lambda x, w: torch.bmm(w[torch.tensor([1, 1, 3])], x[..., None])
    ),
}  # fmt: skip
GROUPED = {
    "grouped": ((16, 128), (4, 96, 128), lambda x, w: grouped_mm(x, w.transpose(-2, -1), offs=OFFSETS)),
    "grouped by rows": ((16, 96), (4, 96, 128), lambda x, w: grouped_mm(x, w, offs=OFFSETS)),
}
SUMMED = [USES["head, 0.0"][2], USES["head, 0.1"][2]]  # slice by slice, where the weight is dequantized by slices
BFLOAT16 = [torch.bfloat16]


@pytest.mark.parametrize(
    ("use", "bits", "dtype"),
    [*pairwise(USES, [8, 10, 12], [*BFLOAT16, torch.float32, torch.float16]), *product(GROUPED, [8, 12], BFLOAT16)],
    ids=str,
)
def test_every_use_computes_the_bits_of_a_matrix(use, bits, dtype):
    """This applies to the result and all gradients, and to the result in no_grad and inference mode."""
    of_input, shape, function = {**USES, **GROUPED}[use]
    results = []
    for weight in pair(bits, dtype, shape):
        torch.manual_seed(1)
        x = torch.randn(of_input).to(dtype).requires_grad_()
        out = function(x, weight)
        out.backward(torch.randn(out.shape).to(out.dtype))
        results.append([out, x.grad, weight.grad])
        assert type(weight.grad) is torch.Tensor and weight.grad.is_contiguous()
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                results[-1].append(function(x, weight))
    for got, expected in zip(*results, strict=True):
        assert got.dtype == expected.dtype
        if function in SUMMED:  # summed in another order: one bfloat16 spacing on CPUs without its instructions
            torch.testing.assert_close(got, expected, rtol=torch.finfo(dtype).eps, atol=1e-6)
        else:
            assert torch.equal(got, expected)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(5, 7, 128), (5, 128, 7)])  # the second is transposed, so it is not one matrix
def test_autograd_saves_quantized_weights(shape, bias, trained):
    quantized, matrix = (weight.requires_grad_(trained) for weight in pair())
    x = torch.randn(shape).bfloat16()
    x = (x if shape[-1] == 128 else x.transpose(1, 2)).requires_grad_()
    saved, ones = [], torch.ones(96).bfloat16()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        out = F.linear(x, quantized, ones if bias else None)
    assert torch.equal(out, F.linear(x, matrix, ones if bias else None))
    if trained or not bias or shape[-1] == 128:  # otherwise torch expands and saves a frozen weight
        assert any(isinstance(tensor, QuantizedWeight) for tensor in saved)
        assert all(isinstance(tensor, QuantizedWeight) or tensor.numel() == x.numel() for tensor in saved)


@pytest.mark.parametrize("autocast", [False, True])
def test_backward_through_a_graph_from_before_an_update_raises(autocast):
    quantized, _ = pair(12, torch.float32)
    opt, losses = lowmem.FusedOptimizer([("weight", quantized)], lr=1e-2), []
    for _ in range(2):
        with torch.autocast(torch.get_default_device().type, torch.bfloat16, enabled=autocast):
            losses.append(F.linear(torch.ones(2, 128, requires_grad=True), quantized).float().square().mean())
    opt.backward(losses[0])
    with pytest.raises((RuntimeError, lowmem.LowmemError), match="modified by an inplace operation"):
        losses[1].backward()


COPIES = {
    "half": lambda weight: weight.half(),
    "double": lambda weight: weight.double(),
    "float": lambda weight: weight.to(torch.float32, copy=True),
    "int": lambda weight: weight.int(),
    "to": lambda weight: weight.to(torch.bfloat16, copy=True),
    "clone": lambda weight: weight.clone(),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("change", COPIES.values(), ids=COPIES)
def test_copies_keep_the_values_of_the_matrix(change, autocast):
    quantized, matrix = pair(12, torch.float32)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16, enabled=autocast):
        taken, expected = (change(weight.detach()) for weight in (quantized, matrix))
    with torch.no_grad():
        quantized.copy_(torch.ones(96, 128))
    assert taken.dtype == expected.dtype
    assert torch.equal(plain(taken), expected)


def test_non_finite_numbers_raise():
    model = nn.Linear(128, 96)
    with torch.no_grad():
        model.weight[5, 3] = torch.inf
    with pytest.raises(lowmem.LowmemError, match=r"^weight contains Inf.* in rows 0 to 95"):
        lowmem.quantize_(model, "int12")
    quantized, _ = pair()
    before = quantized.dequantize()
    with torch.no_grad(), pytest.raises(lowmem.LowmemError, match="NaN"):
        quantized.copy_(torch.tensor([0.0, torch.nan]).repeat(64))
    assert torch.equal(plain(quantized), before)


@compiles
def test_a_strided_slice_is_decoded_by_compiled_code(monkeypatch):
    monkeypatch.setattr(QuantizedWeight, "compiled", True)
    for shape in ((96, 128), (4, 96, 128), (96, 64)):  # the last has one group per row
        quantized, matrix = pair(shape=shape)
        assert torch.equal(plain(quantized[::2]), matrix[::2])
    assert QuantizedWeight.compiled


@pytest.mark.parametrize(
    "backward",
    [
        lambda loss, params: loss.backward(),
        lambda loss, params: loss.backward(inputs=params),
        lambda loss, params: loss.backward(inputs=params[0]),
        lambda loss, params: torch.autograd.backward(loss, inputs=params),
        lambda loss, params: setattr(params[0], "grad", torch.autograd.grad(loss, params)[0]),
    ],
    ids=["all", "inputs", "one", "function", "grad"],
)
def test_a_backward_to_chosen_inputs_computes_a_checkpointed_forward_again(backward):
    quantized, weight = pair()
    inputs = torch.randn(4, 128, generator=seeded(1)).bfloat16().requires_grad_()
    for param in (quantized, weight):
        backward(checkpoint(lambda x, w=param: F.linear(x, w).sin(), inputs, use_reentrant=False).sum(), [param])
    assert torch.equal(quantized.grad, weight.grad)


def test_moving_copying_and_saving_keep_every_bit(tmp_path):
    model = lowmem.quantize_(nn.Sequential(nn.Linear(128, 96), nn.Linear(96, 64)).bfloat16(), "int12", group=32)
    weight = model[0].weight
    assert model.to(weight.device)[0].weight is weight
    other = lowmem.quantize_(nn.Sequential(nn.Linear(128, 96), nn.Linear(96, 64)).bfloat16(), "int12", group=32)
    other.load_state_dict(through_file(model.state_dict()))
    for same in (copy.deepcopy(model), other):
        for mine, theirs in zip(weight.parts, same[0].weight.parts, strict=True):
            assert torch.equal(mine, theirs)
            assert mine.data_ptr() != theirs.data_ptr()


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda weight: weight + 1, "aten.add"),
        (lambda weight: weight.norm(), "ordinary matrix"),
        (lambda weight: weight.t()[:64], "aten.slice"),
        (lambda weight: F.embedding(torch.tensor([1]), weight.t()), "aten.embedding"),
        (lambda weight: weight.t().contiguous(), "skip"),
        (lambda weight: weight.numpy(), "dequantize_"),
        (lambda weight: save_file({"weight": weight}, os.devnull), "dequantize_"),
        (lambda weight: weight.as_strided((3, 64), (128, 1)), "aten.as_strided"),
        (lambda weight: F.embedding(torch.tensor([1]), weight, max_norm=1.0), "aten.embedding_renorm_"),
        (lambda weight: setattr(weight, "data", torch.zeros(96, 128)), "dequantize_"),
    ],
)
def test_unsupported_operations_raise(use, words):
    quantized, _ = pair()
    with pytest.raises(lowmem.LowmemError, match=words):
        use(quantized.detach().requires_grad_())
