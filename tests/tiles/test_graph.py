"""Tests errors of the compiler, and that the calling thread loads it when the first update is compiled."""

import logging
import threading

import pytest
import torch
from support.devices import seeded
from torch._dynamo.utils import counters
from torch._inductor import compile_fx, config

import lowmem
from lowmem.errors import ConfigError
from lowmem.step import compiled
from lowmem.step.compiled import has_compiler
from lowmem.tiles import graph, stages

pytestmark = [
    pytest.mark.skipif(not has_compiler("cpu"), reason="no C++ compiler"),
    pytest.mark.cpu_only("the simulated GPU has no compiler"),
]


@pytest.fixture
def fresh(monkeypatch):
    """Clears the cache of traced code."""
    monkeypatch.setattr(compiled, "_TRACED", {})


def gradients(params, seed):
    source = seeded(seed)
    return sum((p * torch.randn(p.shape, generator=source)).sum() for p in params)


def parameters():
    source = seeded(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=source)) for shape in ((8,), (256, 96), (300, 128))]


@pytest.mark.parametrize(("compile", "gpu"), [(True, True), ("auto", False)])
def test_an_error_of_inductor(fresh, monkeypatch, caplog, compile, gpu):
    """The step in which it happens falls back to eager updates. With compile=True, the next step raises before its
    first update. Compilation is then retried."""
    monkeypatch.setattr(compiled, "COMPILE_FROM", 0)
    graph.try_compiler("cpu")
    params, others = parameters(), parameters()
    opt = lowmem.FusedOptimizer(params, rule="adalomo", lr=1e-2, compile=compile)
    eager = lowmem.FusedOptimizer(others, rule="adalomo", lr=1e-2, compile=False)

    def broken(*args, **options):
        raise NotImplementedError("no such thing in Inductor")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "lowmem"):
        patch.setattr(compile_fx, "compile_fx", broken)
        patch.setattr(torch.cuda, "is_available", lambda: gpu)
        for seed in range(1, 2 if compile is True else 10):
            opt.backward(gradients(params, seed))
            eager.backward(gradients(others, seed))
        assert all(map(torch.equal, params, others)) and not opt.compiled
        if compile is True:
            for backward in (opt.backward, lambda loss: loss.backward())[:: -1 if gpu else 1]:
                with pytest.raises(ConfigError, match=r"but compiling failed.*no such thing in Inductor"):
                    backward(gradients(params, 2))
                opt.zero_grad()
                backward(gradients(params, 2))
                eager.backward(gradients(others, 2))
            assert all(map(torch.equal, params, others))
            with pytest.raises(ConfigError, match=r"but compiling failed.*no such thing in Inductor"):
                opt.backward(gradients(params, 2))
    assert sum(record.levelname == "WARNING" for record in caplog.records) == (3 if compile is True else 1)
    assert "no such thing in Inductor" in caplog.text and ("tens of launches" in caplog.text) == gpu
    opt.backward(gradients(params, 10))  # step 10 of "auto"
    assert opt.compiled and compiled._TRACED
    assert any(code for record in opt._records.values() for code in record.program.compiled.values())


def test_an_error_in_one_of_several_parts(fresh, monkeypatch):
    """All parts of an update with several tiles are compiled before the first one writes anything."""
    graph.try_compiler("cpu")
    params, others = ([torch.nn.Parameter(torch.full((1009, 200), 2.0))] for _ in range(2))
    opt = lowmem.FusedOptimizer(params, rule="adalomo", lr=1e-2, compile=True)
    eager = lowmem.FusedOptimizer(others, rule="adalomo", lr=1e-2, compile=False)
    calls = []

    def broken(*args):
        calls.append(args)
        if len(calls) > 2:
            raise NotImplementedError
        return graph.compiled(*args)

    monkeypatch.setattr(stages, "compiled", broken)
    opt.backward(gradients(params, 1))
    eager.backward(gradients(others, 1))
    assert len(calls) == 3 and opt._updates.compilation.failure
    assert all(map(torch.equal, params, others))


def stepped(optimizer, steps=2):
    """Returns a weight after updates by `optimizer(param)`, which returns a function of a gradient."""
    source = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.randn(512, 96, generator=source))
    step = optimizer(param)
    for _ in range(steps):
        step(torch.randn(512, 96, generator=source))
    return param.detach()


@pytest.mark.parametrize("rule", ["adamw", "lomo"])
def test_compiled_updates_round_as_the_kernels_of_torch(fresh, rule):
    """Compiled code fuses exactly the multiply-adds that torch's kernels fuse."""

    def ours(param):
        opt = lowmem.FusedOptimizer([param], rule=rule, lr=1e-2, weight_decay=0.0, compile=True, batching=False)
        return lambda grad: opt.backward((param * grad).sum())

    def theirs(param):
        options = {"lr": 1e-2, "weight_decay": 0.0}
        cls = torch.optim.AdamW if rule == "adamw" else torch.optim.SGD
        opt = cls([param], fused=rule == "adamw", **options)

        def step(grad):
            param.grad = grad
            opt.step()

        return step

    assert torch.equal(stepped(ours), stepped(theirs))


def test_code_compiled_by_a_different_version_is_not_used(fresh, monkeypatch, tmp_path):
    """Inductor's own cache key does not include this package's changes to its code generation."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def hits():
        before = counters["inductor"]["fxgraph_cache_hit"]
        compiled._TRACED.clear()
        opt = lowmem.FusedOptimizer(parameters()[1:2], rule="lomo", lr=1e-2, compile=True, batching=False)
        opt.backward(gradients(opt.param_groups[0]["params"], 1))
        return counters["inductor"]["fxgraph_cache_hit"] - before

    assert (hits(), hits()) == (0, 1)
    monkeypatch.setattr(graph, "_VERSION", "another")
    assert (hits(), hits()) == (0, 1)


def test_cuda_graphs_are_not_used(fresh):
    """They would copy each gradient, so they stay off even if the environment turns them on for other code."""
    skipped = counters["inductor"]["cudagraph_skips"]
    with config.patch({"triton.cudagraphs": True, "force_disable_caches": True}):
        opt = lowmem.FusedOptimizer(parameters()[1:2], rule="lomo", lr=1e-2, compile=True, batching=False)
        opt.backward(gradients(opt.param_groups[0]["params"], 1))
    assert counters["inductor"]["cudagraph_skips"] == skipped  # Inductor counts a skip for each request without a GPU


def test_no_thread_is_started():
    """A background thread that imports modules may deadlock with a fork, the interpreter's exit or another import."""
    before = threading.enumerate()
    opt = lowmem.FusedOptimizer(parameters(), rule="lion", lr=1e-2, compile=True)
    started = [thread for thread in threading.enumerate() if thread not in before]
    # Inductor creates a hidden progress bar, and tqdm starts a thread for its first one
    assert opt.compiled and all(type(thread).__name__ == "TMonitor" for thread in started)


def test_sizes_with_the_same_example_differ():
    sizes = graph.Sizes()
    args = [sizes.tensor((sizes.size(64), sizes.size(64)), torch.float32, torch.device("cpu")) for _ in range(2)]
    traced = graph.trace(lambda one, other: [one + 1, other.t() + 2], args)
    run = graph.compiled(traced, sizes, args)
    for shapes in ([(3, 5), (7, 2)], [(1, 6), (6, 1)]):
        one, other = map(torch.randn, shapes)
        assert all(map(torch.equal, run(one, other), (one + 1, other.t() + 2)))
