"""In a step nothing waits for the device, and what runs beside it there is in order."""

from collections import namedtuple
from contextlib import nullcontext

import pytest
import torch
from support import pretended_gpu, simgpu
from support.pretended_gpu import Failed, watched
from support.products import FULL, pairwise
from torch._subclasses.fake_tensor import FakeTensorMode

import lowmem
from lowmem.rules import Lomo
from lowmem.step.offload import GradientStore
from lowmem.step.record import ParamRecord
from lowmem.tiles.layout import Span

ROUNDINGS = ("nearest", "stochastic", "compensated", "master")
RULES = [row.name for row in lowmem.rules.table()]
POLICIES = {
    "immediate": {"policy": "immediate"},
    "two_pass": {"policy": "two_pass"},
    "host": {"policy": "deferred", "store": "host"},
    "device": {"policy": "deferred", "store": "device"},
}
DYNAMIC, NORM, ACCUMULATE = {"loss_scale": "dynamic"}, {"clip_value": 1.0, "clip_norm": 1.0}, {"accumulate": True}
# What can be asked for under each, one by one, and then all of it.
ASKED = {
    "immediate": [{}, DYNAMIC],
    "two_pass": [{}, DYNAMIC, NORM, DYNAMIC | NORM],
    "host": [{}, DYNAMIC, NORM, ACCUMULATE, ACCUMULATE | DYNAMIC | NORM],
    "device": [{}, ACCUMULATE | DYNAMIC | NORM],
}
# What a rule clips by norms by itself.
OWN = {"adafactor": {"global_norm_clip_threshold": 1.0}, "scaled_adam": {"clipping_scale": 2.0}}

Case = namedtuple("Case", "rule rounding policy asked")


def case_id(case):
    return f"{case.rule}-{case.rounding}-{case.policy}-{', '.join(case.asked)}"


def cases():
    """Everything that a policy allows at once, and each thing by itself."""
    for rule, rounding, policy in pairwise(RULES, ROUNDINGS, ASKED):
        yield Case(rule, rounding, policy, ASKED[policy][-1])
    alone = [(policy, asked) for policy, choices in ASKED.items() for asked in choices[:-1]]
    for n, (rounding, (policy, asked)) in enumerate(pairwise(ROUNDINGS, alone)):
        for rule in RULES if FULL else [RULES[n % len(RULES)]]:  # a rule sees no more of it than another
            yield Case(rule, rounding, policy, asked)


def take_steps(case, device, count=2):
    """A matrix that is updated alone, two vectors that are updated as a stack, and a wider parameter."""
    settings = {**case.asked, **POLICIES[case.policy]}
    accumulate = settings.pop("accumulate", False)
    own = OWN.get(case.rule, {}) if "clip_norm" in settings else {}
    matrix, *others = (torch.randn(size, device=device).bfloat16() for size in ((160, 160), (64,), (64,)))
    params = [torch.nn.Parameter(value) for value in (matrix, *others, torch.randn(3, 4, device=device))]
    opt = lowmem.FusedOptimizer(params, case.rule, rounding=case.rounding, compile=False, **own, **settings)
    for _ in range(count):
        for last in (False, True) if accumulate else (True,):
            with nullcontext() if last else opt.accumulate():
                opt.backward(torch.stack([param.square().sum().float() for param in params]).sum())
    assert params[0]._version > 0
    assert opt.last_step.norms.shape == (4,)
    assert opt.last_step.grad_norm.shape == ()
    opt.remove()


# -- nothing is read back ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pretending():
    """Runs a function of this file where there is a pretended GPU."""
    process = pretended_gpu.Process()
    yield process.run
    process.stop()


def take_watched_steps(case):
    with watched():
        take_steps(case, "gpu")


@pytest.mark.parametrize("case", cases(), ids=case_id)
def test_nothing_is_read_back(case, pretending):
    """A tensor without values cannot be read."""
    pretending(take_watched_steps, case)


@pytest.mark.parametrize(
    "case",
    [Case(rule, "nearest", policy, asked[-1]) for rule in RULES for policy, asked in ASKED.items()],
    ids=case_id,
)
def test_nothing_is_read_back_on_a_cpu(case):
    with FakeTensorMode():
        take_steps(case, "cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rule", RULES)
def test_nothing_waits_for_a_gpu(rule):
    torch.cuda.set_sync_debug_mode("error")
    try:
        for case in cases():
            if case.rule == rule:
                take_steps(case, "cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not hasattr(simgpu, "library"), reason="needs the simulated GPU: scripts/test.sh --simgpu")
@pytest.mark.parametrize("case", cases(), ids=case_id)
def test_what_a_step_waits_for(case):
    """Only for values of the step before. No copy is staged on the host either, in the first step neither."""
    with simgpu.watch("sync", "wait", "pageable") as found:
        take_steps(case, "cuda", count=3)
    assert [event.kind for event in found] == ["wait"] * 2, simgpu.summary(found)
    assert all("transfers.py" in event.where for event in found)


def read(how):
    with watched():
        how(torch.ones(1, device="gpu"))


@pytest.mark.parametrize("how", [torch.Tensor.item, torch.Tensor.nonzero, bool])
def test_what_is_read_back_is_noticed(how, pretending):
    with pytest.raises(Failed, match=r"DataDependentOutput|DynamicOutputShape"):
        pretending(read, how)


# -- copies beside what the device computes ----------------------------------------------------------------------------

ELEMENTS = 10_000


def slots_of(count):
    params = [torch.nn.Parameter(torch.zeros(ELEMENTS, device="gpu")) for _ in range(count)]
    return [
        ParamRecord(f"p{n}", param, Span((ELEMENTS,), 0, ELEMENTS, ELEMENTS), {}, Lomo())
        for n, param in enumerate(params)
    ]


def gradient():
    return torch.randn(ELEMENTS, device="gpu")


def step_of_two_micro_batches():
    """Returns how many gradients are on the device at most while they come, and while they are applied."""
    with watched() as watch:
        records, store = slots_of(6), GradientStore(host=True)
        standing = watch.held
        for record in records:
            store.keep(record, gradient())
        for record in records:
            store.keep(record, store.get(record).add_(gradient()))
        for record in records:
            watch.most = 0
            store.keep(record, store.get(record).add_(gradient()))
        for record in records:
            store.keep(record, gradient())  # in place of what may have been fetched ahead
        coming = watch.most - standing
        watch.most = 0
        for record, grad in store.drain(records):
            record.param.detach().sub_(grad)
            del grad
        store.keep(records[0], gradient())
        return coming / ELEMENTS / 4, (watch.most - standing) / ELEMENTS / 4


def test_how_many_gradients_are_on_the_device(pretending):
    """While they come: the one before leaves, one arrives, and the sum that it is added to is there or coming."""
    assert pretending(step_of_two_micro_batches) == (3, 2)


def give_up(how):
    with watched() as watch:
        records, store = slots_of(3), GradientStore(host=True)
        standing = watch.held
        for record in records:
            store.keep(record, gradient())
        if how == "while they are applied":
            next(store.drain(records))
        store.clear()
        assert watch.held == standing
        assert not list(store.drain(records))


@pytest.mark.parametrize("how", ["while they come", "while they are applied"])
def test_gradients_that_nobody_wants_any_more(how, pretending):
    pretending(give_up, how)


def steps_without(stream_method):
    """As if a store forgot to let one stream wait for another."""
    kept = getattr(pretended_gpu.Stream, stream_method)
    setattr(pretended_gpu.Stream, stream_method, lambda self, other: None)
    try:
        step_of_two_micro_batches()
    finally:
        setattr(pretended_gpu.Stream, stream_method, kept)


@pytest.mark.parametrize("stream_method", ["wait_stream", "wait_event"])
def test_a_wait_that_is_forgotten_is_noticed(stream_method, pretending):
    with pytest.raises(Failed, match="Race"):
        pretending(steps_without, stream_method)


def forget_what_leaves():
    """As if a store gave gradients back before they are copied."""
    with watched():
        (record,), store = slots_of(1), GradientStore(host=True)
        store.keep(record, gradient())
        store._leaving = None
        gradient()


def test_memory_that_is_given_back_too_soon_is_noticed(pretending):
    with pytest.raises(Failed, match="Race: memory was given back"):
        pretending(forget_what_leaves)
