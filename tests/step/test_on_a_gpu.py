"""Tests that need a GPU: current and default devices, streams of the training loop, stores that copy.

The simulated GPU runs them too, and reports races.
"""

import gc
import math
from contextlib import contextmanager, nullcontext

import pytest
import torch
from support.nets import records_of
from support.products import in_turn

import lowmem
from lowmem.step.offload import GradientStore
from lowmem.tiles.transfers import Readback, to_device

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, or a simulated one")

# Allowed difference between the kernels of two devices, relative to the largest weight.
SAME = 1e-5


def trained(device, stream=nullcontext, accumulate=1, overflow=None, created_on=None, **options):
    """Returns the weights after some steps on random data, and the number of skipped steps."""
    torch.manual_seed(0)
    with torch.device("cpu"):
        net = torch.nn.Sequential(torch.nn.Linear(48, 400), torch.nn.LayerNorm(400), torch.nn.Linear(400, 48))
        inputs = torch.randn(6, 8, 48)
    net, inputs = net.to(created_on or device), inputs.to(device)
    opt = lowmem.FusedOptimizer(net.named_parameters(), model=net, compile=False, **{"rule": "adalomo", **options})
    net.to(device)
    for step, x in enumerate(inputs):
        scale = math.inf if step == overflow else 1.0
        with stream():
            for n in range(accumulate):
                with opt.accumulate() if n < accumulate - 1 else nullcontext():
                    opt.backward(net(x).square().mean() * scale)
    assert opt.last_step.grad_norm.device == opt.last_step.changed_share.device == inputs.device
    skipped = opt.nonfinite_steps
    opt.remove()
    return [param.detach().cpu() for param in net.parameters()], skipped


def assert_trained_alike(one, other):
    (weights, skipped), (others, others_skipped) = one, other
    assert skipped == others_skipped
    for weight, want in zip(weights, others, strict=True):
        assert (weight - want).abs().max() <= SAME * want.abs().max().clamp(min=1.0)


SETTINGS = {
    "immediate": {},
    "two passes": {"policy": "two_pass", "clip_norm": 0.1},
    "auto": {"policy": "deferred", "clip_norm": 0.1},
    "host": {"policy": "deferred", "store": "host", "clip_norm": 0.1},
    "device": {"policy": "deferred", "store": "device", "clip_norm": 0.1},
    "host, summed": {"policy": "deferred", "store": "host", "clip_norm": 0.1, "accumulate": 3},
    "device, summed": {"policy": "deferred", "store": "device", "accumulate": 3},
    "overflow": {"loss_scale": "dynamic", "overflow": 2},
    "ScaledAdam": {"rule": "scaled_adam", "clipping_scale": 2.0},
}


def test_states_that_a_class_keeps_on_the_host_are_there_after_resuming():
    """NAdam reads its product in every update, which would wait for the device."""
    param = torch.nn.Parameter(torch.randn(8, 8, device="cuda"))
    with torch.device("cpu"):  # the default device, on which NAdam creates the product
        opt = lowmem.FusedOptimizer([param], torch.optim.NAdam)
        opt.backward(param.square().sum())
        saved = opt.state_dict()
        opt.remove()
        resumed = lowmem.FusedOptimizer([param], torch.optim.NAdam)
        resumed.load_state_dict(saved)
    devices = {name: value.device.type for name, value in resumed.state[param].items()}
    assert devices == {"step": "cpu", "mu_product": "cpu", "exp_avg": "cuda", "exp_avg_sq": "cuda"}


@contextmanager
def on_another_stream():
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)


@pytest.mark.parametrize(
    ("settings", "stream", "default", "created_on"),
    in_turn(SETTINGS, [nullcontext, on_another_stream], [None, None, "cuda"], ["cuda", "cuda", "cpu", "cpu"]),
)
def test_as_on_a_cpu(settings, stream, default, created_on):
    """Covers other default devices, loops on a side stream that still reads memory that a step replaces, and models
    that are moved after the optimizer was created, as Accelerate does: norms, counters and the loss scale must follow.
    """
    options = {"clip_value": 1.0, **SETTINGS[settings]}
    with nullcontext() if default is None else torch.device(default):
        actual = trained("cuda", stream=stream, created_on=created_on, **options)
    assert_trained_alike(actual, trained("cpu", **options))


def test_deleting_an_optimizer_during_its_last_copy():
    """The gradient's memory must not be freed before the copy is complete; the simulated GPU reports the race."""
    net = torch.nn.Linear(400, 300, device="cuda")
    opt = lowmem.FusedOptimizer(net.named_parameters(), rule="lomo", policy="deferred", store="host", clip_norm=1.0)
    with opt.accumulate():
        opt.backward(net(torch.ones(2, 400, device="cuda")).sum())
    opt.remove()
    del opt, net
    gc.collect()


@pytest.mark.parametrize("first", ["drained", "fetched"])
def test_a_gradient_that_another_stream_has_stored(first):
    """FSDP2 runs hooks on its reduction stream, so a read has to wait until that stream has written."""
    records = records_of(*(torch.nn.Parameter(torch.zeros(400, 300, device="cuda")) for _ in range(2)))
    store, side = GradientStore(0), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for n, record in enumerate(records):
            store.keep(record, torch.full((400, 300), n + 1.0, device="cuda"))
    if first == "fetched":
        assert store.get(records[1]).eq(2.0).all()
    for record, grad in store.drain(records[::-1]):
        assert grad.eq(int(record.name[1:]) + 1.0).all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_values_of_a_device_that_is_not_the_current_one():
    assert Readback(torch.arange(3.0, device="cuda:1")).values() == [0.0, 1.0, 2.0]
    assert Readback(to_device([3.0], torch.float32, torch.device("cuda:1"))).values() == [3.0]
