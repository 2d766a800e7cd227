"""Runs PyTorch's list of operations on quantized weights: the result is that of a matrix, or LowmemError is raised.

Without LOWMEM_FULL, a seeded sample of operations runs with a few inputs each; with it, all operations and inputs.
"""

import random
import warnings
from collections import Counter

import pytest
import torch
from support.products import FULL
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from lowmem.errors import LowmemError
from lowmem.tiles.quantized import QuantizedWeight, plain
from lowmem.tiles.storage import STORED_DTYPES, Integer

# Number of operations and of inputs for each without LOWMEM_FULL.
OPERATIONS, INPUTS = 25, 2

# Operations that accept a quantized weight and are always in the sample.
TAKEN = {"nn.functional.embedding", "__getitem__", "half"}

# Operations that accept a quantized weight and write into another tensor.
PRODUCTS = {
    "mm", "addmm", "mv", "addmv", "bmm", "baddbmm", "addbmm", "matmul", "linalg.multi_dot", "nn.functional.linear",
}  # fmt: skip

UNDEFINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}  # values


def can_be_quantized(value):
    fits = isinstance(value, Tensor) and value.dtype in STORED_DTYPES and value.layout == torch.strided
    return fits and value.ndim in (2, 3) and value.numel() > 0 and min(value.shape[-2:]) > 1 and value.isfinite().all()


def as_quantized(value):
    """Returns a quantized weight with as many groups per row and bits as its row length allows."""
    columns = value.shape[-1]
    group = columns // 2 if columns % 4 == 0 else columns
    return QuantizedWeight.of(value, Integer(10 if group % 4 == 0 else 12 if group % 2 == 0 else 8, group))


FORMS = [
    as_quantized,
    lambda value: as_quantized(value.mT).mT,
    lambda value: as_quantized(value.repeat_interleave(2, 0))[::2],
]


def outcome(function, leaves, spec):
    """Returns a function's results, its arguments after the call, and their gradients."""
    torch.manual_seed(0)
    arguments, keywords = tree_unflatten(leaves, spec)
    result = function(*arguments, **keywords)
    outputs = [out for out in tree_leaves(result) if isinstance(out, Tensor) and out.requires_grad]
    inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    total = [(out.abs() if out.is_complex() else out).double().sum() for out in outputs]
    grads = torch.autograd.grad(total, inputs, allow_unused=True) if total and inputs else ()
    return [leaf.detach() if isinstance(leaf, Tensor) else str(leaf) for leaf in tree_leaves([result, leaves, grads])]


def compare(got, expected, undefined):
    """Raises `AssertionError` if two outcomes differ."""
    for one, other in zip(got, expected, strict=True):
        if not isinstance(one, Tensor) or undefined:
            assert getattr(one, "shape", one) == getattr(other, "shape", other)
            continue
        if isinstance(one, QuantizedWeight) and one.format.group > 1 and not torch.equal(plain(one), other):
            other = plain(one.of(other, one.format))  # copy_() has quantized the result
        torch.testing.assert_close(plain(one), other, equal_nan=True)


def trial(function, arguments, keywords, places, form, undefined):
    """Returns "equal", "refused", or a difference, if the leaves at these places of the arguments are quantized."""
    leaves, spec = tree_flatten((arguments, keywords))
    copies = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    weights = [form(copy) if n in places else copy for n, copy in enumerate(copies)]
    matrices = [plain(weight).clone() if isinstance(weight, Tensor) else weight for weight in weights]
    for n in places:
        matrices[n] = matrices[n].new_empty_strided(weights[n].shape, weights[n].stride()).copy_(matrices[n])
    for leaf, *pair in zip(leaves, weights, matrices, strict=True):
        for tensor in pair if isinstance(leaf, Tensor) and leaf.requires_grad else ():
            tensor.requires_grad_()
    expected = got = error = None
    try:
        expected = outcome(function, matrices, spec)
    except Exception as raised:
        error = raised
    try:
        got = outcome(function, weights, spec)
        assert error is None, f"no {error!r}"
        compare(got, expected, undefined)
    except LowmemError:
        return "refused"
    except Exception as raised:
        return "equal" if type(raised) is type(error) else repr(raised)
    return "equal"


def into(op):
    """Returns an operation that writes into new tensors by `out=`."""

    def function(*arguments, **keywords):
        *matrices, options = tree_map(plain, (*arguments, keywords))
        return op(*arguments, **keywords, out=tree_map_only(Tensor, torch.zeros_like, op(*matrices, **options)))

    return function


def trials(op, dtype, limit):
    """Yields the results for each variant of an operation, with inputs quantized one at a time and all together."""
    drawn, backward = random.Random(op.formatted_name), op.supports_autograd and op.supported_backward_dtypes("cpu")
    writes = into(op.op) if op.supports_out else None
    for function, requires_grad in (
        (op.op, bool(backward) and dtype in backward), (op.method_variant, False), (op.inplace_variant, False),
        (writes, False),
    ):  # fmt: skip
        samples = op.sample_inputs("cpu", dtype, requires_grad=requires_grad) if function is not None else ()
        for n, sample in enumerate(samples):
            if n == limit:
                break
            arguments = (sample.input, *sample.args)
            places = [n for n, leaf in enumerate(tree_leaves((arguments, sample.kwargs))) if can_be_quantized(leaf)]
            for chosen in dict.fromkeys([*((place,) for place in places[:3]), tuple(places)]):
                if chosen:
                    form = drawn.choice(FORMS)
                    result = trial(function, arguments, sample.kwargs, chosen, form, op.name in UNDEFINED)
                    assert result != "refused" or op.name not in PRODUCTS or function is not writes, op.name
                    yield result


@pytest.mark.cpu_only("the list is of operations on a CPU")
def test_every_operation_gives_the_result_of_the_matrix_or_raises(monkeypatch):
    """For one of the dtypes, weights are dequantized by compiled code."""
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds, so there is only one test

    for module in ("common_utils", "opinfo.core"):  # reads the sources of all callers for each sample
        monkeypatch.setattr(f"torch.testing._internal.{module}.extract_test_fn", lambda: None, raising=False)
    for dtype in (torch.float32, torch.bfloat16):
        monkeypatch.setattr(QuantizedWeight, "compiled", dtype == torch.bfloat16)
        ops = [op for op in op_db if dtype in op.supported_dtypes("cpu")]
        if not FULL:
            drawn = random.Random(0).sample(ops, OPERATIONS)
            ops = [op for op in ops if op in drawn or op.name in TAKEN | PRODUCTS]
        counts, wrong = Counter(), {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for op in ops:
                for result in trials(op, dtype, None if FULL else INPUTS):
                    counts[result if result in ("equal", "refused") else "different"] += 1
                    if result not in ("equal", "refused"):
                        wrong.setdefault(op.formatted_name, result)
        print(dtype, dict(counts))
        assert not wrong, "\n".join(f"{name}: {result[:300]}" for name, result in wrong.items())
        assert counts["equal"] and counts["refused"]
