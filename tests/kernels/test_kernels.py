"""Kernels in Triton's interpreter have the bits of the eager sweep. They run if LOWMEM_TRITON=1."""

import pytest
import torch
from support.interpreted import INTERPRETED
from support.updated import Parameter, update

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="runs in tests/test_parts.py, in Triton's interpreter")

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

# Matrices of several programs, with rests of tiles in both directions; experts, a convolution, vectors.
SHAPES = [(140, 270), (3, 41), (129, 1), (1, 300), (3, 20, 40), (2, 3, 5, 5), (2500,), (7,), ()]
GROUPED = [(136, 256), (9, 64), (3, 10, 128), (512,)]  # whose rows are complete groups


def cases(*rows):
    return pytest.mark.parametrize("case", rows, ids=lambda case: " ".join(map(str, case)).replace("torch.", ""))


def made(rule, dtype=F32, rounding="nearest", storage="float32", options=None, shapes=SHAPES, **more):
    return [
        Parameter(rule, shape, dtype, rounding, storage, options=options or {}, name=str(shape), **more)
        for shape in shapes
    ]


def assert_exact(differences):
    assert differences
    assert {key: different for key, (different, _) in differences.items() if different} == {}


def assert_close(differences, dtype=F32):
    """Sums in another order may change the last bit of a float32 number, and so some roundings to 16 bits."""
    assert differences
    for key, (_, relative) in differences.items():
        assert relative <= (2e-6 if dtype == F32 else 1e-2), key


@cases(
    ("lion",), ("lion", BF16, "stochastic", "bfloat16"), ("lion", F16, "stochastic", "float16"),
    ("lomo", BF16), ("adamw",), ("adamw", BF16, "stochastic", "bfloat16"),
)  # fmt: skip
def test_rules_that_sum_nothing(case):
    assert_exact(update(made(*case)))


FACTORED = {"min_dim_size_to_factor": 2}


@cases(
    ("adalomo",),
    ("adalomo", BF16, "stochastic"),
    ("lans",),
    ("lans", BF16, "stochastic", "bfloat16", {"variant": "step", "lower_bound": 0.1}),
    ("scaled_adam",),
    ("adafactor_t2t", BF16),
    ("adafactor_t2t", F32, "nearest", "float32", {"simulated_quantize_bits": 8, "beta1": 0.9}),
)
def test_rules_that_sum(case):
    got = update(made(*case), steps=5 if case[0] == "scaled_adam" else 2)
    print(got)
    assert_close(got, case[1] if len(case) > 1 else F32)
