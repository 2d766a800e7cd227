"""Tests LANS: differences from its source, options by parameter name, and the step count."""

import functools

import numpy as np
import pytest
import torch
from reference.lans import Lans as Reference
from test_rules import make_optimizer as made_by

import lowmem
from lowmem.errors import ConfigError

make_optimizer = functools.partial(made_by, "lans")

ONE_LARGE = torch.full((4, 35), 1e-30).index_fill_(1, torch.tensor([16]), 1e-12).view(4, 5, 7)
# Gradient scales in four steps.
SIZES = {
    **{f"zero in steps {zeros}": [float(step not in zeros) for step in range(4)] for zeros in [(0,), (2,), (0, 1, 3)]},
    **{f"{size}": [size] * 4 for size in (1e-20, 1e-25, 1e-30, 1e-36, 1e15)},
    "one large element": ONE_LARGE,
}


@pytest.mark.parametrize("variant", ["fused", "step"])
@pytest.mark.parametrize("wd", [0.0, 0.1])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_gradients_of_any_size_are_normalized(give_gradients, variant, wd, sizes):
    """In the source, a gradient of zeros gives 0/0 and NaN forever; here, momentum and weight decay still apply.
    Squares of elements below 1e-19 vanish in float32, and the source's fused kernel then divides by zero."""
    start, options = torch.randn(5, 7), {"lr": 0.1, "variant": variant, "wd": wd}
    (param,), opt = make_optimizer([start], **options)
    reference, want = Reference((5, 7), **options), start.double().cpu().numpy()
    for size in sizes:
        grad = torch.randn(5, 7) * size
        give_gradients(opt, (param, grad))
        want = reference.step(want, grad.double().cpu().numpy())
    assert np.isfinite(want).all()
    np.testing.assert_allclose(param.detach().cpu().numpy(), want, rtol=1e-5, atol=1e-6)
    for name, state in reference.states().items():
        np.testing.assert_allclose(opt.state[param][name].cpu().numpy(), state, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("option", ["lr_mult", "wd_mult"])
def test_an_unknown_name_raises(option):
    params = [("encoder.weight", torch.nn.Parameter(torch.zeros(2))), ("bias", torch.nn.Parameter(torch.zeros(2)))]
    message = r"no parameter is called 'encoder\.wieght'.*Did you mean 'encoder\.weight'"
    with pytest.raises(ConfigError, match=message):
        lowmem.FusedOptimizer(params, rule="lans", **{option: {"bias": 1.0, "encoder.wieght": 2.0}})
    with pytest.raises(ConfigError, match=message):
        lowmem.FusedOptimizer([{"params": params, option: {"encoder.wieght": 2.0}}], rule="lans")


def test_only_updates_are_counted(give_gradients):
    """Steps without a gradient or with a non-finite one do not count."""
    params, opt = make_optimizer([torch.randn(3) for _ in range(3)])
    bad = torch.tensor([1.0, torch.nan, 0.0])
    give_gradients(opt, (params[0], torch.randn(3)), (params[2], bad))
    give_gradients(opt, *((param, torch.randn(3)) for param in params))
    give_gradients(opt, (params[0], torch.randn(3)), (params[1], bad), (params[2], torch.randn(3)))
    assert [opt.state[param]["step"].item() for param in params] == [3, 1, 2]
