"""Parameters whose dtype, shape or strides change are trained in the new format, or raise before any update."""

import pytest
import torch
from support.devices import seeded
from support.nets import same, weights
from support.products import pairwise

import lowmem
from lowmem.errors import StepError, UnsupportedError
from lowmem.step.compiled import has_compiler
from lowmem.step.record import ParamRecord
from lowmem.tiles import stages, storage

SHAPES = [(64, 48), (87, 50), (24,), (24,)]  # two that are updated alone, two that are stacked
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def make_optimizer(rule, dtype=F32, shapes=SHAPES, **options):
    """Returns parameters and their optimizer after one step."""
    source = seeded(0)
    params = torch.nn.ParameterList(torch.randn(shape, generator=source).to(dtype) for shape in shapes)
    opt = lowmem.FusedOptimizer(list(params), rule, **{"lr": 1e-2, "compile": False, **options})
    backward(opt, params, 1)
    return params, opt


def backward(opt, params, seed):
    source = seeded(seed)
    opt.backward(sum((p * torch.randn(p.shape, generator=source).to(p.dtype)).float().sum() for p in params))


def convert(params, dtype):
    for param in params:
        param.data = param.data.to(dtype)


UNFIT = {
    "residual": (BF16, F32, {"rule": "adamw", "rounding": "compensated"}),
    "no residual yet": (F32, BF16, {"rule": "adamw", "rounding": "compensated"}),
    "master copy": (F16, BF16, {"rule": "adamw", "rounding": "master"}),
    "state in the weight's dtype": (BF16, F32, {"rule": "adafactor_t2t", "beta1": 0.9}),
    "foreign": (F32, BF16, {"rule": torch.optim.AdamW}),
}


@pytest.mark.parametrize(("start", "end", "options"), UNFIT.values(), ids=UNFIT)
def test_a_state_that_does_not_fit_any_more_raises(start, end, options):
    """The error leaves everything unchanged: training continues once the parameter is restored."""
    (params, opt), (others, plain) = (make_optimizer(**options, dtype=start) for _ in range(2))
    original = params[0].data
    convert([params[0]], end)
    before = weights(params)
    for _ in range(2):
        with pytest.raises(StepError, match=rf"'param0' has changed \(dtype from {start} to {end}\), .* load a state"):
            backward(opt, params, 2)
        with pytest.raises(StepError, match="'param0' has changed"):
            sum(param.float().sum() for param in params).backward()
        params.zero_grad()
    assert same(weights(params), before)
    params[0].data = original
    backward(opt, params, 2)
    backward(plain, others, 2)
    assert same(weights(params), weights(others))


@pytest.mark.parametrize(
    ("rule", "shape", "change", "message"),
    [
        ("adalomo", (64, 48), {"dtype": torch.float64}, "param0.*float64"),
        ("adamw", (8, 4, 3, 3), {"memory_format": torch.channels_last}, "'param0' of .* Make it contiguous first"),
    ],
)
def test_a_format_that_no_rule_updates_raises(rule, shape, change, message):
    """The error is the same as in the constructor."""
    params, opt = make_optimizer(rule, shapes=[shape])
    original = params[0].data
    params[0].data = original.to(**change)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=message):
            backward(opt, params, 2)
    params[0].data = original
    backward(opt, params, 2)


def test_some_of_a_stack_are_converted():
    """Converted parameters leave the stack and take their states with them."""
    results = []
    for batching in (True, False):
        params, opt = make_optimizer("adamw", shapes=[(24,)] * 4, batching=batching)
        for step, dtype in enumerate((BF16, BF16, F32)):
            convert(params[:2], dtype)
            backward(opt, params, step)
        results.append(weights(params))
    assert same(*results)


def test_another_shape():
    """`resize_token_embeddings` does this. A rule without states continues; a state with the old shape raises."""
    for rule in ("lomo", "adamw"):
        params, opt = make_optimizer(rule, lr=0.5)
        params[0].data = torch.ones(80, 48)
        if rule == "adamw":
            with pytest.raises(StepError, match=r"'param0' has changed .*\[64, 48\].*\[80, 48\]"):
                backward(opt, params, 2)
        else:
            opt.backward(params[0].sum())
            assert torch.equal(params[0], torch.full((80, 48), 0.5))


def test_an_unchanged_parameter_is_inspected_once(monkeypatch):
    chosen, choose = [], ParamRecord.choose_program
    monkeypatch.setattr(ParamRecord, "choose_program", lambda self, *a: chosen.append(self.name) or choose(self, *a))
    params, opt = make_optimizer("adalomo")
    for seed in range(3):
        backward(opt, params, seed)
    assert sorted(chosen) == ["param0", "param1", "param2", "param3"]


@pytest.mark.cpu_only("the simulated GPU has no compiler")
def test_compiled_code_is_not_called_with_a_state_of_a_different_dtype(monkeypatch):
    """A state that the user puts into `opt.state` is updated by the eager sweep instead."""
    monkeypatch.setattr(stages, "compiled", lambda graph, sizes, args: graph)
    results, start = [], None
    for compile in (True, False) if has_compiler("cpu") else (False, False):
        params, opt = make_optimizer("adamw", shapes=[(64, 48)], compile=compile, batching=False)
        (param,) = params
        start = start or (param.detach().clone(), opt.state[param])  # compiled code rounds differently
        param.data.copy_(start[0])
        opt.state[param] = {name: state.bfloat16() for name, state in start[1].items()}
        backward(opt, params, 2)
        results.append(param)
    assert torch.equal(*results)


EDITS = {
    "zero": lambda param: param.zero_(),
    "prune": lambda param: param.mul_(torch.arange(param.numel()).view(param.shape) % 3 > 0),
    "load": lambda param: param.copy_(torch.full(param.shape, 0.3)),
    "infinite": lambda param: param.view(-1)[0].fill_(torch.inf),
    "replace": lambda param: setattr(param, "data", torch.full_like(param, -0.7)),
    "zero its data": lambda param: param.data.zero_(),
}


@pytest.mark.parametrize(("edit", "rounding", "dtype"), pairwise(EDITS, storage.roundings(), [BF16, F16]))
def test_an_edited_weight_is_the_one_that_continues(edit, rounding, dtype):
    """The residual or master copy of the old weight must not overwrite the edit, whether or not weights are stacked."""
    shapes, rate, slope = SHAPES[1:], 1e-3, 0.37
    params, opt = make_optimizer("lomo", dtype, shapes, rounding=rounding, lr=rate)
    masters = [state.get("weight32") for state in opt.named_state_dict()["state"].values()]
    for _ in range(2):
        opt.state.clear()  # resets the states, which do not include residuals and master copies
        before = weights(params)
        with torch.no_grad():
            for param in params:
                EDITS[edit](param)
        expected = [param.detach().float() for param in params]
        if rounding == "master":  # its unchanged elements keep their residuals
            triples = zip(expected, before, masters, strict=True)
            expected = [torch.where(new == old, master, new) for new, old, master in triples]
        for _ in range(3):
            opt.backward(sum((param * slope).float().sum() for param in params))
            expected = [value - torch.tensor(slope).to(dtype).float() * rate for value in expected]
        masters = expected
    for param, value in zip(params, expected, strict=True):
        nearest, apart = value.to(dtype), 3 * torch.finfo(dtype).eps * value.abs()
        if rounding in ("compensated", "master") and edit != "zero its data":  # the skipped step changes nothing
            assert torch.equal(param, nearest)
        elif rounding != "nearest":  # one 16-bit spacing, or the error of an 8-bit residual
            assert ((param - value).abs() <= apart)[value.isfinite()].all()
        assert torch.equal(param.isfinite(), value.isfinite())
