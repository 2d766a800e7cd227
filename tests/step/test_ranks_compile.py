"""Either all ranks of a model use compiled updates or none does. All ranks raise the error of one."""

import pytest
import torch
from support.devices import seeded
from support.products import FULL
from torch._inductor import compile_fx
from torch.distributed.fsdp import fully_shard

import lowmem
from lowmem.errors import ConfigError, RankError
from lowmem.step import compiled
from lowmem.step.compiled import has_compiler
from lowmem.tiles import graph

pytestmark = [
    pytest.mark.skipif(not has_compiler("cpu"), reason="no C++ compiler"),
    pytest.mark.cpu_only("the simulated GPU has no compiler"),
]


def net():
    source = seeded(0)
    layers = torch.nn.Sequential(*(torch.nn.Linear(160, 160) for _ in range(4)))
    with torch.no_grad():
        for param in layers.parameters():
            param.copy_(torch.randn(param.shape, generator=source))
    return layers


def full_disk(*args, **options):
    raise OSError("No space left on device")


def trained(rank, failure, steps):
    """Returns the weights after each step. Compiling fails on rank 1, in the first step or in all steps."""
    model, weights = net(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "COMPILE_FROM", 0)
        patch.setattr(compiled, "_TRACED", {})
        if rank and failure == "no compiler":
            patch.setattr(compiled, "has_compiler", lambda device: False)
        opt = lowmem.FusedOptimizer(model.named_parameters(), rule="adalomo", lr=1e-2)
        for step in range(steps):
            with pytest.MonkeyPatch.context() as passing:
                if rank and step == 0 and failure == "a full disk":
                    passing.setattr(compile_fx, "compile_fx", full_disk)
                inputs = torch.randn(2, 160, generator=seeded(2 * step + rank))
                used = model[1 + step % 2 :] if rank else model  # rank 1 has no gradients for the skipped layers
                opt.backward(used(inputs).square().sum())
            weights.append([param.detach().clone() for param in model.parameters()])
        return opt.compiled, opt.placement, weights


@pytest.mark.parametrize(("failure", "steps"), [("a full disk", 11), ("no compiler", 2)])
def test_replicas_are_updated_alike(two, failure, steps):
    """A full disk makes the first compilation fail on one rank; compilation is tried again in step 10."""
    (one, placement, weights), (other, _, others) = two.run(trained, failure, steps)
    assert placement == "replicated" and one == other == (failure != "no compiler")
    for ours, theirs in zip(weights, others, strict=True):
        assert all(map(torch.equal, ours, theirs))


def a_rank_without_a_working_compiler(rank, sharded):
    model = fully_shard(net()) if sharded else net()
    params = list(model.named_parameters())
    with pytest.MonkeyPatch.context() as patch:
        if rank:
            graph.try_compiler.cache_clear()
            patch.setattr(compile_fx, "compile_fx", full_disk)
        with pytest.raises(ConfigError, match="compile=True, but compiling for 'cpu' fails on rank 1: No space left"):
            lowmem.FusedOptimizer(params, model=model, rule="adalomo", compile=True)
    opt = lowmem.FusedOptimizer(params, model=model, rule="adalomo", lr=1e-2, compile=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "_TRACED", {})
        if rank:
            patch.setattr(compile_fx, "compile_fx", full_disk)
        opt.backward(model(torch.ones(1, 160)).sum())
        with pytest.raises(ConfigError, match=r"compile=True, but compiling failed.* on rank 1: No space left"):
            opt.backward(model(torch.ones(1, 160)).sum())
    opt.backward(model(torch.ones(1, 160)).sum())  # the disk has space again
    assert opt.compiled


@pytest.mark.parametrize("sharded", [False, True] if FULL else [False])
def test_every_rank_raises_the_error_of_the_compiler(two, sharded):
    two.run(a_rank_without_a_working_compiler, sharded)


class Unusual(torch.optim.SGD):
    """An optimizer that works on rank 0 only."""

    works = True

    def step(self, closure=None):
        if not self.works:
            raise OSError("a library that is missing here")
        super().step()


def a_rank_that_fails(rank, sharded, moment):
    model = fully_shard(net()) if sharded else net()
    failing = {"model": model, "rule": Unusual, "lr": 0.1}
    with pytest.MonkeyPatch.context() as patch:
        if moment == "the constructor":
            patch.setattr(Unusual, "works", not rank)
        error = lowmem.errors.UnsupportedError if rank else RankError
        if moment == "the first step":
            opt = lowmem.FusedOptimizer(model.named_parameters(), **failing)
            if rank:
                opt.param_groups.append({"params": []})
            error = lowmem.errors.StepError if rank else RankError
            with pytest.raises(error, match="the number of parameter groups was changed"):
                opt.backward(model(torch.ones(1, 160)).sum())
            return
        with pytest.raises(error, match="a library that is missing here") as caught:
            lowmem.FusedOptimizer(model.named_parameters(), **failing)
    assert rank or "on rank 1" in str(caught.value)


@pytest.mark.parametrize("moment", ["the constructor", "the first step"])
@pytest.mark.parametrize("sharded", [False, True])
def test_an_error_on_one_rank_is_raised_on_all(two, sharded, moment):
    two.run(a_rank_that_fails, sharded, moment)
