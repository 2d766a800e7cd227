"""Tests rules with moments: AdamW equals torch's AdamW, and 16-bit moments are unbiased."""

import math

import pytest
import torch
from support.compiled import equal

import lowmem

# One of each number of dimensions, small ones that are stacked, one too large for a stack, one with several tiles.
SHAPES = [(), (1,), (7,), (5, 3), (5, 3), (5, 3), (2, 3, 4), (2, 2, 3, 3), (16, 16, 65), (400, 400)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"betas": (0.6, 0.95), "weight_decay": 0.0},
        {"betas": (0.3, 0.5), "eps": 1e-3, "weight_decay": 0.5},  # torch's lerp uses another formula from 0.5 on
        {"betas": (0.0, 0.0)},
    ],
)
def test_equals_torch(give_gradients, options):
    """Compares 20 steps with a changing rate bitwise. Some parameters have no gradient in some steps, and their bias
    correction counts only steps with a gradient."""
    start = [torch.randn(shape) for shape in SHAPES]
    params, theirs = ([torch.nn.Parameter(value.clone()) for value in start] for _ in range(2))
    opt = lowmem.FusedOptimizer(params, rule="adamw", **options)
    plain = torch.optim.AdamW(theirs, foreach=False, **options)
    for step in range(20):
        opt.param_groups[0]["lr"] = plain.param_groups[0]["lr"] = 0.1 * (1 + step % 7) ** -0.5
        for i, their in enumerate(theirs):
            absent = (i % 3 == 1 and step < 6) or (i % 4 == 2 and step % 5 == 4)
            their.grad = None if absent else torch.randn(their.shape) * 10.0 ** (step % 5 - 2)
        give_gradients(opt, *((param, their.grad) for param, their in zip(params, theirs, strict=True)))
        plain.step()
    states = opt.named_state_dict()["state"]
    for i, (param, their) in enumerate(zip(params, theirs, strict=True)):
        assert equal(param, their)
        assert states[f"param{i}"]["step"].item() == plain.state[their]["step"].item()
        for name in ("exp_avg", "exp_avg_sq"):
            assert equal(states[f"param{i}"][name], plain.state[their][name])


ELEMENTS, STEPS = 1 << 16, 60
RULES = [
    ("adamw", {"exp_avg": 0.9, "exp_avg_sq": 0.999}, {"lr": 0.0}),
    ("lion", {"exp_avg": 0.99}, {"lr": 0.0}),
    ("lans", {"mean": 0.9, "var": 0.999}, {"lr": 0.0}),
    # without learned sizes, delta is only a mean of steps
    ("scaled_adam", {"delta": 0.9, "exp_avg_sq": 0.98}, {"lr": 1e-4, "scalar_lr_scale": 0.0, "size_update_period": 99}),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rule", "moments", "options"), RULES)
def test_moments_in_16_bits_are_unbiased(give_gradients, rule, moments, options, dtype):
    """All elements get the same gradients but separate noise. The deviation of one stochastic rounding is at most half
    a spacing, and a running mean accumulates 1/(1 - decay²) times its square, so the mean error over all elements has
    to be within five standard deviations."""
    runs = []
    for kept_in in ("float32", str(dtype)):
        param = torch.nn.Parameter(torch.ones(ELEMENTS))
        opt = lowmem.FusedOptimizer([param], rule=rule, state_storage=kept_in.removeprefix("torch."), **options)
        runs.append((param, opt))
    largest = dict.fromkeys(moments, 0.0)
    for step in range(STEPS):
        grad = torch.full((ELEMENTS,), 1.0 + 0.5 * math.sin(step))
        for param, opt in runs:
            give_gradients(opt, (param, grad))
        for name in moments:
            largest[name] = max(largest[name], runs[0][1].state[runs[0][0]][name].abs().max().item())
    exact, rounded = (opt.state[param] for param, opt in runs)
    info, off = torch.finfo(dtype), {}
    for name, decay in moments.items():
        assert rounded[name].dtype == dtype
        off[name] = rounded[name].double() - exact[name].double()
        spacing = info.eps * max(largest[name], info.smallest_normal)
        deviation = spacing / 2 * min(STEPS, 1 / (1 - decay**2)) ** 0.5
        assert abs(off[name].mean().item()) < 5 * deviation / ELEMENTS**0.5
        assert off[name].std() > deviation / 20
    if rule in ("adamw", "lans"):  # the other rules have one moment, or dependent ones
        assert torch.corrcoef(torch.stack(list(off.values())))[0, 1].abs() < 5 / ELEMENTS**0.5
