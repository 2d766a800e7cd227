"""Parameters whose dtype, shape or strides change after the optimizer was made: trained on as what they are, or refused
before anything has moved. The reference is an optimizer that was made after the change and loads the same state.
"""

import pytest
import torch
from support.devices import seeded

import lowmem
from lowmem.errors import StepError, UnsupportedError
from lowmem.step.compiled import has_compiler
from lowmem.step.record import ParamRecord
from lowmem.tiles.graph import Compiler

SHAPES = [(64, 48), (87, 50), (24,), (24,)]  # two that are updated alone, and a stack


def parameters(dtype, shapes=SHAPES):
    source = seeded(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=source).to(dtype)) for shape in shapes]


def backward(opt, params, seed):
    source = seeded(seed)
    opt.backward(sum((p * torch.randn(p.shape, generator=source).to(p.dtype)).float().sum() for p in params))


def states(opt):
    return [value for state in opt.named_state_dict()["state"].values() for value in state.values()]


def convert(params, dtype):
    for param in params:
        param.data = param.data.to(dtype)


REFUSED = {
    "residual": (torch.bfloat16, torch.float32, {"rule": "adamw", "rounding": "compensated"}),
    "another residual": (torch.bfloat16, torch.float16, {"rule": "adamw", "rounding": "compensated"}),
    "no residual yet": (torch.float32, torch.bfloat16, {"rule": "adamw", "rounding": "compensated"}),
    "master copy": (torch.float16, torch.bfloat16, {"rule": "adamw", "rounding": "master"}),
    "state in the weight's dtype": (torch.bfloat16, torch.float32, {"rule": "adafactor_t2t", "beta1": 0.9}),
    "foreign": (torch.float32, torch.bfloat16, {"rule": torch.optim.AdamW}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_state_that_does_not_fit_any_more_is_refused(case):
    start, end, options = REFUSED[case]
    params, reference = parameters(start), parameters(start)
    opt = lowmem.FusedOptimizer(params, lr=1e-2, compile=False, **options)
    plain = lowmem.FusedOptimizer(reference, lr=1e-2, compile=False, **options)
    backward(opt, params, 1)
    backward(plain, reference, 1)
    kept = [param.data for param in params]
    convert(params[:1], end)
    before = [param.clone() for param in params]
    for _ in range(2):
        with pytest.raises(StepError, match=rf"'param0' has changed from \({start}, .* to \({end}, .* load a state"):
            backward(opt, params, 2)
        with pytest.raises(StepError, match="'param0' has changed"):
            sum(param.float().sum() for param in params).backward()
        for param in params:
            param.grad = None
    assert all(torch.equal(param, old) for param, old in zip(params, before, strict=True))
    params[0].data = kept[0]  # nothing is torn
    backward(opt, params, 2)
    backward(plain, reference, 2)
    assert all(torch.equal(param, other) for param, other in zip(params, reference, strict=True))


def test_a_dtype_that_the_rule_does_not_update_is_refused():
    params = parameters(torch.float32)
    opt = lowmem.FusedOptimizer(params, rule="adalomo", lr=1e-2)
    backward(opt, params, 1)
    convert(params[:1], torch.float64)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"param0.*float64"):
            backward(opt, params, 2)
    convert(params[:1], torch.float32)
    backward(opt, params, 2)


def test_loading_a_state_that_fits():
    params = parameters(torch.bfloat16)
    opt = lowmem.FusedOptimizer(params, rule="adamw", rounding="compensated", lr=1e-2)
    backward(opt, params, 1)
    convert(params, torch.float16)
    saved = lowmem.FusedOptimizer(parameters(torch.float16), rule="adamw", rounding="compensated").state_dict()
    opt.load_state_dict(saved)
    backward(opt, params, 2)


def test_some_of_a_stack_are_converted():
    """They leave it, with the states that lie side by side."""
    results = []
    for batching in (True, False):
        params = parameters(torch.float32, [(24,)] * 4)
        opt = lowmem.FusedOptimizer(params, rule="adamw", lr=1e-2, batching=batching, compile=False)
        for step in range(4):
            if step in (1, 3):
                convert(params[:2], torch.bfloat16 if step == 1 else torch.float32)
            backward(opt, params, step)
        results.append(params)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("started", [False, True])
def test_another_shape(started):
    """As `resize_token_embeddings` makes it. A rule that keeps nothing goes on; a state of the old shape is refused."""
    for rule in ("lomo", "adamw"):
        params = parameters(torch.float32)
        opt = lowmem.FusedOptimizer(params, rule=rule, lr=0.5)
        if started:
            backward(opt, params, 1)
        params[0].data = torch.ones(80, 48)
        if started and rule == "adamw":
            with pytest.raises(StepError, match=r"'param0' has changed .*\[64, 48\].*\[80, 48\]"):
                backward(opt, params, 2)
            continue
        opt.backward(params[0].sum())
        if rule == "lomo":
            assert torch.equal(params[0], torch.full((80, 48), 0.5))
        assert opt.named_state_dict()["step"] == 1 + started


def test_another_order_in_memory():
    """A transposed matrix goes on: states stay in their order. Sums are in the order of the memory."""
    results = []
    for transposed in (True, False):
        (param,) = params = parameters(torch.float32, [(64, 48)])
        opt = lowmem.FusedOptimizer(params, rule="adalomo", lr=1e-2, compile=False)
        backward(opt, params, 1)
        if transposed:
            param.data = param.data.t().contiguous().t()
        backward(opt, params, 2)
        results.append(param)
    torch.testing.assert_close(*results, rtol=0, atol=1e-6)


def test_an_order_in_memory_that_no_rule_reads_is_refused():
    """As by the constructor."""
    (param,) = params = parameters(torch.float32, [(8, 4, 3, 3)])
    opt = lowmem.FusedOptimizer(params, rule="adamw", lr=1e-2)
    backward(opt, params, 1)
    param.data = param.data.to(memory_format=torch.channels_last)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"'param0' of shape .* Make it contiguous first"):
            backward(opt, params, 2)
    param.data = param.data.contiguous()
    backward(opt, params, 2)


def test_what_does_not_change_is_settled_once(monkeypatch):
    settled = []
    choose = ParamRecord.choose_program
    monkeypatch.setattr(
        ParamRecord, "choose_program", lambda self, shard: settled.append(self.name) or choose(self, shard)
    )
    params = parameters(torch.float32)
    opt = lowmem.FusedOptimizer(params, rule="adalomo", lr=1e-2)
    for seed in range(3):
        backward(opt, params, seed)
    assert sorted(settled) == ["param0", "param1", "param2", "param3"]


@pytest.mark.cpu_only("the simulated GPU has no compiler")
def test_a_state_of_another_dtype_is_not_given_to_compiled_code(monkeypatch):
    """One that a user has put into `opt.state`: swept, as it is where nothing is compiled."""
    assert Compiler.failure is None
    results, start = [], None
    for compile in (True, False) if has_compiler("cpu") else (False, False):
        (param,) = params = parameters(torch.float32, [(64, 48)])
        opt = lowmem.FusedOptimizer(params, rule="adamw", lr=1e-2, compile=compile, batching=False)
        backward(opt, params, 1)
        if start is None:  # compiled code rounds differently, so both go on from what one of them has computed
            start = param.detach().clone(), opt.state[param]
        param.data.copy_(start[0])
        opt.state[param] = {name: state.bfloat16() for name, state in start[1].items()}
        backward(opt, params, 2)
        results.append(param)
    assert torch.equal(*results)
