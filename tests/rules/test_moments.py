"""Moments that are kept in 16 bits: rounded at random, so that their mean is what float32 would have."""

import math

import pytest
import torch

import lowmem

ELEMENTS, STEPS = 1 << 16, 60
RULES = [
    ("adamw", {"exp_avg": 0.9, "exp_avg_sq": 0.999}, {"lr": 0.0}),
    ("lion", {"exp_avg": 0.99}, {"lr": 0.0}),
    ("lans", {"mean": 0.9, "var": 0.999}, {"lr": 0.0}),
    # a size is not learned, so that delta is a mean of steps alone
    ("scaled_adam", {"delta": 0.9, "exp_avg_sq": 0.98}, {"lr": 1e-4, "scalar_lr_scale": 0.0, "size_update_period": 99}),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rule", "moments", "options"), RULES)
def test_unbiased(give_gradients, rule, moments, options, dtype):
    """All elements have the same gradients, so in float32 the same moments, and noise of their own. The deviation of a
    rounding at random is half a spacing at most, and a running mean with `decay` keeps the squares of 1/(1 - decay²) of
    them: the mean over all elements is to be within five of the deviations that it may have."""
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
    if rule in ("adamw", "lans"):  # in the others one moment follows from the other, or there is one only
        assert torch.corrcoef(torch.stack(list(off.values())))[0, 1].abs() < 5 / ELEMENTS**0.5
