"""A step never waits for the device, and its operations on several streams are ordered correctly."""

import math
from collections import Counter, namedtuple
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from support import simgpu
from support.nets import records_of
from support.products import FULL, in_turn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import lowmem
from benchmarks.engine import without_computing
from lowmem.kernels import Kernels
from lowmem.step import compiled, updates
from lowmem.step.offload import GradientStore

ROUNDINGS = ("nearest", "stochastic", "compensated", "master")
RULES = [row.name for row in lowmem.rules.table()]
POLICIES = {
    "immediate": {"policy": "immediate"},
    "two_pass": {"policy": "two_pass"},
    "host": {"policy": "deferred", "store": "host"},
    "device": {"policy": "deferred", "store": "device"},
    "auto": {"policy": "deferred"},
}
DYNAMIC, NORM, ACCUMULATE = {"loss_scale": "dynamic"}, {"clip_value": 1.0, "clip_norm": 1.0}, {"accumulate": True}
# Options that each policy supports, one by one, and then all of them.
ASKED = {
    "immediate": [{}, DYNAMIC],
    "two_pass": [{}, DYNAMIC, NORM, DYNAMIC | NORM],
    "host": [{}, DYNAMIC, NORM, ACCUMULATE, ACCUMULATE | DYNAMIC | NORM],
    "device": [{}, ACCUMULATE | DYNAMIC | NORM],
    "auto": [{}, ACCUMULATE | DYNAMIC | NORM],
}
# Rules with their own clipping.
CLIPPING = {"adafactor": {"global_norm_clip_threshold": 1.0}, "scaled_adam": {"clipping_scale": 2.0}}

Case = namedtuple("Case", "rule rounding policy asked")


def case_id(case):
    return f"{case.rule}-{case.rounding}-{case.policy}-{', '.join(case.asked)}"


def cases():
    """Yields all options of a policy together, and each option alone."""
    asked = [(policy, options) for policy, choices in ASKED.items() for options in choices]
    rules = product(RULES, ROUNDINGS) if FULL else in_turn(RULES, [*ROUNDINGS, "stochastic"])
    for rule, options in in_turn(rules, asked):
        yield Case(*rule, *options)


def take_steps(case, device, count=2):
    """Trains a matrix that is updated alone, two stacked vectors, and a wider parameter. With a dynamic loss scale the
    second step overflows."""
    settings = {**case.asked, **POLICIES[case.policy]}
    accumulate = settings.pop("accumulate", False)
    defaults = CLIPPING.get(case.rule, {}) if "clip_norm" in settings else {}
    matrix, *others = (torch.randn(size, device=device).bfloat16() for size in ((160, 160), (64,), (64,)))
    params = [torch.nn.Parameter(value) for value in (matrix, *others, torch.randn(3, 4, device=device))]
    opt = lowmem.FusedOptimizer(params, case.rule, rounding=case.rounding, compile=False, **defaults, **settings)
    for step in range(count):
        factor = math.inf if step == 1 and "loss_scale" in settings else 1.0
        for last in (False, True) if accumulate else (True,):
            with nullcontext() if last else opt.accumulate():
                opt.backward(torch.stack([param.square().sum().float() for param in params]).sum() * factor)
    assert params[0]._version > 0
    assert opt.last_step.norms.shape == (4,)
    assert opt.last_step.grad_norm.shape == ()
    opt.remove()


@pytest.mark.cpu_only("its device tells what waits")
@pytest.mark.parametrize("case", cases(), ids=case_id)
def test_nothing_is_read_back(case):
    """Fake tensors have no values, so any attempt to read one raises."""
    with FakeTensorMode():
        take_steps(case, "cpu")


@pytest.mark.skipif(hasattr(simgpu, "library") or not torch.cuda.is_available(), reason="needs a real GPU")
@pytest.mark.parametrize("rule", RULES)
def test_nothing_waits_for_a_gpu(rule):
    torch.cuda.set_sync_debug_mode("error")
    try:
        for case in cases():
            if case.rule == rule:
                take_steps(case, "cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")


on_simgpu = pytest.mark.skipif(
    not hasattr(simgpu, "library"), reason="needs the simulated GPU: scripts/test.sh --simgpu"
)


@on_simgpu
@pytest.mark.parametrize("case", cases(), ids=case_id)
def test_a_step_waits_only_for_the_previous_step(case):
    """The host reads the previous step's report. No copy goes through pageable memory, not even in the first step."""
    with simgpu.watch("sync", "wait", "pageable") as events:
        take_steps(case, "cuda", count=3)
    assert [event.kind for event in events] == ["wait"] * 2, simgpu.summary(events)
    assert all("transfers.py" in event.where for event in events)


@on_simgpu
def test_a_callable_is_launched_before_the_host_waits_for_the_last_step():
    param, waits = torch.nn.Parameter(torch.randn(8, device="cuda")), []
    first = len(simgpu.events)

    def count():
        return sum(event.kind in ("sync", "wait") for event in simgpu.events[first:])

    def loss():
        waits.append(count())
        return param.square().sum()

    opt = lowmem.FusedOptimizer([param])
    for _ in range(3):
        opt.backward(loss)
    assert (waits, count()) == ([0, 0, 1], 2)


class Operations(TorchDispatchMode):
    """Counts operations by name, separately for each marked part of a step."""

    def __init__(self):
        super().__init__()
        self.parts, self.active = [], False

    def mark(self, begins):
        self.parts += [Counter()] * begins
        self.active = begins

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.active:
            self.parts[-1][func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.cpu_only("code is replaced on a CPU")
@pytest.mark.parametrize(("rule", "kernels"), [("adalomo", True), ("adamw", True), ("lion", False)])
def test_a_compiled_update_has_few_operations_on_the_host(rule, kernels, monkeypatch):
    """Counted from a large parameter's hook to the end of its update, once states are bound: the weight and the
    gradient are only reshaped into views. Kernels take addresses and allocate one workspace."""
    monkeypatch.setattr(compiled, "_get_current_dispatch_mode", lambda: None)  # counting must not disable compiled code
    params, counting = [torch.nn.Parameter(torch.randn(160, 160).bfloat16()) for _ in range(4)], Operations()
    with without_computing(kernels=kernels):
        for param in params:
            param.register_post_accumulate_grad_hook(lambda _: counting.mark(True))
        opt = lowmem.FusedOptimizer(params, rule, compile=True)
        for param in params:
            param.register_post_accumulate_grad_hook(lambda _: counting.mark(False))
        for _ in range(2):
            opt.backward(torch.stack([param.sum() for param in params]).sum())
        loss = torch.stack([param.sum() for param in params]).sum()
        with counting:
            loss.backward()
    expected = Counter(detach=1, empty=1) if kernels else Counter(detach=1, view=2)
    assert counting.parts[-3:] == [expected] * 3  # the first part also begins the step


@pytest.mark.cpu_only("code is replaced on a CPU")
@pytest.mark.parametrize(
    ("policy", "room", "flushes"), [("immediate", 0, 9), ("immediate", 8 << 20, 3), ("deferred", 0, 3)]
)
def test_gradients_for_which_memory_is_free_are_updated_together(policy, room, flushes, monkeypatch):
    """A batch is at most as large as the largest gradient: one of 2M elements, two of four times 512k. `immediate`
    batches only if an earlier step left enough memory free; `deferred` always does, since gradients are stored anyway.
    """
    launched = Counter[str]()
    monkeypatch.setattr(updates, "unused_memory", lambda *_: room)
    params = [torch.nn.Parameter(torch.zeros(rows, 1024)) for rows in (2048, *[512] * 8)]
    with without_computing(kernels=True):
        monkeypatch.setattr(Kernels, "launch", lambda self, launch, args: launched.update([launch.name]))
        opt = lowmem.FusedOptimizer(params, "adamw", compile=True, policy=policy)
        opt.backward(torch.stack([param.sum() for param in params]).sum())
        assert launched["pass_0"] == (9 if policy == "immediate" else 3)
        launched.clear()
        opt.backward(torch.stack([param.sum() for param in params]).sum())
    assert launched["pass_0"] == flushes and launched.total() == flushes * (3 if policy == "immediate" else 2)


@pytest.mark.cpu_only("code is replaced on a CPU")
def test_a_peak_counts_after_the_loop_has_reset_it(monkeypatch):
    peaks, received = iter((5, 3, 4)), []
    monkeypatch.setattr(updates, "peak_memory", lambda device: next(peaks))
    monkeypatch.setattr(updates, "unused_memory", lambda device, peak: received.append(peak) or 0)
    opt = lowmem.FusedOptimizer([param := torch.nn.Parameter(torch.zeros(1024, 1024))], "adamw", compile=True)
    with without_computing(kernels=True):
        for _ in range(3):
            opt.backward(param.sum())
    assert received == [0, 5, 5]


ELEMENTS = 10_240


def gradient():
    return torch.randn(ELEMENTS, device="cuda")


def on_the_device(measure, standing):
    """Returns the number of gradients on the device."""
    return (measure() - standing) / ELEMENTS / 4


@pytest.fixture
def store():
    return GradientStore(0)


@pytest.fixture
def records():
    return records_of(*(torch.nn.Parameter(torch.zeros(ELEMENTS, device="cuda")) for _ in range(6)))


def take_two_micro_batches(records, store):
    """Returns the largest number of gradients on the device while they arrive and while they are applied."""
    standing = torch.cuda.memory_allocated()
    for record in records:
        store.keep(record, gradient())
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        for record in records:
            store.keep(record, store.get(record).add_(gradient()))
    for record in records:
        store.keep(record, gradient())  # replaces a gradient that may have been prefetched
    coming = on_the_device(torch.cuda.max_memory_allocated, standing)
    torch.cuda.reset_peak_memory_stats()
    for record, grad in store.drain(records):
        record.param.detach().sub_(grad)
        del grad
    store.keep(records[0], gradient())
    return coming, on_the_device(torch.cuda.max_memory_allocated, standing)


@on_simgpu
def test_the_number_of_gradients_on_the_device(records, store):
    """While gradients arrive, two are being offloaded, one is new, and the other two are the sum it is added to and a
    prefetched one. When updates begin, two are still being offloaded and two are being fetched."""
    assert take_two_micro_batches(records, store) == (5, 4)
