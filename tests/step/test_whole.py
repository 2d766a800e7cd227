"""Updates as one call: the same numbers as a sweep pass by pass, compiled once, and refused where they would not be."""

import itertools
import logging
import math
from typing import ClassVar

import pytest
import torch
from products import pairwise
from torch._inductor import config, metrics
from torch.profiler import ProfilerActivity, profile

import lowmem
from lowmem.rules.rule import TABLE, ParamSpec, UpdateRule
from lowmem.step import whole
from lowmem.step.updates import has_compiler
from lowmem.tiles import storage
from lowmem.tiles.layout import View
from lowmem.tiles.whole import BLOCK_SUMS, blocks

RULES = sorted(TABLE)
ELEMENTWISE = ("lomo", "adamw", "lion")
OPTIONS = {"adafactor": {"min_dim_size_to_factor": 4, "beta1": 0.9}, "lans": {"variant": "step"}}
MATRIX, PRIME, EXPERTS, VECTOR, LONG, KERNEL = (64, 48), (87, 50), (5, 32, 24), (3000,), (4, 3072), (40, 3, 4, 4)
READINGS = {
    "plain": {},
    "clipped": {"clip_norm": 1.0, "policy": "deferred"},
    "scaled": {"loss_scale": 128.0, "clip_value": 0.5},
}


@pytest.fixture
def graphs(monkeypatch):
    """What was traced, which is run as it is."""
    traced = []
    monkeypatch.setattr(whole, "_UPDATES", {})
    monkeypatch.setattr(whole, "compiled", lambda graph, sizes, args: traced.append(graph) or graph)
    return traced


def backward(opt, params, source):
    loss = sum((p * torch.randn(p.shape, generator=source).to(p.dtype)).float().sum() for p in params)
    opt.backward(loss)


def trained(rule, shapes, *, compile, dtype=torch.float32, steps=3, schedule=None, **options):
    """Parameters and their optimizer after some steps, none of them in a stack."""
    source = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=source).to(dtype)) for shape in shapes]
    options = {**OPTIONS.get(rule, {}), **options}
    opt = lowmem.FusedOptimizer(params, rule=rule, lr=1e-2, compile=compile, batching=False, **options)
    for step in range(steps):
        for group in opt.param_groups:
            group.update(schedule(step) if schedule else {"lr": 1e-2 / (step + 1)})
        backward(opt, params, source)
    return params, opt


def results(params, opt):
    """The values of each parameter, with what compensated rounding cut off, and its states."""
    saved = opt.named_state_dict()["state"]
    for n, param in enumerate(params):
        states = dict(saved.get(f"param{n}", {}))
        residual = states.pop("residual", None)
        yield param.detach() if residual is None else storage.widen(param.detach(), residual), states


def assert_same(got, want, bits=False):
    """Bit for bit, or but for sums in another order; of a bfloat16 weight that may be a whole spacing."""
    for (ours, our_states), (its, its_states) in zip(results(*got), results(*want), strict=True):
        if bits or ours.dtype == torch.float32:
            torch.testing.assert_close(ours, its, rtol=0, atol=0 if bits else 2e-6)
        else:
            torch.testing.assert_close(ours, its, rtol=2**-7, atol=2e-6)
            assert (ours != its).sum() <= 1 + 0.01 * ours.numel()
        for name, state in its_states.items():
            size = 5e-6 * state.abs().max().item()
            torch.testing.assert_close(our_states[name], state, rtol=1e-5, atol=size)


def whole_updates(opt):
    """How many parameters were updated by one call."""
    return sum(any(bound is not None for bound in record.whole.values()) for record in opt._records.values())


@pytest.mark.parametrize(
    ("rule", "rounding", "shape"),
    pairwise(RULES, ("nearest", "stochastic", "compensated", "master"), (MATRIX, PRIME, EXPERTS, VECTOR, LONG)),
)
def test_the_same_as_pass_by_pass(graphs, rule, rounding, shape):
    """Also the bits that are drawn at random: with others, weights would be spacings apart."""
    arguments = {"shapes": [shape], "dtype": torch.bfloat16, "rounding": rounding}
    got, want = (trained(rule, compile=compile, **arguments) for compile in (True, False))
    assert whole_updates(got[1]) == (rule != "adafactor_t2t")  # its schedule asks for numbers
    assert_same(got, want, bits=rule in ELEMENTWISE)
    torch.testing.assert_close(got[1].last_step.grad_norm, want[1].last_step.grad_norm)


@pytest.mark.parametrize(("rule", "reading"), pairwise(RULES, READINGS))
def test_gradients_are_read_as_pass_by_pass(graphs, rule, reading):
    shapes = [MATRIX, VECTOR, KERNEL] if rule != "adafactor" else [MATRIX, VECTOR]
    arguments = {"shapes": shapes, **READINGS[reading]}
    got, want = (trained(rule, compile=compile, **arguments) for compile in (True, False))
    assert_same(got, want)


@pytest.mark.parametrize("state_storage", ["bfloat16", "float16"])
def test_states_are_stored_as_pass_by_pass(graphs, state_storage):
    arguments = {"shapes": [MATRIX, EXPERTS], "state_storage": state_storage}
    got, want = (trained("adamw", compile=compile, **arguments) for compile in (True, False))
    assert whole_updates(got[1]) == 2
    assert_same(got, want, bits=True)


def test_shapes_steps_and_hyperparameters_share_code(graphs):
    """Kinds are a matrix, a stack of matrices, a single line, and a convolution."""

    def schedule(step):
        return {"lr": 0.01 * step, "weight_decay": 0.1 * step, "eps": (1e-30, 1e-3 * (step + 1)), "clip_threshold": 2.0}

    arguments = {"shapes": [MATRIX, EXPERTS, VECTOR, PRIME, (7, 40, 16), (2048,), KERNEL], "schedule": schedule}
    got, want = (trained("adalomo", compile=compile, steps=4, **arguments) for compile in (True, False))
    assert_same(got, want)
    assert len(graphs) == 4


def test_numbers_are_computed_once_per_group_and_step(graphs, monkeypatch):
    computed = []
    results = whole.Numbers.results
    monkeypatch.setattr(whole.Numbers, "results", lambda *args: computed.append(args) or results(*args))
    trained("adamw", [MATRIX, PRIME, EXPERTS], compile=True, steps=5)
    assert len(computed) == 5 * len(graphs)


def moved_decayed(t):
    return {"param": t.param * t.scalar.keep - t.grad * t.scalar.step}


class Branching(UpdateRule):
    """Asks whether its weight decay is zero, and calls Python's mathematics with its learning rate if `opaque`."""

    name, source, keeps = "branching", "a test", "nothing"
    defaults: ClassVar = {"lr": 0.1, "weight_decay": 0.0, "opaque": False}

    def spec(self, name, shape, hyper):
        return ParamSpec(View.vector(len(shape)))

    def update(self, sweep, spec, state, hyper, step):
        keep = 1.0 - hyper["lr"] * hyper["weight_decay"] if hyper["weight_decay"] else 1.0
        lr = math.sqrt(hyper["lr"]) if hyper["opaque"] else hyper["lr"]
        sweep.apply(moved_decayed, scalar={"keep": keep, "step": lr})


def test_a_number_that_a_rule_asks_about_is_part_of_the_code(graphs):
    def schedule(step):
        return {"lr": 0.1 * step, "weight_decay": (0.0, 0.5, 0.0, 0.25)[step]}

    arguments = {"shapes": [MATRIX, PRIME], "steps": 4, "schedule": schedule}
    got, want = (trained(Branching(), compile=compile, **arguments) for compile in (True, False))
    assert_same(got, want, bits=True)
    assert len(graphs) == 3  # one for each weight decay


def test_what_cannot_be_traced_is_compiled_pass_by_pass(graphs, caplog):
    with caplog.at_level(logging.INFO, "lowmem"):
        got = trained(Branching(), [MATRIX], compile=True, opaque=True)
    assert "param0 of rule branching is compiled pass by pass" in caplog.text
    assert not graphs and not whole_updates(got[1])
    assert_same(got, trained(Branching(), [MATRIX], compile=False, opaque=True), bits=True)


def test_numbers_that_change_all_the_time_do_not_compile_all_the_time(graphs):
    def schedule(step):
        return {"weight_decay": 0.01 * step}

    arguments = {"shapes": [MATRIX], "steps": 2 * whole.SPECIALISATIONS, "schedule": schedule}
    got, want = (trained(Branching(), compile=compile, **arguments) for compile in (True, False))
    assert_same(got, want, bits=True)
    assert len(graphs) < whole.SPECIALISATIONS


@pytest.mark.parametrize(("bad", "rules"), [(math.nan, RULES[::2]), (math.inf, RULES[1::2])])
def test_not_finite_leaves_everything_as_it_is(graphs, bad, rules):
    for rule in rules:
        params, opt = trained(rule, [MATRIX, VECTOR], compile=True, steps=2)
        before = [param.clone() for param in params]
        opt.backward(params[0].sum() + params[1].square().sum() * bad)
        assert torch.equal(params[1], before[1]) and not torch.equal(params[0], before[0])
        assert opt.nonfinite_gradients == 1


def test_memory_in_another_order_is_swept_pass_by_pass(graphs):
    """Transposed weights, and gradients that are expanded from a scalar."""
    results = []
    for compile in (True, False):
        weight, other = torch.nn.Parameter(torch.ones(48, 64).t()), torch.nn.Parameter(torch.ones(64, 48))
        opt = lowmem.FusedOptimizer([weight, other], rule="adalomo", lr=0.1, compile=compile, batching=False)
        for _ in range(2):
            opt.backward(weight.square().sum() + other.sum())
        assert whole_updates(opt) <= 1
        results.append(([weight, other], opt))
    assert_same(*results)


def test_a_learning_rate_that_is_a_tensor_is_read_when_it_is_used(graphs):
    param = torch.nn.Parameter(torch.ones(MATRIX))
    opt = lowmem.FusedOptimizer([param], rule="lomo", lr=0.5, compile=True, batching=False)
    opt.backward(param.sum())
    opt.param_groups[0]["lr"] = torch.tensor(0.25)
    opt.backward(param.sum())
    opt.param_groups[0]["lr"].fill_(0.0)
    opt.backward(param.sum())
    assert torch.equal(param, torch.full(MATRIX, 0.25))


def test_a_list_that_is_edited_in_place_counts(graphs):
    """As in a warmup of beta1, whatever else has not changed."""
    results = []
    for compile, edited in ((True, 0.5), (False, 0.5), (False, None)):
        source = torch.Generator().manual_seed(0)
        param = torch.nn.Parameter(torch.randn(MATRIX, generator=source))
        opt = lowmem.FusedOptimizer([param], rule="adamw", lr=0.1, betas=[0.9, 0.99], compile=compile, batching=False)
        backward(opt, [param], source)
        if edited is not None:
            opt.param_groups[0]["betas"][0] = edited
        backward(opt, [param], source)
        assert whole_updates(opt) == compile
        results.append(param.detach())
    assert torch.equal(results[0], results[1]) and not torch.equal(results[1], results[2])


def test_random_bits_are_of_the_seed_that_was_loaded(graphs):
    params, opt = trained("lion", [MATRIX], compile=True, dtype=torch.bfloat16, rounding="stochastic", seed=1)
    others, other = trained("lion", [MATRIX], compile=True, dtype=torch.bfloat16, rounding="stochastic", seed=2)
    others[0].data.copy_(params[0])
    other.load_state_dict(opt.state_dict())
    for each in ((opt, params), (other, others)):
        backward(*each, torch.Generator().manual_seed(1))
    assert whole_updates(other) and torch.equal(params[0], others[0])


@pytest.mark.parametrize(("rows", "cols"), [(1, 7), (1, 589_824), (32_000, 768), (50_257, 768), (4096, 4096), (97, 5)])
def test_blocks(rows, cols):
    count, height, width = blocks(rows, cols)
    assert count * height * width == rows * cols
    assert width == cols or rows == 1
    assert rows == 1 or count * cols <= max(BLOCK_SUMS, cols)


def test_what_has_no_blocks():
    assert blocks(1_000_003, 64) is None  # a prime number of rows: neither small blocks nor sums that are few
    assert blocks(1 << 16, 1 << 15) is None


COMPILED = [(rule, ("nearest", "stochastic", "compensated")[n % 3]) for n, rule in enumerate(RULES)]


@pytest.mark.skipif(not has_compiler("cpu"), reason="no C++ compiler")
@pytest.mark.parametrize(("rule", "rounding"), COMPILED)
def test_compiled(rule, rounding):
    """Compiled code sums in another order. A matrix is compiled, and one of another size runs that code."""
    arguments = {"shapes": [MATRIX, PRIME], "dtype": torch.bfloat16, "rounding": rounding}
    got, want = (trained(rule, compile=compile, **arguments) for compile in (True, False))
    assert_same(got, want)


@pytest.mark.skipif(not has_compiler("cpu"), reason="no C++ compiler")
def test_rows_columns_and_weights_are_summed_in_one_loop(monkeypatch):
    monkeypatch.setattr(whole, "_UPDATES", {})
    monkeypatch.setattr(metrics, "cpp_outer_loop_fused_inner_counts", [])
    with config.patch(force_disable_caches=True):
        trained("adalomo", [MATRIX], compile=True, steps=1)
    # along the rows of a block, over all of it, along its columns: three loops in one over blocks
    assert 3 in [count.inner_kernel_number for count in metrics.cpp_outer_loop_fused_inner_counts]


@pytest.mark.skipif(not has_compiler("cpu"), reason="no C++ compiler")
def test_compiled_code_has_no_temporaries_of_the_parameters_size():
    """The largest are column sums of blocks of 16 rows, an eighth of a bfloat16 weight. Two tensors are written, and
    both results depend on what both were before."""
    source = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.randn(512, 1024, generator=source).bfloat16())
    opt = lowmem.FusedOptimizer([param], rule="adalomo", lr=1e-2, compile=True, rounding="compensated")
    opt.backward(param.square().sum())
    grad = torch.randn(param.shape, generator=source).bfloat16()
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        opt._updates.put(opt._records[param], grad, None)
    events = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
    assert max(itertools.accumulate(sizes)) < param.nbytes / 4
