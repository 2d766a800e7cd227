"""LANS: what it does otherwise than its source, and what it is told by name."""

import functools

import numpy as np
import pytest
import torch
from reference.lans import Lans as Reference
from test_rules import make_optimizer as made_by

import lowmem
from lowmem.errors import ConfigError

BOTH = pytest.mark.parametrize("variant", ["fused", "step"])


make_optimizer = functools.partial(made_by, "lans")


def follows_reference(give_gradients, grads, dtype=torch.float32, **options):
    """A parameter through these gradients, and the reference through the same in float64."""
    start = torch.randn(5, 7).to(dtype)
    (param,), opt = make_optimizer([start], **options)
    reference, want = Reference((5, 7), **{"lr": 0.1, **options}), start.double().cpu().numpy()
    for grad in grads:
        stored = want if dtype == torch.float32 else param.detach().double().cpu().numpy()
        give_gradients(opt, (param, grad.to(dtype)))
        want = reference.step(stored, grad.to(dtype).double().cpu().numpy())
    assert np.isfinite(want).all()
    if dtype == torch.float32:
        np.testing.assert_allclose(param.detach().cpu().numpy(), want, rtol=1e-5, atol=1e-6)
    for name, state in reference.states().items():
        np.testing.assert_allclose(
            opt.named_state_dict()["state"]["w0"][name].cpu().numpy(), state, rtol=1e-5, atol=1e-6
        )
    return param.detach(), start


# -- differences from the source ---------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("wd", [0.0, 0.1])
@pytest.mark.parametrize("zeros", [(0,), (2,), (0, 1, 3)])
def test_zero_gradients_are_not_normalized(give_gradients, variant, wd, zeros):
    """In the source it is 0/0, and NaN for ever. Here the momentum goes on, and the weight decays."""
    grads = [torch.zeros(5, 7) if step in zeros else torch.randn(5, 7) for step in range(4)]
    follows_reference(give_gradients, grads, variant=variant, wd=wd)


@BOTH
@pytest.mark.parametrize("size", [1e-20, 1e-25, 1e-30, 1e-36, 1e15])
def test_gradients_of_any_size_are_normalised(give_gradients, variant, size):
    """Squares of less than 1e-19 vanish in float32, which in the source's fused kernel makes the gradient infinite."""
    grads = [torch.randn(5, 7) * size for _ in range(3)]
    follows_reference(give_gradients, grads, variant=variant, wd=0.01)


@BOTH
def test_one_element_much_larger_than_the_others(give_gradients, variant):
    grads = [torch.randn(5, 7) * 1e-30 for _ in range(3)]
    for i, grad in enumerate(grads):
        grad[i, 2] = 1e-12
    follows_reference(give_gradients, grads, variant=variant)


# -- by name -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["lr_mult", "wd_mult"])
def test_an_unknown_name_raises(option):
    params = [("encoder.weight", torch.nn.Parameter(torch.zeros(2))), ("bias", torch.nn.Parameter(torch.zeros(2)))]
    message = r"no parameter is called 'encoder\.wieght'.*Did you mean 'encoder\.weight'"
    with pytest.raises(ConfigError, match=message):
        lowmem.FusedOptimizer(params, rule="lans", **{option: {"bias": 1.0, "encoder.wieght": 2.0}})
    with pytest.raises(ConfigError, match=message):
        lowmem.FusedOptimizer([{"params": params, option: {"encoder.wieght": 2.0}}], rule="lans")


def test_an_unknown_name_in_a_later_group_raises():
    opt = lowmem.FusedOptimizer([("one", torch.nn.Parameter(torch.zeros(2)))], rule="lans")
    with pytest.raises(ConfigError, match="no parameter is called 'tow'"):
        opt.add_param_group({"params": [("two", torch.nn.Parameter(torch.zeros(2)))], "lr_mult": {"tow": 2.0}})


def test_names_of_other_groups_are_known():
    one, two = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    groups = [{"params": [("one", one)]}, {"params": [("two", two)]}]
    lowmem.FusedOptimizer(groups, rule="lans", lr_mult={"one": 1.0, "two": 2.0})


# -- its own count -----------------------------------------------------------------------------------------------------


def test_only_updates_are_counted(give_gradients):
    """Not steps without a gradient, nor such whose gradient is not finite."""
    params, opt = make_optimizer([torch.randn(3) for _ in range(3)])
    bad = torch.tensor([1.0, torch.nan, 0.0])
    give_gradients(opt, (params[0], torch.randn(3)), (params[2], bad))
    give_gradients(opt, *((param, torch.randn(3)) for param in params))
    give_gradients(opt, (params[0], torch.randn(3)), (params[1], bad), (params[2], torch.randn(3)))
    assert [opt.state[param]["step"].item() for param in params] == [3, 1, 2]
