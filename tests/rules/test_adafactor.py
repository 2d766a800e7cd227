"""Tests options of T5X's Adafactor for which a comparison with a transcription is not sufficient."""

import functools

import numpy as np
import pytest
import torch
from reference.adafactor import Adafactor as Reference
from support.products import pairwise
from test_rules import make_optimizer as made_by

import lowmem
from lowmem.errors import ConfigError

make_optimizer = functools.partial(made_by, "adafactor")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_op_by_op_rounds_the_decayed_weight(give_gradients, dtype):
    """1 - weight_decay_rate and its product with the weight are rounded before the step of ±2⁻⁶ is subtracted."""
    start, signs = torch.randn(200).to(dtype), torch.randn(200).sign().to(dtype)
    stored = {}
    for variant in ("jit", "op_by_op"):
        (param,), opt = make_optimizer(
            [start], lr=2.0**-6, weight_decay_rate=0.1, multiply_by_parameter_scale=False, variant=variant,
            rounding="nearest",
        )  # fmt: skip
        give_gradients(opt, (param, signs))
        stored[variant] = param.detach()
    rounded = (start.double() * torch.tensor(0.9).to(dtype).double()).to(dtype).double()
    assert torch.equal(stored["op_by_op"], (rounded - 2.0**-6 * signs.double()).to(dtype))
    assert torch.equal(stored["jit"], (start.float() * 0.9 - 2.0**-6 * signs.float()).to(dtype))
    assert not torch.equal(stored["jit"], stored["op_by_op"])


@pytest.mark.parametrize("size", [3, 20_000])
@pytest.mark.parametrize("plain", [False, True])
def test_step_offset_of_a_new_run(give_gradients, size, plain):
    """The error comes before the step begins, so no weight changes and the step is not torn."""
    param = torch.nn.Parameter(torch.ones(size))
    opt = lowmem.FusedOptimizer([param], rule="adafactor", step_offset=10)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"step_offset=10, but this is step 1\. .*Omit it in a new run"):
            param.sum().backward() if plain else give_gradients(opt, (param, torch.ones(size)))
        opt.zero_grad()
    assert (param == 1).all()
    assert opt.named_state_dict()["step"] == 0


def clipped_as_the_source(grads, threshold):
    """T5X's `apply_gradient`: how NaN and Inf propagate follows from jnp.sqrt, jnp.minimum and the product."""
    global_norm = np.sqrt(np.sum([np.sum(np.square(grad)) for grad in grads]))
    scale = threshold * np.minimum(1.0 / threshold, 1.0 / global_norm)
    return [grad * scale for grad in grads]


def skips_as_the_source(give_gradients, shapes, bad, options, threshold=None, **more):
    """Compares four steps with the reference. In the second step, one gradient has a bad element."""
    options = {"skip_nan_updates": True, "lr": 0.1, **options}
    start = [torch.randn(shape) for shape in shapes]
    params, opt = make_optimizer(start, **options, global_norm_clip_threshold=threshold, **more)
    references = [Reference(shape, **options) for shape in shapes]
    want = [value.double().cpu().numpy() for value in start]
    for step in range(4):
        grads = [torch.randn(shape) for shape in shapes]
        if step == 1:
            grads[1].view(-1)[3] = bad
        give_gradients(opt, *zip(params, grads, strict=True))
        assert opt.last_step.nonfinite == (["w1"] if step == 1 else [])
        assert not opt.last_step.skipped and ("policy" not in more or opt.last_step.skipped_params == 0)
        with np.errstate(all="ignore"):
            gradients = [grad.double().cpu().numpy() for grad in grads]
            gradients = gradients if threshold is None else clipped_as_the_source(gradients, threshold)
            want = [one.step(value, grad) for one, value, grad in zip(references, want, gradients, strict=True)]
    assert opt.named_state_dict()["step"] == 4
    for param, value, reference in zip(params, want, references, strict=True):
        np.testing.assert_allclose(param.detach().cpu().numpy(), value, rtol=1e-5, atol=1e-6)
        for name, state in reference.states().items():
            np.testing.assert_allclose(opt.state[param][name].cpu().numpy(), state, rtol=1e-5, atol=1e-7)


BAD = [np.nan, np.inf, -np.inf]
MATRIX, DECAYED = {"min_dim_size_to_factor": 2}, {"beta1": 0.9, "weight_decay_rate": 0.1}
SKIPPING = {
    "a vector": ((6,), {}),
    "its momentum": ((6,), {"clipping_threshold": None, "beta1": 0.9}),
    "a matrix": ((4, 5), MATRIX),
    "all of its states": ((4, 5), {**MATRIX, "clipping_threshold": None, **DECAYED}),
    "by columns": ((5, 4), {**MATRIX, "clipping_threshold": None}),
    "a stack": ((2, 4, 5), {**MATRIX, "beta1": 0.9}),
    "not factored": ((2, 4, 5), {"clipping_threshold": None}),
}


@pytest.mark.parametrize(("case", "batching", "bad"), pairwise(SKIPPING, [False, True], BAD))
def test_skip_nan_updates_element_by_element(give_gradients, case, batching, bad):
    """As in T5X, only elements that would become NaN keep their value, in the weight and in each state, where lowmem
    usually skips the whole parameter. An infinite gradient is not NaN, so its second moment stays infinite. Stacked
    parameters do not affect each other."""
    shape, options = SKIPPING[case]
    skips_as_the_source(give_gradients, [shape] * 3, bad, options, batching=batching)


@pytest.mark.parametrize(
    ("threshold", "bad", "policy", "options"),
    pairwise([None, 0.5], BAD, ["two_pass", "deferred"], [{}, {"clipping_threshold": None}, DECAYED]),
)
def test_skip_nan_updates_when_the_step_is_decided(give_gradients, options, threshold, bad, policy):
    """As in T5X, the step is counted. With a threshold, a NaN in one gradient makes all gradients NaN, and an Inf makes
    the finite elements 0."""
    options, shapes = {"min_dim_size_to_factor": 4, **options}, [(6,), (4, 5), (5, 4), (7,)]
    skips_as_the_source(give_gradients, shapes, bad, options, threshold, policy=policy)


@pytest.mark.parametrize("policy", ["two_pass", "deferred"])
def test_skip_nan_updates_and_a_dynamic_loss_scale(give_gradients, policy):
    """An overflow of the scaled loss skips the step, as GradScaler does, and the scale backs off."""
    start, grad = torch.randn(6), torch.randn(6)
    grad[3] = torch.inf
    (param,), opt = make_optimizer([start], skip_nan_updates=True, policy=policy, loss_scale="dynamic")
    scale = opt.loss_scale
    give_gradients(opt, (param, grad))
    assert opt.last_step.skipped
    assert torch.equal(param.detach(), start)
    assert opt.loss_scale == scale / 2
    assert opt.named_state_dict()["step"] == 0
