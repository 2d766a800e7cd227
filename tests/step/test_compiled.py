"""Compiled updates equal updates by tiles, are traced once, and fall back to tiles if tracing fails."""

import gc
import itertools
import math
import weakref
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from support.attack import Settings, compare
from support.devices import seeded
from support.interpreted import INTERPRETED
from support.products import FULL, in_turn
from torch.profiler import ProfilerActivity, profile

import lowmem
from lowmem.rules.rule import TABLE, ParamSpec, UpdateRule
from lowmem.step import compiled
from lowmem.step.compiled import has_compiler
from lowmem.step.record import Operands
from lowmem.tiles import stages, storage
from lowmem.tiles.blocks import BLOCK_SUMS, blocks
from lowmem.tiles.layout import Layout, View
from lowmem.tiles.rounding import widen, widen8
from lowmem.tiles.storage import StoredTensor
from lowmem.tiles.stored import NO_READING, StoredTiles
from lowmem.tiles.sweep import Scalars, Sweep

pytestmark = [
    pytest.mark.cpu_only("the simulated GPU has no compiler"),
    pytest.mark.skipif(INTERPRETED, reason="of Inductor's code"),
]

RULES = sorted(TABLE)
ELEMENTWISE = ("lomo", "adamw", "lion")
OPTIONS = {"adafactor": {"min_dim_size_to_factor": 4, "beta1": 0.9}, "lans": {"variant": "step"}}
MATRIX, PRIME, EXPERTS, VECTOR, LONG, KERNEL = (64, 48), (87, 50), (5, 32, 24), (3000,), (4, 3072), (40, 3, 4, 4)
CUT = (1009, 200), (2, 997, 150), (200_003,)  # several tiles, which do not divide into blocks
READINGS = {"clipped": {"clip_norm": 1.0, "policy": "deferred"}, "scaled": {"loss_scale": 128.0, "clip_value": 0.5}}


@pytest.fixture(scope="module")
def traces():
    """Returns a trace cache for all tests of this file, except for tests that count traces."""
    return {}


@pytest.fixture
def as_traced(traces, monkeypatch):
    """Runs graphs as they are traced, since generated kernels may fuse multiply-adds."""
    monkeypatch.setattr("lowmem.tiles.graph.fused_operations", dict)
    monkeypatch.setattr(compiled, "_TRACED", traces)
    monkeypatch.setattr(stages, "compiled", lambda graph, sizes, args: graph)


@pytest.fixture
def graphs(as_traced, monkeypatch):
    """Collects the graphs that a test traces."""
    traced = []
    monkeypatch.setattr(compiled, "_TRACED", {})
    monkeypatch.setattr(stages, "compiled", lambda graph, sizes, args: traced.append(graph) or graph)
    return traced


def backward(opt, params, source):
    loss = sum((p * torch.randn(p.shape, generator=source).to(p.dtype)).float().sum() for p in params)
    opt.backward(loss)


def trained(rule, shapes, *, compile, dtype=torch.float32, steps=3, schedule=None, **options):
    """Returns parameters and their optimizer after some steps, without stacking."""
    source = seeded(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=source).to(dtype)) for shape in shapes]
    options = {**OPTIONS.get(rule, {}), **options}
    opt = lowmem.FusedOptimizer(params, rule=rule, lr=1e-2, compile=compile, batching=False, **options)
    for step in range(steps):
        for group in opt.param_groups:
            group.update(schedule(step) if schedule else {"lr": 1e-2 / (step + 1)})
        backward(opt, params, source)
    return params, opt


def results(params, opt):
    """Returns each parameter's values, including the residual of compensated rounding, and its states."""
    saved = opt.named_state_dict()["state"]
    for n, param in enumerate(params):
        states = dict(saved.get(f"param{n}", {}))
        residual = [states.pop(name) for name in ("residual", "residual_low") if name in states]
        widened = {0: lambda weight: weight, 1: widen8, 2: widen}[len(residual)]
        yield widened(param.detach(), *residual), states


def assert_same(got, want, bits=False):
    """Compares bit for bit, or up to summation order, which may change a bfloat16 weight by one spacing."""
    for (ours, our_states), (its, its_states) in zip(results(*got), results(*want), strict=True):
        if bits or ours.dtype == torch.float32:
            torch.testing.assert_close(ours, its, rtol=0, atol=0 if bits else 2e-6)
        else:
            torch.testing.assert_close(ours, its, rtol=2**-7, atol=2e-6)
            assert (ours != its).sum() <= 1 + 0.01 * ours.numel()
        for name, state in its_states.items():
            size = 5e-6 * state.abs().max().item()
            torch.testing.assert_close(our_states[name], state, rtol=1e-5, atol=size)


def traced_updates(opt):
    """Returns the number of parameters that were updated by traced code."""
    return sum(any(code is not None for code in r.program.compiled.values()) for r in opt._records.values())


def assert_as_by_tiles(rule, shapes, bits=False, **arguments):
    if not bits:  # 16-bit states might differ by a whole spacing
        arguments = {"state_storage": "float32", **arguments}
    got, want = (trained(rule, shapes, compile=compile, **arguments) for compile in (True, False))
    assert traced_updates(got[1]) == len(shapes)
    assert_same(got, want, bits)
    torch.testing.assert_close(got[1].last_step.grad_norm, want[1].last_step.grad_norm)


@pytest.mark.parametrize(("rule", "rounding"), in_turn(RULES, ("nearest", "stochastic", "compensated", "master")))
def test_compiled_updates_equal_updates_by_tiles(as_traced, rule, rounding):
    """This includes the random bits: with different ones, weights would differ by several spacings."""
    shapes = (MATRIX, EXPERTS, CUT[RULES.index(rule) % 3])
    assert_as_by_tiles(rule, shapes, steps=2, bits=rule in ELEMENTWISE, dtype=torch.bfloat16, rounding=rounding)


@pytest.mark.parametrize(("rule", "reading"), in_turn(RULES if FULL else RULES[::2], [*READINGS, "clipped"]))
def test_gradients_are_read_as_by_tiles(as_traced, rule, reading):
    shapes = [VECTOR, CUT[0]] if rule == "adafactor" else [KERNEL, CUT[0]]
    assert_as_by_tiles(rule, shapes, steps=2, **READINGS[reading])


@pytest.mark.parametrize(
    ("rule", "state_storage", "rounding"),
    [
        ("adamw", "8bit", "compensated8"),
        ("lion", "8bit_64", "weight_in_groups"),
        *(itertools.product(("lion", "adamw"), ("float16", "bfloat16"), ("compensated8",)) if FULL else ()),
    ],
)
def test_states_are_stored_as_by_tiles(as_traced, rule, state_storage, rounding, monkeypatch):
    """The group sizes of weight and state differ in one case. The last shape has several tiles, and splitting its lines
    without regard to groups would leave incomplete ones."""
    monkeypatch.setitem(storage.TABLE, "weight_in_groups", lambda dtype, signed: storage.Moment(signed, 64, False))
    shapes = [LONG if rounding == "compensated8" else (5, 32, 64), (3001, 64)]
    arguments = {"state_storage": state_storage, "rounding": rounding, "dtype": torch.bfloat16}
    assert_as_by_tiles(rule, shapes, bits=True, steps=2, **arguments)


def stepped(t):
    return {"param": t.param - t.grad * t.scalar.step}


class Stepped(UpdateRule):
    """Subtracts lr times the gradient, times 1 to 5 by slice if `slices`. `opaque` branches on a number's value."""

    name, source, keeps = "stepped", "a test", "nothing"
    defaults: ClassVar = {"lr": 1.0, "weight_decay": 0.0, "slices": False, "opaque": False}

    def spec(self, name, shape, hyper):
        return ParamSpec(View.matrix(len(shape)))

    def scalars(self, hyper, step):
        flags = {name: 1.0 for name in ("weight_decay", "slices", "opaque") if hyper[name]}
        return {**flags, "lr": hyper["lr"], "half": hyper["weight_decay"] / 2}

    def update(self, sweep, spec, state):
        step = sweep.scalar.lr
        if "slices" in sweep.scalar:
            step = step * torch.arange(1.0, 1.0 + sweep.shape[0])
        if "weight_decay" in sweep.scalar:
            step = step * sweep.scalar.half
        if "opaque" in sweep.scalar and sweep.scalar.lr > 0.5:
            step = step * 2.0
        sweep.apply(stepped, scalar={"step": step})


@pytest.mark.parametrize("rule", ["adalomo", *(["adamw", "lans"] if FULL else [])])
def test_shapes_steps_and_hyperparameters_share_code(graphs, rule):
    """Code is shared among all matrices, stacks of matrices, single lines and convolutions with one tile or with
    several tiles, of one row or of several rows. The first shape is square."""

    def schedule(step):
        decay = {TABLE[rule].decay: 0.1 * step}
        more = {"eps": (1e-30, 1e-3 * (step + 1)), "clip_threshold": 2.0} if rule == "adalomo" else {}
        return {"lr": 0.01 * step, **decay, **more}

    arguments = {"steps": 3, "schedule": schedule}
    first = [(64, 64), VECTOR, (3, 96, 30), (1, 170_000), (3, 200, 1000), KERNEL, (2048,), *CUT]
    later = [(300_001,), (99, 64), (5, 64, 20), (47, 5000), (901, 210), PRIME, (30, 2, 5, 5), (1013, 170)]
    later += [(3, 991, 60), (150_011,), (5001,), EXPERTS]
    trained(rule, first, compile=True, **arguments)
    kinds, parts = len(compiled._TRACED), len(graphs)
    assert_as_by_tiles(rule, later, **arguments)
    assert (len(compiled._TRACED), len(graphs)) == (kinds, parts)


@pytest.mark.parametrize("shape", [(1009, 200)])
def test_gradients_of_any_dtype_read_in_any_way(as_traced, shape):
    for dtype, options in itertools.product((torch.float32, torch.bfloat16), ({}, {"clip_value": 1.0})):
        param = torch.nn.Parameter(torch.zeros(shape))
        opt = lowmem.FusedOptimizer([param], rule=Stepped(), compile=True, batching=False, **options)
        opt.backward(param.sum())
        with torch.no_grad():
            opt._updates.put(opt._records[param], torch.ones(shape, dtype=dtype), None)
        assert torch.equal(param, torch.full(shape, -2.0))
        assert len(opt._records[param].program.compiled) == (1 if dtype == torch.float32 else 2)


@pytest.mark.parametrize("slices", [False, True])
def test_hyperparameters_shared_by_slices_or_one_per_slice(as_traced, slices):
    assert_as_by_tiles(Stepped(), [EXPERTS, CUT[1]], bits=True, slices=slices)


REPLACED = {
    "state": lambda opt, param, name: opt.state[param].update({name: opt.state[param][name] + 1}),
    "its data": lambda opt, param, name: setattr(opt.state[param][name], "data", opt.state[param][name] + 1),
    "states of a parameter": lambda opt, param, name: opt.state[param].clear(),
    "all states": lambda opt, param, name: opt.state.clear(),
}


@pytest.mark.parametrize("what", REPLACED)
@pytest.mark.parametrize("shape", [MATRIX, CUT[0]])
def test_a_replaced_state_is_the_one_that_continues(as_traced, what, shape):
    """Compiled code must not hold on to the old state, which is freed immediately."""
    got, want = (trained("adamw", [shape], compile=compile, state_storage="float32") for compile in (True, False))
    for (param,), opt in (got, want):
        assert len(opt._updates.compilation._bound) == (opt is got[1])
        REPLACED[what](opt, param, "exp_avg")
        assert what == "its data" or not opt._updates.compilation._bound
        backward(opt, [param], seeded(1))
    assert_same(got, want, bits=True)


def test_code_is_cached_by_the_hyperparameters_it_reads(graphs):
    def schedule(step):
        return {"weight_decay": (0.0, 0.5, 0.0, 0.25)[step]}

    assert_as_by_tiles(Stepped(), [MATRIX, PRIME], bits=True, steps=4, schedule=schedule)
    assert len(graphs) == 2  # with weight decay, and without


def test_code_is_cached_by_how_gradients_are_read(as_traced):
    """A gradient is used directly, then stored until a later backward turns out to be non-finite."""
    params, opt = trained("adamw", [MATRIX, CUT[0]], compile=True)
    with opt.accumulate():
        backward(opt, params, seeded(1))
    before = [param.clone() for param in params]
    opt.backward(params[0].sum() + params[1].sum() * math.nan)
    assert all(map(torch.equal, params, before))


@pytest.mark.parametrize("event", ["save", "betas in place", "bfloat16"])
def test_loops_train_as_in_plain_pytorch(as_traced, event):
    """The loop resumes with a new optimizer, edits hyperparameters in place, or converts the model."""
    plain = Settings(hidden=48, rounding="stochastic", batching=False, as_list=True, bias=True)
    compare(replace(plain, compile=True, events=((1, event),)))


needs_compiler = pytest.mark.skipif(not has_compiler("cpu"), reason="no C++ compiler")


def test_a_failed_trace_is_not_retried_and_frees_its_memory(graphs, caplog):
    """The failure counts for all parameters of the rule. Groups and parameters are freed with their optimizer."""
    traces = []

    class ReadsBack(Stepped):
        def __init__(self):
            self.attribute = object()

        def spec(self, name, shape, hyper):
            spec = super().spec(name, shape, hyper)
            object.__setattr__(spec, "group", hyper)  # a spec may refer to its group
            return spec

        def update(self, sweep, spec, state):
            traces.append(sweep.shape)
            if sweep.scalar.lr > 0:
                super().update(sweep, spec, state)

    params, opt = trained(ReadsBack(), [MATRIX, PRIME, CUT[0]], compile=True, steps=1)
    assert len(traces) == 4  # one trace, and three updates by tiles
    gone = weakref.ref(params[0])
    del params, opt
    gc.collect()
    assert gone() is None and any(None in updates.values() for updates in compiled._TRACED.values())


def test_rules_that_cannot_be_traced_are_updated_by_tiles(graphs, caplog):
    got = trained(Stepped(), [MATRIX], compile=True, opaque=True)
    assert "updates of rule stepped are not compiled: GuardOnDataDependentSymNode: Could not guard" in caplog.text
    assert not graphs and not traced_updates(got[1]) and not got[1].compiled
    assert caplog.text.count("the update of parameter 'param0' by rule 'stepped' is not compiled") == 1
    assert_same(got, trained(Stepped(), [MATRIX], compile=False, opaque=True), bits=True)


def test_an_error_of_tracing_is_reported(graphs, caplog, monkeypatch):
    """An unexpected error is never mistaken for a rule that cannot be traced, whatever its type."""
    monkeypatch.setattr(compiled, "_TRACED", {})
    monkeypatch.setattr(stages, "run_in_blocks", lambda *args: torch.ones(2) + torch.ones(3))
    got = trained("adamw", [MATRIX], compile=True)
    assert "WARNING  lowmem.step.compiled:" in caplog.text
    assert "updates of rule adamw are not compiled: RuntimeError: Attempting to broadcast a dimension" in caplog.text
    monkeypatch.undo()
    assert_same(got, trained("adamw", [MATRIX], compile=False), bits=True)


@pytest.mark.parametrize(("bad", "rule"), in_turn([math.nan, math.inf, 1e25], ["adalomo", "adamw", "lans"]))
def test_non_finite_gradients_change_nothing(as_traced, bad, rule):
    """Neither do finite gradients whose squares overflow float32."""
    for other in (VECTOR, CUT[0]):
        params, opt = trained(rule, [MATRIX, other], compile=True, steps=2)
        before = [param.clone() for param in params]
        opt.backward(params[0].sum() + params[1].square().sum() * bad)
        assert torch.equal(params[1], before[1]) and not torch.equal(params[0], before[0])
        assert opt.nonfinite_gradients == 1


def test_memory_in_another_order_is_updated_by_tiles(as_traced, monkeypatch):
    """This applies to transposed weights and to gradients that are expanded from a scalar."""
    results, ran, run = [], [], compiled.Compilation.run
    monkeypatch.setattr(compiled.Compilation, "run", lambda *args: ran.append((args, run(*args))) or ran[-1][1])
    for compile in (True, False):
        weight, other = torch.nn.Parameter(torch.ones(48, 64).t()), torch.nn.Parameter(torch.ones(64, 48))
        opt = lowmem.FusedOptimizer([weight, other], rule="adalomo", lr=0.1, compile=compile, batching=False)
        for _ in range(2):
            opt.backward(weight.square().sum() + other.sum())
        assert all(result is None or args[1].weight.parts[0].is_contiguous() for args, result in ran)
        results.append(([weight, other], opt))
    assert_same(*results)


def test_a_tensor_learning_rate_is_read_at_each_update(as_traced):
    param = torch.nn.Parameter(torch.ones(MATRIX))
    opt = lowmem.FusedOptimizer([param], rule="lomo", lr=0.5, compile=True, batching=False)
    opt.backward(param.sum())
    opt.param_groups[0]["lr"] = torch.tensor(0.25)
    opt.backward(param.sum())
    opt.param_groups[0]["lr"].fill_(0.0)
    opt.backward(param.sum())
    assert torch.equal(param, torch.full(MATRIX, 0.25))


@pytest.mark.parametrize(("rows", "cols"), [(1, 7), (1, 589_824), (32_000, 768), (50_257, 768), (4096, 4096), (97, 5)])
def test_blocks(rows, cols):
    count, height, width = blocks(rows, cols)
    assert count * height * width == rows * cols
    assert width == cols or rows == 1
    assert rows == 1 or count * cols <= max(BLOCK_SUMS, cols)


@pytest.mark.parametrize(("cols", "group"), [(50_257 * 768, 32), (50_257 * 768, 64), (192_000, 32), (4096, 1024)])
def test_blocks_of_a_line_have_complete_groups(cols, group):
    count, height, width = blocks(1, cols, group)
    assert (count * width, height, width % group) == (cols, 1, 0)


@needs_compiler
@pytest.mark.parametrize(
    ("rule", "rounding", "shape"),
    in_turn(
        RULES if FULL else ("adalomo", "adamw", "lion"),
        ("stochastic", "compensated", "nearest"),
        (MATRIX, (2500,), (3, 67, 30), *CUT) if FULL else (CUT[1], (2500,), CUT[0]),
    ),
)
def test_compiled(rule, rounding, shape):
    """Compiled code may fuse a multiplication with an addition, and sums in a different order."""
    assert_as_by_tiles(rule, [shape], dtype=torch.bfloat16, rounding=rounding)


@needs_compiler
def test_many_columns_compiled():
    """Column indices exceed int32, yet the random bits are the same as in tiles."""
    start, count = (1 << 31) - 2500, 5000
    layout, grad = Layout.of((1 << 34,), View.vector(1), start, start + count), torch.full((count,), -1 - 2.0**-8)
    param = torch.nn.Parameter(torch.zeros(count, dtype=torch.bfloat16))
    opt = lowmem.FusedOptimizer([param], rule="lomo", lr=1.0, weight_decay=0.0, rounding="stochastic")
    record, weights = opt._records[param], torch.zeros(2, count, dtype=torch.bfloat16)
    scalars, key = Scalars.of(record.rule.scalars(record.group.live, 1)), torch.tensor(7, dtype=torch.int32)
    stored = [StoredTensor(record.program.weight, (w,)) for w in weights]
    tiles = [StoredTiles(layout, each, grad, NO_READING, scalars, keys=key) for each in stored]
    record.rule.update(Sweep(tiles[0]), record.program.spec, {})
    opt._updates.compilation.run(Operands([record], weights[1], {}, grad, {}), tiles[1])
    assert weights.unique().numel() == 2 and torch.equal(*weights)


@needs_compiler
@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("lion", {"rounding": "compensated8", "state_storage": "8bit_64"}),
        *([("adalomo", {"rounding": "compensated"}), ("adamw", {"state_storage": "8bit"})] if FULL else []),
    ],
)
def test_compiled_code_of_several_tensors(rule, options):
    """Rounding may pick the adjacent code if the last bit differs, and later steps may double that difference.

    No temporary is as large as the parameter: the largest are column sums of blocks of 16 rows, an eighth of a bfloat16
    weight. Two tensors are written, and both results depend on the previous values of both.
    """
    options = {"dtype": torch.bfloat16, **options}
    got, want = (trained(rule, [(512, 1024)], compile=compile, **options) for compile in (True, False))
    ((_, ours),), ((_, its),) = (results(*each) for each in (got, want))
    assert (got[0][0] != want[0][0]).float().mean() < 0.01
    for name, codes in its.items():
        if codes.dtype in (torch.int8, torch.uint8):
            off = (ours[name].short() - codes.short()).abs()
            assert off.max() <= 2 and (off > 0).float().mean() < 0.01, name
    (param,), opt = got
    grad = torch.randn(param.shape).bfloat16()
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        opt._updates.put(opt._records[param], grad, None)
    events = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
    assert max(itertools.accumulate(sizes)) < param.nbytes / 4


def test_foreign_classes_are_not_traced(graphs, monkeypatch, caplog):
    """A trace would fail, and its references to a parameter group would outlive the optimizer."""
    monkeypatch.setattr(compiled, "compiled_update", None)
    params, opt = trained("torch.optim.SGD", [MATRIX, CUT[0]], compile=True)
    assert traced_updates(opt) == 0 and not compiled._TRACED and not opt.compiled
    (message,) = [message for message in caplog.messages if "is not compiled" in message]
    assert "by rule 'torch.optim.sgd.SGD' is not compiled" in message
    gone = weakref.ref(params[0])
    del params, opt
    gc.collect()
    assert gone() is None
