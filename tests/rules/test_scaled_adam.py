"""Tests ScaledAdam: parameters without a gradient, the clipping period, and the statistics of a step."""

import math

import numpy as np
import pytest
import torch
from reference.scaled_adam import ScaledAdam as Reference

import lowmem
from lowmem.errors import ConfigError


def test_the_period_of_clipping_cannot_change(give_gradients):
    param = torch.nn.Parameter(torch.randn(3))
    opt = lowmem.FusedOptimizer([param], rule="scaled_adam", clipping_scale=1.0, clipping_update_period=3)
    give_gradients(opt, (param, torch.ones(3)))
    give_gradients(opt, (param, torch.ones(3)))
    opt.param_groups[0]["clipping_update_period"] = 5
    before = param.detach().clone()
    with pytest.raises(ConfigError, match=r"clipping_update_period=5, but the norms of the last 3 steps"):
        give_gradients(opt, (param, torch.ones(3)))
    assert torch.equal(before, param)


@pytest.mark.parametrize("batching", [False, True])
@pytest.mark.parametrize("shape", [(), (1, 1), (3, 5), (130, 130)])
def test_a_missing_gradient_is_zero(give_gradients, shape, batching):
    """The momentum is still applied, averages decay, and the step counts. Of three parameters, one always has a
    gradient, one only at first, and one in two later steps."""
    rng = np.random.default_rng(0)
    start = [torch.tensor(rng.normal(size=shape)).float() for _ in range(3)]
    params = [torch.nn.Parameter(value.clone()) for value in start]
    opt = lowmem.FusedOptimizer(params, rule="scaled_adam", size_update_period=2, batching=batching)
    references = [Reference(shape, lr=3e-2, size_update_period=2) for _ in params]
    want = [value.double().cpu().numpy() for value in start]
    present = [range(8), range(2), (3, 6)]
    for step in range(8):
        grads = [torch.tensor(rng.normal(size=shape)).float() if step in steps else None for steps in present]
        give_gradients(opt, *zip(params, grads, strict=True))
        gradients = [None if grad is None else grad.double().cpu().numpy() for grad in grads]
        want = [reference.step(*pair) for reference, *pair in zip(references, want, gradients, strict=True)]
        assert opt.last_step.names == tuple(f"param{i}" for i in range(3) if grads[i] is not None)
    for param, value, reference in zip(params, want, references, strict=True):
        np.testing.assert_allclose(param.detach().cpu().numpy(), value, rtol=1e-5, atol=1e-6)
        states = opt.state[param]
        assert states["step"].item() == 8
        for name, state in reference.states().items():
            atol = 1e-5 * np.abs(state).max() + 1e-12
            np.testing.assert_allclose(states[name].cpu().numpy(), state, rtol=1e-4, atol=atol)


def test_unfreezing_does_not_change_the_clipping_period(give_gradients):
    """Two parameters are unfrozen later; thresholds still use the norms of all previous steps."""
    params = [torch.nn.Parameter(torch.ones(4), requires_grad=n == 2) for n in range(3)]
    options = {"clipping_scale": 1.0, "clipping_update_period": 4, "size_update_period": 100}
    opt = lowmem.FusedOptimizer(params, rule="scaled_adam", lr=0.0, **options)
    norms, thresholds = [], []
    for step in range(9):
        trained = params[2 - step // 3 :]
        for param in trained:
            param.requires_grad_(True)
        give_gradients(opt, *((param, torch.full((4,), 1.0 + step)) for param in trained))
        norms.append((1.0 + step) * 2.0 * math.sqrt(len(trained)))
        memory = opt.named_state_dict()["state"]["_group0"]
        if step >= 4:
            last = sorted(range(step - 3, step + 1), key=lambda n: n % 4)
            torch.testing.assert_close(memory["model_norms"], torch.tensor([norms[n] for n in last]))
        thresholds.append(memory["model_norm_threshold"].item())
    assert all(math.isnan(value) for value in thresholds[:4])
    assert thresholds[4:8] == pytest.approx([sorted(norms[1:5])[2]] * 4)
    assert thresholds[8] == pytest.approx(sorted(norms[5:9])[2])


def test_a_parameter_that_never_had_a_gradient_stays(give_gradients):
    used, unused, frozen = (torch.nn.Parameter(torch.full((2, 3), 2.0)) for _ in range(3))
    frozen.requires_grad_(False)
    opt = lowmem.FusedOptimizer([("used", used), ("unused", unused), ("frozen", frozen)], rule="scaled_adam")
    for _ in range(5):
        give_gradients(opt, (used, torch.randn(2, 3)))
    assert (unused == 2).all()
    assert (used != 2).all()
    assert opt.state[unused]["step"].item() == 5
    assert opt.named_state_dict()["state"].keys() == {"used", "unused"}


def test_statistics(give_gradients):
    """Compares with values computed by hand. The norm is over gradients times the size of their weight, which is
    measured in step 1 and, after the statistics, in steps 2 and 4. Parameters with one element are not scaled.
    """
    matrix, single = torch.nn.Parameter(torch.full((2, 2), 2.0)), torch.nn.Parameter(torch.tensor([7.0]))
    opt = lowmem.FusedOptimizer([("m", matrix), ("s", single)], rule="scaled_adam", lr=0.0, size_update_period=2)
    grad = torch.tensor([[3.0, 0.0], [0.0, -4.0]])

    def says(norm, dominant, proportion, rms):
        actual = opt.last_step.statistics
        assert actual.keys() == {"model_norm", "dominant_parameter", "dominant_proportion", "dominant_rms"}
        assert actual["dominant_parameter"] == dominant
        numbers = [actual[key] for key in ("model_norm", "dominant_proportion", "dominant_rms")]
        assert numbers == pytest.approx([norm, proportion, rms])

    give_gradients(opt, (matrix, grad), (single, torch.tensor([5.0])))
    says(math.sqrt(5**2 * 2**2 + 25), "m", 100 / 125, 2.0)
    first = opt.last_step
    with torch.no_grad():
        matrix.mul_(3)
    give_gradients(opt, (matrix, grad), (single, torch.tensor([30.0])))
    says(math.sqrt(100 + 900), "s", 900 / 1000, 1.0)
    give_gradients(opt, (matrix, grad), (single, torch.tensor([40.0])))
    says(math.sqrt(5**2 * 6**2 + 1600), "s", 1600 / 2500, 1.0)
    give_gradients(opt, (matrix, grad))
    says(5 * 6, "m", 1.0, 6.0)
    assert first.statistics["model_norm"] == pytest.approx(math.sqrt(125))  # later steps do not change it
